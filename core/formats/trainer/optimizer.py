"""The state dict of an optimizer, with names in place of numbers where they are certain.

::

    optimizer.pt    {"state": {0: {"step": …, "exp_avg": tensor, "exp_avg_sq": tensor}, 1: …},
                     "param_groups": [{"lr": …, "params": [0, 1, …]}, …]}

    in the catalog  {"state": {"lm_head.weight": {"step": …, "exp_avg": …}, …},
                     "param_groups": [{"lr": …, "params": ["lm_head.weight", …]}, …]}

This is the form of ``torch.distributed.checkpoint.state_dict``, whose ``set_optimizer_state_dict``
loads it, and in which FSDP saves optimizers. ``parameter_order`` finds the names, unless the groups
record them: in ``param_names``, if the optimizer got ``named_parameters``, or Adam-mini's in
``name``, in lower case, as each of its groups has one parameter.

Source: torch 2.13 ``torch/optim/optimizer.py`` (``state_dict``),
``torch/distributed/checkpoint/state_dict.py``; adam-mini 1.1.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from core.arrays.box import Shape
from core.catalog.optimizer_keys import BITSANDBYTES, MOMENTS
from core.formats.trainer.parameter_order import NamedNumbers, named_numbers
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
    unnamed = "numbers its parameters, and their names are not certain ({}); they keep the numbers"
    if len({*flat}) < len(flat) or not states.keys() <= {*flat}:
        return NamedOptimizer(value, unnamed.format("the groups do not list each number once"))

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
            reason = f"it has {len(flat)}, but the model has {len(weights.shapes)}"
        else:
            reason = (
                "several orders of the model's parameters fit the shapes, or none; a torch file of "
                "the weights has the order"
            )
        return NamedOptimizer(value, unnamed.format(reason))

    return NamedOptimizer(
        with_names(value, result.groups),
        f"numbers its parameters; they are named in the order of {result.source}, and all shapes "
        "agree",
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
            return f"{', '.join(names[:4])} of number {number} do not show the shape of a parameter"
    return "it has no states, which would show the shapes of its parameters"
