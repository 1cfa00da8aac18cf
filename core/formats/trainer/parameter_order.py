"""Find the names of parameters that an optimizer numbers, by their order and their shapes.

An optimizer of torch numbers its parameters group by group, each group in the order of
``named_parameters``. Two facts are needed for the names, and both are checked:

1. *The order of the model's parameters.* A file of ``torch.save`` has it; one of safetensors is
   sorted. Then the model is a tree of modules: numbered modules come in the order of their numbers,
   ``weight`` before ``bias``, and others as ``parameter_order.toml`` says for the families of
   transformers. For other models every order of the modules is tried, if they are few.
2. *The group of each parameter.* Every division of the parameters among the groups is tried that
   keeps the order and in which all shapes agree.

The names are known only if all orders and divisions that fit give the same ones.

The states of Adam, SGD, Adafactor, Adagrad and RMSprop show the shapes, and so do the 8-bit states
of bitsandbytes and torchao.

Not supported: optimizers whose states do not show the shapes of their parameters (SGD without
momentum, GaLore, APOLLO, Shampoo); they keep the numbers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import permutations, product
from math import factorial, prod
from pathlib import Path

from core.arrays.box import Shape
from core.values import dataclass

_LEAVES = ("weight", "bias")
_LEAST_ROWS = 3
"""Least number of rows that have to be true of a model without a configuration."""
_MOST_ORDERS = 720
"""Maximum number of orders that are tried for a model of no known family."""
_MOST_STATES = 200_000
"""Maximum number of partial divisions that are followed."""
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters without weight decay, the second group of transformers' Trainer.

Source: transformers 5.23 ``Trainer.get_decay_parameter_names``.
"""

ModuleTree = Mapping[str, Sequence[str]]
"""Path of a module, with * for numbers → names of its parameters and modules in order."""


@dataclass(frozen=True, slots=True)
class NamedNumbers:
    """The names of an optimizer's parameters.

    Args:
        groups: names of the parameters of each group, in order.
        source: what gave the order, for people.
    """

    groups: tuple[tuple[str, ...], ...]
    source: str


def named_numbers(
    shapes: Mapping[str, Shape],
    groups: Sequence[Sequence[Shape | None]],
    *,
    is_ordered: bool,
    model_type: str | None,
) -> NamedNumbers | None:
    """Return the names of the numbered parameters, or None if they are not certain.

    Args:
        shapes: parameter → shape, of the whole model.
        groups: shapes of the parameters of each group, in order; None where no state shows it.
        is_ordered: ``shapes`` is in the order of the model.
        model_type: the family of transformers, or None if it is unknown.
    """
    if is_ordered:
        return _only_fit([tuple(shapes)], shapes, groups, source="the weights' file")
    # The family's own order; or those of all families that have such modules.
    table = families()
    own_tree = table.get(model_type or "")
    trees = {model_type or "": own_tree} if own_tree is not None else table
    matching = {
        family: order
        for family, tree in trees.items()
        if (family == model_type or _n_rows(tree, shapes) >= _LEAST_ROWS)
        and (order := _order_by(tree, shapes)) is not None
    }
    if matching:
        return _only_fit(
            list(dict.fromkeys(matching.values())),
            shapes,
            groups,
            source=f"{next(iter(matching))} in transformers",
        )
    return _only_fit(
        _possible_orders(shapes), shapes, groups, source="their shapes, which allow no other order"
    )


@cache
def families() -> dict[str, ModuleTree]:
    """Read ``parameter_order.toml``: model type → modules in order."""
    text = Path(__file__).with_name("parameter_order.toml").read_text("utf-8")
    table: dict[str, ModuleTree] = {}
    for row in tomllib.loads(text)["families"]:
        tree = {
            path: names.split()
            for path, _, names in (line.partition(":") for line in row["children"].splitlines())
        }
        table |= dict.fromkeys(row["model_types"], tree)
    return table


def _only_fit(
    orders: Sequence[tuple[str, ...]],
    shapes: Mapping[str, Shape],
    groups: Sequence[Sequence[Shape | None]],
    *,
    source: str,
) -> NamedNumbers | None:
    """Return the names that all fitting orders give; None if they differ, or no order fits."""
    results: set[tuple[tuple[str, ...], ...]] = set()
    for order in orders:
        division = _divide(order, shapes, groups)
        if division.is_ambiguous:
            return None
        if division.groups is not None:
            results.add(division.groups)
        if len(results) > 1:
            return None
    return NamedNumbers(results.pop(), source) if results else None


@dataclass(frozen=True, slots=True)
class _Division:
    """The division of ordered parameters among groups.

    Args:
        groups: names by group; None if no division fits, or several do.
        is_ambiguous: several fit, or there are too many to tell.
    """

    groups: tuple[tuple[str, ...], ...] | None = None
    is_ambiguous: bool = False


def _divide(
    order: Sequence[str], shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> _Division:
    """Divide parameters among groups so that each group has its shapes in its order.

    Parameters that are left over are frozen.
    """
    sizes = tuple(len(group) for group in groups)
    n_frozen = len(order) - sum(sizes)
    if n_frozen < 0:
        return _Division()
    # Count the ways to every partial division, up to two. A partial division is the number of
    # parameters that each group has got; ``came_from`` has one step to it.
    steps: list[dict[tuple[int, ...], tuple[int, int | None]]] = [{(0,) * len(groups): (1, None)}]
    n_states = 0
    for number, name in enumerate(order):
        after: dict[tuple[int, ...], tuple[int, int | None]] = {}
        for filled, (ways, _) in steps[-1].items():
            for group, filled_after in _next(filled, shapes[name], groups):
                ways_before, came_from = after.get(filled_after, (0, group))
                after[filled_after] = (min(2, ways_before + ways), came_from)
            if number - sum(filled) < n_frozen:
                ways_before, came_from = after.get(filled, (0, None))
                after[filled] = (min(2, ways_before + ways), came_from)
        n_states += len(after)
        if n_states > _MOST_STATES:
            return _Division(is_ambiguous=True)
        steps.append(after)
    ways = steps[-1].get(sizes, (0, None))[0]
    if ways == 0:
        return _Division()
    if ways > 1:
        by_rule = _divide_by_rule(order, shapes, groups)
        return _Division(by_rule, is_ambiguous=by_rule is None)

    # Follow the only way back.
    names: list[list[str]] = [[] for _ in groups]
    filled = sizes
    for number in range(len(order), 0, -1):
        came_from = steps[number][filled][1]
        if came_from is not None:
            names[came_from].append(order[number - 1])
            filled = tuple(n - (group == came_from) for group, n in enumerate(filled))
    return _Division(tuple(tuple(reversed(group)) for group in names))


def _next(
    filled: tuple[int, ...], shape: Shape, groups: Sequence[Sequence[Shape | None]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each group that the next parameter may belong to, and how far groups are filled then.

    Args:
        filled: number of parameters that each group has got.
        shape: shape of the next parameter.
    """
    for group, n in enumerate(filled):
        if n < len(groups[group]) and groups[group][n] in (None, shape):
            yield group, (*filled[:group], n + 1, *filled[group + 1 :])


def _divide_by_rule(
    order: Sequence[str], shapes: Mapping[str, Shape], groups: Sequence[Sequence[Shape | None]]
) -> tuple[tuple[str, ...], ...] | None:
    """Divide parameters by the Trainer's rule for weight decay; None if the shapes disagree."""
    divided = (
        tuple(name for name in order if _NO_DECAY.search(name.lower()) is None),
        tuple(name for name in order if _NO_DECAY.search(name.lower()) is not None),
    )
    is_fitting = [len(group) for group in groups] == [len(names) for names in divided] and all(
        shape in (None, shapes[name])
        for names, group in zip(divided, groups, strict=True)
        for name, shape in zip(names, group, strict=True)
    )
    return divided if is_fitting else None


def _n_rows(tree: ModuleTree, names: Iterable[str]) -> int:
    """Return the number of a family's rows that are about modules of a model."""
    paths: set[str] = set()
    for name in names:
        parts = ["*" if _is_number(part) else part for part in name.split(".")]
        paths |= {".".join(parts[:depth]) for depth in range(len(parts))}
    return len(paths & tree.keys())


def _order_by(tree: ModuleTree, names: Mapping[str, object]) -> tuple[str, ...] | None:
    """Return parameters in the order of a family; None if the family has no such modules."""
    keys: dict[tuple[tuple[int, int], ...], str] = {}
    for name in names:
        key: list[tuple[int, int]] = []
        path: list[str] = []
        for part in name.split("."):
            if _is_number(part):
                key.append((0, int(part)))
                path.append("*")
                continue
            children = tree.get(".".join(path), _LEAVES)
            if part not in children:
                return None
            key.append((list(children).index(part), 0))
            path.append(part)
        keys[tuple(key)] = name
    return tuple(keys[key] for key in sorted(keys))


def _possible_orders(names: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Return the orders that the parameters of a model of no known family may have.

    Parameters of a module come before its modules, and modules whose paths differ in numbers only
    have one order. Returns [] if there are too many orders.
    """
    # The children of every module: parameters, and modules.
    own: dict[str, dict[str, None]] = {}
    modules: dict[str, dict[str, None]] = {}
    for name in names:
        path: list[str] = []
        *above, last = name.split(".")
        for part in above:
            if not _is_number(part):
                modules.setdefault(".".join(path), {})[part] = None
            path.append("*" if _is_number(part) else part)
        own.setdefault(".".join(path), {})[last] = None
    # Numbered parameters (a ParameterList) are in the order of their numbers, too.
    parts = {
        (path, is_module): [name for name in children if not _is_number(name)]
        for is_module, table in ((False, own), (True, modules))
        for path, children in table.items()
    }
    free = {
        place: children
        for place, children in parts.items()
        if len(children) > 1 and set(children) != set(_LEAVES)
    }
    if prod(factorial(min(len(children), 8)) for children in free.values()) > _MOST_ORDERS:
        return []

    orders: dict[tuple[str, ...], None] = {}
    for chosen in product(*(permutations(children) for children in free.values())):
        sequence = {
            place: children if set(children) != set(_LEAVES) else list(_LEAVES)
            for place, children in parts.items()
        } | {place: list(children) for place, children in zip(free, chosen, strict=True)}
        tree = {
            path: [*sequence.get((path, False), ()), *sequence.get((path, True), ())]
            for path, _ in sequence
        }
        order = _order_by(tree, names)
        if order is not None:
            orders[order] = None
    return list(orders)


def _is_number(part: str) -> bool:
    """Return whether a part of a name is a number."""
    return part.isascii() and part.isdigit()
