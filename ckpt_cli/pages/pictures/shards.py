"""The picture of ``--map``: the boxes of a tensor to scale, who holds them, and what moves.

Two axes of the tensor span a drawing: those that are cut come first, the last axis runs to the
right. Further cut axes make a drawing for each of their positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ckpt_cli.screen.blocks import Cell, box_text, bytes_text, n_text, table
from ckpt_cli.screen.terminal import Screen, columns_of, escaped, shortened
from core.pictures.shards import Shard, ShardMap, ShardMove

_MOST_COLUMNS, _LEAST_COLUMNS = 64, 48
_MOST_ROWS, _USUAL_ROWS = 16, 10
"""Limits of a drawing, in characters; it has more than the usual rows where its boxes need them."""
_BOX_COLUMNS, _BOX_ROWS = 4, 2
"""Least size of a box, one of its borders included."""
_CHARACTER_RATIO = 2
"""Height of a character, in widths."""
_MOST_DRAWINGS = 3
"""Most positions of further cut axes that are drawn."""
_MOST_LISTED = 64
"""Most boxes, and most moves, in a table."""
_MOST_NAMES = 2
"""Most ranks of one box in a table."""
_LEAST_FILE_COLUMNS = 12
"""Least columns in which the name of a file is shown inside a box."""
_STYLES = ("cyan", "green", "yellow", "blue")
"""Styles of the holders of boxes, in turn."""
_UP, _RIGHT, _DOWN, _LEFT = 1, 2, 4, 8
"""Directions in which a line leaves a character."""
_GLYPHS = " ╵╶└╷│┌├╴┘─┴┐┤┬┼"
"""The character of each sum of directions."""
_ASCII_GLYPHS = " |-+||++-+-++++++"


def shard_lines(screen: Screen, shards: ShardMap) -> Iterator[str]:
    """Yield the drawing of a tensor's boxes, and a table of them by their numbers."""
    across, down = _drawn_axes(shards)
    yield screen.plain(_axes_text(shards, across, down))
    styles = _holder_styles(shards.shards)

    # A drawing for each position along the cut axes that it does not show.
    others = [axis for axis in shards.cut_axes if axis not in (across, down)]
    drawings: dict[tuple[int, ...], list[int]] = {}
    for number, shard in enumerate(shards.shards):
        position = tuple(shard.box.offset[axis] for axis in others)
        drawings.setdefault(position, []).append(number)
    for position, numbers in list(drawings.items())[:_MOST_DRAWINGS]:
        if others:
            places = zip(others, position, strict=True)
            yield screen.plain(", ".join(f"axis {axis} from {start:,}" for axis, start in places))
        yield from _drawing_lines(screen, shards, numbers, styles, across, down)
    if len(drawings) > _MOST_DRAWINGS:
        n_more = len(drawings) - _MOST_DRAWINGS
        yield screen.plain(f"… {n_text(n_more, 'more position')} along the other axes")
    yield from _table_lines(screen, shards.shards, styles)


def move_lines(screen: Screen, move: ShardMove) -> Iterator[str]:
    """Yield a tensor before and after a change of layout, and what each box is made of."""
    for title, side in (("source", move.before), ("target", move.after)):
        yield screen.styled(title, "bold")
        yield from shard_lines(screen, side)
        yield ""
    yield screen.styled("moves", "bold")
    sources, targets = move.before.shards, move.after.shards
    titles = ("target", "", "from source", "", "bytes")
    rows = [[Cell(title, ("dim",)) for title in titles]]
    moves = sorted(move.moves, key=lambda entry: (entry.target, entry.source))
    for entry in moves[:_MOST_LISTED]:
        source, target = sources[entry.source], targets[entry.target]
        rows.append(
            [
                Cell(f"{entry.target + 1}"),
                Cell(_names_text(target.ranks or target.files)),
                Cell(f"{entry.source + 1}"),
                Cell(_names_text(source.ranks or source.files)),
                Cell(bytes_text(entry.n_bytes)),
            ]
        )
    yield from table(screen, rows, align="><><>")
    yield from _more_lines(screen, len(move.moves), "move")


def map_json(shards: ShardMap) -> dict[str, object]:
    """Return the boxes of a tensor as an object of ``--json``."""
    return {
        "key": shards.key,
        "dtype": shards.dtype,
        "shape": list(shards.shape),
        "cut_axes": list(shards.cut_axes),
        "boxes": [
            {
                "offset": list(shard.box.offset),
                "shape": list(shard.box.shape),
                "ranks": list(shard.ranks),
                "files": list(shard.files),
                "bytes": shard.n_bytes,
            }
            for shard in shards.shards
        ],
    }


def move_json(move: ShardMove) -> dict[str, object]:
    """Return a tensor before and after as an object of ``--json``; ends are numbers of boxes."""
    return {
        "source": map_json(move.before),
        "target": map_json(move.after),
        "moves": [
            {"source": entry.source, "target": entry.target, "bytes": entry.n_bytes}
            for entry in move.moves
        ],
    }


def _drawn_axes(shards: ShardMap) -> tuple[int | None, int | None]:
    """Return the axes that run to the right and down; None where the tensor has too few."""
    n_axes = len(shards.shape)
    wanted = [*shards.cut_axes, *range(max(n_axes - 2, 0), n_axes)]
    axes = sorted(list(dict.fromkeys(wanted))[:2])
    return (axes[-1] if axes else None), (axes[0] if len(axes) == 2 else None)


def _axes_text(shards: ShardMap, across: int | None, down: int | None) -> str:
    """Return the lengths of the axes that are drawn, and into how many parts each is cut."""
    parts = []
    for axis, arrow in ((down, "↓"), (across, "→")):
        if axis is not None:
            n_parts = len({shard.box.offset[axis] for shard in shards.shards})
            cut = f", cut into {n_parts:,}" if n_parts > 1 else ""
            parts.append(f"axis {axis} {arrow} {shards.shape[axis]:,}{cut}")
    return "   ".join(parts) or "a scalar"


def _holder_styles(shards: Sequence[Shard]) -> list[str]:
    """Return the style of each box: one for each group of ranks, or of files, that hold it."""
    styles: dict[tuple[str, ...], str] = {}
    return [
        styles.setdefault(shard.ranks or shard.files, _STYLES[len(styles) % len(_STYLES)])
        for shard in shards
    ]


def _drawing_lines(
    screen: Screen,
    shards: ShardMap,
    numbers: Sequence[int],
    styles: Sequence[str],
    across: int | None,
    down: int | None,
) -> Iterator[str]:
    """Yield the drawing of some boxes.

    Args:
        numbers: positions of the boxes in ``shards.shards``.
        styles: the style of every box.
    """
    n_columns, n_rows = _size_of(screen, shards, across, down)
    boxes = [shards.shards[number].box for number in numbers]
    spans = [
        [(0, 1) if axis is None else (box.offset[axis], box.end[axis]) for box in boxes]
        for axis in (across, down)
    ]
    columns = _positions(spans[0], n_columns, _BOX_COLUMNS)
    rows = _positions(spans[1], n_rows, _BOX_ROWS)

    # Frames share the lines between them, so the lines are collected before any is shown.
    canvas = _Canvas(n_rows + 1, n_columns + 1)
    n_drawn = 0
    for number, across_span, down_span in zip(numbers, *spans, strict=True):
        is_drawn = columns.keys() >= {*across_span} and rows.keys() >= {*down_span}
        if not is_drawn or across_span[0] == across_span[1] or down_span[0] == down_span[1]:
            continue
        n_drawn += 1
        first_column, last_column = (columns[edge] for edge in across_span)
        first_row, last_row = (rows[edge] for edge in down_span)
        canvas.frame(first_row, first_column, last_row, last_column)
        labels = _labels_of(shards.shards[number], number, last_column - first_column - 1)
        for at, label in enumerate(labels[: last_row - first_row - 1]):
            canvas.write(first_row + 1 + at, first_column + 1, label, styles[number])
    yield from canvas.lines(screen)
    if n_drawn < len(numbers):
        yield screen.styled(f"{n_drawn:,} of {n_text(len(numbers), 'box', 'boxes')} drawn", "dim")


def _size_of(
    screen: Screen, shards: ShardMap, across: int | None, down: int | None
) -> tuple[int, int]:
    """Return the columns and rows of a drawing, in proportion to the tensor within the limits."""
    n_columns = min((screen.width or _MOST_COLUMNS + 2) - 2, _MOST_COLUMNS)
    if across is None or down is None:
        return n_columns, _BOX_ROWS
    n_parts = len({shard.box.offset[down] for shard in shards.shards})
    least_rows = min(n_parts * _BOX_ROWS, _MOST_ROWS)
    most_rows = max(_USUAL_ROWS, least_rows)
    ratio = max(shards.shape[down], 1) / max(shards.shape[across], 1)
    n_rows = round(n_columns * ratio / _CHARACTER_RATIO)
    # A tall tensor is drawn narrower.
    if n_rows > most_rows:
        narrow = round(most_rows * _CHARACTER_RATIO / ratio)
        n_columns = max(narrow, min(_LEAST_COLUMNS, n_columns))
    return n_columns, min(max(n_rows, least_rows), most_rows)


def _positions(spans: Sequence[tuple[int, int]], n_cells: int, least: int) -> Mapping[int, int]:
    """Return where the edges of boxes are drawn along an axis: to scale, but apart.

    Args:
        spans: first and last edge of each box, in elements.
        n_cells: length of the axis in the drawing.
        least: least distance of two edges in it.

    Returns:
        Edge → position. Of more edges than there is room for, the first ones.
    """
    edges = sorted({edge for span in spans for edge in span})[: n_cells // least + 1]
    if len(edges) < 2:
        return {}
    scale = n_cells / (edges[-1] - edges[0])
    places = [round((edge - edges[0]) * scale) for edge in edges]
    for at in range(1, len(places)):
        places[at] = max(places[at], places[at - 1] + least)
    places[-1] = n_cells
    for at in reversed(range(len(places) - 1)):
        places[at] = min(places[at], places[at + 1] - least)
    return dict(zip(edges, places, strict=True))


def _labels_of(shard: Shard, number: int, room: int) -> list[str]:
    """Return the lines inside of a box: its number, and rank, file and bytes as far as they fit."""
    rank = _names_text(shard.ranks, most=1)
    file = _names_text(shard.files[:1])
    short = f"{number + 1}"
    full = f"{short} {rank}" if rank else short
    labels = [full if columns_of(full) <= room else short if len(short) <= room else ""]
    if file and room >= _LEAST_FILE_COLUMNS:
        labels.append(shortened(file, room))
    size = bytes_text(shard.n_bytes)
    if len(size) <= room:
        labels.append(size)
    return labels


def _names_text(names: Sequence[str], *, most: int = _MOST_NAMES) -> str:
    """Return the names of ranks or files, and how many more there are."""
    text = ", ".join(map(escaped, names[:most]))
    return text if len(names) <= most else f"{text} +{len(names) - most}"


def _table_lines(screen: Screen, shards: Sequence[Shard], styles: Sequence[str]) -> Iterator[str]:
    """Yield a line for each box, without empty columns."""
    titles = ("", "box", "bytes", "ranks", "files")
    rows = [[Cell(title, ("dim",)) for title in titles]]
    for number, shard in enumerate(shards[:_MOST_LISTED]):
        rows.append(
            [
                Cell(f"{number + 1}", (styles[number],)),
                Cell(box_text(shard.box)),
                Cell(bytes_text(shard.n_bytes)),
                Cell(_names_text(shard.ranks), (styles[number],)),
                Cell(_names_text(shard.files, most=1) or "zeros (padding)", ("dim",)),
            ]
        )
    filled = [at for at in range(len(titles)) if any(row[at].text for row in rows[1:])]
    align = "".join("><><<"[at] for at in filled)
    yield from table(screen, [[row[at] for at in filled] for row in rows], align=align, fits=True)
    yield from _more_lines(screen, len(shards), "box", "boxes")


def _more_lines(screen: Screen, n: int, noun: str, plural: str | None = None) -> Iterator[str]:
    if n > _MOST_LISTED:
        n_more = n_text(n - _MOST_LISTED, f"more {noun}", plural and f"more {plural}")
        yield screen.plain(f"… {n_more}; --json lists all")


class _Canvas:
    """Characters with frames, which share lines, and texts in them.

    Args:
        n_rows, n_columns: its size.
    """

    def __init__(self, n_rows: int, n_columns: int) -> None:
        self._joins = [[0] * n_columns for _ in range(n_rows)]
        self._texts: dict[int, dict[int, tuple[str, str]]] = {}

    def frame(self, top: int, left: int, bottom: int, right: int) -> None:
        """Add the frame of a box, given by the positions of its lines."""
        for row in (top, bottom):
            for before, after in pairwise(range(left, right + 1)):
                self._joins[row][before] |= _RIGHT
                self._joins[row][after] |= _LEFT
        for column in (left, right):
            for before, after in pairwise(range(top, bottom + 1)):
                self._joins[before][column] |= _DOWN
                self._joins[after][column] |= _UP

    def write(self, row: int, column: int, text: str, style: str) -> None:
        """Put a text into a row, from a column on."""
        if text:
            self._texts.setdefault(row, {})[column] = (text, style)

    def lines(self, screen: Screen) -> Iterator[str]:
        """Yield the rows."""
        glyphs = _GLYPHS if screen.has_unicode else _ASCII_GLYPHS
        for row, joins in enumerate(self._joins):
            line, column = "", 0
            for start, (text, style) in sorted(self._texts.get(row, {}).items()):
                line += "".join(glyphs[bits] for bits in joins[column:start])
                line += screen.styled(screen.plain(text), style)
                column = start + columns_of(screen.plain(text))
            yield (line + "".join(glyphs[bits] for bits in joins[column:])).rstrip()
