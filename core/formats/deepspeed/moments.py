"""The optimizer's state by parameter, taken from the flat groups of all ranks.

An optimizer that ZeRO wraps has one flat parameter per group, so that every state of it is flat too
(``exp_avg``), or one for the whole group (``step``), which then is that of each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.catalog.stored import StoredArray
from core.errors import ReplicaMismatchError
from core.formats.deepspeed.pieces import tensor_in_groups, tensor_of_array
from core.formats.deepspeed.tree import WholeObject

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore
    from core.formats.deepspeed.optim_states import OptimStates
    from core.formats.deepspeed.partition import Partition

STEP = "step"


@dataclass(frozen=True, slots=True)
class StatesByParameter:
    """The optimizer's states.

    Args:
        states: parameter → state name → ``UnkeyedTensor`` or ``WholeObject``; parameters without state
            are left out.
        dropped: states that cannot be divided among parameters.
    """

    states: dict[str, dict[str, object]]
    dropped: list[str]


def states_by_parameter(
    store: ReadStore,
    partition: Partition,
    shapes: Mapping[str, Shape],
    optim: Sequence[OptimStates],
) -> StatesByParameter:
    """Return the optimizer's states by parameter.

    Args:
        shapes: shapes of the parameters in the flat groups.
        optim: the files, by rank.

    Raises:
        CorruptError: the ranks have different states, or one is too short.
        ReplicaMismatchError: a scalar differs between ranks.
    """
    # A state is flat, or one value for its group; others belong to no parameter.
    kinds = [
        {state: _state_kind(store, optim, group, state) for state in _state_names(optim, group)}
        for group in range(len(optim[0].fp32))
    ]
    dropped = [
        f"optimizer state {state!r} of flat group {group} (neither one value nor as long as the group)"
        for group, group_kinds in enumerate(kinds)
        for state, kind in group_kinds.items()
        if kind is None
    ]

    # A parameter has the states that all its groups have.
    flat = {state: _flat_arrays(optim, state) for group_kinds in kinds for state in group_kinds}
    states: dict[str, dict[str, object]] = {}
    for name, shape in shapes.items():
        groups = partition.groups_of(name)
        for state, kind in kinds[groups[0]].items() if groups else ():
            if kind is None or any(kinds[group].get(state) is None for group in groups):
                continue
            entry = tensor_in_groups(partition, name, shape, flat[state]) if kind == _FLAT else kind
            states.setdefault(name, {})[state] = entry
    return StatesByParameter(states, dropped)


_FLAT = "flat"


def _state_names(optim: Sequence[OptimStates], group: int) -> list[str]:
    """Return the names of the states of a flat group, which must be equal on all ranks."""
    names = list(optim[0].states[group])
    for rank, rank_states in enumerate(optim):
        if set(rank_states.states[group]) != set(names):
            raise rank_states.state.corrupt(
                f"rank {rank} has states {sorted(rank_states.states[group])} of flat group {group}, "
                f"but rank 0 has {sorted(names)}"
            )
    return names


def _state_kind(store: ReadStore, optim: Sequence[OptimStates], group: int, state: str) -> object:
    """Return ``_FLAT``, or the entry that every parameter of the group gets; None if it is
    neither.
    """
    values = [rank.states[group][state] for rank in optim]
    arrays = [item for item in values if isinstance(item, StoredArray)]
    if not arrays:
        return WholeObject(values[0])
    if len(arrays) < len(values):
        return None
    if all(array.shape == () or (state == STEP and array.shape == (1,)) for array in arrays):
        _check_equal(store, arrays, state)
        return tensor_of_array(arrays[0])
    if any(len(array.shape) != 1 or array.extent.strides is not None for array in arrays):
        return None
    for rank, array in zip(optim, arrays, strict=True):
        n = rank.fp32[group].shape[0]
        if array.shape[0] < n:
            raise rank.state.corrupt(
                f"state {state!r} of flat group {group} has {array.shape[0]} elements, but its weights have {n}"
            )
    return _FLAT


def _flat_arrays(optim: Sequence[OptimStates], state: str) -> list[list[StoredArray]]:
    """Return rank → flat group → array of that state.

    For a group without it, the array of its weights.
    """
    arrays = []
    for rank in optim:
        values = (states.get(state) for states in rank.states)
        arrays.append([
            array if isinstance(array, StoredArray) else fp32 for array, fp32 in zip(values, rank.fp32, strict=True)
        ])  # fmt: skip
    return arrays


def _check_equal(store: ReadStore, arrays: Sequence[StoredArray], state: str) -> None:
    """Raise unless a scalar is the same on every rank."""
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
