"""The param groups of a distributed optimizer, which ranks list without their parameters.

Source: megatron-core 0.12.1 and 0.16.1
``core/optimizer/{__init__,distrib_optimizer,optimizer}.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field

from core.engine.catalog.optimizer_keys import Optimizer, ParamGroup
from core.errors import CheckpointingException, CorruptError, Report, raising
from core.megatron.extras.common_state import renamed_leaves
from core.megatron.optimizer.groups import identity
from core.pickle.equality import are_same
from core.pickle.inert import as_mapping
from core.values import dataclass

GROUPS = "param_groups"
_STEP = "step"


def combine_ranks(
    entries: Sequence[tuple[str, object]],
    note: Callable[[str, str], None],
    *,
    states: Iterable[str],
    report: Report = raising,
) -> Optimizer:
    """Combine the groups and other entries of a distributed optimizer that all ranks describe.

    Ranks may list groups in different orders, and before megatron-core 0.14 a rank listed only the
    groups of its own parameters. Apex and Transformer Engine count no steps in a group without a
    parameter in a data parallel rank's part of the buffers: ``step`` then comes from other ranks.

    Args:
        entries: (rank directory, entry ``optimizer`` of its file, or of one of its chained
            optimizers).
        note: called with (new key, old key) for every tensor among the entries.
        states: names of the optimizer's states, without its master weights.
        report: receives the problems of single ranks; by default, raises them.

    Raises:
        CorruptError: an entry does not describe an optimizer, or settings differ between ranks.
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
                value = renamed_leaves(stored_entry, f"optimizer.{name}", note)
                if not are_same(common.setdefault(str(name), value), value):
                    problem = f"the optimizer's entry {name} differs between ranks"
                    report(CorruptError(problem, rank=rank, rule="optim.entries"))
    groups = tuple(group for _, group in table.groups.values())
    return Optimizer("distributed", groups, tuple(states), None, common, table.omits_empty())


@dataclass(frozen=True, slots=True)
class _GroupTable:
    """The groups of all ranks that were added.

    Args:
        note: called with (new key, old key) for every tensor among the settings.
        groups: identity and number among groups of that identity → (first rank with it, group).
        listed: identities of each rank's groups.
    """

    note: Callable[[str, str], None]
    groups: dict[tuple[object, ...], tuple[str, ParamGroup]] = field(default_factory=dict)
    listed: list[set[tuple[object, ...]]] = field(default_factory=list)

    def add(self, state: Mapping[object, object], *, rank: str) -> None:
        """Add the groups of a rank.

        Raises:
            CorruptError: the rank has no groups, or settings differ from those of another rank.
        """
        rank_ids: set[tuple[object, ...]] = set()
        self.listed.append(rank_ids)
        listed = (as_mapping(state.get("optimizer")) or {}).get(GROUPS)
        groups = [as_mapping(item) for item in listed] if isinstance(listed, list) else [None]
        if None in groups:
            raise CorruptError(f"the optimizer has no {GROUPS}", rank=rank)
        for item in groups:
            stored = {str(name): value for name, value in (item or {}).items()}

            # Groups of one rank that have the same identity are matched by their order.
            base_id = identity(stored)
            group_id = (*base_id, sum(other[:-1] == base_id for other in rank_ids))
            number = (
                list(self.groups).index(group_id) if group_id in self.groups else len(self.groups)
            )
            prefix = f"optimizer.groups.{number}"
            settings = {
                name: renamed_leaves(value, f"{prefix}.{name}", self.note)
                for name, value in stored.items()
            }
            rank_ids.add(group_id)
            first_rank, group = self.groups.setdefault(group_id, (rank, ParamGroup(settings)))

            # A rank that counts no steps in this group takes those of the others.
            counting = group.settings if _STEP in group.settings else settings
            steps = {_STEP: counting[_STEP]} if _STEP in counting else {}
            first_settings, settings = {**steps, **group.settings}, {**steps, **settings}
            for name in dict.fromkeys([*first_settings, *settings]):
                own, other = settings.get(name), first_settings.get(name)
                if not are_same(other, own):
                    raise CorruptError(
                        f"{name} of a param group is {own!r}, but {other!r} in {first_rank}",
                        rank=rank,
                        hint="check that all rank directories are from the same step",
                    )
            self.groups[group_id] = (first_rank, ParamGroup({**group.settings, **steps}))

    def omits_empty(self) -> bool | None:
        """Return True if a rank lists some groups of dense parameters, or of experts, but not all.

        Otherwise None: ranks that list all groups may have parameters of all.
        """
        for is_expert in (False, True):
            kind = {
                group_id
                for group_id, (_, group) in self.groups.items()
                if group.is_expert == is_expert
            }
            if any(rank_ids & kind and not kind <= rank_ids for rank_ids in self.listed):
                return True
        return None
