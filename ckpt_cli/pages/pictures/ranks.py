"""The picture of ``ckpt inspect --ranks``: pipeline stages × tensor ranks × expert ranks.

A row is a pipeline stage (and expert rank), a column is a tensor rank. Where the bytes of all
columns do not fit, a rank is one character.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    bytes_text,
    dim_cell,
    draw_text,
    n_text,
    table,
    table_width,
)
from ckpt_cli.screen.terminal import Screen, escaped
from core.engine.catalog.key_patterns import ranges
from core.values import dataclass

if TYPE_CHECKING:
    from core.verbs.pictures.ranks import RankCell, RankGrid

_MOST_ROWS = 32
"""Rows from which equal rows are folded."""
_MOST_NAMED = 12
"""Maximum number of missing ranks that are named; the others are counted."""
_LAST_COLUMNS = 18
"""Columns for the modules outside layers, which are wrapped."""
_TO = " to "
"""Stands between the numbers of the first and the last of several rows."""
_UNLIMITED = 120
"""Columns of the picture in files and pipes."""


@dataclass(frozen=True, slots=True)
class _RankRow:
    """A row of the grid, or several equal ones.

    Args:
        pp, ep: numbers of the stages and expert ranks.
        layers, experts: their numbers, for the row or for the first and last of several.
        others: modules outside layers.
        cells: tensor rank → its cell, in the first of the rows.
    """

    pp: tuple[int, ...]
    ep: tuple[int, ...]
    layers: str
    experts: str
    others: tuple[str, ...]
    cells: Mapping[int, RankCell]

    @property
    def is_complete(self) -> bool:
        """No rank is missing."""
        return not any(cell.is_missing for cell in self.cells.values())

    @property
    def look(self) -> object:
        """A value that is equal for rows that may be folded into one."""
        return self.others, [
            (tp, bytes_text(cell.model_bytes), bytes_text(cell.optimizer_bytes))
            for tp, cell in self.cells.items()
        ]


def rank_lines(screen: Screen, grid: RankGrid, *, folds: bool = True) -> Iterator[str]:
    """Yield the grid, a line above it with its sizes, and the names of missing ranks.

    Args:
        folds: fold equal rows if there are many.
    """
    yield from draw_text(screen, [rank_title(grid), ""])
    rows = _rows_of(grid)
    if folds and len(rows) > _MOST_ROWS:
        rows = _fold(rows, "ep")
    if folds and len(rows) > _MOST_ROWS:
        rows = _fold(rows, "pp")
    yield from _grid_lines(screen, grid, rows)
    texts = [_missing_text(cell, grid) for cell in grid.cells if cell.is_missing]
    yield from draw_text(screen, missing_blocks(texts, "rank"))


def rank_title(grid: RankGrid) -> tuple[Cell | str, ...]:
    """Return the line above the grid: its sizes, and how many ranks are missing."""
    n_bytes = sum(cell.model_bytes + cell.optimizer_bytes for cell in grid.cells)
    sizes = [f"TP {grid.tp}", f"PP {grid.pp}"]
    sizes += [f"VPP {grid.vpp}"] if grid.vpp > 1 else []
    sizes += [f"EP {grid.ep}"] if grid.ep > 1 else []
    count = f"{n_text(len(grid.cells), 'rank')}, {bytes_text(n_bytes)}"
    n_missing = sum(cell.is_missing for cell in grid.cells)
    alarm = f", {n_missing:,} missing" if n_missing else ""
    return f"{' · '.join(sizes)}: {count}", Cell(alarm, ("red",))


def missing_blocks(texts: Sequence[str], noun: str) -> Iterator[Block]:
    """Yield the first texts about what is missing: colours are not for everyone."""
    if texts:
        yield ""
    for text in texts[:_MOST_NAMED]:
        yield Cell(text, ("red",))
    if len(texts) > _MOST_NAMED:
        yield Cell(f"… {n_text(len(texts) - _MOST_NAMED, f'more missing {noun}')}", ("red",))


def _missing_text(cell: RankCell, grid: RankGrid) -> str:
    """Return the name of a missing rank and what it should hold."""
    name = f"tp {cell.tp} pp {cell.pp}" + (f" ep {cell.ep}" if grid.ep > 1 else "")
    state = "missing" if not cell.files else f"unreadable ({escaped(', '.join(cell.files))})"
    parts = [
        f"{label} {numbers}"
        for label, numbers in (("layers", cell.layers), ("experts", cell.experts))
        if numbers
    ]
    return f"{state}: {name}" + (f", with {' and '.join(parts)}" if parts else "")


def _rows_of(grid: RankGrid) -> list[_RankRow]:
    """Arrange the cells in rows."""
    cells: dict[tuple[int, int], dict[int, RankCell]] = {}
    for cell in grid.cells:
        cells.setdefault((cell.pp, cell.ep), {})[cell.tp] = cell
    return [
        _RankRow(
            (pp,),
            (ep,),
            _joined(cell.layers for cell in row.values()),
            _joined(cell.experts for cell in row.values()),
            tuple(dict.fromkeys(name for cell in row.values() for name in cell.others)),
            row,
        )
        for (pp, ep), row in cells.items()
    ]


def _joined(texts: Iterator[str]) -> str:
    """Return the text that all cells have; several if a damaged rank has another."""
    return " / ".join(dict.fromkeys(text for text in texts if text))


def _fold(rows: Sequence[_RankRow], axis: str) -> list[_RankRow]:
    """Merge successive complete rows that look alike and differ along one axis.

    Args:
        axis: ``ep`` for the expert ranks of a stage, ``pp`` for stages.
    """
    folded: list[_RankRow] = []
    for row in rows:
        last = folded[-1] if folded else None
        if (
            last is None
            or not (row.is_complete and last.is_complete)
            or (axis == "ep" and row.pp != last.pp)
            or (axis == "pp" and row.ep != last.ep)
            or row.look != last.look
        ):
            folded.append(row)
            continue
        folded[-1] = replace(
            last,
            pp=tuple(dict.fromkeys((*last.pp, *row.pp))),
            ep=tuple(dict.fromkeys((*last.ep, *row.ep))),
            layers=_span(last.layers, row.layers),
            experts=_span(last.experts, row.experts),
        )
    return folded


def _span(first: str, last: str) -> str:
    """Return the numbers of the first and of the last of several rows: ``0-3 to 60-63``."""
    return first if first == last else f"{first.partition(_TO)[0]}{_TO}{last.rpartition(_TO)[2]}"


def _grid_lines(screen: Screen, grid: RankGrid, rows: Sequence[_RankRow]) -> Iterator[str]:
    """Yield the rows in the most detailed form that fits."""
    absent = "✗" if screen.has_unicode else "X"
    marks = [
        "".join(
            " " if (cell := row.cells.get(tp)) is None else absent if cell.is_missing else "■"
            for tp in range(grid.tp)
        )
        for row in rows
    ]
    # The bytes of each rank, or ranks that are one character each; those of model and optimizer
    # apart, if there is room.
    has_optimizer = any(cell.optimizer_bytes for cell in grid.cells)
    for is_compact, is_apart in product(
        (False, True), (True, False) if has_optimizer else (False,)
    ):
        cells, align = _table_rows(grid, rows, marks, is_compact=is_compact, is_apart=is_apart)
        # The last column may be wrapped.
        n_columns = table_width([row[:-1] for row in cells], align=align)
        if n_columns + _LAST_COLUMNS <= (screen.width or _UNLIMITED):
            break
    if is_apart and not is_compact:
        yield screen.plain(screen.styled("bytes of each rank: model + optimizer", "dim"))
    # A row that is wrapped has lines without marks.
    styled = {mark: mark.replace(absent, screen.styled(absent, "red")) for mark in marks}
    for line in table(screen, cells, align=align, fits=True):
        for mark in styled if is_compact else ():
            shown = screen.plain(mark)
            if absent in mark and shown in line:
                line = line.replace(shown, screen.plain(styled[mark]), 1)
                break
        yield line


def _label_cells(grid: RankGrid, row: _RankRow | None) -> list[Cell]:
    """Return the first cells of a row; of the heading for None."""
    has_experts = any(cell.experts for cell in grid.cells)
    if row is None:
        titles = ["", *([""] if grid.ep > 1 else []), "layers", *(["experts"] * has_experts)]
        return list(map(dim_cell, titles))
    cells = [Cell(f"pp {ranges(row.pp)}", ("bold",))]
    cells += [Cell(f"ep {ranges(row.ep)}", ("bold",))] if grid.ep > 1 else []
    cells.append(Cell(row.layers or "–"))
    return [*cells, *([Cell(row.experts or "–")] if has_experts else [])]


def _table_rows(
    grid: RankGrid,
    rows: Sequence[_RankRow],
    marks: Sequence[str],
    *,
    is_compact: bool,
    is_apart: bool,
) -> tuple[list[list[Cell]], str]:
    """Return a heading and the rows, with their alignment.

    Args:
        marks: a text for each row, in which a rank is one character.
        is_compact: show the marks, and the bytes of one rank of each row; otherwise those of each.
        is_apart: the bytes of model and optimizer, not their sum.
    """
    if not is_compact:
        titles = [Cell(f"tp {tp}", ("bold",)) for tp in range(grid.tp)]
    else:
        titles = list(map(dim_cell, ("model", "optimizer") if is_apart else ("each rank",)))
    cells = []
    for row, mark in zip((None, *rows), (f"tp 0-{grid.tp - 1}", *marks), strict=True):
        stage, *labels = _label_cells(grid, row)
        if is_compact:
            labels.insert(0, Cell(mark, () if row else ("bold",)))
        if row is None:
            cells.append([stage, *labels, *titles, dim_cell("outside layers")])
            continue
        if is_compact:
            sizes = [
                (cell.model_bytes, cell.optimizer_bytes)
                for cell in row.cells.values()
                if not cell.is_missing
            ]
            columns = list(zip(*sizes, strict=True)) if is_apart else [list(map(sum, sizes))]
            figures = [Cell(_each_text(column)) for column in columns or ((), ())]
        else:
            figures = [_bytes_cell(row.cells.get(tp), is_apart=is_apart) for tp in range(grid.tp)]
        # The modules outside layers, without the stack's name.
        names = ", ".join(name.rpartition(".")[2] for name in row.others)
        cells.append([stage, *labels, *figures, dim_cell(escaped(names))])
    n_labels = len(cells[0]) - len(titles) - 1
    return cells, "<" * n_labels + ">" * len(titles) + "<"


def _bytes_cell(cell: RankCell | None, *, is_apart: bool) -> Cell:
    """Return the bytes of a rank, or that it is missing."""
    if cell is None:
        return Cell("")
    if cell.is_missing:
        return Cell("unreadable" if cell.files else "missing", ("red",))
    if is_apart:
        return Cell(f"{bytes_text(cell.model_bytes)} + {bytes_text(cell.optimizer_bytes)}")
    return Cell(bytes_text(cell.model_bytes + cell.optimizer_bytes))


def _each_text(sizes: Sequence[int]) -> str:
    """Return the bytes of each rank of a row; the least and the most if they differ."""
    if not sizes:
        return "–"
    least, most = bytes_text(min(sizes)), bytes_text(max(sizes))
    return least if least == most else f"{least} – {most}"


def grid_json(grid: RankGrid) -> dict[str, object]:
    """Return the grid as an object of ``--json``."""
    return {
        "tp": grid.tp,
        "pp": grid.pp,
        "vpp": grid.vpp,
        "ep": grid.ep,
        "cells": [
            {
                "tp": cell.tp,
                "pp": cell.pp,
                "ep": cell.ep,
                "layers": cell.layers,
                "experts": cell.experts,
                "others": list(cell.others),
                "model_bytes": cell.model_bytes,
                "optimizer_bytes": cell.optimizer_bytes,
                "files": list(cell.files),
                "missing": cell.is_missing,
            }
            for cell in grid.cells
        ],
    }
