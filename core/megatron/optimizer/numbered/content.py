"""The entry ``optimizer`` of a rank file whose states are numbered: FP32 and Float16 optimizers, alone or chained.

::

    FP32Optimizer     {"state": {id: {["step",] "exp_avg", "exp_avg_sq"}}, "param_groups": [{…, "params": [id …]}]}
    Float16Optimizer  {"optimizer": the above, ["grad_scaler": …,] "fp32_from_fp16_params": [[master …] of each group]}
    ChainedOptimizer  its only member's, or a list: [dense, experts]

Ids number the parameters of all groups of one member. Masters are listed for fp16 and bf16 parameters only. Older files
have the names ``optimizer_state_dict`` and ``fp32_from_fp16``, which Megatron still reads.

Source: megatron-core 0.16.1 ``core/optimizer/optimizer.py``; Megatron-LM d98e8a64, pinned in tests/golden
(``mcore_legacy/dense_gqa/*_optim``).

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
        states: of each of its parameters, by name; the number of steps is among them.
        masters: those that are stored; None without masters.
    """

    settings: Mapping[str, object]
    states: Sequence[Mapping[str, object]]
    masters: Sequence[TensorLeaf] | None


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """All members of a rank's optimizer.

    Args:
        groups: of all members, one after the other.
        entries: others of the members, of each member by name.
        has_masters: it is a Float16Optimizer.
    """

    groups: Sequence[StoredGroup]
    entries: Sequence[Mapping[str, object]]
    has_masters: bool


def stored_optimizer(value: object, *, rank: str, report: Report = raising) -> StoredOptimizer:
    """The optimizer of a rank.

    Args:
        value: the entry.
        rank: the rank's directory, for messages.
        report: takes states of no parameter (rule ``optim.numbers``); raises them, if none is given.

    Raises:
        MissingShardError: it has none.
        UnsupportedError: members of several kinds.
        CorruptError: the entry is not as above.
    """
    members = [_member(item, report, rank=rank) for item in _members(value, rank=rank)]
    if len({member.has_masters for member in members}) > 1:
        raise CorruptError("only some of the chained optimizers have masters", rank=rank)
    if len(members) > 1:
        kinds = [{bool(group.settings.get(EXPERT)) for group in member.groups} for member in members]
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
    if value is None:
        raise MissingShardError("the rank's file has no optimizer, others have one", rank=rank)
    found = as_mapping(value)
    if found is not None and found and all(isinstance(name, int) for name in found):
        value = [item for _, item in sorted(found.items(), key=lambda pair: int(str(pair[0])))]
    members = list(value) if isinstance(value, (list, tuple)) else [value]
    if not members:
        raise CorruptError("the list of optimizers is empty", rank=rank)
    return members


def _member(value: object, report: Report, *, rank: str) -> StoredOptimizer:
    entries = _named(value, "an optimizer", rank=rank)
    inner = next((name for name in INNER if name in entries), None)
    if inner is None:
        groups = _groups(entries, None, report, rank=rank)
        rest = {name: item for name, item in entries.items() if name not in ("state", "param_groups")}
        return StoredOptimizer(groups, [rest], has_masters=False)
    masters = next((name for name in MASTERS if name in entries), None)
    if masters is None:
        raise _no_masters(entries[inner], rank=rank)
    lists = entries[masters]
    if not isinstance(lists, (list, tuple)) or not all(isinstance(one, (list, tuple)) for one in lists):
        raise CorruptError(f"{masters} is not a list of lists", rank=rank)
    torch_entries = _named(entries[inner], inner, rank=rank)
    more = sorted(set(torch_entries) - {"state", "param_groups"})
    if more:
        raise UnsupportedError(f"the optimizer has entries that are not resharded: {', '.join(more)}", rank=rank)
    groups = _groups(torch_entries, lists, report, rank=rank)
    return StoredOptimizer(
        groups, [{name: item for name, item in entries.items() if name not in (inner, masters)}], has_masters=True
    )


def _no_masters(inner: object, *, rank: str) -> MissingShardError:
    """The error of an optimizer without masters: that of a distributed one, if its groups list no parameters."""
    listed = (as_mapping(inner) or {}).get("param_groups")
    groups = [as_mapping(item) or {} for item in listed] if isinstance(listed, (list, tuple)) else []
    if not groups or any("params" in group for group in groups):
        return MissingShardError(f"the optimizer has no {MASTERS[0]}", rank=rank)
    return MissingShardError(
        "this is a distributed optimizer, whose states are in distrib_optim.pt, and no rank has that file",
        rank=rank,
        hint="copy the checkpoint again, with all of its files, or leave the optimizer out with --no-optim",
    )


def _groups(
    inner: Mapping[str, object], masters: Sequence[Sequence[object]] | None, report: Report, *, rank: str
) -> list[StoredGroup]:
    """The groups of a torch optimizer's state dict."""
    listed = inner.get("param_groups")
    state = as_mapping(inner.get("state"))
    if not isinstance(listed, (list, tuple)) or state is None:
        raise CorruptError("an optimizer without state and param_groups", rank=rank)
    if masters is not None and len(masters) != len(listed):
        raise CorruptError(f"masters of {len(masters)} param groups, but there are {len(listed)}", rank=rank)
    seen: set[object] = set()
    found = []
    for number, item in enumerate(listed):
        group = _named(item, f"param group {number}", rank=rank)
        ids = group.pop("params", None)
        if not isinstance(ids, (list, tuple)) or not all(isinstance(one, int) for one in ids) or seen & {*ids}:
            raise CorruptError(f"param group {number} has no list of parameter numbers of its own", rank=rank)
        if len({*ids}) < len(ids):
            twice = next(one for one in ids if list(ids).count(one) > 1)
            raise CorruptError(f"param group {number} lists parameter {twice} twice", rank=rank)
        seen |= {*ids}
        states = [_named(state.get(one, {}), f"the state of parameter {one}", rank=rank) for one in ids]
        found.append(StoredGroup(group, states, None if masters is None else _leaves(masters[number], rank=rank)))
    for one in (one for one in state if one not in seen):
        what = f"the optimizer has a state of {one!r}, which is in no param group"
        report(CorruptError(what, rank=rank, rule="optim.numbers"))
    return found


def _leaves(items: Sequence[object], *, rank: str) -> list[TensorLeaf]:
    found = [item for item in items if isinstance(item, TensorLeaf)]
    if len(found) < len(items):
        raise CorruptError("a master is not a tensor", rank=rank)
    return found


def _named(value: object, what: str, *, rank: str) -> dict[str, object]:
    found = as_mapping(value)
    if found is None or not all(isinstance(name, str) for name in found):
        raise CorruptError(f"{what} is a {type(value).__name__}, not a dict of names", rank=rank)
    return {str(name): item for name, item in found.items()}
