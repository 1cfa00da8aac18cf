"""The picture of ``--map``: the boxes of a tensor, to scale, with the ranks that hold them.

Two axes span the drawing, the first that are cut. Positions along other axes that are cut have a
drawing each. The boxes are numbered, and listed below with their ranks, files and bytes. A box that
is too thin to be numbered is drawn thicker. Of many boxes along an axis, the first ones and the
last one are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from ckpt_cli.pages.pictures.box_drawing import (
    BoxOutline,
    Label,
    canvas_lines,
    lines_of,
    ruler_of,
    ticks_text,
)
from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    box_text,
    bytes_text,
    dim_cell,
    n_text,
    shape_text,
    table,
    table_width,
    title_cell,
    wrapped,
)
from ckpt_cli.screen.terminal import Screen, columns_of, escaped, padded, shortened
from core.arrays.dtypes import itemsize

if TYPE_CHECKING:
    from core.verbs.pictures.shards import Shard, ShardMap

LISTED = 16
"""Default number of boxes, and of moves between boxes, that are listed."""
MAPS = 4
"""Most tensors whose boxes are drawn by default."""
_UNLIMITED = 80
"""Columns of the picture in files and pipes."""
_WIDEST = 100
_HIGHEST = 16
"""Most columns and rows of a drawing, without its numbers."""
LOW_DRAWING = 8
"""Most rows of a drawing that is one of several."""
_LEAST_COLUMNS = 34
_COLUMNS_OF_BOX = 16
"""Columns in which the number and rank of a box have room."""
_DRAWINGS = 3
"""Most drawings of one tensor."""
_NAMED = 3
"""Most ranks of a box that are named; the others are counted."""
_COLORS = ("cyan", "green", "yellow", "blue", "magenta")


def draw_keys(
    keys: Sequence[str],
    draw: Callable[[str], Iterable[Block]],
    *,
    limit: int | None = MAPS,
    hint: str,
) -> Iterator[Block]:
    """Yield the drawings of the first tensors below their names, and how many more there are.

    Args:
        limit: number of tensors; None for all.
        hint: how to see the others.
    """
    for number, key in enumerate(keys[:limit]):
        if number:
            yield ""
        yield title_cell(key)
        yield from draw(key)
    if limit is not None and len(keys) > limit:
        yield ""
        yield dim_cell(f"… {n_text(len(keys) - limit, 'more tensor')}; {hint}")


def map_lines(
    screen: Screen,
    shards: ShardMap,
    *,
    listed: int = LISTED,
    beside: ShardMap | None = None,
    highest: int = _HIGHEST,
    hint: str = "",
) -> Iterator[str]:
    """Yield the drawing of a tensor's boxes and the list of them.

    Args:
        listed: number of boxes that are listed; 0 for all.
        beside: another map of the tensor, whose drawing shall have the same axes and size.
        highest: as for ``picture_lines``.
        hint: end of the line that counts the boxes that are not listed.
    """
    yield from map(screen.plain, wrapped(_cut_text(shards), screen.width or _UNLIMITED))
    yield from picture_lines(screen, shards, beside=beside, highest=highest)
    if shards.shards:
        yield ""
        yield from _list_lines(screen, shards.shards, listed=listed, hint=hint)


def picture_lines(
    screen: Screen, shards: ShardMap, *, beside: ShardMap | None = None, highest: int = _HIGHEST
) -> Iterator[str]:
    """Yield the drawing of a tensor's boxes without the list of them.

    Args:
        beside: as for ``map_lines``.
        highest: most rows between the outer lines of a drawing.
    """
    if not shards.shards:
        yield screen.styled("no boxes, because no file stores the tensor", "dim")
        return
    if sum(shard.box.n_elements for shard in shards.shards) > prod(shards.shape):
        yield screen.styled("some boxes overlap", "yellow")
    colors = colors_of(shards.shards)
    down, across, others = _drawn_axes(shards, beside)
    # One drawing for each position along the axes that are cut and not drawn.
    drawings: dict[str, list[int]] = {}
    for number, shard in enumerate(shards.shards):
        title = ", ".join(f"axis {axis} from {shard.box.offset[axis]:,}" for axis in others)
        drawings.setdefault(title, []).append(number)
    if len(drawings) > 1:
        highest = min(highest, LOW_DRAWING)
    for title, numbers in list(drawings.items())[:_DRAWINGS]:
        if title:
            yield screen.styled(title, "bold")
        yield from _drawing(
            screen, shards, numbers, colors, beside=beside, axes=(down, across), highest=highest
        )
    if len(drawings) > _DRAWINGS:
        n_more = sum(map(len, list(drawings.values())[_DRAWINGS:]))
        more = f"… {n_text(n_more, 'more box', 'more boxes')} not drawn"
        yield screen.plain(screen.styled(more, "dim"))


def map_json(shards: ShardMap) -> dict[str, object]:
    """Return a map as an object of ``--json``; the schema is in ``ckpt_cli.commands.inspect``."""
    return {
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


def _cut_text(shards: ShardMap) -> str:
    """Return a line on a tensor: ``float32 [384, 64], 96.0 KiB: cut along axis 0 into 2 boxes``."""
    n_bytes = prod(shards.shape) * itemsize(shards.dtype)
    tensor = f"{shards.dtype} {shape_text(shards.shape)}, {bytes_text(n_bytes)}"
    boxes = n_text(len(shards.shards), "box", "boxes")
    if not shards.cut_axes:
        return f"{tensor}: not cut, {boxes}"
    *first, last = map(str, shards.cut_axes)
    axes = f"axes {', '.join(first)} and {last}" if first else f"axis {last}"
    return f"{tensor}: cut along {axes} into {boxes}"


def holder_of(shard: Shard) -> str:
    """Return who holds a box: its first rank, else its first file; "" if it is stored nowhere."""
    return next(iter((*shard.ranks, *shard.files)), "")


def colors_of(shards: Sequence[Shard]) -> dict[str, str]:
    """Return a colour for each holder of boxes."""
    holders = dict.fromkeys(map(holder_of, shards))
    return {holder: _COLORS[at % len(_COLORS)] for at, holder in enumerate(holders)}


def _short_name(shard: Shard) -> str:
    """Return the first holder of a box, a file without its directory."""
    return escaped(holder_of(shard).rpartition("/")[2]) or "zeros"


def box_name(number: int, shard: Shard) -> str:
    """Return the number of a box and who holds it: ``2 tp0 pp1``."""
    return f"{number} {_short_name(shard)}"


def _drawn_axes(
    shards: ShardMap, beside: ShardMap | None
) -> tuple[int | None, int | None, list[int]]:
    """Return the axes that go down and across, and the cut axes that are not drawn.

    The first two axes that are cut are drawn, else the last ones. None stands for no axis: a
    tensor of one axis goes across.
    """
    n_axes = len(shards.shape)
    cut_axes = () if beside is None else beside.cut_axes
    # Both maps have to agree on the axes: the lower ones come first, whichever map cuts them.
    cut_axes = tuple(sorted({*shards.cut_axes, *cut_axes}))
    candidates = dict.fromkeys((*cut_axes, *range(max(n_axes - 2, 0), n_axes)))
    axes = sorted(list(candidates)[:2])
    across = axes[-1] if axes else None
    down = axes[0] if len(axes) > 1 else None
    return down, across, [axis for axis in shards.cut_axes if axis not in axes]


def _drawing(
    screen: Screen,
    shards: ShardMap,
    numbers: Sequence[int],
    colors: Mapping[str, str],
    *,
    beside: ShardMap | None,
    axes: tuple[int | None, int | None],
    highest: int,
) -> Iterator[str]:
    """Yield the drawing of some boxes, with a line that names its axes above.

    Args:
        numbers: positions in ``shards.shards``.
        axes: the axes that go down and across.
        highest: most rows.
    """
    down, across = axes
    spans = [
        {number: _span(shards.shards[number], axis) for number in numbers}
        for axis in (down, across)
    ]
    extents = [1 if axis is None else max(shards.shape[axis], 1) for axis in (down, across)]
    all_shards = (*shards.shards, *(() if beside is None else beside.shards))
    n_down, n_across = (len({_span(shard, axis) for shard in all_shards}) for axis in axes)
    n_columns, n_rows = _size(
        screen, extents, (n_down, n_across), has_rows=down is not None, highest=highest
    )
    digits = len(str(len(shards.shards) - 1))
    rows = ruler_of(spans[0].values(), extents[0], n_rows, least=2)
    columns = ruler_of(spans[1].values(), extents[1], n_columns, least=digits + 2)
    # The boxes between the edges that are drawn, and what is written in them.
    outlines = {
        number: BoxOutline(*horizontal, *vertical)
        for number in numbers
        if (horizontal := lines_of(columns, spans[1][number])) is not None
        and (vertical := lines_of(rows, spans[0][number])) is not None
    }
    labels = [
        label
        for number, outline in outlines.items()
        for label in _labels(number, shards.shards[number], outline, colors)
    ]
    axis_texts = [
        f"{way}: axis {axis}, {n_text(shards.shape[axis], 'element')}"
        + (", cut" if axis in shards.cut_axes else "")
        for way, axis in (("down", down), ("across", across))
        if axis is not None
    ]
    for line in wrapped(" · ".join(axis_texts), screen.width or _UNLIMITED):
        yield screen.plain(screen.styled(line, "dim"))
    margin = 0 if down is None else max(len(str(edge)) for edge in rows.positions) + 1
    if across is not None:
        yield screen.styled(" " * margin + ticks_text(columns), "dim")
    lines = canvas_lines(screen, outlines.values(), labels, rows=rows, columns=columns)
    edge_of = {row: str(edge) for edge, row in rows.positions.items()}
    for row, line in enumerate(lines):
        tick = padded(f"{edge_of.get(row, '')} ", margin, right=True) if margin else ""
        yield (screen.styled(tick, "dim") if tick.strip() else tick) + line
    notes = []
    if len(outlines) < len(numbers):
        n_more = len(numbers) - len(outlines)
        notes.append(f"… {n_text(n_more, 'more box', 'more boxes')} not drawn")
    if not (rows.is_to_scale and columns.is_to_scale):
        notes.append("thin boxes are drawn thicker")
    if notes:
        yield screen.plain(screen.styled("; ".join(notes), "dim"))


def _span(shard: Shard, axis: int | None) -> tuple[int, int]:
    """Return the first and last edge of a box along an axis; an empty box is one element."""
    if axis is None:
        return 0, 1
    return shard.box.offset[axis], max(shard.box.end[axis], shard.box.offset[axis] + 1)


def _size(
    screen: Screen,
    extents: Sequence[int],
    counts: tuple[int, int],
    *,
    has_rows: bool,
    highest: int,
) -> tuple[int, int]:
    """Return the columns and rows between the outer lines of a drawing.

    Args:
        extents: elements down and across.
        counts: number of boxes down and across.
        has_rows: an axis goes down.
        highest: most rows.
    """
    room = min((screen.width or _UNLIMITED) - (12 if has_rows else 2), _WIDEST)
    n_down, n_across = counts
    widest = max(min(room, max(_LEAST_COLUMNS, n_across * _COLUMNS_OF_BOX)), 1)
    if not has_rows:
        return widest, 2 if n_across == 1 else 3
    # Along an axis that is not cut there is nothing to see.
    if n_down == 1:
        return widest, min(highest, 4)
    # A character is about twice as high as wide.
    rows_per_column = extents[0] / extents[1] / 2
    n_rows = max(round(widest * rows_per_column), 2 * n_down, 4)
    return widest, min(n_rows, highest)


def _labels(
    number: int, shard: Shard, outline: BoxOutline, colors: Mapping[str, str]
) -> Iterator[Label]:
    """Yield what is written into a box: its number and rank, or its number, if there is room."""
    room = outline.right - outline.left - 1
    n_rows = outline.bottom - outline.top - 1
    name = _short_name(shard)
    texts = [f"{number} {name}"]
    if columns_of(texts[0]) > room:
        texts = [str(number), name] if n_rows > 1 and columns_of(name) <= room else [str(number)]
    if not n_rows or columns_of(texts[0]) > room:
        return
    for at, text in enumerate(texts):
        row = outline.top + 1 + (n_rows - len(texts)) // 2 + at
        column = outline.left + 1 + (room - columns_of(text)) // 2
        yield Label(row, column, text, colors[holder_of(shard)])


def _list_lines(
    screen: Screen, shards: Sequence[Shard], *, listed: int, hint: str
) -> Iterator[str]:
    """Yield a row for each box: number, region, bytes, copies, ranks and files.

    Args:
        listed: number of boxes that are listed; 0 for all.
        hint: end of the line that counts the others.
    """
    # Where there is no room for the ranks and files of all boxes, one rank of each is named.
    for n_named in (_NAMED, 1):
        cells, align = _list_cells(shards, listed=listed, n_named=n_named)
        if screen.width is None or table_width(cells, align=align) <= screen.width:
            break
    yield from table(screen, _with_short_files(screen, cells), align=align, fits=True)
    if listed and len(shards) > listed:
        more = f"… {n_text(len(shards) - listed, 'more box', 'more boxes')}{hint}"
        yield screen.plain(screen.styled(more, "dim"))


def _list_cells(
    shards: Sequence[Shard], *, listed: int, n_named: int
) -> tuple[list[list[Cell]], str]:
    """Return the list of the boxes below a heading, without empty columns, and its alignment.

    Args:
        listed: number of boxes that are listed; 0 for all.
        n_named: number of ranks of a box that are named; the others are counted.
    """
    head = ["", "box", "bytes", "copies", "ranks", "files"]
    colors = colors_of(shards)
    rows = []
    for number, shard in enumerate(shards[: listed or None]):
        color = colors[holder_of(shard)]
        n_copies = len(shard.files)
        rows.append(
            [
                Cell(str(number), (color,)),
                Cell(box_text(shard.box)),
                Cell(bytes_text(shard.n_bytes), ("dim",)),
                Cell(str(n_copies) if n_copies > 1 else ""),
                Cell(_some_of(shard.ranks, n_named), (color,)),
                Cell(_files_text(shard), ("cyan",) if shard.files else ("dim",)),
            ]
        )
    columns = [at for at in range(len(head)) if any(row[at].text for row in rows)]
    align = "".join(">" if head[at] in ("", "bytes", "copies") else "<" for at in columns)
    cells = [[Cell(head[at], ("dim",)) for at in columns]]
    cells += [[row[at] for at in columns] for row in rows]
    return cells, align


def _with_short_files(screen: Screen, cells: list[list[Cell]]) -> list[list[Cell]]:
    """Return the rows of the list with names of files that fit in a line."""
    if screen.width is None:
        return cells
    others = sum(
        max(columns_of(row[at].text) for row in cells) + 2 for at in range(len(cells[0]) - 1)
    )
    room = max(screen.width - others, 16)
    ellipsis = screen.plain("…")
    return [
        [*row[:-1], Cell(shortened(row[-1].text, room, ellipsis=ellipsis), row[-1].styles)]
        for row in cells
    ]


def _files_text(shard: Shard) -> str:
    """Return the files of a box, the first by name."""
    files = tuple(dict.fromkeys(shard.files))
    return _some_of(files, 1) if files else "zeros (padding)"


def _some_of(names: Sequence[str], most: int) -> str:
    """Return the first names and how many more there are: ``tp0 pp0, tp1 pp0 + 6``."""
    more = f" + {len(names) - most:,}" if len(names) > most else ""
    return ", ".join(map(escaped, names[:most])) + more
