"""The optimizer's parameter groups in ``optimizer_state.pt`` of a universal checkpoint.

ZeRO-1 and 2 walk their own groups and this list side by side and stop, silently, at the shorter
one: groups that are left over keep the weights that they were made with (seen with 0.19.8). So
empty entries, which change no setting, fill the list up to the number of parameters, save where it
is DeepSpeed's own and names every parameter.

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
class UniversalParamGroup:
    """A parameter group.

    Args:
        settings: learning rate and others; {} if the run that loads keeps its own.
        names: names of its parameters.
    """

    settings: Mapping[str, object]
    names: Sequence[str]


def param_groups(
    target: TargetCatalog, names: Sequence[str], trained: Sequence[str]
) -> list[UniversalParamGroup]:
    """Return the parameter groups from the target's objects.

    One without settings if there are none.

    Objects are called ``optimizer.param_groups.<number>.<setting>``, one of them ``params``; or, as
    torch flattens them, ``optimizer.param_groups.<parameter>.<setting>``: parameters with equal
    settings become a group.

    Args:
        names: names of all parameters that are written.
        trained: names of those in the optimizer.

    Raises:
        UnsupportedError: a setting belongs to no group and no parameter.
    """
    prefix = f"{OPTIMIZER}.{PARAM_GROUPS}."
    by_number: dict[int, dict[str, object]] = {}
    by_name: dict[str, dict[str, object]] = {}
    written = set(names)
    for key, item in target.objects.items():
        owner, _, setting = key.removeprefix(prefix).rpartition(".")
        if not key.startswith(prefix) or not owner:
            continue
        if owner in written:
            by_name.setdefault(owner, {})[setting] = item.value
        elif owner.isascii() and owner.isdigit():
            by_number.setdefault(int(owner), {})[setting] = item.value
        else:
            raise UnsupportedError(
                "the setting belongs to no parameter that is written",
                key=key,
                hint="leave it out with --exclude",
            )
    if by_number:
        return [_numbered(settings, written) for _, settings in sorted(by_number.items())]
    by_settings: dict[str, tuple[dict[str, object], list[str]]] = {}
    for name in trained:
        settings = by_name.get(name, {})
        by_settings.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(name)
    return [UniversalParamGroup(settings, members) for settings, members in by_settings.values()]


def _numbered(settings: dict[str, object], written: set[str]) -> UniversalParamGroup:
    """Return the group of numbered settings."""
    listed = settings.get(PARAMS)
    members = (
        [name for name in listed if name in written] if isinstance(listed, (list, tuple)) else []
    )
    return UniversalParamGroup(
        {name: value for name, value in settings.items() if name != PARAMS}, members
    )


def stored_groups(
    target: TargetCatalog, groups: Sequence[UniversalParamGroup], trained: Sequence[str]
) -> list[object]:
    """Return ``param_groups`` as the file stores them."""
    listed: list[object] = [
        {**group.settings, PARAMS: [number]} for number, group in enumerate(groups)
    ]
    named = {name for group in groups for name in group.names}
    facts = target.facet(ZeroFacts)
    is_own = facts is not None and facts.stage is not None
    is_complete = is_own and named.issuperset(trained) and all(g.settings for g in groups)
    if not is_complete:
        listed += [{PARAMS: []} for _ in range(len(trained) - len(listed))]
    return listed
