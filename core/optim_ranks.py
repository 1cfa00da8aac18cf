"""The optimizer of rank files: for every rank, which stored array is which state of which parameter.

``read_states`` finds the form and leaves the work to ``core.optim_numbered`` (FP32 and Float16 optimizers, in
model_optim_rng.pt) or ``core.optim_flat`` (the distributed optimizer's distrib_optim.pt).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from core.catalog import Catalog, StoredArray
from core.errors import Report, UnsupportedError, raising
from core.layout_chunk import Chunk
from core.layout_facts import Facts
from core.layout_rules import Rules
from core.optimizer import Optimizer
from core.store import ReadStore
from core.topology import Rank
from core.value import value


@value(frozen=True, slots=True)
class Param:
    """A tensor in a rank's state dict.

    Args:
        chunk: its model chunk; ``chunk.arrays(name, array)`` tells what it is called in the whole model, and takes its
            optimizer's states as well, whose shape is the same.
        name: in the chunk, without ``model.``; local numbers.
        array: its weights.
    """

    chunk: Chunk
    name: str
    array: StoredArray


@dataclass(frozen=True, slots=True)
class RankFile:
    """What a rank's model_optim_rng.pt holds.

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
        notes, dropped: as in the catalog's attrs.
    """

    optimizer: Optimizer
    states: Sequence[ParamState]
    steps: Sequence[StoredArray] = ()
    beside: Mapping[str, Sequence[StoredArray]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    dropped: Sequence[str] = ()


def read_states(
    catalog: Catalog,
    files: Sequence[RankFile],
    facts: Facts,
    rules: Rules,
    *,
    store: ReadStore | None,
    report: Report = raising,
) -> RankStates:
    """The optimizer of a rank catalog that has one.

    Args:
        catalog: ``core.formats.megatron``'s.
        files: all ranks.
        store: to compare masters with weights; None leaves that out.
        report: takes what is wrong with single ranks (rules ``optim.numbers``, ``.groups``, ``.states``, ``.shape``,
            ``.step``, ``.settings``, ``.entries``, ``.buffers``, ``.missing``), which is then left out; raises it, if
            none is given.

    Raises:
        UnsupportedError: of a kind that is not read, or nothing proves which state is whose.
        CorruptError: ranks contradict each other.
    """
    kind = catalog.attrs.get("optimizer")
    if kind == "distributed":
        from core.optim_flat import read_flat

        return read_flat(catalog, files, facts, rules, store=store, report=report)
    if kind == "layer-wise":
        raise UnsupportedError(
            "the layer-wise optimizer (Muon) cannot be resharded yet",
            hint="leave it out with --no-optim; the weights are exact, and training starts with a fresh optimizer",
        )
    from core.optim_numbered import read_numbered

    return read_numbered(catalog, files, facts, rules, store=store, report=report)
