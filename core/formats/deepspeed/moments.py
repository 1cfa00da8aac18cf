"""The optimizer's state by parameter: out of flat groups that all ranks share.

An optimizer that ZeRO wraps has one flat parameter per group, so that every state of it is flat too (``exp_avg``), or
one for the whole group (``step``), which then is that of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from core.catalog.stored import StoredArray
from core.errors import ReplicaMismatchError
from core.formats.deepspeed.pieces import held_in_groups, held_whole
from core.formats.deepspeed.tree import Whole

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore
    from core.formats.deepspeed.optim_states import OptimStates
    from core.formats.deepspeed.partition import Partition

STEP = "step"


def states_by_parameter(
    store: ReadStore,
    partition: Partition,
    shapes: Mapping[str, Shape],
    optim: Sequence[OptimStates],
    dropped: list[str],
) -> dict[str, dict[str, object]]:
    """Parameter → state name → ``Held`` or ``Whole``; parameters without state are left out.

    Args:
        shapes: of the parameters that the flat groups hold.
        optim: the files, by rank.
        dropped: takes what cannot be told by parameter.

    Raises:
        CorruptError: the ranks have different states, or one is too short.
        ReplicaMismatchError: a scalar differs between ranks.
    """
    kinds = [
        {state: _kind(store, optim, group, state) for state in _state_names(optim, group)}
        for group in range(len(optim[0].fp32))
    ]
    for group, found in enumerate(kinds):
        dropped += [
            f"optimizer state {state!r} of flat group {group} (neither one value nor as long as the group)"
            for state, kind in found.items()
            if kind is None
        ]
    flat = {state: _flat(optim, state) for state in dict.fromkeys(state for found in kinds for state in found)}
    made: dict[str, dict[str, object]] = {}
    for name, shape in shapes.items():
        groups = partition.groups_of(name)
        for state, kind in kinds[groups[0]].items() if groups else ():
            if kind is None or any(kinds[group].get(state) is None for group in groups):
                continue
            below = made.setdefault(name, {})
            below[state] = held_in_groups(partition, name, shape, flat[state]) if kind == _FLAT else kind
    return made


_FLAT = "flat"


def _state_names(optim: Sequence[OptimStates], group: int) -> list[str]:
    """Names of the states of a flat group, which all ranks have."""
    names = list(optim[0].states[group])
    for rank, found in enumerate(optim):
        if set(found.states[group]) != set(names):
            raise found.state.corrupt(
                f"rank {rank} has states {sorted(found.states[group])} of flat group {group}, rank 0 {sorted(names)}"
            )
    return names


def _kind(store: ReadStore, optim: Sequence[OptimStates], group: int, state: str) -> object:
    """``_FLAT``, or the ``Held`` or ``Whole`` that every parameter of the group has; None if it is neither."""
    found = [rank.states[group][state] for rank in optim]
    arrays = [item for item in found if isinstance(item, StoredArray)]
    if not arrays:
        return Whole(found[0])
    if len(arrays) < len(found):
        return None
    if all(array.shape == () or (state == STEP and array.shape == (1,)) for array in arrays):
        _check_equal(store, arrays, state)
        return held_whole(arrays[0])
    if any(len(array.shape) != 1 or array.extent.strides is not None for array in arrays):
        return None
    for rank, array in zip(optim, arrays, strict=True):
        n = rank.fp32[group].shape[0]
        if array.shape[0] < n:
            raise rank.state.corrupt(
                f"state {state!r} of flat group {group} has {array.shape[0]} elements, its weights have {n}"
            )
    return _FLAT


def _flat(optim: Sequence[OptimStates], state: str) -> list[list[StoredArray]]:
    """Rank → flat group → array of that state; where a group does not have it, the array of its weights."""
    made = []
    for rank in optim:
        found = (states.get(state) for states in rank.states)
        made.append([
            array if isinstance(array, StoredArray) else fp32 for array, fp32 in zip(found, rank.fp32, strict=True)
        ])  # fmt: skip
    return made


def _check_equal(store: ReadStore, arrays: Sequence[StoredArray], state: str) -> None:
    """A scalar is the same on every rank."""
    first = None
    for rank, array in enumerate(arrays):
        data = store.read(array.extent.file, array.extent.offset, array.n_bytes)
        first = data if first is None else first
        if data != first:
            raise ReplicaMismatchError(
                f"state {state!r} differs from that of rank 0",
                file=array.extent.file,
                rank=str(rank),
                hint="files of different steps were mixed; copy the checkpoint again",
            )
