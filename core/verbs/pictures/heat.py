"""Arrange the differences of two checkpoints by layer and module.

The first number of a key is the row, the rest of the key is the column::

    decoder.layers.3.mlp.linear_fc1.weight           row 3, column mlp.linear_fc1.weight
    transformer.h.3.attn.c_attn.weight               row 3, column attn.c_attn.weight
    encoder.layers.3.…, decoder.layers.3.…           row 3, columns encoder.… and decoder.…
    optimizer.state.exp_avg.decoder.layers.3.…       of the optimizer: row 3, column exp_avg.…
    …layers.3.mlp.experts.0.w1.weight, ….7.…         row 3, column mlp.experts.[0-7].w1.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, log
from typing import Literal

from core.engine.catalog.key_patterns import ranges, split_numbers
from core.values import dataclass
from core.verbs.diff.result import KINDS, TensorDiff
from core.verbs.inspect.optimizer_states import is_state
from core.verbs.inspect.tree import MIN_SUFFIXED

Part = Literal["model", "optimizer"]
N_LEVELS = 10
"""Number of levels of a scale, 0 for the smallest differences."""
_STEPS = (2, 4, 10)
"""Factors between neighbouring levels; the smallest with which all differences fit is used."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """The differences between the tensors of one module in one layer.

    Args:
        keys: the tensors; several where experts are folded.
        kind: the most serious of their results (``core.verbs.diff.result.KINDS``).
        relative: largest relative difference; None if the values were not compared or cannot be.
        n_different: number of different elements.
        n_nan: number of elements that are NaN in one checkpoint only.
    """

    keys: tuple[str, ...]
    kind: str
    relative: float | None
    n_different: int
    n_nan: int = 0

    @property
    def order(self) -> tuple[object, ...]:
        """Sort key that puts the most serious difference first."""
        return KINDS.index(self.kind), self.n_nan == 0, -(self.relative or 0.0)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The differences between the models, or between the optimizers, of two checkpoints.

    Args:
        part: what the tensors belong to; ``model`` includes what belongs to neither.
        stack: name of the list of layers in the keys, such as ``layers`` or ``h``; ``layer`` if
            there are several names or none.
        layers: number of each row.
        modules: name of each column, such as ``self_attention.linear_qkv.weight``.
        cells: a row for each layer, with None where the layer lacks the module.
        outside: the tensors that belong to no layer, the most serious difference first.
    """

    part: Part
    stack: str
    layers: tuple[int, ...]
    modules: tuple[str, ...]
    cells: tuple[tuple[HeatCell | None, ...], ...]
    outside: tuple[HeatCell, ...]


@dataclass(frozen=True, slots=True)
class HeatScale:
    """A logarithmic scale of relative differences, which ends at the largest of some maps.

    So neither the largest nor, within nine powers of ten, the smallest differences look all alike.

    Args:
        largest: the difference of level 9.
        step: factor between a level and the one below it.
    """

    largest: float
    step: int

    def level(self, relative: float) -> int:
        """Return the level of a difference, from 0 to 9."""
        if relative == 0:
            return 0
        if not isfinite(relative):
            return N_LEVELS - 1
        steps = (log(self.largest) - log(relative)) / log(self.step)
        return max(N_LEVELS - 1 - round(steps), 0)

    def difference(self, level: int) -> float:
        """Return the relative difference that a level stands for."""
        return self.largest / float(self.step) ** (N_LEVELS - 1 - level)


@dataclass(frozen=True, slots=True)
class _Column:
    """The key of a column.

    Args:
        stack: components before the number of the layer.
        texts: texts after it, between further numbers.
        numbers: the further numbers; None if they are folded.
    """

    stack: tuple[str, ...]
    texts: tuple[str, ...]
    numbers: tuple[str, ...] | None


def heat_maps(tensors: Iterable[TensorDiff]) -> list[HeatMap]:
    """Arrange the results by layer and module: those of the model, then those of the optimizer.

    Returns:
        The map of each part that has tensors.
    """
    parts: dict[Part, list[TensorDiff]] = {"model": [], "optimizer": []}
    for tensor in tensors:
        parts["optimizer" if is_state(tensor.key) else "model"].append(tensor)
    return [_heat_map(part, members) for part, members in parts.items() if members]


def scale_heat(maps: Iterable[HeatMap]) -> HeatScale:
    """Return the scale for maps that are shown together."""
    cells = (cell for heat in maps for row in (*heat.cells, heat.outside) for cell in row)
    differences = [
        cell.relative
        for cell in cells
        if cell is not None
        and cell.kind == "values"
        and cell.relative is not None
        and cell.relative > 0
        and isfinite(cell.relative)
    ]
    largest, smallest = max(differences, default=1.0), min(differences, default=1.0)
    # The quotient of the two may be beyond any number.
    width = log(largest) - log(smallest)
    step = next((step for step in _STEPS if round(width / log(step)) < N_LEVELS), _STEPS[-1])
    return HeatScale(largest, step)


def most_different(lines: Sequence[Sequence[HeatCell | None]], limit: int) -> list[int]:
    """Return the positions of the ``limit`` rows or columns with the greatest differences.

    Args:
        lines: the cells of each row or column.
    """
    orders = [min(cell.order for cell in line if cell is not None) for line in lines]
    return sorted(sorted(range(len(lines)), key=orders.__getitem__)[:limit])


def _heat_map(part: Part, tensors: Iterable[TensorDiff]) -> HeatMap:
    """Arrange the results of one part."""
    # Split each key into column and layer; what has no number is outside the layers.
    outside: list[TensorDiff] = []
    places: list[tuple[TensorDiff, _Column, int]] = []
    numbers_of: dict[_Column, set[tuple[str, ...]]] = {}
    for tensor in tensors:
        before, *rest = split_numbers(tensor.key)
        if not rest:
            outside.append(tensor)
            continue
        stack = tuple(before.rstrip(".").split(".")) if before else ()
        column = _Column(stack, tuple(rest[1::2]), None)
        places.append((tensor, column, int(rest[0])))
        numbers_of.setdefault(column, set()).add(tuple(rest[2::2]))
    # Few further numbers have columns of their own; many, such as experts, are folded.
    members: dict[_Column, dict[int, list[TensorDiff]]] = {}
    for tensor, column, layer in places:
        if len(numbers_of[column]) < MIN_SUFFIXED:
            numbers = tuple(split_numbers(tensor.key)[3::2])
            column = _Column(column.stack, column.texts, numbers)
        members.setdefault(column, {}).setdefault(layer, []).append(tensor)
    stacks = _short_stacks({column.stack for column in members})
    labels = {
        column: _label(stacks[column.stack], column, numbers_of.get(column, set()))
        for column in members
    }
    columns = sorted(members, key=lambda column: labels[column])
    layers = sorted({layer for cells in members.values() for layer in cells})
    names = {column.stack[-1] for column in members if column.stack}
    return HeatMap(
        part,
        names.pop() if len(names) == 1 else "layer",
        tuple(layers),
        tuple(labels[column] for column in columns),
        tuple(
            tuple(
                _cell(cell) if (cell := members[column].get(layer)) else None for column in columns
            )
            for layer in layers
        ),
        tuple(sorted((_cell([tensor]) for tensor in outside), key=lambda cell: cell.order)),
    )


def _short_stacks(stacks: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the stacks without the components at both ends that all have in common.

    ``encoder.layers`` and ``decoder.layers`` become ``encoder`` and ``decoder``, the stack
    ``decoder.layers`` of a model without another one is left out completely.
    """
    short = {stack: stack for stack in stacks}
    while all(short.values()) and len({stack[0] for stack in short.values()}) == 1:
        short = {stack: rest[1:] for stack, rest in short.items()}
    while all(short.values()) and len({stack[-1] for stack in short.values()}) == 1:
        short = {stack: rest[:-1] for stack, rest in short.items()}
    return short


def _label(stack: Sequence[str], column: _Column, folded: Iterable[tuple[str, ...]]) -> str:
    """Return the name of a column.

    Args:
        stack: the components of its stack that are shown.
        folded: the further numbers of the tensors, if they are folded.
    """
    numbers = column.numbers
    if numbers is None:
        values = [sorted(set(map(int, position))) for position in zip(*folded, strict=True)]
        numbers = tuple(str(n[0]) if len(n) == 1 else f"[{ranges(n)}]" for n in values)
    name = "".join(text + number for text, number in zip(column.texts, (*numbers, ""), strict=True))
    label = ".".join((*stack, name.lstrip("."))).rstrip(".")
    return label or ".".join(column.stack) or "tensor"


def _cell(members: Sequence[TensorDiff]) -> HeatCell:
    """Return the worst of some results, and how many elements differ."""
    values = [tensor.values for tensor in members if tensor.values is not None]
    relative = [value.relative for value in values if value.relative is not None]
    return HeatCell(
        tuple(tensor.key for tensor in members),
        min((tensor.kind for tensor in members), key=KINDS.index),
        max(relative, default=None),
        sum(value.n_differing for value in values),
        sum(value.n_nan for value in values),
    )
