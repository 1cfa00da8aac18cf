"""Boxes drawn with lines: the positions of their edges, and the characters between them.

An edge is an element index; a position is the column or row of the line at that edge. What is too
thin is drawn thicker, and where there are too many edges, those in the middle are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise

from ckpt_cli.screen.terminal import Screen, columns_of
from core.values import dataclass

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
_LINES = " │││─┘┐┤─└┌├─┴┬┼"
"""The character whose lines go to these sides, as a sum of ``_UP``, ``_DOWN``, …."""
_ASCII_LINES = " |||-+++-+++-+++"


@dataclass(frozen=True, slots=True)
class Ruler:
    """The positions of the edges of boxes along one axis of the drawing.

    Args:
        positions: column or row of each edge, by element index.
        gap: the positions between which boxes are left out; None if all have room.
        is_to_scale: no box is drawn thicker than it is.
    """

    positions: Mapping[int, int]
    gap: tuple[int, int] | None
    is_to_scale: bool

    @property
    def end(self) -> int:
        """Position of the last edge."""
        return max(self.positions.values())


@dataclass(frozen=True, slots=True)
class BoxOutline:
    """The columns and rows of the lines around a box."""

    left: int
    right: int
    top: int
    bottom: int


@dataclass(frozen=True, slots=True)
class Label:
    """Text inside a box of the drawing.

    Args:
        row, column: where it begins.
    """

    row: int
    column: int
    text: str
    style: str


def ruler_of(
    spans: Iterable[tuple[int, int]], extent: int, n_positions: int, *, least: int
) -> Ruler:
    """Place the edges of boxes along one axis.

    Args:
        extent: elements of the axis.
        n_positions: position of the last edge; that of the first is 0.
        least: least distance of two edges.
    """
    spans = set(spans)
    edges = sorted({0, extent}.union(*spans))
    most = max(n_positions // least, 3)
    has_gap = len(edges) - 1 > most
    if has_gap:
        edges = [*edges[: most - 1], *edges[-2:]]
    sizes = [stop - start for start, stop in pairwise(edges)]
    if has_gap:
        sizes[-2] = 0
    # What is too thin gets the least distance; the others share what remains.
    thin: set[int] = set()
    while True:
        wide = [at for at in range(len(sizes)) if at not in thin]
        scale = (n_positions - least * len(thin)) / max(sum(sizes[at] for at in wide), 1)
        too_thin = {at for at in wide if sizes[at] * scale < least}
        if not too_thin or len(wide) == len(too_thin):
            break
        thin |= too_thin
    widths = [least if at in thin else max(size * scale, least) for at, size in enumerate(sizes)]
    positions = [round(position) for position in accumulate(widths, initial=0.0)]
    gap = (positions[-3], positions[-2]) if has_gap else None
    n_enlarged = len(thin) - has_gap
    return Ruler(dict(zip(edges, positions, strict=True)), gap, n_enlarged <= 0)


def lines_of(ruler: Ruler, span: tuple[int, int]) -> tuple[int, int] | None:
    """Return the positions of the edges of a box; None if it lies in the gap."""
    positions = ruler.positions
    if span[0] not in positions or span[1] not in positions:
        return None
    lines = positions[span[0]], positions[span[1]]
    return None if lines == ruler.gap else lines


def ticks_text(columns: Ruler) -> str:
    """Return the indices of the edges above their columns, those that have room."""
    text = ""
    positions = sorted(columns.positions.items())
    for at, (edge, column) in enumerate(positions):
        tick = str(edge)
        # The last index is right-aligned, and always there.
        is_last = at == len(positions) - 1
        start = max(column + 1 - len(tick), 0) if is_last else column
        if is_last and len(text) >= start:
            text = text[: max(start - 1, 0)].rpartition(" ")[0]
        if not text or len(text) < start:
            text = text.ljust(start) + tick
    return text


def canvas_lines(
    screen: Screen,
    outlines: Iterable[BoxOutline],
    labels: Iterable[Label],
    *,
    rows: Ruler,
    columns: Ruler,
) -> Iterator[str]:
    """Yield the rows of a drawing: lines around the boxes, and the labels in them."""
    sides = [[0] * (columns.end + 1) for _ in range(rows.end + 1)]
    for box in outlines:
        for row in (box.top, box.bottom):
            for column in range(box.left, box.right):
                sides[row][column] |= _RIGHT
                sides[row][column + 1] |= _LEFT
        for column in (box.left, box.right):
            for row in range(box.top, box.bottom):
                sides[row][column] |= _DOWN
                sides[row + 1][column] |= _UP
    glyphs = _LINES if screen.has_unicode else _ASCII_LINES
    texts = [[" " if not mask else glyphs[mask] for mask in line] for line in sides]
    # Dots stand for what is left out.
    dot = "·" if screen.has_unicode else "."
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            is_skipped = any(
                gap is not None and gap[0] < position < gap[1]
                for gap, position in ((rows.gap, row), (columns.gap, column))
            )
            if is_skipped and text == " ":
                line[column] = dot
    for label in labels:
        # A character of two columns takes the place of two.
        line = texts[label.row]
        line[label.column : label.column + columns_of(label.text)] = [
            screen.styled(label.text, label.style),
            *[""] * (columns_of(label.text) - 1),
        ]
    for line in texts:
        yield "".join(line).rstrip()
