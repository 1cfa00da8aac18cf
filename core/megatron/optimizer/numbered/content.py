"""The entry ``optimizer`` of a rank file whose states are numbered: FP32 and Float16 optimizers,
alone or chained.

::

    FP32Optimizer     {"state": {id: {["step",] "exp_avg", "exp_avg_sq"}}, "param_groups": [{…, "params": [id …]}]}
    Float16Optimizer  {"optimizer": the above, ["grad_scaler": …,] "fp32_from_fp16_params": [[master …] of each group]}
    ChainedOptimizer  its only member's, or a list: [dense, experts]

Ids number the parameters of all groups of one member. Masters are listed for fp16 and bf16
parameters only. Older files have the names ``optimizer_state_dict`` and ``fp32_from_fp16``, which
Megatron still reads.

Source: megatron-core 0.16.1 ``core/optimizer/optimizer.py``; Megatron-LM d98e8a64, pinned in
tests/golden (``mcore_legacy/dense_gqa/*_optim``).

Not supported: chained members of other kinds (Muon beside Adam).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from core.errors import CorruptError, MissingShardError, Report, UnsupportedError, raising
from core.megatron.optimizer.groups import EXPERT
from core.pickle.inert import TensorLeaf, as_mapping

INNER = ("optimizer", "optimizer_state_dict")
MASTERS = ("fp32_from_fp16_params", "fp32_from_fp16")
STEP_NAME = "step"


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group as a rank's file has it.

    Args:
        settings: without ``params``.
        states: states of each of its parameters, by name; the number of steps is among them.
        masters: the masters that are stored; None without masters.
    """

    settings: Mapping[str, object]
    states: Sequence[Mapping[str, object]]
    masters: Sequence[TensorLeaf] | None


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """All members of a rank's optimizer.

    Args:
        groups: groups of all members, one after the other.
        entries: others of the members, of each member by name.
        has_masters: it is a Float16Optimizer.
    """

    groups: Sequence[StoredGroup]
    entries: Sequence[Mapping[str, object]]
    has_masters: bool


def stored_optimizer(value: object, *, rank: str, report: Report = raising) -> StoredOptimizer:
    """Return the optimizer of a rank.

    Args:
        value: the entry.
        rank: the rank's directory, for messages.
        report: takes states of no parameter (rule ``optim.numbers``); raises them, if none is
            given.

    Raises:
        MissingShardError: the rank has no optimizer.
        UnsupportedError: members of several kinds.
        CorruptError: the entry is not as above.
    """
    members = [_member(item, report, rank=rank) for item in _members(value, rank=rank)]
    if len({member.has_masters for member in members}) > 1:
        raise CorruptError("only some of the chained optimizers have masters", rank=rank)
    if len(members) > 1:
        # Megatron chains one optimizer for dense parameters and one for experts.
        kinds = [
            {bool(group.settings.get(EXPERT)) for group in member.groups} for member in members
        ]
        if kinds != [{False}, {True}]:
            raise UnsupportedError(
                f"{len(members)} chained optimizers that are not one for dense parameters and one for experts",
                rank=rank,
                hint="leave the optimizer out with --no-optim",
            )
    return StoredOptimizer(
        [group for member in members for group in member.groups],
        [entries for member in members for entries in member.entries],
        members[0].has_masters,
    )


def _members(value: object, *, rank: str) -> list[object]:
    """Return the members of a chained optimizer, or the only one."""
    if value is None:
        raise MissingShardError("the rank's file has no optimizer, others have one", rank=rank)
    by_number = as_mapping(value)
    if by_number is not None and by_number and all(isinstance(name, int) for name in by_number):
        value = [item for _, item in sorted(by_number.items(), key=lambda pair: int(str(pair[0])))]
    members = list(value) if isinstance(value, (list, tuple)) else [value]
    if not members:
        raise CorruptError("the list of optimizers is empty", rank=rank)
    return members


def _member(value: object, report: Report, *, rank: str) -> StoredOptimizer:
    """Return one member of an optimizer, FP32 or Float16."""
    entries = _named(value, "an optimizer", rank=rank)
    inner = next((name for name in INNER if name in entries), None)
    if inner is None:
        groups = _groups(entries, None, report, rank=rank)
        rest = {
            name: item for name, item in entries.items() if name not in ("state", "param_groups")
        }
        return StoredOptimizer(groups, [rest], has_masters=False)

    # A Float16Optimizer wraps the optimizer of torch, and has masters.
    masters = next((name for name in MASTERS if name in entries), None)
    if masters is None:
        raise _no_masters(entries[inner], rank=rank)
    lists = entries[masters]
    if not isinstance(lists, (list, tuple)) or not all(
        isinstance(masters_of_group, (list, tuple)) for masters_of_group in lists
    ):
        raise CorruptError(f"{masters} is not a list of lists", rank=rank)
    torch_entries = _named(entries[inner], inner, rank=rank)
    more = sorted(set(torch_entries) - {"state", "param_groups"})
    if more:
        raise UnsupportedError(
            f"the optimizer has entries that are not resharded: {', '.join(more)}", rank=rank
        )
    groups = _groups(torch_entries, lists, report, rank=rank)
    return StoredOptimizer(
        groups,
        [{name: item for name, item in entries.items() if name not in (inner, masters)}],
        has_masters=True,
    )


def _no_masters(inner: object, *, rank: str) -> MissingShardError:
    """Return the error for an optimizer without masters.

    If its groups list no parameters, it is a distributed one.
    """
    listed = (as_mapping(inner) or {}).get("param_groups")
    groups = (
        [as_mapping(item) or {} for item in listed] if isinstance(listed, (list, tuple)) else []
    )
    if not groups or any("params" in group for group in groups):
        return MissingShardError(f"the optimizer has no {MASTERS[0]}", rank=rank)
    return MissingShardError(
        "this is a distributed optimizer, whose states are in distrib_optim.pt, and no rank has that file",
        rank=rank,
        hint="copy the checkpoint again, with all of its files, or leave the optimizer out with --no-optim",
    )


def _groups(
    inner: Mapping[str, object],
    masters: Sequence[Sequence[object]] | None,
    report: Report,
    *,
    rank: str,
) -> list[StoredGroup]:
    """Return the groups of a torch optimizer's state dict."""
    listed = inner.get("param_groups")
    state = as_mapping(inner.get("state"))
    if not isinstance(listed, (list, tuple)) or state is None:
        raise CorruptError("an optimizer without state and param_groups", rank=rank)
    if masters is not None and len(masters) != len(listed):
        raise CorruptError(
            f"masters of {len(masters)} param groups, but there are {len(listed)}", rank=rank
        )

    # Every parameter has a number, in one group only.
    grouped: set[object] = set()
    groups = []
    for number, item in enumerate(listed):
        group = _named(item, f"param group {number}", rank=rank)
        ids = group.pop("params", None)
        if (
            not isinstance(ids, (list, tuple))
            or not all(isinstance(i, int) for i in ids)
            or grouped & {*ids}
        ):
            raise CorruptError(
                f"param group {number} has no list of parameter numbers of its own", rank=rank
            )
        if len({*ids}) < len(ids):
            twice = next(i for i in ids if list(ids).count(i) > 1)
            raise CorruptError(f"param group {number} lists parameter {twice} twice", rank=rank)
        grouped |= {*ids}
        states = [_named(state.get(i, {}), f"the state of parameter {i}", rank=rank) for i in ids]
        groups.append(
            StoredGroup(
                group, states, None if masters is None else _leaves(masters[number], rank=rank)
            )
        )

    # States without a parameter are reported and left out.
    for key in state:
        if key not in grouped:
            problem = f"the optimizer has a state of {key!r}, which is in no param group"
            report(CorruptError(problem, rank=rank, rule="optim.numbers"))
    return groups


def _leaves(items: Sequence[object], *, rank: str) -> list[TensorLeaf]:
    """Return masters, all of which must be tensors."""
    leaves = [item for item in items if isinstance(item, TensorLeaf)]
    if len(leaves) < len(items):
        raise CorruptError("a master is not a tensor", rank=rank)
    return leaves


def _named(value: object, label: str, *, rank: str) -> dict[str, object]:
    """Return a dict, of which ``label`` is the name in messages; its keys must be strings."""
    mapping = as_mapping(value)
    if mapping is None or not all(isinstance(name, str) for name in mapping):
        raise CorruptError(f"{label} is a {type(value).__name__}, not a dict of names", rank=rank)
    return {str(name): item for name, item in mapping.items()}
