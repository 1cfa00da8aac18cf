"""The optimizer's parameter groups in ``optimizer_state.pt`` of a universal checkpoint.

ZeRO-1 and 2 walk their own groups and this list side by side and stop, silently, at the shorter one: groups that are
left over keep the weights that they were made with (seen with 0.19.8). So empty entries, which change no setting, fill
the list up to the number of parameters, save where it is DeepSpeed's own and names every parameter.

ZeRO-3 gives all its groups the settings of the first entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.errors import UnsupportedError
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.tree import OPTIMIZER, PARAM_GROUPS, PARAMS

if TYPE_CHECKING:
    from core.catalog.catalog import TargetCatalog


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """A parameter group.

    Args:
        settings: learning rate and others; {} where the run that loads keeps its own.
        names: of its parameters.
    """

    settings: Mapping[str, object]
    names: Sequence[str]


def param_groups(target: TargetCatalog, names: Sequence[str], trained: Sequence[str]) -> list[ParamGroup]:
    """The groups: as the objects say, else one without settings.

    Objects are called ``optimizer.param_groups.<number>.<setting>``, one of them ``params``; or, as torch flattens
    them, ``optimizer.param_groups.<parameter>.<setting>``: parameters with equal settings become a group.

    Args:
        names: of all parameters that are written.
        trained: of those that the optimizer has.

    Raises:
        UnsupportedError: a setting belongs to neither.
    """
    prefix = f"{OPTIMIZER}.{PARAM_GROUPS}."
    by_number: dict[int, dict[str, object]] = {}
    by_name: dict[str, dict[str, object]] = {}
    known = set(names)
    for key, item in target.objects.items():
        place, _, setting = key.removeprefix(prefix).rpartition(".")
        if not key.startswith(prefix) or not place:
            continue
        if place in known:
            by_name.setdefault(place, {})[setting] = item.value
        elif place.isascii() and place.isdigit():
            by_number.setdefault(int(place), {})[setting] = item.value
        else:
            raise UnsupportedError(
                "the setting belongs to none of the parameters that are written",
                key=key,
                hint="leave it out with --exclude",
            )
    if by_number:
        return [_numbered(settings, known) for _, settings in sorted(by_number.items())]
    alike: dict[str, tuple[dict[str, object], list[str]]] = {}
    for name in trained:
        settings = by_name.get(name, {})
        alike.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(name)
    return [ParamGroup(settings, members) for settings, members in alike.values()]


def _numbered(settings: dict[str, object], known: set[str]) -> ParamGroup:
    listed = settings.get(PARAMS)
    members = [name for name in listed if name in known] if isinstance(listed, (list, tuple)) else []
    return ParamGroup({name: value for name, value in settings.items() if name != PARAMS}, members)


def stored_groups(target: TargetCatalog, groups: Sequence[ParamGroup], trained: Sequence[str]) -> list[object]:
    """``param_groups`` as the file has it."""
    listed: list[object] = [{**group.settings, PARAMS: [number]} for number, group in enumerate(groups)]
    named = {name for group in groups for name in group.names}
    facts = target.facet(ZeroFacts)
    is_own = facts is not None and facts.stage is not None
    is_complete = is_own and named.issuperset(trained) and all(g.settings for g in groups)
    if not is_complete:
        listed += [{PARAMS: []} for _ in range(len(trained) - len(listed))]
    return listed
