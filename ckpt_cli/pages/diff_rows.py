"""The rows of ``ckpt diff``: one tensor, or several shown as one, with the cells of each list."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckpt_cli.screen.blocks import Cell, bytes_text, n_text, shape_text
from ckpt_cli.screen.terminal import escaped
from core.engine.catalog.key_patterns import folded, split_numbers
from core.values import dataclass
from core.verbs.diff.layers import LayerDifference
from core.verbs.diff.result import TensorDiff

_SPAN = r"\d{1,18}(?:-\d{1,18}(?::[1-9]\d{0,17})?)?"
_RANGES = re.compile(rf"\[({_SPAN}(?:,{_SPAN})*)\]")
"""Numbers that ``folded`` joined; a key may have other brackets of its own."""
END = "\0"
"""Marks the end of a key for ``core.engine.catalog.key_patterns.folded``."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors that are shown as one row.

    Args:
        name: the key, with ranges for the numbers that vary, safe for a terminal.
        worst: the tensor that differs most.
        members: all tensors of the row.
        is_group: the members are a group, such as the optimizer, with dtypes and shapes of their
            own.
    """

    name: str
    worst: TensorDiff
    members: Sequence[TensorDiff]
    is_group: bool = False


RowCells = Callable[[Row], list[Cell | str]]
"""Returns the cells of a row, after its name."""
VALUES_HEAD = ("", "differing", "max |Δ|", "|Δ|/|A|", "cosine", "first difference")
"""Titles of the columns of ``values_row``, after that of the name."""


def folded_rows(tensors: Iterable[TensorDiff]) -> Iterator[Row]:
    """Yield a row for each group of tensors whose keys differ only in numbers.

    Args:
        tensors: the worst first; the rows have the order of their worst tensors.
    """
    # Tensors that share a row have the same key apart from numbers, and the same shapes and dtypes.
    groups: dict[tuple[object, ...], list[TensorDiff]] = {}
    for tensor in tensors:
        shapes = tuple((meta.dtype, meta.shape) if meta else None for meta in (tensor.a, tensor.b))
        groups.setdefault(("#".join(split_numbers(tensor.key)[::2]), shapes), []).append(tensor)
    # Numbers become ranges in brackets; keys that the first such name does not cover are counted.
    for members in groups.values():
        names = folded((tensor.key + END for tensor in members), end=END)
        name = escaped(names[0].removesuffix(END))
        if len(names) > 1:
            n_more = len(members) - _n_folded_keys(names[0])
            name += f" and {n_more} more" if n_more > 0 else " …"
        yield Row(name, members[0], members)


def _n_folded_keys(name: str) -> int:
    """Return the number of keys that a folded name such as ``layers.[0-3,8].[0-6:2]`` covers."""
    n_keys = 1
    for ranges in _RANGES.findall(name):
        n_numbers = 0
        for part in ranges.split(","):
            # FIRST, FIRST-LAST or FIRST-LAST:STEP.
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            n_numbers += (int(last or first) - int(first)) // int(step or 1) + 1
        n_keys *= n_numbers
    return n_keys


def only_row(row: Row) -> list[Cell | str]:
    """Return the cells of a tensor that only one side has: dtype, shape, bytes."""
    meta = row.worst.meta
    size = bytes_text(sum(tensor.meta.n_bytes for tensor in row.members))
    if row.is_group:
        return [Cell(n_text(len(row.members), "tensor")), "", Cell(size, ("dim",))]
    return [Cell(meta.dtype, ("cyan",)), shape_text(meta.shape), Cell(size, ("dim",))]


def shape_row(row: Row) -> list[Cell | str]:
    """Return the cells of a tensor with two shapes."""
    a, b = row.worst.a, row.worst.b
    assert a is not None and b is not None
    return [shape_text(a.shape), f"→ {shape_text(b.shape)}"]


def dtype_row(row: Row) -> list[Cell | str]:
    """Return the cells of a tensor with two dtypes, and whether its values are the same."""
    a, b = row.worst.a, row.worst.b
    assert a is not None and b is not None
    # Without values and a verdict on rounding, only the dtypes are known.
    types = Cell(f"{a.dtype} → {b.dtype}", ("cyan",))
    members = [
        tensor for tensor in row.members if tensor.values is not None or tensor.is_cast is not None
    ]
    if not members:
        return [types, ""]
    # All are casts, exact or rounded; or some hold different values.
    if all(tensor.is_cast for tensor in members):
        is_exact = all(
            tensor.values is not None and not tensor.values.n_differing for tensor in members
        )
        return [types, Cell("same values" if is_exact else "same values, rounded", ("green",))]
    values = row.worst.values
    distance = ""
    if values is not None and values.relative is not None:
        distance = f": |Δ|/|A| {_number_text(values.relative)}"
    return [types, Cell(f"different values{distance}", ("red",))]


def values_row(row: Row) -> list[Cell | str]:
    """Return the cells of a tensor with different values, in the order of ``VALUES_HEAD``."""
    # Counts are sums over the members, maximum and cosine the worst of any member.
    values = [tensor.values for tensor in row.members if tensor.values is not None]
    n_differing = sum(diff.n_differing for diff in values)
    n_elements = sum(diff.n_elements for diff in values)
    maxima = [diff.max_abs for diff in values if diff.max_abs is not None]
    cosines = [diff.cosine for diff in values if diff.cosine is not None]
    n_nan = sum(diff.n_nan for diff in values)
    relative = None if row.worst.values is None else row.worst.values.relative
    # A NaN on one side is worse than any distance.
    maximum = f"{n_nan:,} NaN" if n_nan else _number_text(max(maxima, default=None))
    return [
        Cell(f"{n_differing:,} of {n_elements:,} ({_percent_text(n_differing, n_elements)})"),
        Cell(maximum, ("red",) if n_nan else ()),
        Cell(_number_text(relative), ("yellow",)),
        Cell(_cosine_text(min(cosines, default=None))),
        Cell(_first_difference(row), ("dim",)),
    ]


def layer_row(layer: LayerDifference) -> list[Cell | str]:
    """Return the name of a layer with the figures of its tensors, and its worst tensor."""
    maximum = f"{layer.n_nan:,} NaN" if layer.n_nan else _number_text(layer.max_abs)
    return [
        escaped(layer.name),
        f"{len(layer.differing):,} of {layer.n_tensors:,}",
        Cell(maximum, ("red",) if layer.n_nan else ()),
        Cell(_number_text(layer.relative), ("yellow",)),
        Cell(escaped(layer.worst.key[len(layer.name) :].lstrip(".")), ("dim",)),
    ]


def _first_difference(row: Row) -> str:
    """Return the index of the first difference in a row's worst tensor, and the two values there.

    For example ``[0, 3]: 1 → 2``.
    """
    tensor = row.worst
    if tensor.values is None or tensor.values.first is None:
        return ""
    index = shape_text(tensor.index_of(tensor.values.first))
    # In a row of several tensors, the number in the key (the layer) identifies the worst.
    numbers = [] if len(row.members) == 1 else split_numbers(tensor.key)[1::2]
    lead = f"in {numbers[0]} at " if numbers else ""
    if tensor.first is None or tensor.first[0] is None or tensor.first[1] is None:
        return lead + index
    a, b = (str(value) if isinstance(value, int) else f"{value:.6g}" for value in tensor.first)
    return f"{lead}{index}: {a} → {b}"


def _number_text(value: float | None) -> str:
    """Format a distance with three digits, an integer exactly; "–" without a value."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _percent_text(part: int, total: int) -> str:
    """Format a share; only nothing and everything are written as 0 % and 100 %."""
    if part == 0 or part == total:
        return "100 %" if part else "0 %"
    value = 100 * part / total
    return f"{value:.2g} %" if value < 99 else "> 99 %"


def _cosine_text(value: float | None) -> str:
    """Format a cosine, near 1 by its distance from 1: ``1 - 2e-06``; "–" without a value."""
    if value is None:
        return "–"
    distance = 1 - value
    if distance >= 1e-3 or math.isnan(distance):
        return f"{value:.3f}"
    return "1" if distance < 1e-15 else f"1 - {distance:.1g}"
