"""The state dict of an optimizer, with names in place of numbers where they are certain.

::

    optimizer.pt    {"state": {0: {"step": …, "exp_avg": tensor, "exp_avg_sq": tensor}, 1: …},
                     "param_groups": [{"lr": …, "params": [0, 1, …]}, …]}

    in the catalog  {"state": {"lm_head.weight": {"step": …, "exp_avg": …}, …},
                     "param_groups": [{"lr": …, "params": ["lm_head.weight", …]}, …]}

This is the form of ``torch.distributed.checkpoint.state_dict``, whose ``set_optimizer_state_dict``
loads it, and in which FSDP saves optimizers. The names are found as below, unless the groups
record them: in ``param_names``, if the optimizer got ``named_parameters``, or Adam-mini's in
``name``, in lower case, as each of its groups has one parameter.

Source: torch 2.13 ``torch/optim/optimizer.py`` (``state_dict``),
``torch/distributed/checkpoint/state_dict.py``; adam-mini 1.1.1.

The names of numbered parameters are found by their order and their shapes. An optimizer of torch
numbers its parameters group by group, each group in the order of ``named_parameters``. Two facts
are needed for the names, and both are checked:

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
from core.engine.catalog.optimizer_keys import BITSANDBYTES, MOMENTS
from core.pickle.inert import TensorLeaf, as_mapping, rebuild
from core.values import dataclass

_STATE, _GROUPS, _PARAMS, _NAMES = "state", "param_groups", "params", "param_names"


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model, as far as they tell the names of an optimizer's parameters.

    Args:
        shapes: parameter → shape, without buffers and other names of tied parameters.
        is_ordered: the parameters are in the order of the model.
        model_type: the family of transformers, or None if it is unknown.
        is_further: they are those of a further model, whose keys begin with its name.
        problem: why the parameters are not known to be those of the optimizer; None if they are.
    """

    shapes: Mapping[str, Shape]
    is_ordered: bool
    model_type: str | None
    is_further: bool = False
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """The state dict of an optimizer.

    Args:
        value: the state dict, with the names of parameters if they are certain.
        note: a note about the names, without the file; None if the file itself has them.
    """

    value: object
    note: str | None = None


def is_state_dict(value: object) -> bool:
    """Return whether a value is the state dict of an optimizer."""
    root = as_mapping(value)
    if root is None or as_mapping(root.get(_STATE)) is None:
        return False
    groups = root.get(_GROUPS)
    return isinstance(groups, list) and all(
        (group := as_mapping(item)) is not None and isinstance(group.get(_PARAMS), list)
        for item in groups
    )


def numbers_of(value: object) -> list[list[object]]:
    """Return the numbers (or names) of the parameters of each group of a state dict."""
    groups = _list((as_mapping(value) or {})[_GROUPS])
    return [_list((as_mapping(group) or {})[_PARAMS]) for group in groups]


def state_shapes(value: object, shape_of: Mapping[str, Shape]) -> dict[object, Shape | None]:
    """Return the shape of each parameter that has states; None where they do not show it.

    Args:
        value: an optimizer's state dict.
        shape_of: shapes of its tensors, by the keys of their leaves.
    """
    states = as_mapping((as_mapping(value) or {})[_STATE]) or {}
    return {number: _shape_of(state, shape_of) for number, state in states.items()}


def named(value: object, shape_of: Mapping[str, Shape], weights: Weights) -> NamedOptimizer:
    """Replace the numbers of parameters by their names.

    Args:
        value: an optimizer's state dict.
        shape_of: shapes of its tensors, by the keys of their leaves.
        weights: the model's weights.
    """
    root = as_mapping(value) or {}
    states = as_mapping(root[_STATE]) or {}
    groups = [as_mapping(group) or {} for group in _list(root[_GROUPS])]
    numbers = numbers_of(value)
    flat = [number for group in numbers for number in group]
    # Names, as FSDP saves them, stay.
    if not flat or not all(type(number) is int for number in flat):
        return NamedOptimizer(value)
    unnamed = "numbers its parameters, and their names are uncertain ({}), so the numbers are kept"
    if len({*flat}) < len(flat) or not states.keys() <= {*flat}:
        return NamedOptimizer(
            value, unnamed.format("the groups do not list each number exactly once")
        )

    # The shape of a parameter is that of its moments.
    shapes = [[_shape_of(states.get(number), shape_of) for number in group] for group in numbers]
    recorded = [group.get(_NAMES) for group in groups]
    is_shown = all(
        shape is not None or number not in states
        for group, group_shapes in zip(numbers, shapes, strict=True)
        for number, shape in zip(group, group_shapes, strict=True)
    )
    result = None
    if weights.problem is None:
        result = _recorded_by_adam_mini(groups, numbers, states, shape_of, weights)
    if result is None and is_shown and states and weights.problem is None:
        result = _recorded(recorded, shapes, weights) or named_numbers(
            weights.shapes, shapes, is_ordered=weights.is_ordered, model_type=weights.model_type
        )
    if result is None:
        if weights.problem is not None:
            reason = weights.problem
        elif not is_shown or not states:
            reason = _hidden_shapes(flat, states, shapes)
        elif len(flat) > len(weights.shapes):
            reason = (
                f"the optimizer has {len(flat)} parameters, but the model has only "
                f"{len(weights.shapes)}"
            )
        else:
            reason = (
                "the shapes fit several orders of the model's parameters, or none; a torch file of "
                "the weights records the order"
            )
        return NamedOptimizer(value, unnamed.format(reason))

    return NamedOptimizer(
        with_names(value, result.groups),
        f"numbers its parameters; they were named in the order of {result.source}, and all shapes "
        "match",
    )


def with_names(value: object, name_groups: Sequence[Sequence[str]]) -> object:
    """Return an optimizer's state dict with these names in place of its numbers.

    Args:
        value: the state dict; each of its states is of a parameter in a group.
        name_groups: names of the parameters of each group, in order.
    """
    root = as_mapping(value) or {}
    numbers = [number for group in numbers_of(value) for number in group]
    name_of = dict(zip(numbers, (name for group in name_groups for name in group), strict=True))
    new_groups: list[object] = []
    for item, names in zip(_list(root[_GROUPS]), name_groups, strict=True):
        entries: dict[object, object] = {**(as_mapping(item) or {}), _PARAMS: list(names)}
        new_groups.append(rebuild(item, entries))
    states = as_mapping(root[_STATE]) or {}
    new_states: dict[object, object] = {name_of[number]: state for number, state in states.items()}
    new_root: dict[object, object] = {
        **root,
        _STATE: rebuild(root[_STATE], new_states),
        _GROUPS: new_groups,
    }
    return rebuild(value, new_root)


def _list(value: object) -> list[object]:
    """Return a value that ``is_state_dict`` found to be a list."""
    assert isinstance(value, list)
    return value


def _shape_of(state: object, shape_of: Mapping[str, Shape]) -> Shape | None:
    """Return the shape of a parameter according to its states, or None if none shows it."""
    items = as_mapping(state) or {}
    # bitsandbytes has its states in a mapping of their own; torchao's tensors are taken apart.
    items = {**items, **(as_mapping(items.get(BITSANDBYTES)) or {})}
    shapes = {
        name: shape_of[leaf.key]
        for name, leaf in items.items()
        if isinstance(leaf, TensorLeaf) and leaf.key in shape_of
    }
    for name, shape in shapes.items():
        if name in MOMENTS:
            return shape
    for name, item in items.items():
        parts = as_mapping(item) or {} if name in MOMENTS else {}
        recorded = parts.get("shape")
        if isinstance(recorded, list) and all(type(extent) is int for extent in recorded):
            return tuple(recorded)
    # The first state of AdEMAMix has two moments, the second one has not.
    for name in ("state2", "state1"):
        if name in shapes:
            return shapes[name]
    # Adafactor keeps sums over the last axis, and over the one before it.
    rows, columns = shapes.get("exp_avg_sq_row"), shapes.get("exp_avg_sq_col")
    return (*rows, columns[-1]) if rows and columns else None


def _recorded(
    recorded: Sequence[object], shapes: Sequence[Sequence[Shape | None]], weights: Weights
) -> NamedNumbers | None:
    """Return the names that the groups record, if the model has such parameters in these shapes."""
    groups: list[tuple[str, ...]] = []
    for names, group_shapes in zip(recorded, shapes, strict=True):
        if not isinstance(names, list) or len(names) != len(group_shapes):
            return None
        for name, shape in zip(names, group_shapes, strict=True):
            parameter = weights.shapes.get(name) if isinstance(name, str) else None
            if parameter is None or shape not in (None, parameter):
                return None
        groups.append(tuple(map(str, names)))
    return NamedNumbers(tuple(groups), "param_names, which the file records")


def _recorded_by_adam_mini(
    groups: Sequence[Mapping[object, object]],
    numbers: Sequence[Sequence[object]],
    states: Mapping[object, object],
    shape_of: Mapping[str, Shape],
    weights: Weights,
) -> NamedNumbers | None:
    """Return the names that Adam-mini's groups record, if the model has one parameter of each name.

    The first moment of a query or key weight has its elements in another shape.
    """
    of_lower_case: dict[object, list[str]] = {}
    for name in weights.shapes:
        of_lower_case.setdefault(name.lower(), []).append(name)
    names: list[tuple[str, ...]] = []
    for group, members in zip(groups, numbers, strict=True):
        candidates = of_lower_case.get(group.get("name"), [])
        if len(members) != 1 or len(candidates) != 1:
            return None
        if members[0] in states:
            moment = (as_mapping(states[members[0]]) or {}).get("m")
            shape = shape_of.get(moment.key) if isinstance(moment, TensorLeaf) else None
            if shape is None or prod(shape) != prod(weights.shapes[candidates[0]]):
                return None
        names.append((candidates[0],))
    if not states or len({*names}) < len(names):
        return None
    return NamedNumbers(tuple(names), "the names that its groups record (Adam-mini)")


def _hidden_shapes(
    numbers: Sequence[object],
    states: Mapping[object, object],
    shapes: Sequence[Sequence[Shape | None]],
) -> str:
    """Return which states do not show the shape of their parameter.

    Args:
        numbers: numbers of all parameters, in order.
        states: number → states.
        shapes: shape of each parameter by group, in the same order; None where none shows it.
    """
    flat = [shape for group in shapes for shape in group]
    for number, shape in zip(numbers, flat, strict=True):
        names = [str(name) for name in as_mapping(states.get(number)) or {}]
        if shape is None and names:
            return f"{', '.join(names[:4])} of parameter {number} do not show the parameter's shape"
    return "the optimizer has no states to show the shapes of its parameters"


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
        return _only_fit([tuple(shapes)], shapes, groups, source="the weights file")
    # The family's own order; or those of all families that have such modules.
    table = read_module_orders()
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
def read_module_orders() -> dict[str, ModuleTree]:
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
