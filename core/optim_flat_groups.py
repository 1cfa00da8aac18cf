"""The parameter groups of a distributed optimizer, which ranks list without their parameters.

Source: megatron-core 0.12.1 and 0.16.1 ``core/optimizer/{__init__,distrib_optimizer,optimizer}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import CorruptError
from core.inert import as_mapping
from core.layout_state import same
from core.optim_groups import identity
from core.optimizer import ParamGroup

GROUPS = "param_groups"


def shared_groups(entries: Sequence[tuple[str, object]]) -> tuple[tuple[ParamGroup, ...], dict[str, object]]:
    """(groups, other entries) of an optimizer that all ranks describe.

    Ranks may list groups in different orders, and before megatron-core 0.14 a rank listed only those that it had
    parameters of.

    Args:
        entries: (rank directory, entry ``optimizer`` of its file).

    Raises:
        CorruptError: an entry is none of an optimizer's, or ranks have trained differently.
    """
    groups: dict[tuple[object, ...], tuple[str, ParamGroup]] = {}
    others: dict[str, object] = {}
    for rank, entry in entries:
        for member in entry if isinstance(entry, list) else [entry]:
            state = as_mapping(member) or {}
            seen: dict[tuple[object, ...], int] = {}
            for settings in _groups_of(state, rank=rank):
                which = identity(settings)
                n = seen[which] = seen.get(which, 0) + 1
                found = groups.setdefault((*which, n), (rank, ParamGroup(settings)))
                _check_same(found[1].settings, settings, rank=rank, other=found[0])
            for name, value in state.items():
                if name != "optimizer" and not same(others.setdefault(str(name), value), value):
                    raise CorruptError(f"entry {name} of the optimizer differs between ranks", rank=rank)
    return tuple(group for _, group in groups.values()), others


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
