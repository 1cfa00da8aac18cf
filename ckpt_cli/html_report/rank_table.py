"""The grid of ranks as a table: a row for each pipeline stage, a column for each tensor rank.

DeepSpeed's has a row for each kind of file, and a column for each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from ckpt_cli.html_report.grid import CellFindings, Grid, GridCell
from ckpt_cli.html_report.names import shown_name
from ckpt_cli.pages.pictures.ranks import rank_title
from ckpt_cli.pages.pictures.zero_ranks import zero_title
from ckpt_cli.screen.blocks import bytes_text, line_text
from core.verbs.pictures.ranks import RankCell, RankGrid
from core.verbs.pictures.zero_ranks import ZeroGrid

MAX_CELLS = 1024
"""Most cells of the table; the others are counted."""


def rank_name(grid: RankGrid, *, pp: int, tp: int, ep: int) -> str:
    """Return the name of a rank: ``pp0 tp1``, with its expert rank if there are several."""
    return f"pp{pp} tp{tp}" + (f" ep{ep}" if grid.ep > 1 else "")


def rank_table(grid: RankGrid, findings: Mapping[str, CellFindings] | None = None) -> Grid:
    """Arrange the ranks as rows and columns.

    Args:
        findings: findings by the name of the rank.
    """
    largest = max((cell.model_bytes + cell.optimizer_bytes for cell in grid.cells), default=0)
    cells = {
        (cell.pp, cell.tp, cell.ep): _rank_cell(cell, grid, largest, findings or {})
        for cell in grid.cells
    }
    # A row for each stage and expert rank.
    coordinates = list(product(range(grid.pp), range(grid.ep)))
    shown = coordinates[: max(MAX_CELLS // max(grid.tp, 1), 1)]
    n_columns = min(grid.tp, MAX_CELLS)
    rows = tuple(
        (
            f"PP {pp}{f' · EP {ep}' if grid.ep > 1 else ''}",
            tuple(cells.get((pp, tp, ep)) for tp in range(n_columns)),
        )
        for pp, ep in shown
    )
    n_more = len(coordinates) - len(shown)
    is_cut = f"the first {len(shown):,} rows; {n_more:,} more are not shown" if n_more else ""
    columns = tuple(f"TP {tp}" for tp in range(n_columns))
    return Grid("ranks", line_text(rank_title(grid)), "pipeline stage", columns, rows, is_cut)


def zero_name(kind: str, rank: int) -> str:
    """Return the name of the cell of DeepSpeed's files of one kind: ``optimizer dp3``."""
    return f"{kind} dp{rank}"


def zero_table(grid: ZeroGrid, findings: Mapping[str, CellFindings]) -> Grid:
    """Arrange DeepSpeed's files: a row for each kind, a column for each data-parallel rank.

    Args:
        findings: findings by the name of the cell.
    """
    n_columns = min(grid.n_ranks, MAX_CELLS // max(len(grid.kinds), 1))
    largest = max((file.n_bytes or 0 for files in grid.kinds.values() for file in files), default=0)
    rows = []
    for kind, files in grid.kinds.items():
        cells = {}
        for file in files:
            name = zero_name(kind, file.rank)
            state = "missing" if file.n_bytes is None else bytes_text(file.n_bytes)
            tip = (f"{name}: {state}", file.name)
            cells[file.rank] = _grid_cell(name, file.n_bytes, largest, findings, tip=tip)
        rows.append((kind, tuple(map(cells.get, range(n_columns)))))
    n_more = grid.n_ranks - n_columns
    is_cut = f"the first {n_columns:,} ranks; {n_more:,} more are not shown" if n_more else ""
    columns = tuple(f"DP {rank}" for rank in range(n_columns))
    return Grid("ranks", line_text(zero_title(grid)), "files", columns, tuple(rows), is_cut)


def _rank_cell(
    cell: RankCell, grid: RankGrid, largest: int, findings: Mapping[str, CellFindings]
) -> GridCell:
    """Return one cell, with a tooltip that says everything about its rank."""
    name = rank_name(grid, pp=cell.pp, tp=cell.tp, ep=cell.ep)
    lines = [f"layers {cell.layers}"] if cell.layers else []
    lines += [f"experts {cell.experts}"] if cell.experts else []
    lines += cell.others[:3]
    lines += [f"and {len(cell.others) - 3} more"] if len(cell.others) > 3 else []
    if cell.is_missing:
        n_bytes = None
        tip = [f"{name}: missing"]
    else:
        n_bytes = cell.model_bytes + cell.optimizer_bytes
        tip = [name, f"model {bytes_text(cell.model_bytes)}"]
        tip += [f"optimizer {bytes_text(cell.optimizer_bytes)}"] if cell.optimizer_bytes else []
    tip += [*lines, *cell.files[:4]]
    tip += [f"and {len(cell.files) - 4:,} more files"] if len(cell.files) > 4 else []
    return _grid_cell(name, n_bytes, largest, findings, tip=tip, lines=lines)


def _grid_cell(
    name: str,
    n_bytes: int | None,
    largest: int,
    findings: Mapping[str, CellFindings],
    *,
    tip: Sequence[str],
    lines: Sequence[str] = (),
) -> GridCell:
    """Return the cell of a rank, coloured by its bytes and framed by its findings.

    Args:
        n_bytes: its bytes; None if it is missing.
        largest: the bytes of the largest cell.
    """
    place = findings.get(name)
    style = f"h{round(5 * (n_bytes or 0) / largest) if largest else 0}"
    style += " missing" if n_bytes is None else ""
    style += f" has-{place.worst}" if place else ""
    text = "✗ missing" if n_bytes is None else bytes_text(n_bytes)
    return GridCell(text, style, "\n".join(map(shown_name, tip)), tuple(lines), name, place)
