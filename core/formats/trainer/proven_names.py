"""Names for an optimizer's numbered parameters, from a file or from the model, and their proof.

``core.opening.numbered_optimizers`` finds the optimizers in a catalog and renames their entries.
Here the names are chosen and proven: by the shapes of all states, and by samples of fp32 master
weights, which round to the weights.

A file has a name for each number, in their order: one per line, or a JSON list. A JSON object has
such a list for each optimizer, by its key (``optimizer_states.0``).

Source: torch 2.13 ``torch/optim/optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import dtype_of
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.optimizer_keys import MASTERS
from core.errors import CorruptError, UnsupportedError, UsageError, did_you_mean
from core.files.json_object import parse_json_object
from core.formats.trainer.optimizer import Weights, named, numbers_of, state_shapes
from core.formats.trainer.state import BUFFERS
from core.megatron.optimizer.proof import are_masters
from core.pickle.inert import TensorLeaf, as_mapping
from core.pickle.nesting import Path, entries, join_path
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

OPTION = "--param-order"
MODEL = "model"
"""The order of the checkpoint's own model."""
_HINT = (
    "list the parameters' names in a file, one per line, in the order of the numbers, and pass it "
    f"with {OPTION} FILE"
)


@dataclass(frozen=True, slots=True)
class ParameterOrder:
    """The names of numbered parameters, from a file.

    Args:
        label: the file, for messages.
        names: the names by optimizer; under None, those of the only optimizer.
    """

    label: str
    names: Mapping[str | None, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class NumberedOptimizer:
    """An optimizer's state dict in a catalog.

    Args:
        path: where it is in the skeleton.
        stored: the state dict as the skeleton has it, perhaps with objects in place of its groups.
        value: the complete state dict, whose states have integers as keys.
    """

    path: Path
    stored: object
    value: object

    @property
    def key(self) -> str:
        return join_path(self.path)


def parse_order(data: bytes, *, label: str) -> ParameterOrder:
    """Parse a file of names.

    Raises:
        UsageError: it is not text, or its JSON is not a list of names, or an object of such lists.
    """
    try:
        text = data.decode("utf-8").strip()
        if text.startswith("{"):
            lists: Mapping[str | None, object] = dict(parse_json_object(data, file=label).items())
        elif text.startswith("["):
            lists = {None: json.loads(text)}
        else:
            lists = {None: [line.strip() for line in text.splitlines() if line.strip()]}
    except (CorruptError, ValueError, RecursionError) as err:
        raise UsageError(f"{OPTION}: the file is neither text nor JSON", file=label) from err
    names: dict[str | None, tuple[str, ...]] = {}
    for key, items in lists.items():
        if not (isinstance(items, list) and items and all(isinstance(i, str) for i in items)):
            where = "" if key is None else f" under {key!r}"
            raise UsageError(
                f"{OPTION}: the file has no list of names{where}", file=label, hint=_HINT
            )
        names[key] = tuple(map(str, items))
        repeated = next((name for name in items if items.count(name) > 1), None)
        if repeated is not None:
            raise UsageError(f"{OPTION}: the file lists {repeated!r} twice", file=label)
    return ParameterOrder(label, names)


def check_named_optimizers(order: ParameterOrder, optimizers: Sequence[NumberedOptimizer]) -> None:
    """Raise unless a file has names for each optimizer, and for no other.

    Raises:
        UsageError: see above.
    """
    keys = [optimizer.key for optimizer in optimizers]
    if order.names.keys() == {None} and len(keys) > 1:
        raise UsageError(
            f"{OPTION}: the checkpoint has {len(keys)} optimizers, but the file has only one list "
            "of names",
            file=order.label,
            hint="write a JSON object with one list of names for each optimizer: "
            f"{', '.join(keys)}",
        )
    if None not in order.names and order.names.keys() != {*keys}:
        raise UsageError(
            f"{OPTION}: the file has names for {', '.join(map(str, order.names))}, but the "
            f"checkpoint's optimizers are {', '.join(keys)}",
            file=order.label,
        )


def models_of(
    catalog: Catalog, optimizers: Sequence[NumberedOptimizer]
) -> dict[Path, dict[str, Shape]]:
    """Return the parameters of each container of the catalog, in their order.

    A container is a state dict: of the model, but also of its running average, or of a callback.

    Returns:
        Path of the container → name of the parameter in it → shape.
    """
    models: dict[Path, dict[str, Shape]] = {}
    for entry in entries(catalog.skeleton):
        tensor = catalog.tensors.get(entry.key)
        is_state = any(entry.path[: len(item.path)] == item.path for item in optimizers)
        if tensor is None or is_state or entry.key in catalog.ties:
            continue
        name = str(entry.path[-1])
        if dtype_of(tensor.dtype).kind == "float" and name.rpartition(".")[2] not in BUFFERS:
            models.setdefault(entry.path[:-1], {})[name] = tensor.shape
    return models


def names_of_model(
    optimizer: NumberedOptimizer, catalog: Catalog, models: Mapping[Path, Mapping[str, Shape]]
) -> tuple[tuple[str, ...], ...]:
    """Return the names of an optimizer's parameters by group, in the order of a model.

    Raises:
        UsageError: no model of the catalog fits in exactly one way, or two give different names.
        UnsupportedError: states do not show the shapes of their parameters.
    """
    shape_of = {key: tensor.shape for key, tensor in catalog.tensors.items()}
    numbers = numbers_of(optimizer.value)
    results: set[tuple[tuple[str, ...], ...]] = set()
    for model in models.values():
        answer = named(optimizer.value, shape_of, Weights(model, is_ordered=True, model_type=None))
        names = numbers_of(answer.value)
        if names != numbers:
            results.add(tuple(tuple(map(str, group)) for group in names))
    if len(results) == 1:
        return results.pop()
    if results:
        raise UsageError(
            f"{OPTION} {MODEL}: several of the checkpoint's models fit this optimizer",
            key=optimizer.key,
            hint=_HINT,
        )

    # Nothing fits: name the first parameter that shows it, in the largest model.
    shapes = _state_shapes(optimizer, catalog)
    if not models or not shapes:
        reason = "model with parameters" if not models else "optimizer states"
        raise UsageError(f"{OPTION} {MODEL}: the checkpoint has no {reason}", hint=_HINT)
    model = max(models.values(), key=len)
    flat = [number for group in numbers for number in group]
    if len(flat) > len(model):
        raise UsageError(
            f"{OPTION} {MODEL}: the optimizer has {len(flat)} parameters, but the model has only "
            f"{len(model)}",
            key=optimizer.key,
            hint=_HINT,
        )
    for number, (name, shape) in zip(flat, model.items(), strict=False):
        if shapes.get(number) not in (None, shape):
            raise UsageError(
                f"{OPTION} {MODEL}: the model's parameters do not match the optimizer's, because "
                f"the states of parameter {number} have shape {_text(shapes[number])}, but {name} "
                f"has shape {_text(shape)}",
                key=optimizer.key,
                hint=_HINT,
            )
    raise UsageError(
        f"{OPTION} {MODEL}: the model's parameters fit the optimizer's groups in more than one way",
        key=optimizer.key,
        hint=_HINT,
    )


def names_of_file(
    optimizer: NumberedOptimizer,
    order: ParameterOrder,
    catalog: Catalog,
    models: Mapping[Path, Mapping[str, Shape]],
) -> tuple[tuple[str, ...], ...]:
    """Return the names that a file gives an optimizer's parameters, by group.

    Raises:
        UsageError: the file has another number of names, one that no model has, or one of another
            shape.
        UnsupportedError: states do not show the shapes of their parameters.
    """
    names = order.names[None] if None in order.names else order.names[optimizer.key]
    numbers = numbers_of(optimizer.value)
    flat = [number for group in numbers for number in group]
    if len(names) != len(flat):
        raise UsageError(
            f"{OPTION}: the file has {len(names)} names, but the optimizer has {len(flat)} "
            "parameters",
            file=order.label,
            key=optimizer.key,
        )
    # The numbers say which name is whose: the first name is that of number 0.
    by_number = dict(zip(sorted(map(_as_int, flat)), names, strict=True))
    model = max(models.values(), key=lambda model: sum(name in model for name in names), default={})
    shapes = _state_shapes(optimizer, catalog)
    for number, name in by_number.items():
        if name not in model:
            raise UsageError(
                f"{OPTION}: the checkpoint has no parameter {name!r}",
                file=order.label,
                key=optimizer.key,
                hint=did_you_mean(name, model) or _HINT,
            )
        if shapes.get(number) not in (None, model[name]):
            raise UsageError(
                f"{OPTION}: parameter {number} is named {name}, which has shape "
                f"{_text(model[name])}, but its optimizer state has shape {_text(shapes[number])}",
                file=order.label,
                key=optimizer.key,
            )
    return tuple(tuple(by_number[_as_int(number)] for number in group) for group in numbers)


def _state_shapes(optimizer: NumberedOptimizer, catalog: Catalog) -> dict[object, Shape | None]:
    """Return the shapes of an optimizer's parameters according to their states, by number.

    Raises:
        UnsupportedError: a state does not show the shape of its parameter.
    """
    shape_of = {key: tensor.shape for key, tensor in catalog.tensors.items()}
    shapes = state_shapes(optimizer.value, shape_of)
    hidden = next((number for number, shape in shapes.items() if shape is None), None)
    if hidden is not None:
        raise UnsupportedError(
            f"{OPTION}: the states of parameter {hidden} do not show its shape, so ckpt cannot "
            "prove any order",
            key=optimizer.key,
            hint=f"convert without {OPTION}; the states then keep their numbers",
        )
    return shapes


def _text(shape: Shape | None) -> str:
    return str(list(shape or ()))


def _as_int(number: object) -> int:
    assert isinstance(number, int), "the groups list numbers"
    return number


def check_masters(
    optimizer: NumberedOptimizer,
    groups: Sequence[Sequence[str]],
    catalog: Catalog,
    store: ReadStore,
    models: Mapping[Path, Mapping[str, Shape]],
) -> int:
    """Check that fp32 master weights in the states round to the weights; return their number.

    Raises:
        UsageError: those of a parameter do not.
    """
    key_of = {entry.path: entry.key for entry in entries(catalog.skeleton)}
    flat = [number for group in numbers_of(optimizer.value) for number in group]
    name_of = dict(zip(flat, (name for group in groups for name in group), strict=True))
    container = next(path for path, model in models.items() if {*name_of.values()} <= model.keys())
    states = as_mapping((as_mapping(optimizer.value) or {})["state"]) or {}
    n_masters = 0
    for number, state in states.items():
        name = name_of[number]
        weight = key_of[(*container, name)]
        for kind, leaf in (as_mapping(state) or {}).items():
            if kind not in MASTERS or not isinstance(leaf, TensorLeaf):
                continue
            pairs = _pairs_of(catalog, leaf.key, weight)
            if not are_masters(store, pairs):
                raise UsageError(
                    f"{OPTION}: parameter {number} would be {name}, but its master weights do not "
                    "round to that parameter's weights",
                    key=optimizer.key,
                    hint=_HINT,
                )
            n_masters += bool(pairs)
    return n_masters


def _pairs_of(catalog: Catalog, master: str, weight: str) -> list[tuple[StoredArray, StoredArray]]:
    """Return the arrays of master weights and weights that hold the same box of a parameter."""
    arrays = {chunk.box: chunk.array for chunk in catalog.fragments(weight)}
    pairs = []
    for chunk in catalog.fragments(master):
        partner = arrays.get(chunk.box)
        if partner is not None and chunk.array is not None and chunk.array.shape == partner.shape:
            pairs.append((chunk.array, partner))
    return pairs
