"""The parameter groups of a distributed optimizer, which ranks list without their parameters.

Source: megatron-core 0.12.1 and 0.16.1
    ``core/optimizer/{__init__,distrib_optimizer,optimizer}.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.catalog.optimizer_keys import Optimizer, ParamGroup
from core.errors import CheckpointingException, CorruptError, Report, raising
from core.megatron.extras.common_state import renamed_leaves, same
from core.megatron.optimizer.groups import identity
from core.pickle.inert import as_mapping

GROUPS = "param_groups"
_STEP = "step"


@dataclass(frozen=True, slots=True)
class SharedGroups:
    """The groups and entries that all ranks have in common.

    Args:
        groups: without their parameters.
        entries: others than groups (``grad_scaler``).
        omits_empty: as in ``core.catalog.optimizer_keys.Optimizer``.
    """

    groups: tuple[ParamGroup, ...]
    entries: Mapping[str, object]
    omits_empty: bool | None

    def optimizer(self, states: Iterable[str]) -> Optimizer:
        """Return the distributed optimizer with these states, and with masters."""
        return Optimizer(
            "distributed", self.groups, tuple(states), None, self.entries, self.omits_empty
        )


def shared_groups(
    entries: Sequence[tuple[str, object]],
    note: Callable[[str, str], None],
    *,
    report: Report = raising,
) -> SharedGroups:
    """Combine the groups and other entries of an optimizer that all ranks describe.

    Ranks may list groups in different orders, and before megatron-core 0.14 a rank listed only
    those that it had parameters of. Where a data parallel rank's part of the buffers has no
    parameter of a group, Apex and Transformer Engine count no steps there: ``step`` is that of the
    others.

    Args:
        entries: (rank directory, entry ``optimizer`` of its file, or that of one of its chained
            optimizers).
        note: takes (new key, old key) of every tensor among them.
        report: takes the problems of single ranks; raises them, if none is given.

    Raises:
        CorruptError: an entry is not an optimizer's, or ranks have trained differently.
    """
    table = _GroupTable(note)
    common: dict[str, object] = {}
    for rank, entry in entries:
        for member in entry if isinstance(entry, list) else [entry]:
            state = as_mapping(member) or {}
            try:
                table.add(state, rank=rank)
            except CheckpointingException as err:
                report(err.breaking("optim.settings"))
            for name, stored_entry in state.items():
                if name == "optimizer":
                    continue

                # Other entries must be equal on all ranks.
                value = _renamed(stored_entry, f"optimizer.{name}", note)
                if not same(common.setdefault(str(name), value), value):
                    problem = f"entry {name} of the optimizer differs between ranks"
                    report(CorruptError(problem, rank=rank, rule="optim.entries"))
    return SharedGroups(
        tuple(group for _, group in table.groups.values()), common, table.omits_empty()
    )


@dataclass(frozen=True, slots=True)
class _GroupTable:
    """The groups of all ranks that were added.

    Args:
        note: takes (new key, old key) of every tensor among the settings.
        groups: identity and number among groups of that identity → (rank that has it first, group).
        listed: the groups of each rank.
    """

    note: Callable[[str, str], None]
    groups: dict[tuple[object, ...], tuple[str, ParamGroup]] = field(default_factory=dict)
    listed: list[set[tuple[object, ...]]] = field(default_factory=list)

    def add(self, state: Mapping[object, object], *, rank: str) -> None:
        """Add the groups of a rank.

        Raises:
            CorruptError: the rank has no groups, or settings differ from those of another rank.
        """
        own: set[tuple[object, ...]] = set()
        self.listed.append(own)
        for stored in _groups_of(state, rank=rank):
            shared_identity = identity(stored)
            group_id = (*shared_identity, sum(other[:-1] == shared_identity for other in own))
            number = (
                list(self.groups).index(group_id) if group_id in self.groups else len(self.groups)
            )
            prefix = f"optimizer.groups.{number}"
            settings = {
                name: _renamed(value, f"{prefix}.{name}", self.note)
                for name, value in stored.items()
            }
            own.add(group_id)
            first_rank, group = self.groups.setdefault(group_id, (rank, ParamGroup(settings)))

            # A rank that counts no steps in this group takes those of the others.
            counting = next(
                (source for source in (group.settings, settings) if _STEP in source), {}
            )
            steps = {name: value for name, value in counting.items() if name == _STEP}
            _check_same(
                {**steps, **group.settings}, {**steps, **settings}, rank=rank, other=first_rank
            )
            self.groups[group_id] = (first_rank, ParamGroup({**group.settings, **steps}))

    def omits_empty(self) -> bool | None:
        """Return True if an optimizer of dense parameters, or of experts, lacks groups of its kind;
        else None.
        """
        for is_expert in (False, True):
            kind = {
                group_id
                for group_id, (_, group) in self.groups.items()
                if group.is_expert == is_expert
            }
            if any(own & kind and not kind <= own for own in self.listed):
                return True
        return None


def _renamed(value: object, key: str, note: Callable[[str, str], None]) -> object:
    """Return a value whose tensors, if any, have keys of the combined optimizer."""

    def new_key(path: str, old: str) -> str:
        new = f"{key}.{path}" if path else key
        note(new, old)
        return new

    return renamed_leaves(value, new_key)


def _groups_of(state: Mapping[object, object], *, rank: str) -> list[Mapping[str, object]]:
    """Return the groups of a rank's entry."""
    listed = (as_mapping(state.get("optimizer")) or {}).get(GROUPS)
    groups = [as_mapping(group) for group in listed] if isinstance(listed, list) else [None]
    named: list[Mapping[str, object]] = [
        {str(name): value for name, value in group.items()} for group in groups if group is not None
    ]
    if len(named) != len(groups):
        raise CorruptError(f"the optimizer has no {GROUPS}", rank=rank)
    return named


def _check_same(
    settings: Mapping[str, object], other_settings: Mapping[str, object], *, rank: str, other: str
) -> None:
    """Raise unless two ranks have the same settings of a group."""
    for name in dict.fromkeys([*settings, *other_settings]):
        if not same(settings.get(name), other_settings.get(name)):
            raise CorruptError(
                f"{name} of a parameter group is {other_settings.get(name)!r} here and {settings.get(name)!r} in "
                f"{other}",
                rank=rank,
                hint="the rank directories are not of one step",
            )
