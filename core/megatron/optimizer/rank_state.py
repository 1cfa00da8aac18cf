"""The optimizer of rank files as values: the tensors of a rank, and which stored array is which
state of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.arrays.fast_value import value
from core.catalog.catalog import TargetFragment
from core.catalog.file_image import JoinedArray
from core.catalog.optimizer_keys import Optimizer
from core.catalog.stored import Coords, PlannedArray, StoredArray
from core.megatron.model.topology import Rank
from core.megatron.placement.chunk import ModelChunk


@value(frozen=True, slots=True)
class Param:
    """A tensor in a rank's state dict.

    Args:
        chunk: model chunk of the tensor; ``chunk.arrays(name, array)`` tells what it is called in
            the whole model, and takes its optimizer's states as well, whose shape is the same.
        name: in the chunk, without ``model.``; local numbers.
        array: weights of the tensor.
    """

    chunk: ModelChunk
    name: str
    array: StoredArray


@dataclass(frozen=True, slots=True)
class RankFile:
    """The content of a rank's model_optim_rng.pt.

    Args:
        folder: the rank's directory.
        root: the file's content.
        params: the tensors of all its chunks, in their order; buffers are among them.
    """

    rank: Rank
    folder: str
    root: Mapping[object, object]
    params: Sequence[Param]


@value(frozen=True, slots=True)
class ParamState:
    """One state of one parameter on one rank; ``array`` has the parameter's shape."""

    param: Param
    state: str
    array: StoredArray


@dataclass(frozen=True, slots=True)
class RankStates:
    """The optimizer of all ranks.

    Args:
        optimizer: what is not a tensor; its groups name global parameters.
        states: in the order of ranks and files.
        steps: arrays of one element that all hold the number of steps; () where it is no tensor.
        beside: key of another hidden tensor, in ``optimizer.entries`` → its equal copies.
        notes, dropped: for the catalog's fields of these names.
    """

    optimizer: Optimizer
    states: Sequence[ParamState]
    steps: Sequence[StoredArray] = ()
    beside: Mapping[str, Sequence[StoredArray]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dropped: Sequence[str] = ()


@value(frozen=True, slots=True)
class HeldParam:
    """A tensor of a rank's state dict.

    Args:
        key: global name of the tensor.
        chunk: ``model``, ``model0`` …
        name: local name of the tensor in the chunk.
    """

    key: str
    chunk: str
    name: str


class OptimizerFiles(Protocol):
    """The optimizer in the files of all ranks, which is added rank by rank.

    Attributes:
        files: coordinates → distrib_optim.pt (``core.megatron.optimizer.flat.content.OptimFile``),
            where there is such a file.
        arrays: by name, those of parameters' states in model_optim_rng.pt.
        beside: key of a hidden tensor of the source (the number of steps, say) → the arrays that it
            goes to.
        notes, dropped: for the catalog's fields of these names.
    """

    files: dict[Coords, object]
    arrays: dict[str, PlannedArray | JoinedArray]
    beside: dict[str, list[PlannedArray]]
    notes: list[str]
    dropped: list[str]

    def add(self, rank: Rank, folder: str, coords: Coords, params: Sequence[HeldParam]) -> object:
        """Add the tensors of a rank's file, in order, and return the rank's entry ``optimizer``."""

    def fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the target's fragments of one state, once all ranks have been added."""
