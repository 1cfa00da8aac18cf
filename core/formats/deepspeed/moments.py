"""The optimizer's state by parameter, taken from the flat groups of all ranks.

The optimizer that ZeRO wraps has one flat parameter per group. So each of its states is either flat
too (``exp_avg``) or one value for the group (``step``), which then belongs to each parameter.

Not supported, dropped by name: states of 8 bits of bitsandbytes, which quantizes each rank's part
of a flat group in blocks that reach across parameters; states of other lengths; mappings of
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from core.catalog.dropped import Dropped
from core.catalog.stored import StoredArray
from core.catalog.tensor import whole_tensor
from core.errors import ReplicaMismatchError
from core.formats.deepspeed.runs import tensor_in_groups
from core.formats.deepspeed.state_file import MIXED_STEPS_HINT
from core.formats.deepspeed.tree import WholeObject
from core.pickle.inert import TensorLeaf, walk
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore
    from core.formats.deepspeed.optim_states import OptimStates
    from core.formats.deepspeed.partition import Partition

STEP = "step"


@dataclass(frozen=True, slots=True)
class StatesByParameter:
    """The optimizer's states by parameter.

    Args:
        states: parameter → state name → ``Tensor`` or ``WholeObject``; only parameters that
            have a state.
        dropped: states that cannot be divided among parameters, with the reason.
    """

    states: dict[str, dict[str, object]]
    dropped: list[Dropped]


def states_by_parameter(
    store: ReadStore,
    partition: Partition,
    shapes: Mapping[str, Shape],
    optim: Sequence[OptimStates],
) -> StatesByParameter:
    """Return the optimizer's states by parameter.

    Args:
        shapes: shapes of the parameters in the flat groups.
        optim: the optimizer files by rank.

    Raises:
        CorruptError: the ranks have different states, or a state is shorter than the weights.
        ReplicaMismatchError: a scalar differs between ranks.
    """
    # A state is flat or one value for its group; other states cannot be assigned to parameters.
    kinds = [_group_kinds(store, optim, group) for group in range(len(optim[0].fp32))]
    dropped = [
        Dropped((f"optimizer state {state!r} of flat group {group}",), _reason(kinds[group], state))
        for group, group_kinds in enumerate(kinds)
        for state, kind in group_kinds.items()
        if kind is None
    ]
    flat = {state: _flat_arrays(optim, state) for group_kinds in kinds for state in group_kinds}
    # A parameter in several flat groups (ZeRO-3) has the states that all of them have.
    states: dict[str, dict[str, object]] = {}
    for name, shape in shapes.items():
        groups = partition.groups_of(name)
        for state, kind in kinds[groups[0]].items() if groups else ():
            if any(kinds[group].get(state) is None for group in groups):
                continue
            entry = tensor_in_groups(partition, name, shape, flat[state]) if kind == _FLAT else kind
            states.setdefault(name, {})[state] = entry
    return StatesByParameter(states, dropped)


_FLAT = "flat"
_QUANTIZED = frozenset(f"{name}{number}" for name in ("state", "absmax", "qmap") for number in "12")
"""States of bitsandbytes before 0.49 that are codes, or belong to them."""
_WRAPPER = "__bnb_optimizer_quant_state__"
"""The mapping of these in bitsandbytes 0.49 and later."""


def _reason(kinds: Mapping[str, object], state: str) -> str:
    """Return why a state cannot be divided among parameters.

    Args:
        kinds: the states of the flat group, see ``_group_kinds``.
    """
    if state == _WRAPPER or (state in _QUANTIZED and "absmax1" in kinds):
        return (
            "8 bits of bitsandbytes, in blocks of the flat group; DeepSpeed alone can load them, "
            "on as many ranks"
        )
    return "neither one value nor as long as the group"


def _group_kinds(store: ReadStore, optim: Sequence[OptimStates], group: int) -> dict[str, object]:
    """Return the states of a flat group by name, each as described at ``_state_kind``.

    Raises:
        CorruptError: the ranks have different states, or one is shorter than the weights.
        ReplicaMismatchError: a scalar differs between ranks.
    """
    names = list(optim[0].states[group])
    for rank, rank_states in enumerate(optim):
        if set(rank_states.states[group]) != set(names):
            raise rank_states.state.mismatch(
                f"rank {rank} has states {sorted(rank_states.states[group])} of flat group "
                f"{group}, but rank 0 has {sorted(names)}"
            )
    # Codes are as long as the group, but of no use without their scales.
    undivided = _QUANTIZED if "absmax1" in names else frozenset()
    return {
        state: None if state in undivided else _state_kind(store, optim, group, state)
        for state in names
    }


def _state_kind(store: ReadStore, optim: Sequence[OptimStates], group: int, state: str) -> object:
    """Determine how a state of a flat group is divided among its parameters.

    Returns:
        ``_FLAT``, if the state is partitioned like the weights; the entry that every parameter of
        the group gets, if it is one value; None, if it is neither.
    """
    values = [rank.states[group][state] for rank in optim]
    arrays = [item for item in values if isinstance(item, StoredArray)]
    if not arrays:
        # A mapping of tensors is that of the rank's part of the group.
        holds_tensors = any(isinstance(node, TensorLeaf) for node in walk(values[0]))
        return None if holds_tensors else WholeObject(values[0])
    if len(arrays) < len(values):
        return None
    # Only the step may be a tensor of one axis; another state of one element is a short flat group.
    scalar_shapes = {(), (1,)} if state == STEP else {()}
    if scalar_shapes.issuperset(array.shape for array in arrays):
        _check_equal(store, arrays, state)
        return whole_tensor(arrays[0])
    if any(len(array.shape) != 1 or array.extent.strides is not None for array in arrays):
        return None
    # Longer states are padded, as the weights may be; the padding is never read.
    for rank, array in zip(optim, arrays, strict=True):
        n = rank.fp32[group].shape[0]
        if array.shape[0] < n:
            raise rank.state.mismatch(
                f"state {state!r} of flat group {group} has {array.shape[0]} elements, but its "
                f"weights have {n}"
            )
    return _FLAT


def _flat_arrays(optim: Sequence[OptimStates], state: str) -> list[list[StoredArray]]:
    """Return the arrays of a state: rank → flat group → array.

    In place of a group that lacks the state, which is never read, there is the array of its
    weights.
    """
    arrays = []
    for rank in optim:
        values = (group_states.get(state) for group_states in rank.states)
        arrays.append([
            value if isinstance(value, StoredArray) else fp32
            for value, fp32 in zip(values, rank.fp32, strict=True)
        ])  # fmt: skip
    return arrays


def _check_equal(store: ReadStore, arrays: Sequence[StoredArray], state: str) -> None:
    """Raise unless a scalar state is the same on every rank.

    Raises:
        ReplicaMismatchError: names the first rank whose value differs from that of rank 0.
    """
    first = None
    for rank, array in enumerate(arrays):
        data = store.read(array.extent.file, array.extent.offset, array.n_bytes)
        first = data if first is None else first
        if data != first:
            raise ReplicaMismatchError(
                f"state {state!r} differs from that of rank 0",
                file=array.extent.file,
                rank=str(rank),
                hint=MIXED_STEPS_HINT,
            )
