"""The heat maps of a comparison as tables of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_cli.html_report.grid import Grid, GridCell, Legend
from ckpt_cli.html_report.names import shown_name
from ckpt_cli.screen.blocks import n_text
from core.verbs.pictures.heat import (
    N_LEVELS,
    HeatCell,
    HeatMap,
    HeatScale,
    most_different,
    scale_heat,
)

MAX_ROWS, MAX_COLUMNS = 128, 32
"""Most layers and modules; of more, those with the greatest differences are shown."""
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


def heat_blocks(maps: Sequence[HeatMap]) -> list[Legend | Grid]:
    """Return the legend and the tables of each part: its layers, and what is outside layers."""
    scale = scale_heat(maps)
    tables = []
    for heat in maps:
        tables += [_layer_table(heat, scale)] if heat.layers else []
        tables += [_outside_table(heat, scale)] if heat.outside else []
    return [_legend(tables, scale), *tables] if tables else []


def _legend(tables: Iterable[Grid], scale: HeatScale) -> Legend:
    """Return what the colours mean that the tables use."""
    styles = {cell.style for table in tables for _, cells in table.rows for cell in cells if cell}
    levels = [
        (f"r{level}", f"{scale.difference(level):.2g}{' or less' * (level == 0)}")
        for level in range(N_LEVELS)
    ]
    others = [("equal", "equal"), ("close", "within the tolerance"), ("unread", "not read")]
    others.append(("kind", "different dtype or shape, missing, NaN"))
    return Legend(
        "Relative difference |A−B| / |A| of each layer and module, about:",
        tuple(item for item in (*levels, *others) if item[0] in styles),
    )


def _layer_table(heat: HeatMap, scale: HeatScale) -> Grid:
    """Arrange the differences inside layers by layer and module."""
    columns = most_different(list(map(list, zip(*heat.cells, strict=True))), MAX_COLUMNS)
    rows = most_different([list(row) for row in heat.cells], MAX_ROWS)
    n_rows, n_columns = len(heat.layers) - len(rows), len(heat.modules) - len(columns)
    left_out = " and ".join(
        n_text(n, noun) for n, noun in ((n_rows, "layer"), (n_columns, "module")) if n > 0
    )
    labels = [f"{shown_name(heat.stack, 60)} {layer}" for layer in heat.layers]
    modules = [shown_name(module, 80) for module in heat.modules]
    return Grid(
        "heat",
        heat.part.capitalize(),
        "layer",
        tuple(modules[column] for column in columns),
        tuple(
            (
                labels[row],
                tuple(
                    _grid_cell(heat.cells[row][column], scale, f"{labels[row]}, {modules[column]}")
                    for column in columns
                ),
            )
            for row in rows
        ),
        left_out and f"Only the largest differences; {left_out} not shown.",
    )


def _outside_table(heat: HeatMap, scale: HeatScale) -> Grid:
    """List the differences of the tensors outside layers, the greatest first."""
    cells = heat.outside[:MAX_ROWS]
    n_more = len(heat.outside) - len(cells)
    names = [shown_name(cell.keys[0], 80) for cell in cells]
    return Grid(
        "heat",
        f"{heat.part.capitalize()}, outside layers",
        "tensor",
        ("difference",),
        tuple(
            (name, (_grid_cell(cell, scale, name),))
            for name, cell in zip(names, cells, strict=True)
        ),
        f"{n_text(n_more, 'tensor')} with smaller differences left out." if n_more else "",
    )


def _grid_cell(cell: HeatCell | None, scale: HeatScale, title: str) -> GridCell | None:
    """Return one cell with its colour: by relative difference, or by kind without one.

    Args:
        title: what the cell is about.
    """
    if cell is None:
        return None
    names = "\n".join(shown_name(key) for key in cell.keys[:4])
    more = f"\nand {len(cell.keys) - 4:,} more" if len(cell.keys) > 4 else ""
    tip = f"{title}: {_KIND_TEXTS[cell.kind]}"
    if cell.relative is not None:
        tip += f"\nrelative difference {cell.relative:.3g}, {cell.n_different:,} elements differ"
    tip += f"\n{names}{more}"
    if cell.kind in ("only_a", "only_b", "shape", "dtype"):
        return GridCell(_KIND_TEXTS[cell.kind], "kind", tip)
    if cell.n_nan:
        return GridCell(f"{cell.n_nan:,} NaN", "kind", tip)
    if cell.kind == "unread":
        return GridCell("–", cell.kind, tip)
    if cell.kind in ("close", "equal"):
        return GridCell(_KIND_TEXTS[cell.kind], cell.kind, tip)
    if cell.relative is None:
        return GridCell(_KIND_TEXTS[cell.kind], "kind", tip)
    return GridCell(f"{cell.relative:.2g}", f"r{scale.level(cell.relative)}", tip)
