"""The rows of ``ckpt diff``: a tensor, or several that are shown as one, and what there is to say about them."""

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
"""Ends a key in what ``core.catalog.key_patterns.folded`` takes."""


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors that are shown as one."""

    name: str
    worst: TensorDiff
    members: Sequence[TensorDiff]


RowCells = Callable[[Row], list[Cell | str]]
VALUES_HEAD = ("", "differing", "max |Δ|", "|Δ|/|A|", "cosine", "first difference")


def folded_rows(tensors: Iterable[TensorDiff]) -> Iterator[Row]:
    """Tensors that differ in numbers of their keys only, in order of the worst."""
    alike: dict[tuple[object, ...], list[TensorDiff]] = {}
    for one in tensors:
        shapes = tuple((meta.dtype, meta.shape) if meta else None for meta in (one.a, one.b))
        alike.setdefault((_NUMBER.sub("#", one.key), shapes), []).append(one)
    for members in alike.values():
        names = folded((one.key + END for one in members), end=END)
        name = escaped(names[0].removesuffix(END))
        if len(names) > 1:
            n_more = len(members) - _standing(names[0])
            name += f" and {n_more} more" if n_more > 0 else " …"
        yield Row(name, members[0], members)


def _standing(name: str) -> int:
    """How many keys a folded name stands for, at least."""
    n = 1
    for inside in re.findall(r"\[([\d,:-]+)\]", name):
        n *= sum(_length(part) for part in inside.split(","))
    return n


def _length(part: str) -> int:
    span, _, step = part.partition(":")
    first, _, last = span.partition("-")
    return (int(last or first) - int(first)) // int(step or 1) + 1


def only_row(row: Row) -> list[Cell | str]:
    meta = row.worst.meta
    size = bytes_text(sum(one.meta.n_bytes for one in row.members))
    if row.name.startswith("all "):
        return [Cell(n_text(len(row.members), "tensor")), "", Cell(size, ("dim",))]
    return [Cell(meta.dtype, ("cyan",)), shape_text(meta.shape), Cell(size, ("dim",))]


def shape_row(row: Row) -> list[Cell | str]:
    a, b = row.worst.a, row.worst.b
    assert a is not None and b is not None
    return [shape_text(a.shape), f"→ {shape_text(b.shape)}"]


def dtype_row(row: Row) -> list[Cell | str]:
    a, b = row.worst.a, row.worst.b
    assert a is not None and b is not None
    types = Cell(f"{a.dtype} → {b.dtype}", ("cyan",))
    members = [one for one in row.members if one.values is not None or one.is_cast is not None]
    if not members:
        return [types, ""]
    if all(one.is_cast for one in members):
        exact = all(one.values is not None and not one.values.n_differing for one in members)
        return [types, Cell("the same values" if exact else "the same values, rounded", ("green",))]
    values = row.worst.values
    far = "" if values is None or values.relative is None else f": |Δ|/|A| {_short(values.relative)}"
    return [types, Cell(f"other values{far}", ("red",))]


def values_row(row: Row) -> list[Cell | str]:
    values = [one.values for one in row.members if one.values is not None]
    worst = row.worst
    n_differing, n_elements = sum(one.n_differing for one in values), sum(one.n_elements for one in values)
    maxima = [one.max_abs for one in values if one.max_abs is not None]
    cosines = [one.cosine for one in values if one.cosine is not None]
    n_nan = sum(one.n_nan for one in values)
    relative = worst.values.relative if worst.values is not None else None
    share = f"{n_differing:,} of {n_elements:,} ({_percent(n_differing, n_elements)})"
    return [
        Cell(share),
        Cell(f"{n_nan:,} NaN" if n_nan else _short(max(maxima)) if maxima else "–", ("red",) if n_nan else ()),
        Cell("–" if relative is None else _short(relative), ("yellow",)),
        Cell(_cosine(min(cosines)) if cosines else "–"),
        Cell(_first(worst, is_one=len(row.members) == 1), ("dim",)),
    ]


def _first(one: TensorDiff, *, is_one: bool) -> str:
    values = one.values
    if values is None or values.first is None:
        return ""
    where = shape_text(one.index_of(values.first))
    number = "" if is_one else next((f"{m[0]} " for m in [_NUMBER.search(one.key)] if m), "")
    lead = f"in {number}at " if number else ""
    if one.first is None or one.first[0] is None or one.first[1] is None:
        return lead + where
    return f"{lead}{where}: {_value(one.first[0])} → {_value(one.first[1])}"


def _value(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def _percent(part: int, whole: int) -> str:
    if part == 0 or part == whole:
        return "100 %" if part else "0 %"
    value = 100 * part / whole
    return f"{value:.2g} %" if value < 99 else "> 99 %"


def _cosine(value: float) -> str:
    rest = 1 - value
    if rest >= 1e-3 or math.isnan(rest):
        return f"{value:.3f}"
    return "1" if rest < 1e-15 else f"1 - {rest:.1g}"
