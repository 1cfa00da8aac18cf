"""The grid of ranks as a table: a row for each pipeline stage, a column for each tensor rank.

DeepSpeed's has a row for each kind of file, and a column for each data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from ckpt_cli.html_report.names import shown_name
from ckpt_cli.screen.blocks import bytes_text, n_text
from core.values import dataclass
from core.verbs.pictures.ranks import RankCell, RankGrid
from core.verbs.pictures.zero_ranks import ZeroGrid

MAX_CELLS = 1024
"""Most cells of the table; the others are counted."""


@dataclass(frozen=True, slots=True)
class CellFindings:
    """The findings about one rank: the worst severity, and their number as a text."""

    worst: str
    text: str


@dataclass(frozen=True, slots=True)
class TableCell:
    """A cell of the table.

    Args:
        id: name of the rank.
        heat: its bytes in proportion to the largest, 0 to 9.
        lines: what it holds.
        worst: the worst severity of its findings; "" without findings.
        findings: their number.
    """

    id: str
    n_bytes: int
    heat: int
    lines: tuple[str, ...]
    tip: str
    is_missing: bool
    worst: str = ""
    findings: str = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    """A pipeline stage, or a part of it with one expert rank; None where there is no rank."""

    label: str
    cells: tuple[TableCell | None, ...]


@dataclass(frozen=True, slots=True)
class RankTable:
    """The table, with a sentence above it.

    Args:
        is_cut: a sentence on what is left out; "" if nothing is.
    """

    summary: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    is_cut: str = ""


def rank_name(grid: RankGrid, *, pp: int, tp: int, ep: int) -> str:
    """Return the name of a rank: ``pp0 tp1``, with its expert rank if there are several."""
    return f"pp{pp} tp{tp}" + (f" ep{ep}" if grid.ep > 1 else "")


def rank_table(grid: RankGrid, findings: Mapping[str, CellFindings] | None = None) -> RankTable:
    """Arrange the ranks as rows and columns.

    Args:
        findings: findings by the name of the rank.
    """
    findings = findings or {}
    largest = max((cell.model_bytes + cell.optimizer_bytes for cell in grid.cells), default=0)
    cells = {
        (cell.pp, cell.tp, cell.ep): _table_cell(
            cell, grid, largest, findings.get(rank_name(grid, pp=cell.pp, tp=cell.tp, ep=cell.ep))
        )
        for cell in grid.cells
    }
    # A row for each stage and expert rank.
    coordinates = list(product(range(grid.pp), range(grid.ep)))
    shown = coordinates[: max(MAX_CELLS // max(grid.tp, 1), 1)]
    n_columns = min(grid.tp, MAX_CELLS)
    rows = tuple(
        TableRow(
            f"PP {pp}{f' · EP {ep}' if grid.ep > 1 else ''}",
            tuple(cells.get((pp, tp, ep)) for tp in range(n_columns)),
        )
        for pp, ep in shown
    )
    n_missing = sum(cell.is_missing for cell in grid.cells)
    sizes = [("TP", grid.tp), ("PP", grid.pp), ("VPP", grid.vpp), ("EP", grid.ep)]
    texts = [f"{name} {size}" for name, size in sizes if size > 1 or name in ("TP", "PP")]
    summary = f"{' · '.join(texts)}: {n_text(len(grid.cells), 'rank')}"
    summary += f", {n_missing:,} missing" if n_missing else ""
    n_more = len(coordinates) - len(shown)
    is_cut = f"the first {len(shown):,} rows; {n_more:,} more are not shown" if n_more else ""
    columns = tuple(f"TP {tp}" for tp in range(n_columns))
    return RankTable(summary, columns, rows, is_cut)


def zero_name(kind: str, rank: int) -> str:
    """Return the name of the cell of DeepSpeed's files of one kind: ``optimizer dp3``."""
    return f"{kind} dp{rank}"


def zero_table(grid: ZeroGrid, findings: Mapping[str, CellFindings]) -> RankTable:
    """Arrange DeepSpeed's files: a row for each kind, a column for each data-parallel rank.

    Args:
        findings: findings by the name of the cell.
    """
    n_columns = min(grid.n_ranks, MAX_CELLS // max(len(grid.kinds), 1))
    largest = max((file.n_bytes or 0 for files in grid.kinds.values() for file in files), default=0)
    rows = []
    for kind, files in grid.kinds.items():
        cells: dict[int, TableCell] = {}
        for file in files:
            name = zero_name(kind, file.rank)
            place = findings.get(name)
            state = "missing" if file.n_bytes is None else bytes_text(file.n_bytes)
            cells[file.rank] = TableCell(
                name,
                file.n_bytes or 0,
                round(5 * (file.n_bytes or 0) / largest) if largest else 0,
                (),
                f"{name}: {state}\n{shown_name(file.name)}",
                file.n_bytes is None,
                *(("", "") if place is None else (place.worst, place.text)),
            )
        rows.append(TableRow(kind, tuple(map(cells.get, range(n_columns)))))
    summary = f"ZeRO: {n_text(grid.n_ranks, 'data-parallel rank')}"
    n_missing = len(grid.missing)
    summary += f", {n_text(n_missing, 'file')} missing" if n_missing else ""
    n_more = grid.n_ranks - n_columns
    is_cut = f"the first {n_columns:,} ranks; {n_more:,} more are not shown" if n_more else ""
    return RankTable(summary, tuple(f"DP {rank}" for rank in range(n_columns)), tuple(rows), is_cut)


def _table_cell(
    cell: RankCell, grid: RankGrid, largest: int, findings: CellFindings | None
) -> TableCell:
    """Return one cell, with a tooltip that says everything about its rank."""
    n_bytes = cell.model_bytes + cell.optimizer_bytes
    lines = [f"layers {cell.layers}"] if cell.layers else []
    lines += [f"experts {cell.experts}"] if cell.experts else []
    lines += cell.others[:3]
    lines += [f"and {len(cell.others) - 3} more"] if len(cell.others) > 3 else []
    name = rank_name(grid, pp=cell.pp, tp=cell.tp, ep=cell.ep)
    tip = [name + (": missing" if cell.is_missing else "")]
    if not cell.is_missing:
        tip.append(f"model {bytes_text(cell.model_bytes)}")
        if cell.optimizer_bytes:
            tip.append(f"optimizer {bytes_text(cell.optimizer_bytes)}")
    tip += lines
    tip += [shown_name(file) for file in _first(cell.files, 4)]
    return TableCell(
        name,
        n_bytes,
        round(5 * n_bytes / largest) if largest else 0,
        tuple(lines),
        "\n".join(shown_name(line) for line in tip),
        cell.is_missing,
        *(("", "") if findings is None else (findings.worst, findings.text)),
    )


def _first(texts: Sequence[str], limit: int) -> list[str]:
    """Return the first texts, and how many more there are."""
    more = [f"and {len(texts) - limit:,} more files"] if len(texts) > limit else []
    return [*texts[:limit], *more]
