"""Find layers of a model, and experts of a layer, that differ from the others or are absent.

Works without a table of names.

::

    layers.0.mlp.up_proj.weight ┐
    layers.1.mlp.up_proj.weight ├─ a stack of layers: prefix ``layers``, and each layer's tensors
    layers.2.…  (none)          ┘

The layers of a model may differ: experts or attention in every n-th layer, cross-attention, a
first layer without a norm, a last one without the connection to the next. So a layer counts as
incomplete only if no other has exactly its names, at least two others have those and more, and it
lacks

* one tensor, or all of one module; for the first and last layer only a matrix, or a module's weight
  or bias; or
* several modules that are parts of a module (``self_attn``) that still has others; or
* more, if all the others, at least seven, have the same names, and it is neither the first nor the
  last.

Of two layers, one is incomplete only if it lacks what every attention or MLP has (``q_proj``), or a
module's weight or bias. If the configuration distinguishes layers (``layer_types``, or lists of
layers), a layer is compared only with those of its kind.

The layers of Megatron's encoders, and experts, are all alike: each has what half of them have.
Numbers without a layer, up to the highest, are layers that were lost if the others have attention:
other stacks (``nn.Sequential``) have modules without parameters.

Source: names and shapes of every model of transformers 5.23.0 that can be built from its default
configuration (1,245 classes), with all its layers and with two, three, four and six; none of them
is reported. Of its automatic classes (1,408), with three layers, none has numbers without a layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from core.arrays.box import Shape
from core.arrays.dtypes import dtype_of
from core.engine.catalog.tensor import Tensor
from core.values import dataclass, n_text

_LAYER = re.compile(r"((?:[^.]+\.)*?(?:layers|h|blocks|block|layer))\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"((?:[^.]+\.)+experts)\.(\d{1,6})\.(.+)")
_FEWEST_SHAPES = 3
"""Minimum number of layers with one shape for another shape to be odd."""
_USUAL = re.compile(
    r"(.*\.)?([qkvo]_proj|out_proj|(gate|up|down|gate_up)_proj|query|key|value|c_attn|c_fc|fc[12])"
    r"\.(.*)"
)
"""Names of tensors that every attention or MLP has if it has others of these."""
_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
"""Part of the names of attention, which no activation or other filler of a list has."""
_MOST_KINDS = 64
"""Maximum number of different sets of names; more are no evidence and take long to compare."""
_FEWEST_ALIKE = 7
"""Minimum number of equal layers for another to be reported that lacks more than a module."""

Layers = Mapping[int, Mapping[str, Tensor]]
"""Number of a layer → its tensors, by their names in it."""


@dataclass(frozen=True, slots=True)
class _Stack:
    """The layers of a model, or the experts of one layer.

    Args:
        prefix: prefix of their names, such as ``model.layers``.
        layers: the layers or experts, at least two unless all are alike.
        kind_of: number of a layer → its kind in the configuration; equal for all if it does not
            distinguish layers.
        noun: what they are, ``layer`` or ``expert``.
        is_uniform: all are alike, including the first and last.
    """

    prefix: str
    layers: Layers
    kind_of: Mapping[int, object]
    noun: str
    is_uniform: bool

    def is_inner(self, number: int) -> bool:
        """Return whether a layer is neither the first nor the last, or may be compared like one."""
        return self.is_uniform or min(self.layers) < number < max(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A tensor or layer that is missing, or has another shape than those of the other layers.

    Args:
        key: name of the tensor or module; that of the first layer if layers are missing.
        message: description in one clause, without the key.
        expected, found: the two values that disagree.
        is_layer: complete layers are missing.
        is_lack: something is missing.
    """

    key: str
    message: str
    expected: str
    found: str
    is_layer: bool = False
    is_lack: bool = True


def find_deviations(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    *,
    is_quantized: bool,
    is_uniform: Callable[[str], bool] = lambda prefix: False,
) -> Iterator[Deviation]:
    """Yield layers and tensors that are missing beside others, and shapes that only one layer has.

    Args:
        tensors: tensors of the checkpoint, by name.
        config: parsed ``config.json``.
        is_quantized: some weights may be quantized and others not, so only modules are compared,
            not shapes.
        is_uniform: prefix of a stack → all of its layers are alike by design.
    """
    keys: set[str] = set()  # a tensor of an expert also belongs to a layer
    layers = _stacks(tensors, config, _LAYER, is_uniform)
    experts = _stacks(tensors, config, _EXPERT, lambda prefix: True)
    for stack in (*layers, *experts):
        deviations = (
            *(() if stack.noun == "expert" else _find_lost_layers(stack)),
            *_find_missing(stack, is_quantized=is_quantized),
            *(() if is_quantized else _find_odd_shapes(stack)),
        )
        yield from (deviation for deviation in deviations if deviation.key not in keys)
        keys |= {deviation.key for deviation in deviations}


def _stacks(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, object],
    pattern: re.Pattern[str],
    is_uniform: Callable[[str], bool],
) -> Iterator[_Stack]:
    """Yield the stacks of layers or experts whose names match a pattern, and can be compared."""
    stacks: dict[str, dict[int, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        match = pattern.fullmatch(key)
        if match is not None:
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    lists = [_LayerList.of(values) for values in _lists(config)] if pattern is _LAYER else []
    for prefix, layers in stacks.items():
        if len(layers) > 1 or is_uniform(prefix):
            n_layers = max(layers) + 1
            kind_of = {
                number: tuple(kinds.kind_of(number, n_layers) for kinds in lists)
                for number in layers
            }
            noun = "expert" if pattern is _EXPERT else "layer"
            yield _Stack(prefix, layers, kind_of, noun, is_uniform(prefix))


@dataclass(frozen=True, slots=True)
class _LayerList:
    """A list in the configuration that may distinguish layers.

    Args:
        values: its entries; with one per layer they are kinds of layers (``layer_types``).
        numbers: layers that it lists, if it contains distinct numbers (``global_attn_indexes``), or
            None.
    """

    values: tuple[str, ...]
    numbers: frozenset[int] | None

    @classmethod
    def of(cls, values: list[object]) -> _LayerList:
        """Parse a list of the configuration."""
        numbers = frozenset(value for value in values if type(value) is int)
        return cls(tuple(map(repr, values)), numbers if len(numbers) == len(values) else None)

    def kind_of(self, number: int, n_layers: int) -> object:
        """Return the kind of a layer; the same for all layers if the list does not concern them."""
        if self.numbers is not None:
            return number in self.numbers
        return self.values[number] if len(self.values) == n_layers else None


def _lists(value: object) -> Iterator[list[object]]:
    """Yield the lists of a configuration, at any depth."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _lists(item)
    elif isinstance(value, list):
        yield value


def _find_lost_layers(stack: _Stack) -> Iterator[Deviation]:
    """Yield a deviation if numbers below the highest have no layer.

    Only stacks with attention count: those of other modules may have numbers without parameters.
    """
    n_layers = max(stack.layers) + 1
    n_lost = n_layers - len(stack.layers)
    if not 0 < n_lost <= len(stack.layers):
        return  # none is missing, or too many for a loss
    if any(_ATTENTION.search(name) for layer in stack.layers.values() for name in layer):
        first = next(number for number in range(n_layers) if number not in stack.layers)
        yield Deviation(
            key=f"{stack.prefix}.{first}",
            message=f"only {len(stack.layers)} of {n_layers} layers have tensors",
            expected=f"{n_layers} layers",
            found=f"{len(stack.layers)}",
            is_layer=True,
        )


def _find_missing(stack: _Stack, *, is_quantized: bool) -> Iterator[Deviation]:
    """Yield a problem for every tensor that an incomplete layer lacks."""
    # Group the layers by their sets of names. In quantized models, the tensors of a module may
    # differ between layers, so that only modules are compared.
    names_of = {
        number: frozenset(f"{_module(name)}." for name in layer)
        if is_quantized
        else frozenset(layer)
        for number, layer in stack.layers.items()
    }
    # Layers that are all alike have what at least half of them have.
    if stack.is_uniform:
        counts = Counter(name for names in names_of.values() for name in names)
        usual = {name for name, n in counts.items() if 2 * n >= len(names_of)}
        for number, names in sorted(names_of.items()):
            yield from _lacks(stack, number, {name: counts[name] for name in usual - names})
        return
    numbers_of: dict[frozenset[str], list[int]] = {}
    for number, names in names_of.items():
        numbers_of.setdefault(names, []).append(number)
    if len(numbers_of) > _MOST_KINDS:
        return
    least = min(2, len(names_of) - 1)
    for names, numbers in numbers_of.items():
        # A layer may be incomplete if it is the only one with its names, and several others have
        # these names and more.
        wider = [
            (len(group), other)
            for other, group in numbers_of.items()
            if names < other and len(group) >= least
        ]
        if len(numbers) > 1 or not wider:
            continue
        # Compare it with the largest such group, if that has layers of its kind.
        (number,) = numbers
        n_sisters, complete = max(wider, key=lambda item: (item[0], sorted(item[1])))
        sisters = numbers_of[complete]
        if not any(stack.kind_of[sister] == stack.kind_of[number] for sister in sisters):
            continue
        # Report the missing tensors, unless the design of the model explains them.
        lost = complete - names
        example = stack.layers[sisters[0]]
        if not _is_lost(stack, number, lost, example, n_sisters=n_sisters):
            continue
        yield from _lacks(stack, number, dict.fromkeys(lost, n_sisters))


def _lacks(stack: _Stack, number: int, lost: Mapping[str, int]) -> Iterator[Deviation]:
    """Yield a deviation for every tensor that a layer lacks.

    Args:
        lost: name of a missing tensor, or of a missing module with a trailing dot → number of
            layers that have it.
    """
    for name, n_sisters in sorted(lost.items()):
        shapes = (layer[name].shape for layer in stack.layers.values() if name in layer)
        shape = next(shapes, None)
        yield Deviation(
            key=f"{stack.prefix}.{number}.{name}".removesuffix("."),
            message=f"missing from this {stack.noun}, but present in "
            f"{n_text(n_sisters, f'other {stack.noun}')}",
            expected="the tensors of a module"
            if shape is None
            else f"the tensor, with shape {shape}",
            found="no such tensor",
        )


def _is_lost(
    stack: _Stack,
    number: int,
    lost: frozenset[str],
    example: Mapping[str, Tensor],
    *,
    n_sisters: int,
) -> bool:
    """Return whether tensors that a layer lacks were lost, rather than absent by design.

    Args:
        lost: names of missing tensors, or of missing modules with a trailing dot.
        example: tensors of a complete layer.
        n_sisters: number of complete layers.
    """
    modules = {_module(name) for name in lost}
    present = {_module(name) for name in stack.layers[number]}
    # 1. One tensor, or all tensors of one module. The first and last layer may lack a norm by
    # design, but not a matrix, nor the weight or bias of a module that they have.
    if len(modules) == 1:
        if modules <= present and all(name.endswith((".weight", ".bias")) for name in lost):
            return True
        if len(stack.layers) == 2:
            return all(map(_USUAL.fullmatch, lost))
        is_matrix = any(
            len(tensor.shape) > 1
            for name, tensor in example.items()
            if name in lost or f"{_module(name)}." in lost
        )
        return stack.is_inner(number) or is_matrix
    if not stack.is_inner(number):
        return False
    # 2. Several parts of a module that still has others; or more, if all other layers are equal and
    # numerous enough to be the norm.
    parts = set(map(_module, present))
    is_partial = all((part := _module(module)) and part in parts for module in modules)
    return is_partial or (n_sisters >= _FEWEST_ALIKE and n_sisters == len(stack.layers) - 1)


def _module(name: str) -> str:
    """Return the module of a tensor, or the parent of a module; "" for the layer itself."""
    return name.rpartition(".")[0]


def _find_odd_shapes(stack: _Stack) -> Iterator[Deviation]:
    """Yield a problem for every tensor whose shape differs in a single inner layer."""
    # Quantized numbers are packed, so only floats have comparable shapes.
    shapes_of: dict[str, dict[int, Shape]] = {}
    for number, layer in stack.layers.items():
        for name, tensor in layer.items():
            if dtype_of(tensor.dtype).kind == "float":
                shapes_of.setdefault(name, {})[number] = tensor.shape
    for name, shape_of in shapes_of.items():
        # Exactly two shapes, one of them in a single layer and the other in several.
        counts = Counter(shape_of.values()).most_common()
        if len(counts) != 2 or counts[1][1] != 1 or counts[0][1] < _FEWEST_SHAPES:
            continue
        (usual, n_sisters), (odd, _) = counts
        number = next(number for number, shape in shape_of.items() if shape == odd)
        sisters = (sister for sister in shape_of if sister != number)
        if stack.is_inner(number) and any(
            stack.kind_of[sister] == stack.kind_of[number] for sister in sisters
        ):
            yield Deviation(
                message=f"the shape is {odd}, but it is {usual} in the "
                f"{n_text(n_sisters, f'other {stack.noun}')}",
                key=f"{stack.prefix}.{number}.{name}",
                expected=str(usual),
                found=str(odd),
                is_lack=False,
            )
