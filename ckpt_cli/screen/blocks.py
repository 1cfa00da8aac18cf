"""The blocks of reports, and their text: numbers with units, facts, aligned columns, trees.

A page is a sequence of blocks (``Block``). ``draw_text`` makes lines of them for a terminal, and
``ckpt_cli.html_report`` elements of HTML. Pure functions from values to lines, without rich:
docs/decisions/0030-tables-without-rich.md gives the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from textwrap import wrap
from typing import TYPE_CHECKING

from ckpt_cli.screen.terminal import Screen, columns_of, escaped, padded, shortened
from core.arrays.box import Box
from core.values import bytes_text as bytes_text
from core.values import count_text as count_text
from core.values import dataclass
from core.values import n_text as n_text
from core.values import seconds_text as seconds_text

if TYPE_CHECKING:
    from core.verbs.inspect.tree import Node

LISTED = 12
"""Maximum number of entries of a list that are shown; ``--json`` prints all."""
_UNBREAKABLE = re.compile(
    r"\[[\d:, ]*\]|\d+ × [\d.]+|(?<=\d) (?=(?:[KMGTP]iB|[KMBT])\b)|--[a-z-]+ (?=\w)|\([^()]{1,24}\)"
)
"""Shapes, products, numbers with their units, options with their values, short remarks."""
_HARD_SPACE = "\xa0"
_SHORTEST = 16
"""Least columns that a shortened name gets."""
_LEAST_WRAPPED = 12
"""Least columns in which the last cell of a row is wrapped."""


def elements_text(count: int) -> str:
    """Format a number of elements: ``1 element``, ``187 K elements``."""
    return f"{count_text(count)} {'element' if count == 1 else 'elements'}"


def date_text(seconds: float) -> str:
    """Format a time, in seconds since 1970, as local date and minute: ``2026-11-30 02:17``.

    A file may have a time for which calendars have no date: "".
    """
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return ""


def shape_text(shape: Iterable[int]) -> str:
    """Format a shape: ``[384, 64]``; ``[]`` for a scalar."""
    return f"[{', '.join(map(str, shape))}]"


def box_text(box: Box) -> str:
    """Format a box: ``[0:192, 0:64]``; ``[]`` for a scalar."""
    return f"[{', '.join(f'{o}:{e}' for o, e in zip(box.offset, box.end, strict=True))}]"


@dataclass(frozen=True, slots=True)
class Cell:
    """Text in a column.

    Args:
        styles: styles of the text.
        lead: characters at its start that are never cut off (the branches of a tree).
    """

    text: str
    styles: tuple[str, ...] = ()
    lead: int = 0


def make_cell(value: Cell | str) -> Cell:
    """Return a value as a cell."""
    return value if isinstance(value, Cell) else Cell(value)


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values: ``facts`` draws them."""

    pairs: Sequence[tuple[str, Cell | str]]
    indent: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Aligned columns: ``table`` draws them.

    Args:
        head: titles of the columns; () for none.
        stacks: where the terminal is too narrow, write the cells of a row below its first one.
        filter: of a report in HTML: what the field above the table, which filters rows, asks for.
    """

    rows: Sequence[Sequence[Cell | str]]
    align: str
    head: Sequence[str] = ()
    indent: int = 0
    fits: bool = False
    keeps_names: bool = False
    stacks: bool = False
    filter: str = ""


Draw = Callable[[Screen], Iterable[str]]
"""Draws something at the width of a screen."""
Block = str | Cell | tuple[Cell | str, ...] | Facts | Table | Draw
"""A line (as one text, or several with styles of their own), facts, a table, or a drawing."""


def draw_text(screen: Screen, blocks: Iterable[Block]) -> Iterator[str]:
    """Yield the lines of a page."""
    for block in blocks:
        if isinstance(block, Facts):
            yield from facts(screen, block.pairs, indent=block.indent)
        elif isinstance(block, Table):
            rows = [list(map(dim_cell, block.head)), *block.rows] if block.head else block.rows
            if block.stacks and is_too_wide(screen, rows, align=block.align, indent=block.indent):
                yield from stacked(screen, block.rows, head=block.head, indent=block.indent)
                continue
            yield from table(
                screen,
                rows,
                align=block.align,
                indent=block.indent,
                fits=block.fits,
                keeps_names=block.keeps_names,
            )
        elif callable(block):
            yield from block(screen)
        else:
            cells = map(make_cell, block if isinstance(block, tuple) else (block,))
            yield screen.plain("".join(screen.styled(cell.text, *cell.styles) for cell in cells))


def line_text(line: Cell | str | tuple[Cell | str, ...]) -> str:
    """Return the text of a line without its styles."""
    return "".join(make_cell(part).text for part in (line if isinstance(line, tuple) else (line,)))


def title_cell(text: str) -> Cell:
    """Return the line of a name, which is escaped, or of a title."""
    return Cell(escaped(text), ("bold",))


def dim_cell(text: str) -> Cell:
    """Return the line of a remark, such as how much is not shown."""
    return Cell(text, ("dim",))


def wrapped(text: str, room: int) -> list[str]:
    """Return the lines of a text that is broken at spaces, but in no number, shape or ``·`` item.

    Args:
        room: columns of a line; a longer word has a line of its own.
    """
    if columns_of(text) <= room:
        return [text]
    text = _UNBREAKABLE.sub(lambda match: match[0].replace(" ", _HARD_SPACE), text)
    if " · " in text:
        items = text.split(" · ")
        text = " · ".join(
            item.replace(" ", _HARD_SPACE) if columns_of(item) <= room // 2 else item
            for item in items
        ).replace(" · ", f"{_HARD_SPACE}· ")
    lines = wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_HARD_SPACE, " ") for line in lines]


def table(
    screen: Screen,
    rows: Sequence[Sequence[Cell | str]],
    *,
    align: str,
    indent: int = 0,
    fits: bool = False,
    keeps_names: bool = False,
) -> Iterator[str]:
    """Yield the rows with aligned columns.

    Args:
        align: ``<`` or ``>`` for each column.
        indent: spaces before each row.
        fits: where the terminal is too narrow, wrap a last column with ``<``, otherwise shorten the
            first one.
        keeps_names: instead of shortening a long cell of the first column, give it its own line.
    """
    # Rows may have fewer cells than there are columns.
    cells = [list(map(make_cell, row)) for row in rows]
    widths = [
        max((columns_of(row[i].text) for row in cells if i < len(row)), default=0)
        for i in range(len(align))
    ]
    if fits and screen.width is not None:
        room = screen.width - indent
        cells = _fitted(screen, cells, widths, align=align, room=room, keeps_names=keeps_names)
        widths[0] = max((columns_of(row[0].text) for row in cells if len(row) > 1), default=0)
    for row in cells:
        parts = []
        for i, cell in enumerate(row):
            # The last cell needs no spaces after it.
            is_last = i == len(row) - 1 and align[i] == "<"
            text = padded(cell.text, 0 if is_last else widths[i], right=align[i] == ">")
            # Only the text is styled, not the spaces that align it.
            start = len(text) - len(text.lstrip(" "))
            parts.append(text[:start] + screen.styled(text[start:], *cell.styles))
        yield screen.plain((" " * indent + "  ".join(parts)).rstrip())


def _fitted(
    screen: Screen,
    rows: list[list[Cell]],
    widths: Sequence[int],
    *,
    align: str,
    room: int,
    keeps_names: bool,
) -> list[list[Cell]]:
    """Return the rows with their last cells wrapped, or else their first ones shortened.

    Args:
        widths: columns that each cell needs.
        room: columns that a row may take; with fewer than are needed for numbers, it takes more.
    """
    lack = sum(widths) + 2 * (len(widths) - 1) - room
    if lack <= 0:
        return rows
    last_room = widths[-1] - lack
    if align[-1] == "<" and last_room >= _LEAST_WRAPPED:
        return [line for row in rows for line in _wrapped_row(row, len(align), last_room)]
    first_room = max(widths[0] - lack, min(widths[0], _SHORTEST))
    if keeps_names:
        return [line for row in rows for line in _row_below_name(row, first_room)]
    ellipsis = screen.plain("…")

    def fitted(cell: Cell) -> Cell:
        text = shortened(cell.text, first_room, lead=cell.lead, ellipsis=ellipsis)
        return replace(cell, text=text)

    return [[fitted(row[0]), *row[1:]] for row in rows]


def _row_below_name(row: list[Cell], room: int) -> list[list[Cell]]:
    """Return a row with its first cell, if that is longer than ``room``, on a line of its own."""
    if columns_of(row[0].text) <= room:
        return [row]
    return [row[:1], [Cell(" " * room), *row[1:]]]


def _wrapped_row(row: list[Cell], n_columns: int, room: int) -> list[list[Cell]]:
    """Return a row with its last cell, if it has one in the last column, wrapped below itself."""
    if len(row) < n_columns:
        return [row]
    first, *more = wrapped(row[-1].text, room)
    empty = [Cell("")] * (n_columns - 1)
    return [
        [*row[:-1], replace(row[-1], text=first)],
        *([*empty, replace(row[-1], text=line)] for line in more),
    ]


def table_width(rows: Sequence[Sequence[Cell | str]], *, align: str, indent: int = 0) -> int:
    """Return the columns that the longest line of a table takes in a terminal."""
    lines = table(Screen(), rows, align=align, indent=indent)
    return max(map(columns_of, lines), default=0)


def is_too_wide(
    screen: Screen, rows: Sequence[Sequence[Cell | str]], *, align: str, indent: int = 0
) -> bool:
    """Return whether a table does not fit into the terminal."""
    return screen.width is not None and table_width(rows, align=align, indent=indent) > screen.width


def stacked(
    screen: Screen,
    rows: Sequence[Sequence[Cell | str]],
    *,
    head: Sequence[str],
    indent: int = 0,
) -> Iterator[str]:
    """Yield each row as its first cell and, below it, the others with their titles, wrapped.

    Args:
        head: titles of the columns; () for none.
    """
    room = max((screen.width or 0) - indent - 2, _LEAST_WRAPPED)
    for row in rows:
        name, *others = map(make_cell, row)
        if name.text:
            yield screen.plain(" " * indent + screen.styled(name.text, *name.styles))
        titles = head[1:] or [""] * len(others)
        items = [
            f"{title} {cell.text}".strip()
            for title, cell in zip(titles, others, strict=False)
            if cell.text
        ]
        for line in wrapped(" · ".join(items), room):
            yield screen.plain(" " * (indent + 2) + line.rstrip())


def facts(
    screen: Screen, pairs: Iterable[tuple[str, Cell | str]], *, indent: int = 0
) -> Iterator[str]:
    """Yield names in a dim column, with their values, wrapped, in a second one.

    Args:
        pairs: (name, value); an empty name continues the one above.
        indent: spaces before each line.
    """
    pairs = list(pairs)
    label_width = max((columns_of(name) for name, _ in pairs), default=0) + 2
    for name, value in pairs:
        cell = make_cell(value)
        lead = " " * indent + screen.styled(padded(name, label_width), "dim")
        # At least 24 columns: in a narrower terminal, the terminal itself breaks the lines.
        room = None if screen.width is None else max(screen.width - indent - label_width - 1, 24)
        lines = [cell.text] if room is None else wrapped(cell.text, room)
        for number, line in enumerate(lines):
            start = lead if number == 0 else " " * (indent + label_width)
            yield screen.plain((start + screen.styled(line, *cell.styles)).rstrip())


def fact_list(label: str, texts: Iterable[str], *styles: str) -> Iterator[tuple[str, Cell | str]]:
    """Yield one fact for each text, for ``facts``; only the first has the label.

    The texts may come from a file: they are escaped.
    """
    for number, text in enumerate(texts):
        yield "" if number else label, Cell(escaped(text), styles)


def list_facts(label: str, texts: Sequence[str], *styles: str) -> Iterator[tuple[str, Cell | str]]:
    """Yield one fact for each of the first ``LISTED`` texts, and one that counts the others."""
    yield from fact_list(label, texts[:LISTED], *styles)
    if len(texts) > LISTED:
        yield "", Cell(f"… {len(texts) - LISTED} more (--json lists all)", ("dim",))


def tree_rows(nodes: Sequence[Node], *, sort: str | None = None) -> Iterator[list[Cell]]:
    """Yield one row (name with branches, dtype, shape, bytes) for each node, depth first."""
    for i, node in enumerate(_in_order(nodes, sort)):
        yield from _node_rows(node, "", is_last=i == len(nodes) - 1, is_root=True, sort=sort)


def _node_rows(
    node: Node, lead: str, *, is_last: bool, is_root: bool, sort: str | None
) -> Iterator[list[Cell]]:
    """Yield the row of a node and those of its children.

    Args:
        lead: lines of the ancestors' branches, printed before the node's own.
        is_last: the node is its parent's last child.
    """
    # The name, and the size of one of several nodes that are folded into this one.
    branch = "" if is_root else lead + ("└─ " if is_last else "├─ ")
    name = branch + escaped(node.label)
    times = f"{node.n_alike} × " if node.n_alike > 1 else ""
    size = f"{times}{bytes_text(node.n_bytes // node.n_alike)}"
    if node.dtype is not None and node.shape is not None:
        yield [
            Cell(name, lead=len(branch)),
            Cell(node.dtype, ("cyan",)),
            Cell(shape_text(node.shape)),
            Cell(size, ("dim",)),
        ]
    else:
        n = node.n_tensors // node.n_alike
        same_as = ""
        if node.same_as:
            same_as = "as above" if len(node.same_as) > 12 else f"as {escaped(node.same_as)}"
        content = Cell(f"{times}{n_text(n, 'tensor')}", ("dim",))
        title = Cell(name, ("bold",), lead=len(branch))
        yield [title, Cell(same_as, ("dim",)), content, Cell(size, ("dim",))]
    # The children, unless those of an equal node are shown above.
    if node.same_as:
        return
    below = "" if is_root else lead + ("   " if is_last else "│  ")
    children = _in_order(node.children, sort)
    for i, child in enumerate(children):
        yield from _node_rows(
            child, below, is_last=i == len(children) - 1, is_root=False, sort=sort
        )


def _in_order(nodes: Sequence[Node], sort: str | None) -> Sequence[Node]:
    """Return the nodes sorted by ``size``, the largest first, by ``name``, or as stored."""
    if sort == "size":
        return sorted(nodes, key=lambda node: -node.n_bytes)
    if sort == "name":
        return sorted(nodes, key=lambda node: node.label)
    return nodes


def first_lines(screen: Screen, lines: Sequence[str], limit: int) -> Iterator[str]:
    """Yield the first ``limit`` lines (0: all) and a line that counts the others."""
    yield from lines[: limit or None]
    if limit:
        yield from more_lines(screen, len(lines) - limit)


def more_lines(screen: Screen, n_more: int) -> Iterator[str]:
    """Yield a line that counts lines that are not shown; none without any."""
    if n_more > 0:
        text = f"… {n_text(n_more, 'more line')}; --limit 0 shows all"
        yield screen.plain(screen.styled(text, "dim"))
