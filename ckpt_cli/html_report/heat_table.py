"""The heat map of a comparison as a table of bounded size."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, log10

from ckpt_cli.html_report.names import shown_name
from core.diff.result import KINDS
from core.pictures.heat import HeatCell, HeatMap

MAX_ROWS, MAX_COLUMNS = 128, 32
"""Most layers and modules; of more, those with the greatest differences are shown."""
_LEAST_EXPONENT = -7
"""Relative differences up to 1e-7 have the palest colour."""
_KIND_TEXTS = {
    "only_a": "only A",
    "only_b": "only B",
    "shape": "shape",
    "dtype": "dtype",
    "values": "differ",
    "close": "close",
    "unread": "not read",
    "equal": "=",
}


@dataclass(frozen=True, slots=True)
class HeatTableCell:
    """A cell: its text, and the class of its colour."""

    text: str
    style: str
    tip: str


@dataclass(frozen=True, slots=True)
class HeatTable:
    """The table; ``is_cut`` says what is left out, "" if nothing is."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[HeatTableCell | None, ...]], ...]
    is_cut: str


def heat_table(heat: HeatMap) -> HeatTable | None:
    """Arrange the differences as a table; return None if there is nothing to show."""
    if not heat.cells or not heat.modules:
        return None
    columns = _worst_first(list(map(list, zip(*heat.cells, strict=True))), MAX_COLUMNS)
    rows = _worst_first([list(row) for row in heat.cells], MAX_ROWS)
    n_rows, n_columns = len(heat.layers) - len(rows), len(heat.modules) - len(columns)
    left_out = [
        f"{n:,} {noun}" for n, noun in ((n_rows, "layers"), (n_columns, "modules")) if n > 0
    ]
    return HeatTable(
        tuple(shown_name(heat.modules[column], 80) for column in columns),
        tuple(
            (
                shown_name(heat.layers[row], 60),
                tuple(
                    _table_cell(heat.cells[row][column], heat.layers[row], heat.modules[column])
                    for column in columns
                ),
            )
            for row in rows
        ),
        f"Those with the greatest differences; {' and '.join(left_out)} are left out."
        if left_out
        else "",
    )


def _worst_first(lines: list[list[HeatCell | None]], limit: int) -> list[int]:
    """Return the positions of the lines with the greatest differences, in their own order."""
    worst = sorted(range(len(lines)), key=lambda at: min(map(_order, lines[at]), default=(99, 0.0)))
    return sorted(worst[:limit])


def _order(cell: HeatCell | None) -> tuple[int, float]:
    """Return the sort key of a cell: the most serious kind first, then the greatest difference."""
    if cell is None:
        return len(KINDS), 0.0
    return KINDS.index(cell.kind), -(cell.relative or 0.0)


def _table_cell(cell: HeatCell | None, layer: str, module: str) -> HeatTableCell | None:
    """Return one cell with its colour: by relative difference, or by kind without one."""
    if cell is None:
        return None
    names = "\n".join(shown_name(key) for key in cell.keys[:4])
    more = f"\nand {len(cell.keys) - 4:,} more" if len(cell.keys) > 4 else ""
    tip = f"{shown_name(layer, 60)}, {shown_name(module, 80)}: {_KIND_TEXTS[cell.kind]}"
    if cell.relative is not None:
        tip += f"\nrelative difference {cell.relative:.3g}, {cell.n_different:,} elements differ"
    tip += f"\n{names}{more}"
    if cell.kind in ("only_a", "only_b", "shape", "dtype"):
        return HeatTableCell(_KIND_TEXTS[cell.kind], "kind", tip)
    if cell.kind == "unread":
        return HeatTableCell("–", "unread", tip)
    if cell.kind == "equal" or not cell.relative:
        return HeatTableCell("=" if cell.kind == "equal" else _KIND_TEXTS[cell.kind], "r0", tip)
    return HeatTableCell(f"{cell.relative:.0e}", f"r{_step_of(cell.relative)}", tip)


def _step_of(relative: float) -> int:
    """Return the colour of a relative difference: 1 up to 1e-7, then one for each power of ten."""
    if not isfinite(relative):
        return 7
    return min(max(int(log10(relative) - _LEAST_EXPONENT) + 1, 1), 7)
