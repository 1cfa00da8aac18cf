"""Values that describe the optimizer of rank files: parameters, their states, the ranks' files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Protocol

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import Dropped
from core.engine.catalog.facets import RankFacts
from core.engine.catalog.file_image import JoinedArray
from core.engine.catalog.optimizer_keys import Optimizer
from core.engine.catalog.stored import Coords, PlannedArray, StoredArray
from core.engine.catalog.tensor import TargetFragment
from core.megatron.model.topology import Rank
from core.megatron.placement.chunk import ModelChunk
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Param:
    """A tensor in a rank's state dict.

    Args:
        chunk: model chunk of the tensor; ``chunk.arrays(name, array)`` finds the global names of
            the weights, and of optimizer states, which have the same shape.
        name: name in the chunk, without ``model.``, with local layer numbers.
        array: the weights.
    """

    chunk: ModelChunk
    name: str
    array: StoredArray


def stored_array(catalog: Catalog, key: str) -> StoredArray:
    """Return the stored array of a tensor in a rank's file."""
    ranks = catalog.facet(RankFacts)
    array = None if ranks is None or ranks.arrays is None else ranks.arrays.get(key)
    if array is None:
        array = catalog.fragments(key)[0].array
    assert array is not None
    return array


@dataclass(frozen=True, slots=True)
class RankFile:
    """The content of a rank's model_optim_rng.pt.

    Args:
        folder: name of the rank's directory.
        root: content of the file.
        params: tensors of all chunks, in the order of the file, buffers included.
    """

    rank: Rank
    folder: str
    root: Mapping[object, object]
    params: Sequence[Param]


@dataclass(frozen=True, slots=True)
class ParamState:
    """One state of one parameter on one rank; ``array`` has the parameter's shape."""

    param: Param
    state: str
    array: StoredArray


@dataclass(frozen=True, slots=True)
class RankStates:
    """The optimizer of all ranks.

    Args:
        optimizer: settings and groups; the groups list global parameters.
        states: states of all parameters, in the order of ranks and files.
        steps: arrays of one element that all hold the number of steps; () if that is not a tensor.
        beside: key of another hidden tensor, in ``optimizer.entries`` → its equal copies.
        notes, dropped: for the catalog's fields of these names.
    """

    optimizer: Optimizer
    states: Sequence[ParamState]
    steps: Sequence[StoredArray] = ()
    beside: Mapping[str, Sequence[StoredArray]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dropped: Sequence[Dropped] = ()


@dataclass(frozen=True, slots=True)
class HeldParam:
    """A tensor of a rank's state dict that is to be written.

    Args:
        key: global name of the tensor.
        chunk: ``model``, ``model0`` …
        name: local name of the tensor in the chunk.
    """

    key: str
    chunk: str
    name: str


class OptimizerFiles(Protocol):
    """The optimizer in the files of all ranks, to which ranks are added one by one.

    Attributes:
        files: coordinates → distrib_optim.pt (``core.megatron.optimizer.flat.content.OptimFile``),
            if the rank has such a file.
        arrays: name → array of a parameter's state in model_optim_rng.pt.
        beside: key of a hidden tensor of the source (for example the number of steps) → the arrays
            that it is copied to.
        notes, dropped: for the catalog's fields of these names.
    """

    files: dict[Coords, object]
    arrays: dict[str, PlannedArray | JoinedArray]
    beside: dict[str, list[PlannedArray]]
    notes: list[str]
    dropped: list[Dropped]

    def add(self, rank: Rank, folder: str, coords: Coords, params: Sequence[HeldParam]) -> object:
        """Add the tensors of a rank's file, in order, and return the rank's entry ``optimizer``."""

    def fragments(self, key: str) -> Sequence[TargetFragment]:
        """Return the target's fragments of one state; all ranks must have been added."""
