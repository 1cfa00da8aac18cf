"""The checkpoints in a directory that is none itself, as lines and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Cell, bytes_text, first_lines, n_text, table
from ckpt_cli.screen.terminal import Screen, columns_of, escaped

if TYPE_CHECKING:
    from pathlib import Path

    from core.opening.listing import ListedCheckpoint


_FIXED_COLUMNS = 45
"""Columns of a row without the format's name and the command: indent, date, size, iteration."""


def listing_lines(
    screen: Screen, root: Path, checkpoints: Sequence[ListedCheckpoint], *, limit: int
) -> Iterator[str]:
    """Yield a line for each checkpoint, with the command that shows it.

    Args:
        limit: maximum number of checkpoints; 0 for all.
    """
    count = n_text(len(checkpoints), "checkpoint")
    title = f"{escaped(str(root))}: not a checkpoint, but it contains {count}"
    yield screen.styled(title, "bold")
    yield ""
    heads = ("modified", "size", "iteration", "format")
    rows: list[list[Cell]] = [[Cell(text, ("dim",)) for text in heads]]
    for item in checkpoints:
        modified = datetime.fromtimestamp(item.modified).strftime("%Y-%m-%d %H:%M")
        rows.append(
            [
                Cell(modified, ("dim",)),
                Cell("" if item.n_bytes is None else bytes_text(item.n_bytes)),
                Cell("" if item.iteration is None else str(item.iteration)),
                Cell("?" if item.format is None else item.format.name, ("cyan",)),
            ]
        )
    commands = [escaped(f"ckpt inspect {shlex.quote(str(item.path))}") for item in checkpoints]
    # The commands stand in the last column; where one does not fit, each on a line of its own, so
    # that it can be pasted.
    n_columns = _FIXED_COLUMNS + max((columns_of(row[3].text) for row in rows), default=0)
    n_columns += max(map(columns_of, commands), default=0)
    is_wide = screen.width is None or n_columns <= screen.width
    if is_wide:
        rows = [
            rows[0],
            *([*row, Cell(text)] for row, text in zip(rows[1:], commands, strict=True)),
        ]
    head, *lines = table(screen, rows, align="<>><<"[: 5 if is_wide else 4], indent=2)
    yield head
    if not is_wide:
        lines = [f"{line}\n    {text}" for line, text in zip(lines, commands, strict=True)]
    yield from first_lines(screen, lines, limit)


def listing_json(root: Path, checkpoints: Sequence[ListedCheckpoint]) -> dict[str, object]:
    """Return the object of ``--json``; its schema is in ``ckpt_cli.commands.inspect``."""
    return {
        "schema": "ckpt.inspect-list/1",
        "path": str(root),
        "checkpoints": [
            {
                "path": str(item.path),
                "format": item.format and item.format.name,
                "title": item.format and item.format.title,
                "iteration": item.iteration,
                "files": item.n_files,
                "bytes": item.n_bytes,
                "modified": datetime.fromtimestamp(item.modified, UTC).isoformat(
                    timespec="seconds"
                ),
            }
            for item in checkpoints
        ],
    }
