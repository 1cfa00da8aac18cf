"""Add the names of parameters to the groups of an optimizer that does not record them (torch_dist).

The names follow from the groups' settings and the policies of ``core.megatron.optimizer.groups``,
as when the optimizer is resharded.
"""

from __future__ import annotations

from dataclasses import replace

from core.catalog.catalog import Catalog
from core.catalog.optimizer_keys import trained
from core.megatron.rules.rules import Rules


def with_named_groups(catalog: Catalog, rules: Rules) -> Catalog:
    """Return the global per-layer form with the names of each group's parameters.

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
    from core.megatron.optimizer.target_groups import numbers_of_groups

    numbers = numbers_of_groups(optimizer, trained(catalog.tensors), args=catalog.args, rules=rules)
    groups = tuple(
        replace(group, params=tuple(name for name, owner in numbers.items() if owner == number))
        for number, group in enumerate(optimizer.groups)
    )
    return replace(catalog, optimizer=replace(optimizer, groups=groups))
