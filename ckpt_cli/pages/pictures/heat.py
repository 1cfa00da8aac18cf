"""The picture of ``ckpt diff --map``: layers × modules, a character for the difference of each.

::

    model: 4 layers, 3 modules

    layers  1  2  3
    0       .  .  7
    1-3     9  .  S

     1  mlp.weight    2  norm.weight    3  self_attention.weight

    |A-B|/|A| is about   9 0.031   7 0.0078   . equal   S other shape

A digit is a level of ``HeatScale``: the larger, the greater the relative difference. Other
characters stand for results without a number (``_MARKS``), so the picture can be read without
colours. Where columns of this width do not fit, modules that are equal in every layer are left out;
where the others do not fit either, columns are one character wide, in groups of five.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import isfinite
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import n_text, wrapped
from ckpt_cli.screen.terminal import Screen, columns_of, escaped, padded, shortened
from core.engine.catalog.key_patterns import ranges
from core.values import dataclass
from core.verbs.pictures.heat import most_different, scale_heat

if TYPE_CHECKING:
    from core.verbs.pictures.heat import HeatCell, HeatMap, HeatScale

_MARKS = {
    "equal": (".", "equal"),
    "close": ("~", "within the tolerance"),
    "unread": ("?", "not read"),
    "dtype": ("D", "other dtype"),
    "shape": ("S", "other shape"),
    "only_a": ("A", "only in A"),
    "only_b": ("B", "only in B"),
}
"""Kind of result → its character, and what the legend says about it."""
_NAN = ("N", "NaN in A or B only")
_NO_NUMBER = ("x", "differs, without numbers")
_STYLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(".?", ("dim",)),
    **dict.fromkeys("~0123", ("cyan",)),
    **dict.fromkeys("45", ("green",)),
    **dict.fromkeys("67", ("yellow",)),
    **dict.fromkeys("89x", ("red",)),
    **dict.fromkeys("NDSAB", ("red", "bold")),
}
"""Character → colour, from the smallest differences to the greatest."""
_MOST_UNFOLDED = 32
"""Rows from which equal rows are folded."""
_MOST_LINES = 128
"""Most rows, and most modules; of more, those with the greatest differences are shown."""
_MOST_OUTSIDE = 10
"""Most tensors outside layers that are named."""
_LABEL_COLUMNS = 10
"""Columns of the numbers of layers."""
_NUMBER_COLUMNS = 5
"""Columns before the name of a module."""
_UNLIMITED = 120
"""Columns of the picture in files and pipes."""
_WIDE, _GROUP = 3, 5
"""Columns of a wide cell; number of narrow cells in a group."""


@dataclass(frozen=True, slots=True)
class _HeatRow:
    """A row of the picture: the numbers of its layers, and a character for each module."""

    layers: tuple[int, ...]
    marks: str


def heat_lines(screen: Screen, maps: Iterable[HeatMap], *, folds: bool = True) -> Iterator[str]:
    """Yield the maps, one below the other, and what their characters mean.

    Args:
        folds: fold equal layers if there are many, and show only the greatest differences if there
            are still too many.
    """
    maps = list(maps)
    scale = scale_heat(maps)
    marks: set[str] = set()
    for number, heat in enumerate(maps):
        if number:
            yield ""
        cells = (cell for row in (*heat.cells, heat.outside) for cell in row if cell)
        marks.update(mark_of(cell, scale) for cell in cells)
        yield from _map_lines(screen, heat, scale, folds=folds)
    yield ""
    yield from _legend_lines(screen, marks, scale)


def _legend_lines(screen: Screen, marks: set[str], scale: HeatScale) -> Iterator[str]:
    """Yield what the characters that occur mean, each in its colour."""
    items = [
        (digit, f"{scale.difference(int(digit)):.2g}{' or less' * (digit == '0')}")
        for digit in "9876543210"
        if digit in marks
    ]
    if items:
        items.insert(0, ("", "|A-B|/|A| is about"))
    items += [item for item in (*_MARKS.values(), _NAN, _NO_NUMBER) if item[0] in marks]
    lines: list[str] = []
    columns = 0
    for mark, text in items:
        item = f"{mark} {text}".strip()
        drawn = screen.styled(mark, *_STYLES[mark]) + " " if mark else ""
        drawn += screen.styled(text, "dim")
        columns += 3 + columns_of(item)
        if lines and columns <= (screen.width or _UNLIMITED):
            lines[-1] += f"   {drawn}"
        else:
            lines.append(drawn)
            columns = columns_of(item)
    yield from map(screen.plain, lines)


def mark_of(cell: HeatCell | None, scale: HeatScale) -> str:
    """Return the character of a cell; a space for none."""
    if cell is None:
        return " "
    if cell.n_nan and cell.kind == "values":
        return _NAN[0]
    if cell.kind != "values":
        return _MARKS[cell.kind][0]
    if cell.relative is None:
        return _NO_NUMBER[0]
    return str(scale.level(cell.relative))


def _map_lines(screen: Screen, heat: HeatMap, scale: HeatScale, *, folds: bool) -> Iterator[str]:
    """Yield one map: layers × modules, the names of the modules, what is outside the layers."""
    counts = [n_text(len(heat.layers), "layer"), n_text(len(heat.modules), "module")]
    parts = counts if heat.layers else []
    parts += [f"{n_text(len(heat.outside), 'tensor')} outside layers"] if heat.outside else []
    first, *more = wrapped(f"{heat.part}: {', '.join(parts)}", screen.width or _UNLIMITED)
    yield screen.styled(heat.part, "bold") + first.removeprefix(heat.part)
    yield from more
    if heat.layers:
        yield from _layer_lines(screen, heat, scale, folds=folds)
    if heat.outside:
        yield ""
        yield from _outside_lines(screen, heat.outside, scale, folds=folds)


def _layer_lines(screen: Screen, heat: HeatMap, scale: HeatScale, *, folds: bool) -> Iterator[str]:
    """Yield layers × modules, and the names of the modules."""
    # All modules if they fit; otherwise those that are not equal everywhere.
    columns = list(range(len(heat.modules)))
    room = (screen.width or _UNLIMITED) - _LABEL_COLUMNS
    if folds and _WIDE * len(columns) > room:
        columns = [
            at
            for at in columns
            if any((cell := row[at]) and cell.kind != "equal" for row in heat.cells)
        ]
        lines = [[row[at] for row in heat.cells] for at in columns]
        columns = [columns[position] for position in most_different(lines, _MOST_LINES)]
        if not columns:
            yield from _dim_lines(screen, "all layers are equal; --limit 0 draws them")
            return
    # All layers if they are few; otherwise equal ones are folded.
    rows = [
        _HeatRow((layer,), "".join(mark_of(row[at], scale) for at in columns))
        for layer, row in zip(heat.layers, heat.cells, strict=True)
    ]
    if folds and len(rows) > _MOST_UNFOLDED:
        rows = _fold(rows)
    if folds and len(rows) > _MOST_LINES:
        cells = dict(zip(heat.layers, heat.cells, strict=True))
        positions = most_different([cells[row.layers[0]] for row in rows], _MOST_LINES)
        rows = [rows[position] for position in positions]
    # As many modules at a time as fit.
    is_wide = _WIDE * len(columns) <= room
    n_columns = room // _WIDE if is_wide else room // (_GROUP + 1) * _GROUP
    for start in range(0, len(columns), n_columns):
        yield ""
        part = range(start, min(start + n_columns, len(columns)))
        yield _heading(screen, heat.stack, part, is_wide=is_wide)
        for row in rows:
            yield _row_line(screen, row, part, is_wide=is_wide)
    yield ""
    yield from _module_lines(screen, [heat.modules[at] for at in columns])
    # What is not shown.
    n_layers = len(heat.layers) - sum(len(row.layers) for row in rows)
    n_modules = len(heat.modules) - len(columns)
    left_out = [f"{n_text(n_layers, 'layer')} that differ less"] if n_layers else []
    if n_modules:
        left_out.append(f"{n_text(n_modules, 'module')} that differ less or not at all")
    if left_out:
        yield from _dim_lines(screen, f"not shown: {', '.join(left_out)}; --limit 0 shows all")


def _dim_lines(screen: Screen, text: str) -> Iterator[str]:
    """Yield a remark, in as many lines as it needs."""
    for line in wrapped(text, screen.width or _UNLIMITED):
        yield screen.styled(line, "dim")


def _fold(rows: Sequence[_HeatRow]) -> list[_HeatRow]:
    """Merge successive rows with the same characters."""
    return [
        _HeatRow(tuple(layer for row in group for layer in row.layers), marks)
        for marks, group in groupby(rows, key=lambda row: row.marks)
    ]


def _heading(screen: Screen, stack: str, columns: range, *, is_wide: bool) -> str:
    """Return the numbers of the modules, from 1: of each, or of the first one of each group."""
    if is_wide:
        numbers = "".join(f"{at + 1:>{_WIDE}}" for at in columns)
    else:
        numbers = "".join(f" {at + 1:<{_GROUP}}" for at in columns[::_GROUP])
    name = shortened(escaped(stack), _LABEL_COLUMNS, ellipsis=screen.plain("…"))
    return screen.plain(screen.styled(f"{padded(name, _LABEL_COLUMNS)}{numbers}".rstrip(), "dim"))


def _row_line(screen: Screen, row: _HeatRow, columns: range, *, is_wide: bool) -> str:
    """Return a row: the numbers of its layers, and the character of each module."""
    label = shortened(ranges(row.layers), _LABEL_COLUMNS, ellipsis=screen.plain("…"))
    line = padded(label, _LABEL_COLUMNS)
    for at in columns:
        mark = row.marks[at]
        gap = " " * (_WIDE - 1) if is_wide else "" if at % _GROUP else " "
        line += gap + screen.styled(mark, *_STYLES.get(mark, ()))
    return line.rstrip()


def _module_lines(screen: Screen, modules: Sequence[str]) -> Iterator[str]:
    """Yield the names of the columns with their numbers, side by side if they are short."""
    room = screen.width or _UNLIMITED
    names = [
        shortened(escaped(name), room - _NUMBER_COLUMNS, ellipsis=screen.plain("…"))
        for name in modules
    ]
    name_columns = max(map(columns_of, names), default=0)
    n_side_by_side = max((room + 2) // (_NUMBER_COLUMNS + name_columns + 2), 1)
    n_lines = -(-len(names) // n_side_by_side)
    for first in range(n_lines):
        yield "  ".join(
            screen.styled(f"{at + 1:>3}  ", "dim") + padded(names[at], name_columns)
            for at in range(first, len(names), n_lines)
        ).rstrip()


def _outside_lines(
    screen: Screen, cells: Sequence[HeatCell], scale: HeatScale, *, folds: bool
) -> Iterator[str]:
    """Yield the tensors outside layers, the greatest difference first."""
    shown = cells[:_MOST_OUTSIDE] if folds else cells
    yield screen.styled("outside layers", "dim")
    room = (screen.width or _UNLIMITED) - _NUMBER_COLUMNS
    for cell in shown:
        mark = mark_of(cell, scale)
        name = shortened(escaped(cell.keys[0]), room, ellipsis=screen.plain("…"))
        yield f"{screen.styled(f'  {mark}', *_STYLES[mark])}  {name}"
    n_more = len(cells) - len(shown)
    if n_more:
        all_equal = cells[-1].kind == shown[-1].kind == "equal"
        remark = "equal" if all_equal else "that differ less"
        yield screen.plain(screen.styled(f"  … {n_more:,} more {remark}", "dim"))


def maps_json(maps: Iterable[HeatMap]) -> dict[str, object]:
    """Return the maps as an object of ``--json``."""
    return {heat.part: _map_json(heat) for heat in maps}


def _map_json(heat: HeatMap) -> dict[str, object]:
    """Return one map; what is outside layers has its name, the other cells have their place."""
    return {
        "stack": heat.stack,
        "layers": list(heat.layers),
        "modules": list(heat.modules),
        "cells": [
            [None if cell is None else _cell_json(cell) for cell in row] for row in heat.cells
        ],
        "outside": [{"key": cell.keys[0], **_cell_json(cell)} for cell in heat.outside],
    }


def _cell_json(cell: HeatCell) -> dict[str, object]:
    relative: object = cell.relative
    if cell.relative is not None and not isfinite(cell.relative):
        relative = str(cell.relative)
    return {
        "kind": cell.kind,
        "tensors": len(cell.keys),
        "relative": relative,
        "differing": cell.n_different,
        "nan": cell.n_nan,
    }
