"""The optimizer's parameter groups in ``optimizer_state.pt`` of a universal checkpoint.

ZeRO-1 and 2 iterate over their own groups and this list together and stop, silently, at the end of
the shorter one: their remaining groups keep the weights that they were initialized with (seen with
0.19.8). Therefore empty entries, which change no setting, extend the list to the number of
parameters, unless it is DeepSpeed's own and names every parameter.

ZeRO-3 applies the settings of the first entry to all its groups.

Groups of experts are named after their expert parallel size (``ep_size_2``); the engine replaces
the names of its groups by these, and later looks up process groups by them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from core.errors import UnsupportedError
from core.formats.deepspeed.facets import ZeroFacts
from core.formats.deepspeed.tree import OPTIMIZER, PARAM_GROUPS, PARAMS
from core.formats.deepspeed.universal.expert_parallel import expert_facts
from core.values import dataclass

if TYPE_CHECKING:
    from core.catalog.catalog import TargetCatalog

_EP_NAME = re.compile(r"ep_size_\d+")


@dataclass(frozen=True, slots=True)
class UniversalParamGroup:
    """A parameter group of the optimizer.

    Args:
        settings: learning rate and others; with {}, the run that loads keeps its own settings.
        names: names of the group's parameters.
    """

    settings: Mapping[str, object]
    names: Sequence[str]


def param_groups(
    target: TargetCatalog, names: Sequence[str], trained: Sequence[str]
) -> list[UniversalParamGroup]:
    """Build the parameter groups from the settings among the target's objects.

    The keys of settings are ``optimizer.param_groups.<number>.<setting>``, including ``params``,
    or, as flattened by torch, ``optimizer.param_groups.<parameter>.<setting>``. In the latter case
    parameters with equal settings become a group; without any settings, all become one.

    Args:
        names: names of all parameters that are written.
        trained: names of those that the optimizer trains.

    Raises:
        UnsupportedError: a setting belongs neither to a group nor to a parameter.
    """
    # Collect the settings by their owners. Names take precedence, as a parameter may be called "0".
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
                "the setting does not belong to a parameter that is written",
                key=key,
                hint="skip it with --exclude",
            )
    # Numbered groups list their parameters, of which only some may be written.
    if by_number:
        groups = []
        for _, settings in sorted(by_number.items()):
            params = settings.pop(PARAMS, None)
            members = params if isinstance(params, (list, tuple)) else ()
            groups.append(
                UniversalParamGroup(settings, [name for name in members if name in written])
            )
        return _at_ep_size(groups, expert_facts(target).ep)
    # Values need not be hashable: compare the settings of parameters as text.
    by_settings: dict[str, tuple[dict[str, object], list[str]]] = {}
    for name in trained:
        settings = by_name.get(name, {})
        by_settings.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(name)
    return [UniversalParamGroup(settings, members) for settings, members in by_settings.values()]


def _at_ep_size(groups: Sequence[UniversalParamGroup], ep: int) -> list[UniversalParamGroup]:
    """Return the groups as an engine has them whose MoE layers all have the same ``ep_size``.

    Groups of experts are named after the size, and there is one for each size that the layers have.
    """
    result: list[UniversalParamGroup] = []
    previous: object = None
    for group in groups:
        name = group.settings.get("name")
        if group.settings.get("moe") is not True or not (
            isinstance(name, str) and _EP_NAME.fullmatch(name)
        ):
            result.append(group)
            previous = None
            continue
        settings = {**group.settings, "name": f"ep_size_{ep}"}
        # Groups that differ only in the size become one.
        if previous not in (None, name) and dict(result[-1].settings) == settings:
            result[-1] = UniversalParamGroup(settings, [*result[-1].names, *group.names])
        else:
            result.append(UniversalParamGroup(settings, group.names))
        previous = name
    return result


def stored_groups(
    target: TargetCatalog, groups: Sequence[UniversalParamGroup], trained: Sequence[str]
) -> list[object]:
    """Return ``param_groups`` in the form in which the file stores them.

    Args:
        trained: names of the parameters that the optimizer trains.
    """
    # The wrapped optimizer has one flat parameter per group.
    stored: list[object] = [
        {**group.settings, PARAMS: [number]} for number, group in enumerate(groups)
    ]
    # Extend the list, unless it is DeepSpeed's own and complete (see the module's docstring).
    named = {name for group in groups for name in group.names}
    facts = target.facet(ZeroFacts)
    is_own = facts is not None and facts.stage is not None
    if not (is_own and named.issuperset(trained) and all(group.settings for group in groups)):
        stored += [{PARAMS: []} for _ in range(len(trained) - len(stored))]
    return stored
