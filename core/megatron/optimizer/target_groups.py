"""The param groups of an optimizer after resharding.

The destination has the groups of the source. Only experts may change their group: with expert
parallelism they have groups, and a chained optimizer, of their own (``is_expert_parallel``);
without it, they are in the groups of dense parameters. The version of megatron-core
(``core.megatron.model.version``) decides which groups a rank lists, and in which order: the version
that is to load the result, if requested, otherwise that which wrote the source.

Source: megatron-core 0.12.1, 0.15.0 and 0.16.1 ``core/optimizer/__init__.py``
``_get_param_groups``, ``get_megatron_optimizer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import Optimizer, ParamGroup, trained
from core.errors import CorruptError, UnsupportedError
from core.megatron.model.args import fields_of
from core.megatron.model.version import OPTION, MegatronVersion
from core.megatron.optimizer.groups import (
    EXPERT,
    Policy,
    identity,
    member_of,
    policies_of,
    traits_of,
    without_unused_traits,
)
from core.megatron.rules.rules import Rules
from core.pickle.equality import are_same
from core.values import dataclass

if TYPE_CHECKING:
    from core.megatron.optimizer.reshard_target import ReshardTarget


@dataclass(frozen=True, slots=True)
class TargetGroups:
    """The groups at a destination.

    Args:
        settings: settings of each group, in the order of chained optimizers.
        group_of: global parameter → number of its group.
        is_sorted: ranks list groups in that order; otherwise in the order of their parameters.
        omits_empty: ranks do not list groups of which they have no parameter.
    """

    settings: Sequence[Mapping[str, object]]
    group_of: Mapping[str, int]
    is_sorted: bool
    omits_empty: bool

    def order(self, params: Iterable[str]) -> list[int]:
        """Return the numbers of the groups that a rank lists.

        Args:
            params: parameters that the rank holds, in order.
        """
        numbers = dict.fromkeys(self.group_of[name] for name in params)
        if not self.omits_empty:
            numbers |= dict.fromkeys(range(len(self.settings)))  # empty groups come last …
        return sorted(numbers) if self.is_sorted else list(numbers)  # … unless all are sorted

    def by_member(self, numbers: Iterable[int]) -> list[list[int]]:
        """Return the numbers of groups, by the chained optimizer that they belong to."""
        members: dict[tuple[bool, bool], list[int]] = {}
        for number in numbers:
            members.setdefault(member_of(self.settings[number]), []).append(number)
        return [members[member] for member in sorted(members)]

    def is_expert(self, number: int) -> bool:
        """Return whether a group belongs to the optimizer of experts."""
        return bool(self.settings[number].get(EXPERT))


def target_groups(target: ReshardTarget, params: Mapping[str, int]) -> TargetGroups:
    """Return the param groups of a destination.

    Args:
        target: the destination.
        params: global name of every trained parameter → number of its axes.

    Raises:
        UnsupportedError: no policy matches parameters to the source's groups, two groups with
            different settings would become one, or the target's version describes groups in
            another way.
        CorruptError: a parameter is in no group.
    """
    source_groups, version = target.optimizer.groups, target.version
    source_of = numbers_of_groups(target.optimizer, params, args=target.args, rules=target.rules)
    splits = _splits_experts(target)

    # A parameter stays in its source's group, but experts may get groups of their own or lose them.
    placed: dict[str, tuple[int, bool]] = {}
    for name in params:
        number = source_of[name]
        if splits is None:
            is_expert = source_groups[number].is_expert
        else:
            is_expert = splits and target.rules.expert_of(name) is not None
        placed[name] = (number, is_expert)
    used = set(source_of.values())
    empty = [
        (number, group.is_expert and splits is not False)
        for number, group in enumerate(source_groups)
        if number not in used
    ]

    # Merge the groups that have one identity at the destination.
    groups: dict[tuple[object, ...], Mapping[str, object]] = {}
    ids: dict[tuple[int, bool], tuple[object, ...]] = {}
    for number, is_expert in dict.fromkeys([*placed.values(), *empty]):
        settings = source_groups[number].settings
        group_id = ids[number, is_expert] = identity(settings, is_expert=is_expert)
        if EXPERT in settings:
            settings = {**settings, EXPERT: is_expert}
        _check_same(groups.setdefault(group_id, settings), settings)

    # Chained optimizers follow each other, their groups in the order of the source.
    base = [identity(group.settings, is_expert=False) for group in source_groups]
    groups = dict(
        sorted(
            groups.items(),
            key=lambda item: (
                member_of(item[1]),
                bool(item[0][2]),
                base.index((*item[0][:2], False, *item[0][3:])),
            ),
        )
    )
    is_sorted = all(_USUAL_RATE in group.settings for group in source_groups)
    omits_empty = bool(target.optimizer.omits_empty)

    # A requested megatron-core has its own settings and order.
    if version is not None:
        groups = _groups_of_version(groups, version, is_sorted=is_sorted)
        is_sorted, omits_empty = version.sorts_groups, not version.lists_empty_groups
    order = list(groups)
    return TargetGroups(
        settings=list(groups.values()),
        group_of={name: order.index(ids[place]) for name, place in placed.items()},
        is_sorted=is_sorted,
        omits_empty=omits_empty,
    )


def _groups_of_version(
    groups: Mapping[tuple[object, ...], Mapping[str, object]],
    version: MegatronVersion,
    *,
    is_sorted: bool,
) -> dict[tuple[object, ...], Mapping[str, object]]:
    """Return groups with the settings, and in the order, of a version of megatron-core.

    0.16 lists groups with the usual learning rate as: with weight decay, without; dense ones first.

    Args:
        groups: identity → settings, dense groups first.
        is_sorted: the groups are in the order of 0.16 already.

    Raises:
        UnsupportedError: as for ``_describe``, or two groups have the same weight decay and both
            are, or are not, of experts.
    """
    described = {group_id: _describe(settings, version) for group_id, settings in groups.items()}
    if is_sorted or not version.sorts_groups:
        return described
    place = {
        group_id: (*member_of(settings), bool(group_id[2]), traits_of(settings).is_exempt)
        for group_id, settings in described.items()
    }
    if len(set(place.values())) < len(place):
        raise UnsupportedError(
            "the source's param groups differ in more than weight decay and expert membership, so "
            "their order in megatron-core 0.16 is unknown",
            hint="drop the optimizer with --no-optim",
        )
    return {group_id: described[group_id] for group_id in sorted(place, key=lambda key: place[key])}


def _describe(settings: Mapping[str, object], version: MegatronVersion) -> Mapping[str, object]:
    """Return a group's settings in the form that a version of megatron-core expects.

    Raises:
        UnsupportedError: the version needs a setting that the group lacks, or describes its
            learning rate in another way.
    """
    missing = [name for name in _FOUND_BY if name not in settings and f"pre_{name}" not in settings]
    if missing:
        raise UnsupportedError(
            f"the source's param groups lack {' and '.join(missing)}, which megatron-core uses to "
            "identify groups",
            hint=f"omit {OPTION}, or drop the optimizer with --no-optim",
        )

    # Versions that sort groups have `default_config`; that of a usual learning rate can be added.
    if version.sorts_groups == (_USUAL_RATE in settings):
        return settings
    if traits_of(settings).has_own_lr or settings.get("lr_mult", settings.get("pre_lr_mult")) != 1:
        raise UnsupportedError(
            "the source describes param groups that have their own learning rate in a form that "
            f"megatron-core {version} does not use",
            hint=f"omit {OPTION}, or drop the optimizer with --no-optim",
        )
    if version.sorts_groups:
        return {**settings, _USUAL_RATE: True}
    return {name: value for name, value in settings.items() if name != _USUAL_RATE}


_USUAL_RATE = "default_config"
"""Setting of a group since megatron-core 0.16: True if its learning rate is the usual one."""
_FOUND_BY = ("wd_mult", "lr_mult", EXPERT, "is_decoupled_lr")
"""The settings by which megatron-core 0.15 and later find a group."""


def _splits_experts(target: ReshardTarget) -> bool | None:
    """Return whether the destination has groups of experts only; None to keep the source's groups.

    Without expert parallelism, some versions create such groups if the experts' TP size differs
    from TP. If that is so for both source and destination, the source shows what its version does.
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
    """Raise unless two groups that become one have the same settings."""
    for name in dict.fromkeys([*settings, *other_settings]):
        if (
            name not in settings
            or name not in other_settings
            or not are_same(settings[name], other_settings[name])
        ):
            raise UnsupportedError(
                f"experts and other parameters would share a param group, but their {name} values "
                f"differ: {settings.get(name)!r} and {other_settings.get(name)!r}",
                hint="keep an expert parallel size above 1, or drop the optimizer with --no-optim",
            )


def numbers_of_groups(
    optimizer: Optimizer, params: Mapping[str, int], *, args: object, rules: Rules
) -> Mapping[str, int]:
    """Return the number of every parameter's group in the source.

    Args:
        optimizer: the source's optimizer.
        params: global name of every trained parameter → number of its axes.
        args: training arguments of the source.
        rules: the layout's rules.

    Raises:
        CorruptError: a parameter is in no group.
        UnsupportedError: the groups list no parameters, and no policy fits.
    """
    # The groups of rank files and of this project's own form list their parameters.
    groups = optimizer.groups
    if all(group.params is not None for group in groups):
        numbers = {
            name: number for number, group in enumerate(groups) for name in group.params or ()
        }
        missing = next((name for name in params if name not in numbers), None)
        if missing is not None:
            raise CorruptError(
                "the optimizer has states for this parameter, but no param group contains it",
                key=missing,
            )
        return numbers

    # Otherwise the first policy counts that assigns all parameters and fills all groups.
    for policy in policies_of(fields_of(args)):
        numbers = _groups_by_policy(policy, groups, params, rules)
        if len(numbers) == len(params) and len(set(numbers.values())) == len(groups):
            return numbers
    raise UnsupportedError(
        "the checkpoint does not record which parameters belong to each of the optimizer's "
        f"{len(groups)} param groups, and ckpt cannot derive this from the groups' settings",
        hint="drop the optimizer with --no-optim, or keep the source's format",
    )


def _groups_by_policy(
    policy: Policy, groups: Sequence[ParamGroup], params: Mapping[str, int], rules: Rules
) -> dict[str, int]:
    """Return the number of each parameter's group by a policy; {} if groups are ambiguous."""
    group_traits = [traits_of(group.settings) for group in groups]
    if len(set(group_traits)) < len(group_traits):
        return {}
    numbers: dict[str, int] = {}
    for name, n_axes in params.items():
        traits = policy.traits(name, n_axes, is_expert=rules.expert_of(name) is not None)
        if traits is not None and without_unused_traits(traits, group_traits) in group_traits:
            numbers[name] = group_traits.index(without_unused_traits(traits, group_traits))
    return numbers


def with_named_groups(catalog: Catalog, rules: Rules) -> Catalog:
    """Return the global per-layer form with the names of each group's parameters.

    torch_dist does not record them. They follow from the groups' settings and the policies of
    ``core.megatron.optimizer.groups``, as when the optimizer is resharded.

    Args:
        catalog: the global per-layer form; without an optimizer, it is returned unchanged.
        rules: the layout's rules.

    Raises:
        CorruptError: a parameter with states is in no group.
        UnsupportedError: the parameters of the groups do not follow from the groups' settings.
    """
    optimizer = catalog.optimizer
    if optimizer is None or all(group.params is not None for group in optimizer.groups):
        return catalog

    numbers = numbers_of_groups(optimizer, trained(catalog.tensors), args=catalog.args, rules=rules)
    groups = tuple(
        replace(group, params=tuple(name for name, owner in numbers.items() if owner == number))
        for number, group in enumerate(optimizer.groups)
    )
    return replace(catalog, optimizer=replace(optimizer, groups=groups))
