"""The param groups of an optimizer at another layout.

Groups are those of the source. Only experts may come to other ones: with expert parallelism they
have groups, and a chained optimizer, of their own (``is_expert_parallel``); without, they are in
the groups of dense parameters. Which of them a rank lists, and in which order, depends on
megatron-core's version (``core.megatron.model.version``): on the one that is to load the result,
or, where nobody says, on the one that wrote the source.

Source: megatron-core 0.12.1, 0.15.0 and 0.16.1 ``core/optimizer/__init__.py``
``_get_param_groups``, ``get_megatron_optimizer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from core.errors import CorruptError, UnsupportedError
from core.megatron.extras.common_state import same
from core.megatron.model.args import fields_of
from core.megatron.model.version import OPTION, MegatronVersion
from core.megatron.optimizer.groups import (
    EXPERT,
    Policy,
    identity,
    policies_of,
    traits_of,
    without_unused_traits,
)
from core.megatron.optimizer.reshard_target import ReshardTarget


@dataclass(frozen=True, slots=True)
class TargetGroups:
    """The groups at a destination.

    Args:
        settings: settings of each group, in order: dense ones first.
        group_of: global parameter → number of its group.
        is_sorted: ranks have them in that order; otherwise as their parameters need them.
        omits_empty: ranks leave out those of which they have no parameter.
    """

    settings: Sequence[Mapping[str, object]]
    group_of: Mapping[str, int]
    is_sorted: bool
    omits_empty: bool

    def order(self, params: Iterable[str]) -> list[int]:
        """Return the groups that a rank lists.

        Args:
            params: parameters that the rank holds, in order.
        """
        own = list(dict.fromkeys(self.group_of[name] for name in params))
        if self.is_sorted:
            own.sort()
        if not self.omits_empty:
            all_groups = range(len(self.settings))
            own = (
                list(all_groups)
                if self.is_sorted
                else [*own, *(number for number in all_groups if number not in own)]
            )
        return own

    def is_expert(self, number: int) -> bool:
        """Return whether a group belongs to the optimizer of experts."""
        return bool(self.settings[number].get(EXPERT))


def target_groups(target: ReshardTarget, params: Mapping[str, int]) -> TargetGroups:
    """Return the param groups of a destination.

    Args:
        target: the destination.
        params: global name of every parameter that is trained → number of its axes.

    Raises:
        UnsupportedError: no policy tells which parameters the source's groups have, two groups that
            become one have different settings, or the target's version would describe them in
            another way.
        CorruptError: a parameter is in no group.
    """
    optimizer, rules, version = target.optimizer, target.rules, target.version
    sources = _source_groups(target, params)
    splits = _splits(target)
    wanted: dict[tuple[object, ...], Mapping[str, object]] = {}
    place: dict[tuple[int, bool], tuple[object, ...]] = {}

    def settle(number: int, is_expert: bool) -> tuple[object, ...]:
        if (number, is_expert) in place:
            return place[number, is_expert]
        group = optimizer.groups[number]
        group_id = identity(group.settings, is_expert=is_expert)
        settings = (
            group.settings
            if EXPERT not in group.settings
            else {**group.settings, EXPERT: is_expert}
        )
        _check_same(wanted.setdefault(group_id, settings), settings)
        return place.setdefault((number, is_expert), group_id)

    # Every parameter goes to its source's group; experts may have groups of their own or lose them.
    of_name = {}
    for name in params:
        number = sources[name]
        is_expert = (
            optimizer.groups[number].is_expert
            if splits is None
            else splits and rules.expert_of(name) is not None
        )
        of_name[name] = settle(number, is_expert)
    for number, group in enumerate(optimizer.groups):
        if not any(source == number for source in sources.values()):
            settle(number, group.is_expert if splits in (None, True) else False)

    # Dense groups come first, each kind in the order of the source.
    base = [identity(group.settings, is_expert=False) for group in optimizer.groups]
    order = sorted(
        wanted,
        key=lambda group_id: (bool(group_id[2]), base.index((*group_id[:2], False, *group_id[3:]))),
    )
    is_sorted = all(_USUAL_RATE in group.settings for group in optimizer.groups)
    omits_empty = bool(optimizer.omits_empty)

    # A given megatron-core wants its own settings and order.
    if version is not None:
        wanted = {group_id: _described(settings, version) for group_id, settings in wanted.items()}
        if version.sorts_groups and not is_sorted:
            order = _in_order(wanted)
        is_sorted, omits_empty = version.sorts_groups, not version.lists_empty_groups
    return TargetGroups(
        settings=[wanted[group_id] for group_id in order],
        group_of={name: order.index(group_id) for name, group_id in of_name.items()},
        is_sorted=is_sorted,
        omits_empty=omits_empty,
    )


def _described(settings: Mapping[str, object], version: MegatronVersion) -> Mapping[str, object]:
    """Return a group's settings as a version has them.

    Raises:
        UnsupportedError: the version needs a setting that the group lacks, or describes its
            learning rate in another way.
    """
    missing = [name for name in _FOUND_BY if name not in settings and f"pre_{name}" not in settings]
    if missing:
        raise UnsupportedError(
            f"the source's param groups have no {' and no '.join(missing)}, by which megatron-core tells them apart",
            hint=f"leave {OPTION} out, or leave the optimizer out with --no-optim",
        )
    if version.sorts_groups == (_USUAL_RATE in settings):
        return settings
    if traits_of(settings).has_own_lr or settings.get("lr_mult", settings.get("pre_lr_mult")) != 1:
        raise UnsupportedError(
            f"megatron-core {version} describes param groups with a learning rate of their own in another way than the "
            "source",
            hint=f"leave {OPTION} out, or leave the optimizer out with --no-optim",
        )
    if version.sorts_groups:
        return {**settings, _USUAL_RATE: True}
    return {name: value for name, value in settings.items() if name != _USUAL_RATE}


def _in_order(
    groups: Mapping[tuple[object, ...], Mapping[str, object]],
) -> list[tuple[object, ...]]:
    """Return groups with the usual learning rate in the order of 0.16: with weight decay, without;
    dense ones first.

    Raises:
        UnsupportedError: two groups are alike in weight decay and experts.
    """
    place = {
        group_id: (bool(group_id[2]), traits_of(settings).is_exempt)
        for group_id, settings in groups.items()
    }
    if len(set(place.values())) < len(place):
        raise UnsupportedError(
            "the source's param groups differ in more than weight decay and experts, so that their order in "
            "megatron-core 0.16 is not known",
            hint="leave the optimizer out with --no-optim",
        )
    return sorted(place, key=lambda group_id: place[group_id])


_USUAL_RATE = "default_config"
"""Setting of a group's, since megatron-core 0.16: whether its learning rate is the usual one."""
_FOUND_BY = ("wd_mult", "lr_mult", EXPERT, "is_decoupled_lr")
"""The settings by which megatron-core 0.15 and later find a group."""


def _splits(target: ReshardTarget) -> bool | None:
    """Return whether experts have groups of their own at the destination; None means those that
    they have.

    Without expert parallelism, some versions give them groups of their own where their TP size is
    another; then what the source does decides, if it shows it.
    """
    if not any(EXPERT in group.settings for group in target.optimizer.groups):
        return None
    source, topology = target.facts.topology, target.topology
    if topology.ep > 1:
        return True
    if source.ep == 1 and (source.expert_tp != source.tp) == (topology.expert_tp != topology.tp):
        return None
    return False


def _check_same(settings: Mapping[str, object], other_settings: Mapping[str, object]) -> None:
    """Raise unless two groups that become one agree."""
    for name in dict.fromkeys([*settings, *other_settings]):
        if (
            name not in settings
            or name not in other_settings
            or not same(settings[name], other_settings[name])
        ):
            raise UnsupportedError(
                f"experts and other parameters come to one param group, but their {name} is {settings.get(name)!r} and "
                f"{other_settings.get(name)!r}",
                hint="keep an expert parallel size above 1, or leave the optimizer out with --no-optim",
            )


def _source_groups(target: ReshardTarget, params: Mapping[str, int]) -> Mapping[str, int]:
    """Return the number of every parameter's group in the source.

    Raises:
        CorruptError: a parameter is in no group.
        UnsupportedError: the groups list no parameters, and no policy tells them.
    """
    groups = target.optimizer.groups
    if all(group.params is not None for group in groups):
        numbers = {
            name: number for number, group in enumerate(groups) for name in group.params or ()
        }
        missing = next((name for name in params if name not in numbers), None)
        if missing is not None:
            raise CorruptError(
                "the optimizer has states of it, but no param group has it", key=missing
            )
        return numbers
    for policy in policies_of(fields_of(target.args)):
        numbers = _groups_by_policy(policy, target, params)
        if len(numbers) == len(params) and len(set(numbers.values())) == len(groups):
            return numbers
    raise UnsupportedError(
        f"the parameters of the optimizer's {len(groups)} groups are not stored, and the groups' settings do not tell "
        "them",
        hint="leave the optimizer out with --no-optim, or keep the format",
    )


def _groups_by_policy(
    policy: Policy, target: ReshardTarget, params: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of the group that a policy gives each parameter; {} if it cannot tell the
    groups apart.
    """
    wanted = [traits_of(group.settings) for group in target.optimizer.groups]
    if len(set(wanted)) < len(wanted):
        return {}
    numbers: dict[str, int] = {}
    for name, n_axes in params.items():
        traits = policy.traits(name, n_axes, is_expert=target.rules.expert_of(name) is not None)
        if traits is not None and without_unused_traits(traits, wanted) in wanted:
            numbers[name] = wanted.index(without_unused_traits(traits, wanted))
    return numbers
