"""The bytes that move between ranks, as a matrix of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_cli.html_report.grid import Grid, GridCell
from ckpt_cli.html_report.names import shown_name
from ckpt_cli.screen.blocks import bytes_text, n_text
from core.verbs.pictures.shards import RankMoves

MAX_SIDE = 24
"""Most rows and columns; more ranks are put together in blocks of consecutive ones."""


def moves_table(moves: RankMoves) -> Grid | None:
    """Arrange the bytes, with their sums, as a matrix; return None if there are none."""
    total = sum(map(sum, moves.n_bytes))
    if not total:
        return None
    # Blocks of consecutive ranks, so that 1,024 ranks remain readable.
    sources, targets = _blocks(moves.sources), _blocks(moves.targets)
    sums = [
        [
            sum(sum(moves.n_bytes[i][target.start : target.stop]) for i in source)
            for _, target in targets
        ]
        for _, source in sources
    ]
    most = max(map(max, sums))
    rows = []
    for (source, _), row in zip(sources, sums, strict=True):
        cells = [
            GridCell(
                bytes_text(n) if n else "",
                f"h{1 + round(5 * n / most) if n else 0}{' stays' if source == target else ''}",
                f"{source} → {target}: {bytes_text(n)}, {100 * n / total:.3g} % of all",
            )
            for (target, _), n in zip(targets, row, strict=True)
        ]
        rows.append((source, (*cells, GridCell(bytes_text(sum(row))))))
    columns = [GridCell(bytes_text(sum(column))) for column in zip(*sums, strict=True)]
    rows.append(("sum", (*columns, GridCell(""))))
    # The sentence above.
    n_same = sum(
        moves.n_bytes[row][moves.targets.index(name)]
        for row, name in enumerate(moves.sources)
        if name in moves.targets
    )
    counts = f"{n_text(len(moves.sources), 'source')} → {n_text(len(moves.targets), 'target')}"
    same = f", {bytes_text(n_same)} stay on a rank of the same name" if n_same else ""
    title = (
        f"{bytes_text(total)} from {counts}{same}. Rows are sources, columns are targets; a framed"
        " cell is the same rank on both sides."
    )
    names = (*(name for name, _ in targets), "sum")
    return Grid("matrix", title, "from ↓ to →", names, tuple(rows))


def _blocks(names: Sequence[str]) -> list[tuple[str, range]]:
    """Divide names into at most ``MAX_SIDE`` blocks; return the label and positions of each."""
    step = -(-len(names) // MAX_SIDE)
    blocks = []
    for start in range(0, len(names), max(step, 1)):
        positions = range(start, min(start + step, len(names)))
        first, last = shown_name(names[start], 48), shown_name(names[positions[-1]], 48)
        blocks.append((first if len(positions) == 1 else f"{first} – {last}", positions))
    return blocks
