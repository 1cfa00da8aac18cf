"""Treemaps: nested rectangles whose areas are bytes.

The rectangles of a node's children are squarified (Bruls, Huizing and van Wijk, 2000): rows are
filled as long as that makes the worst aspect ratio better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_cli.html_report.names import shown_name
from ckpt_cli.screen.blocks import bytes_text, n_text
from core.values import dataclass
from core.verbs.pictures.sizes import SizeNode

MAX_TILES = 240
"""Most rectangles of one treemap."""
_TITLE = 17.0
"""Height of the title of a rectangle that contains others."""
_PADDING = 2.0
_LEAST_SIDE = 3.0
"""A rectangle that would be thinner is part of "others"."""
_CHARACTER = 6.9
"""Width of one character of a label."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A rectangle, in units of the drawing."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Tile:
    """One rectangle of a treemap.

    Args:
        area: the rectangle.
        label: text inside it; "" if none fits.
        tip: text of the tooltip, with the complete name.
        depth: 0 for the outermost.
        group: ``model`` or ``optimizer``.
        has_children: other tiles are inside.
    """

    area: Rectangle
    label: str
    tip: str
    depth: int
    group: str
    has_children: bool


@dataclass(frozen=True, slots=True)
class Treemap:
    """A drawing of a given size."""

    width: int
    height: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class SizeDrawings:
    """The sizes of model and optimizer, drawn for wide and for narrow screens.

    Args:
        groups: ``model`` and ``optimizer`` with their bytes.
    """

    groups: tuple[tuple[str, int], ...]
    wide: Treemap
    narrow: Treemap


def draw_sizes(sizes: tuple[SizeNode, SizeNode]) -> SizeDrawings | None:
    """Draw the sizes of the model and of the optimizer; return None without any bytes."""
    roots = [
        (name, root)
        for name, root in zip(("model", "optimizer"), sizes, strict=True)
        if root.n_bytes
    ]
    if not roots:
        return None
    return SizeDrawings(
        tuple((name, root.n_bytes) for name, root in roots),
        wide=draw_treemap(roots, width=1120, height=440),
        narrow=draw_treemap(roots, width=360, height=460),
    )


def draw_treemap(roots: Sequence[tuple[str, SizeNode]], *, width: int, height: int) -> Treemap:
    """Draw trees of sizes side by side, as nested rectangles.

    The largest nodes are opened first, so that a limited number of rectangles shows most bytes.

    Args:
        roots: (``model`` or ``optimizer``, its bytes).
        width, height: size of the drawing.
    """
    total = sum(root.n_bytes for _, root in roots)
    drawn = [(group, root) for group, root in roots if root.n_bytes]
    areas = squarify([root.n_bytes for _, root in drawn], Rectangle(0, 0, width, height))
    tiles: list[Tile] = []
    waiting = [
        (replace(root, name=group), group, area, 0, group)
        for (group, root), area in zip(drawn, areas, strict=True)
    ]
    while waiting:
        # The largest first; its children wait for their turn.
        waiting.sort(key=lambda item: -item[2].width * item[2].height)
        node, path, area, depth, group = waiting.pop(0)
        children, room = _children_of(node, area)
        has_room = len(tiles) + len(waiting) + len(children) < MAX_TILES
        is_open = bool(children) and (has_room or depth == 0)
        tiles.append(_tile(node, path, area, depth, group, total=total, is_open=is_open))
        if is_open:
            inner = squarify([child.n_bytes for child in children], room)
            waiting += [
                (child, f"{path}.{child.name}", place, depth + 1, group)
                for child, place in zip(children, inner, strict=True)
            ]
    return Treemap(width, height, tuple(sorted(tiles, key=lambda tile: tile.depth)))


def _children_of(node: SizeNode, area: Rectangle) -> tuple[list[SizeNode], Rectangle]:
    """Return the children that can be drawn inside a rectangle, and the room for them.

    Children that would be too thin are joined to one node.
    """
    room = Rectangle(
        area.x + _PADDING,
        area.y + _TITLE,
        area.width - 2 * _PADDING,
        area.height - _TITLE - _PADDING,
    )
    if room.width < 24 or room.height < 12 or not node.n_bytes:
        return [], room
    per_byte = room.width * room.height / node.n_bytes
    children = [child for child in node.children if child.n_bytes]
    children.sort(key=lambda child: -child.n_bytes)
    large = [child for child in children if child.n_bytes * per_byte >= _LEAST_SIDE**2 * 4]
    shown = [_joined(child) for child in large]
    rest = children[len(large) :]
    if rest:
        n_bytes = sum(child.n_bytes for child in rest)
        n_tensors = sum(child.n_tensors for child in rest)
        shown.append(SizeNode(f"({n_text(len(rest), 'smaller part')})", n_bytes, n_tensors))
    return (shown if len(shown) > 1 or not rest else []), room


def _joined(node: SizeNode) -> SizeNode:
    """Return a node joined with an only child: ``linear_fc1.weight``."""
    name = node.name
    while len(node.children) == 1:
        node = node.children[0]
        name = f"{name}.{node.name}"
    return replace(node, name=name)


def _tile(
    node: SizeNode, path: str, area: Rectangle, depth: int, group: str, *, total: int, is_open: bool
) -> Tile:
    """Return the rectangle of a node, with as much of a label as fits."""
    size = bytes_text(node.n_bytes)
    name = shown_name(node.name, 60)
    fits = int((area.width - 8) / _CHARACTER)
    label = ""
    if area.height >= 15:
        if len(name) + len(size) + 1 <= fits:
            label = f"{name} {size}"
        elif len(name) <= fits:
            label = name
        elif fits >= 5:
            label = f"{name[: fits - 1]}…"
    tip = (
        f"{shown_name(path)}\n{size}, {100 * node.n_bytes / total:.3g} % of all"
        f" · {n_text(node.n_tensors, 'tensor')}"
    )
    return Tile(area, label, tip, depth, group, is_open)


def squarify(sizes: Sequence[int], room: Rectangle) -> list[Rectangle]:
    """Divide a rectangle into parts with areas in proportion to ``sizes``, close to squares.

    Args:
        sizes: positive numbers, the largest first for the best result.

    Returns:
        A rectangle for each size, in their order.
    """
    if not sizes:
        return []
    scale = room.width * room.height / sum(sizes)
    areas = [size * scale for size in sizes]
    result: list[Rectangle] = []
    at = 0
    while at < len(areas):
        # Extend the row as long as its worst aspect ratio does not get worse.
        side = max(min(room.width, room.height), 1e-9)
        end = at + 1
        row_sum = areas[at]
        worst = _worst_ratio(row_sum, areas[at], areas[at], side)
        while end < len(areas):
            longer = row_sum + areas[end]
            ratio = _worst_ratio(longer, areas[at], areas[end], side)
            if ratio > worst:
                break
            row_sum, worst, end = longer, ratio, end + 1
        # Place the row along the shorter side, and go on in the rest.
        thickness = row_sum / side
        offset = 0.0
        for area in areas[at:end]:
            length = area / thickness if thickness else 0.0
            if room.width >= room.height:
                result.append(Rectangle(room.x, room.y + offset, thickness, length))
            else:
                result.append(Rectangle(room.x + offset, room.y, length, thickness))
            offset += length
        if room.width >= room.height:
            room = Rectangle(room.x + thickness, room.y, room.width - thickness, room.height)
        else:
            room = Rectangle(room.x, room.y + thickness, room.width, room.height - thickness)
        at = end
    return result


def _worst_ratio(row_sum: float, greatest: float, least: float, side: float) -> float:
    """Return the worst aspect ratio of a row of areas along a side."""
    if not least or not row_sum:
        return float("inf")
    square = row_sum * row_sum
    return max(side * side * greatest / square, square / (side * side * least))
