"""The picture of ``--explain --map``: a tensor's boxes before and after, and what moves where."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckpt_cli.pages.pictures.shards import (
    LISTED,
    LOW_DRAWING,
    box_name,
    colors_of,
    holder_of,
    map_json,
    map_lines,
)
from ckpt_cli.screen.blocks import Block, Cell, Table, bytes_text, dim_cell, n_text, title_cell

if TYPE_CHECKING:
    from core.verbs.pictures.shards import ShardMove


def move_blocks(move: ShardMove, *, listed: int = LISTED, hint: str = "") -> Iterator[Block]:
    """Yield the boxes of a tensor before and after a change of layout, and what moves where.

    Args:
        listed: number of boxes and of moves that are listed; 0 for all.
        hint: end of the lines that count those that are not listed.
    """
    before, after = move.before, move.after
    draw = partial(map_lines, listed=listed, highest=LOW_DRAWING, hint=hint)
    n_bytes = sum(part.n_bytes for part in move.moves)
    yield title_cell("source")
    yield partial(draw, shards=before, beside=after)
    yield from ("", f"  ▼  {n_text(len(move.moves), 'move')}, {bytes_text(n_bytes)}", "")
    yield title_cell("target")
    yield partial(draw, shards=after, beside=before)
    # The moves, those into one box together.
    yield ""
    rows = []
    targets = sorted(move.moves, key=lambda part: (part.target, part.source))
    before_colors, after_colors = colors_of(before.shards), colors_of(after.shards)
    for part in targets[: listed or None]:
        source, target = before.shards[part.source], after.shards[part.target]
        rows.append(
            (
                Cell(box_name(part.source, source), (before_colors[holder_of(source)],)),
                "→",
                Cell(box_name(part.target, target), (after_colors[holder_of(target)],)),
                bytes_text(part.n_bytes),
            )
        )
    yield Table(rows, align="<<<>", head=("source", "", "target", "bytes"), fits=True)
    if listed and len(targets) > listed:
        yield dim_cell(f"… {n_text(len(targets) - listed, 'more move')}{hint}")


def move_json(move: ShardMove) -> dict[str, object]:
    """Return a change as an object of ``--json``; the schema is in ``commands.transfer``."""
    return {
        "key": move.after.key,
        "source": map_json(move.before),
        "target": map_json(move.after),
        "moves": [
            {"source": part.source, "target": part.target, "bytes": part.n_bytes}
            for part in move.moves
        ],
    }
