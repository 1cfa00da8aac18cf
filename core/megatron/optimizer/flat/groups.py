"""The parameter groups of a distributed optimizer, which ranks list without their parameters.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/{__init__,distrib_optimizer,optimizer}.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.catalog.optimizer_keys import Optimizer, ParamGroup
from core.errors import CheckpointingException, CorruptError, Report, raising
from core.megatron.extras.common_state import renamed_leaves, same
from core.megatron.optimizer.groups import identity
from core.pickle.inert import as_mapping

GROUPS = "param_groups"
_STEP = "step"


@dataclass(frozen=True, slots=True)
class SharedGroups:
    """What all ranks say about an optimizer.

    Args:
        groups: without their parameters.
        entries: others than groups (``grad_scaler``).
        omits_empty: as in ``core.catalog.optimizer_keys.Optimizer``.
    """

    groups: tuple[ParamGroup, ...]
    entries: Mapping[str, object]
    omits_empty: bool | None

    def optimizer(self, states: Iterable[str]) -> Optimizer:
        """The distributed optimizer with these states, beside masters."""
        return Optimizer("distributed", self.groups, tuple(states), None, self.entries, self.omits_empty)


def shared_groups(
    entries: Sequence[tuple[str, object]], note: Callable[[str, str], None], *, report: Report = raising
) -> SharedGroups:
    """The groups and other entries of an optimizer that all ranks describe.

    Ranks may list groups in different orders, and before megatron-core 0.14 a rank listed only those that it had
    parameters of. Where a data parallel rank's part of the buffers has no parameter of a group, Apex and Transformer
    Engine count no steps there: ``step`` is that of the others.

    Args:
        entries: (rank directory, entry ``optimizer`` of its file, or that of one of its chained optimizers).
        note: takes (new key, old key) of every tensor among them.
        report: takes what is wrong with single ranks; raises it, if none is given.

    Raises:
        CorruptError: an entry is none of an optimizer's, or ranks have trained differently.
    """
    groups: dict[tuple[object, ...], tuple[str, ParamGroup]] = {}
    others: dict[str, object] = {}
    listed: list[set[tuple[object, ...]]] = []
    for rank, entry in entries:
        for member in entry if isinstance(entry, list) else [entry]:
            state = as_mapping(member) or {}
            mine: set[tuple[object, ...]] = set()
            try:
                _add_groups(groups, mine, state, note, rank=rank)
            except CheckpointingException as err:
                report(err.breaking("optim.settings"))
            listed.append(mine)
            for name, stored_entry in state.items():
                if name == "optimizer":
                    continue
                value = _renamed(stored_entry, f"optimizer.{name}", note)
                if not same(others.setdefault(str(name), value), value):
                    what = f"entry {name} of the optimizer differs between ranks"
                    report(CorruptError(what, rank=rank, rule="optim.entries"))
    return SharedGroups(tuple(group for _, group in groups.values()), others, _omits_empty(groups, listed))


def _add_groups(
    groups: dict[tuple[object, ...], tuple[str, ParamGroup]],
    mine: set[tuple[object, ...]],
    state: Mapping[object, object],
    note: Callable[[str, str], None],
    *,
    rank: str,
) -> None:
    """Takes the groups of a rank.

    Args:
        groups: identity → (rank, group) of the ranks before.
        mine: identities of this rank's; they are added here.
    """
    for stored in _groups_of(state, rank=rank):
        which = identity(stored)
        n = sum(one[:-1] == which for one in mine)
        number = list(groups).index((*which, n)) if (*which, n) in groups else len(groups)
        settings = {name: _renamed(value, f"optimizer.groups.{number}.{name}", note) for name, value in stored.items()}
        mine.add((*which, n))
        other, found = groups.setdefault((*which, n), (rank, ParamGroup(settings)))
        counting = next((one for one in (found.settings, settings) if _STEP in one), {})
        steps = {name: value for name, value in counting.items() if name == _STEP}
        _check_same({**steps, **found.settings}, {**steps, **settings}, rank=rank, other=other)
        groups[(*which, n)] = (other, ParamGroup({**found.settings, **steps}))


def _renamed(value: object, key: str, note: Callable[[str, str], None]) -> object:
    """A value whose tensors, if any, have keys of the whole optimizer."""

    def new_key(path: str, old: str) -> str:
        made = f"{key}.{path}" if path else key
        note(made, old)
        return made

    return renamed_leaves(value, new_key)


def _omits_empty(
    groups: Mapping[tuple[object, ...], tuple[str, ParamGroup]], listed: Sequence[set[tuple[object, ...]]]
) -> bool | None:
    """Whether some optimizer of dense parameters, or of experts, lacks groups that others of its kind have."""
    for is_expert in (False, True):
        kind = {which for which, (_, group) in groups.items() if group.is_expert == is_expert}
        if any(mine & kind and not kind <= mine for mine in listed):
            return True
    return None


def _groups_of(state: Mapping[object, object], *, rank: str) -> list[Mapping[str, object]]:
    listed = (as_mapping(state.get("optimizer")) or {}).get(GROUPS)
    groups = [as_mapping(group) for group in listed] if isinstance(listed, list) else [None]
    found: list[Mapping[str, object]] = [
        {str(name): value for name, value in group.items()} for group in groups if group is not None
    ]
    if len(found) != len(groups):
        raise CorruptError(f"the optimizer has no {GROUPS}", rank=rank)
    return found


def _check_same(settings: Mapping[str, object], others: Mapping[str, object], *, rank: str, other: str) -> None:
    for name in dict.fromkeys([*settings, *others]):
        if not same(settings.get(name), others.get(name)):
            raise CorruptError(
                f"{name} of a parameter group is {others.get(name)!r} here and {settings.get(name)!r} in {other}",
                rank=rank,
                hint="the rank directories are not of one step",
            )
