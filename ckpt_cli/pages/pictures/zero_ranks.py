"""The picture of DeepSpeed's ranks: a row for each kind of file, a column per data-parallel rank.

Where the bytes of all ranks do not fit, a rank is one character.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_cli.pages.pictures.ranks import missing_blocks
from ckpt_cli.screen.blocks import Cell, bytes_text, draw_text, n_text, table, table_width
from ckpt_cli.screen.terminal import Screen, escaped

if TYPE_CHECKING:
    from core.verbs.pictures.zero_ranks import ZeroFile, ZeroGrid

_MARKS = 50
"""Most ranks in a row of single characters."""
_UNLIMITED = 120
"""Columns of the picture in files and pipes."""


def zero_lines(screen: Screen, grid: ZeroGrid) -> Iterator[str]:
    """Yield the grid, a line above it, and the names of missing files."""
    yield from draw_text(screen, [zero_title(grid), ""])
    rows = _rows_with_bytes(grid)
    if table_width(rows, align="<" + ">" * grid.n_ranks) <= (screen.width or _UNLIMITED):
        yield from table(screen, rows, align="<" + ">" * grid.n_ranks)
    else:
        yield from _marked_lines(screen, grid)
    texts = [f"missing: dp {file.rank}, {escaped(file.name)}" for file in grid.missing]
    yield from draw_text(screen, missing_blocks(texts, "file"))


def zero_title(grid: ZeroGrid) -> tuple[Cell | str, ...]:
    """Return the line above the grid: the ranks and bytes, and how many files are missing."""
    n_bytes = sum(file.n_bytes or 0 for files in grid.kinds.values() for file in files)
    count = f"{n_text(grid.n_ranks, 'data-parallel rank')}, {bytes_text(n_bytes)}"
    alarm = f", {n_text(len(grid.missing), 'file')} missing" if grid.missing else ""
    return f"ZeRO: {count}", Cell(alarm, ("red",))


def _rows_with_bytes(grid: ZeroGrid) -> list[list[Cell]]:
    """Return a heading, and a row for each kind with the bytes of each rank."""
    heading = [Cell(""), *(Cell(f"dp {rank}", ("bold",)) for rank in range(grid.n_ranks))]
    rows = [heading]
    for kind, files in grid.kinds.items():
        cells = {file.rank: _bytes_cell(file) for file in files}
        row = [cells.get(rank, Cell("")) for rank in range(grid.n_ranks)]
        rows.append([Cell(kind, ("bold",)), *row])
    return rows


def _bytes_cell(file: ZeroFile) -> Cell:
    """Return the size of a file, or that it is missing."""
    return Cell("missing", ("red",)) if file.n_bytes is None else Cell(bytes_text(file.n_bytes))


def _marked_lines(screen: Screen, grid: ZeroGrid) -> Iterator[str]:
    """Yield rows in which a rank is one character, without the later ones that are complete."""
    absent = "✗" if screen.has_unicode else "X"
    label = max(9, *map(len, grid.kinds))
    width = min(_MARKS, max((screen.width or _UNLIMITED) - 17 - label, 10))
    digits = len(str(grid.n_ranks - 1))
    n_left_out = 0
    for kind, files in grid.kinds.items():
        by_rank = {file.rank: file for file in files}
        for first in range(0, max(by_rank) + 1, width):
            ranks = [by_rank.get(rank) for rank in range(first, min(first + width, grid.n_ranks))]
            if first and all(file is None or file.n_bytes is not None for file in ranks):
                n_left_out += 1
                continue
            marks = "".join(
                " " if file is None else "■" if file.n_bytes is not None else absent
                for file in ranks
            )
            last = first + len(ranks) - 1
            span = f"dp {first:>{digits}}-{last:<{digits}}"
            line = screen.plain(f"{kind:<{label}}  {span}  {marks}".rstrip())
            yield line.replace(absent, screen.styled(absent, "red"))
    if n_left_out:
        text = f"{n_text(n_left_out, 'more row')} without missing files"
        yield screen.plain(screen.styled(text, "dim"))
