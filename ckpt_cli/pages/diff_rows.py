"""The rows of ``ckpt diff``: one tensor, or several shown as one, with the cells of each list."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt_cli.screen.blocks import Cell, bytes_text, n_text, shape_text
from ckpt_cli.screen.terminal import escaped
from core.catalog.key_patterns import folded
from core.diff.result import TensorDiff

_NUMBER = re.compile(r"(?<![^.\s])(0|[1-9]\d*)(?![^.\s/])")
END = "\0"
"""Marks the end of a key for ``core.catalog.key_patterns.folded``."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors that are shown as one row; ``worst`` differs most."""

    name: str
    worst: TensorDiff
    members: Sequence[TensorDiff]


RowCells = Callable[[Row], list[Cell | str]]
VALUES_HEAD = ("", "differing", "max |Δ|", "|Δ|/|A|", "cosine", "first difference")


def folded_rows(tensors: Iterable[TensorDiff]) -> Iterator[Row]:
    """Yield a row for each group of tensors whose keys differ only in numbers, in the order of the
    worst.
    """
    groups: dict[tuple[object, ...], list[TensorDiff]] = {}
    for tensor in tensors:
        shapes = tuple((meta.dtype, meta.shape) if meta else None for meta in (tensor.a, tensor.b))
        groups.setdefault((_NUMBER.sub("#", tensor.key), shapes), []).append(tensor)
    for members in groups.values():
        names = folded((tensor.key + END for tensor in members), end=END)
        name = escaped(names[0].removesuffix(END))
        if len(names) > 1:
            n_more = len(members) - _n_folded_keys(names[0])
            name += f" and {n_more} more" if n_more > 0 else " …"
        yield Row(name, members[0], members)


def _n_folded_keys(name: str) -> int:
    """Return how many keys a folded name such as ``layers.[0-3,8].[0-6:2]`` stands for."""
    n_keys = 1
    for ranges in re.findall(r"\[([\d,:-]+)\]", name):
        n_numbers = 0
        for part in ranges.split(","):
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            n_numbers += (int(last or first) - int(first)) // int(step or 1) + 1
        n_keys *= n_numbers
    return n_keys


def only_row(row: Row) -> list[Cell | str]:
    """Return the cells of a tensor that only one side has: dtype, shape, bytes."""
    meta = row.worst.meta
    size = bytes_text(sum(tensor.meta.n_bytes for tensor in row.members))
    if row.name.startswith("all "):
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
    types = Cell(f"{a.dtype} → {b.dtype}", ("cyan",))
    members = [
        tensor for tensor in row.members if tensor.values is not None or tensor.is_cast is not None
    ]
    if not members:
        return [types, ""]
    if all(tensor.is_cast for tensor in members):
        is_exact = all(
            tensor.values is not None and not tensor.values.n_differing for tensor in members
        )
        return [types, Cell("same values" if is_exact else "same values, rounded", ("green",))]
    values = row.worst.values
    distance = (
        ""
        if values is None or values.relative is None
        else f": |Δ|/|A| {_number_text(values.relative)}"
    )
    return [types, Cell(f"different values{distance}", ("red",))]


def values_row(row: Row) -> list[Cell | str]:
    """Return the cells of a tensor with different values, in the order of ``VALUES_HEAD``."""
    values = [tensor.values for tensor in row.members if tensor.values is not None]
    n_differing, n_elements = (
        sum(diff.n_differing for diff in values),
        sum(diff.n_elements for diff in values),
    )
    maxima = [diff.max_abs for diff in values if diff.max_abs is not None]
    cosines = [diff.cosine for diff in values if diff.cosine is not None]
    n_nan = sum(diff.n_nan for diff in values)
    relative = None if row.worst.values is None else row.worst.values.relative
    maximum = f"{n_nan:,} NaN" if n_nan else _number_text(max(maxima)) if maxima else "–"
    return [
        Cell(f"{n_differing:,} of {n_elements:,} ({_percent_text(n_differing, n_elements)})"),
        Cell(maximum, ("red",) if n_nan else ()),
        Cell("–" if relative is None else _number_text(relative), ("yellow",)),
        Cell(_cosine_text(min(cosines)) if cosines else "–"),
        Cell(_first_difference(row), ("dim",)),
    ]


def _first_difference(row: Row) -> str:
    """Return where the worst tensor of a row differs first, and its two values there.

    For example ``[0, 3]: 1 → 2``.
    """
    tensor = row.worst
    if tensor.values is None or tensor.values.first is None:
        return ""
    index = shape_text(tensor.index_of(tensor.values.first))
    # In a row of several tensors the number in the key (the layer) tells which one is meant.
    number = None if len(row.members) == 1 else _NUMBER.search(tensor.key)
    lead = f"in {number[0]} at " if number else ""
    if tensor.first is None or tensor.first[0] is None or tensor.first[1] is None:
        return lead + index
    a, b = (str(value) if isinstance(value, int) else f"{value:.6g}" for value in tensor.first)
    return f"{lead}{index}: {a} → {b}"


def _number_text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _percent_text(part: int, total: int) -> str:
    if part == 0 or part == total:
        return "100 %" if part else "0 %"
    value = 100 * part / total
    return f"{value:.2g} %" if value < 99 else "> 99 %"


def _cosine_text(value: float) -> str:
    distance = 1 - value
    if distance >= 1e-3 or math.isnan(distance):
        return f"{value:.3f}"
    return "1" if distance < 1e-15 else f"1 - {distance:.1g}"
