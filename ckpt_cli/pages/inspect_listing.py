"""The checkpoints in a directory that is none itself, as lines and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Cell, bytes_text, date_text, n_text, table, table_width
from ckpt_cli.screen.terminal import Screen, escaped

if TYPE_CHECKING:
    from pathlib import Path

    from core.opening.listing import ListedCheckpoint, Listing


def listing_lines(
    screen: Screen,
    root: Path,
    listing: Listing,
    *,
    limit: int,
    command: str = "ckpt inspect",
) -> Iterator[str]:
    """Yield a row for each checkpoint, with a command for it.

    The command is on a line of its own if the terminal is too narrow.

    Args:
        limit: maximum number of checkpoints; 0 for all.
        command: the command, which the path of the checkpoint follows.
    """
    checkpoints = listing.checkpoints
    count = n_text(len(checkpoints), "checkpoint")
    title = f"{escaped(str(root))}: not a checkpoint, but it contains {count}"
    yield screen.styled(title, "bold")
    yield ""
    heads = ("modified", "size", "iteration", "format")
    rows: list[list[Cell | str]] = [[Cell(text, ("dim",)) for text in heads]]
    shown = checkpoints[:limit] if limit else checkpoints
    rows += [
        [
            Cell(date_text(item.modified), ("dim",)),
            "" if item.n_bytes is None else bytes_text(item.n_bytes),
            "" if item.iteration is None else str(item.iteration),
            Cell("?" if item.format is None else item.format.name, ("cyan",)),
        ]
        for item in shown
    ]
    commands = ["", *(escaped(f"{command} {shlex.quote(str(item.path))}") for item in shown)]
    wide = [[*row, text] for row, text in zip(rows, commands, strict=True)]
    if screen.width is None or table_width(wide, align="<>><<", indent=2) <= screen.width:
        yield from table(screen, wide, align="<>><<", indent=2)
    else:
        lines = table(screen, rows, align="<>><", indent=2)
        for line, text in zip(lines, commands, strict=True):
            yield line
            if text:
                yield f"    {text}"
    if len(shown) < len(checkpoints):
        more = n_text(len(checkpoints) - len(shown), "more checkpoint")
        yield screen.plain(screen.styled(f"… {more}; --limit 0 shows all", "dim"))
    if listing.rest is not None:
        yield f"{screen.styled('note:', 'yellow')} {escaped(listing.rest)}"


def listing_json(root: Path, listing: Listing) -> dict[str, object]:
    """Return the object of ``--json``; its schema is in ``ckpt_cli.commands.inspect``."""
    return {
        "schema": "ckpt.inspect-list/1",
        "path": str(root),
        "checkpoints": list(map(listed_json, listing.checkpoints)),
        "rest": listing.rest,
    }


def listed_json(item: ListedCheckpoint) -> dict[str, object]:
    """Return the object of one checkpoint of a listing."""
    modified: str | None = None
    with suppress(ValueError, OverflowError, OSError):  # there is no such date
        modified = datetime.fromtimestamp(item.modified, UTC).isoformat(timespec="seconds")
    return {
        "path": str(item.path),
        "format": item.format and item.format.name,
        "title": item.format and item.format.title,
        "iteration": item.iteration,
        "files": item.n_files,
        "bytes": item.n_bytes,
        "modified": modified,
    }
