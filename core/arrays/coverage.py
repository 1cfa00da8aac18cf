"""Whether boxes tile a region: overlaps, holes, and finding the boxes that meet another one.

Checkpoints are cut into grids (10⁵ chunks of one tensor are real), so nothing here compares all pairs: boxes are
grouped by their intervals along one axis after the other, and only what cannot be told apart that way is compared
directly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from core.arrays.box import Box


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Numbers of two boxes that have an element in common, or None.

    Args:
        boxes: of one rank, none empty.
    """
    if len(boxes) < 2:
        return None
    rank = boxes[0].rank
    if rank == 0:
        return 0, 1
    pending = [(list(range(len(boxes))), 0, 0)]
    while pending:
        group, axis, n_tried = pending.pop()
        clusters = _clusters(boxes, group, axis)
        if len(clusters) == 1:
            if n_tried + 1 < rank:
                pending.append((group, (axis + 1) % rank, n_tried + 1))
            elif (found := _overlap_in(boxes, group)) is not None:
                return found
        else:
            pending += [(cluster, (axis + 1) % rank, 0) for cluster in clusters if len(cluster) > 1]
    return None


def _clusters(boxes: Sequence[Box], group: list[int], axis: int) -> list[list[int]]:
    """``group`` in parts whose intervals along ``axis`` do not meet."""
    group = sorted(group, key=lambda number: boxes[number].offset[axis])
    clusters: list[list[int]] = []
    reach = -1
    for number in group:
        start = boxes[number].offset[axis]
        if start >= reach:
            clusters.append([])
        clusters[-1].append(number)
        reach = max(reach, start + boxes[number].shape[axis])
    return clusters


def _overlap_in(boxes: Sequence[Box], group: list[int]) -> tuple[int, int] | None:
    """As ``first_overlap``, for boxes that no axis separates: a sweep along the axis with the most distinct starts."""
    rank = boxes[group[0]].rank
    axis = max(range(rank), key=lambda a: len({boxes[number].offset[a] for number in group}))
    active: list[int] = []
    for number in sorted(group, key=lambda n: boxes[n].offset[axis]):
        box = boxes[number]
        active = [other for other in active if boxes[other].end[axis] > box.offset[axis]]
        for other in active:
            if box.intersect(boxes[other]) is not None:
                return min(other, number), max(other, number)
        active.append(number)
    return None


def first_hole(region: Box, boxes: Sequence[Box]) -> Box | None:
    """A box of ``region`` that no box covers, or None; boxes may overlap."""
    rest = [] if region.is_empty else [region]
    for box in sorted(boxes, key=lambda b: b.offset):
        if not rest:
            return None
        if not box.is_empty:
            rest = [piece for old in rest for piece in old.subtract(box)]
    return min(rest, key=lambda b: b.offset) if rest else None


def is_tiled(region: Box, boxes: Sequence[Box]) -> bool:
    """Whether the boxes, none empty, cover every element of ``region`` exactly once and nothing else."""
    return (
        sum(box.n_elements for box in boxes) == region.n_elements
        and all(region.contains(box) for box in boxes)
        and first_overlap(boxes) is None
    )


class BoxIndex:
    """Finds the boxes that meet a given one without looking at all of them.

    Args:
        boxes: of one rank, none empty; they may overlap.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        rank = boxes[0].rank if boxes else 0
        self._root = _node(boxes, list(range(len(boxes))), tuple(range(rank)))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Number of each box that has an element in common with ``box``, and the common part; in no certain order."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            start = box.offset[node.axis] if node.axis >= 0 else 0
            stop = start + box.shape[node.axis] if node.axis >= 0 else 1
            first = bisect_right(node.reaches, start)
            last = bisect_left(node.starts, stop)
            for child in node.children[first:last]:
                if isinstance(child, _Node):
                    pending.append(child)
                elif (common := self._boxes[child].intersect(box)) is not None:
                    yield child, common


class _Node:
    """Boxes or groups of boxes, ordered along one axis (-1: no order).

    Args:
        axis: the axis.
        starts: first index of each child's interval, ascending.
        reaches: greatest end of this child's and all earlier intervals, ascending.
        children: numbers of boxes, or nodes.
    """

    __slots__ = ("axis", "children", "reaches", "starts")

    def __init__(self, axis: int, starts: list[int], stops: list[int], children: Sequence[_Node | int]) -> None:
        self.axis = axis
        self.starts = starts
        self.reaches = list(accumulate(stops, max))
        self.children = children


def _node(boxes: Sequence[Box], group: list[int], axes: tuple[int, ...]) -> _Node:
    for axis in axes:
        clusters = _clusters(boxes, group, axis)
        if len(clusters) > 1:
            others = tuple(a for a in axes if a != axis)
            return _Node(
                axis,
                [boxes[cluster[0]].offset[axis] for cluster in clusters],
                [max(boxes[number].end[axis] for number in cluster) for cluster in clusters],
                [cluster[0] if len(cluster) == 1 else _node(boxes, cluster, others) for cluster in clusters],
            )
    if group and boxes[group[0]].rank:
        group = sorted(group, key=lambda number: boxes[number].offset[0])
        return _Node(0, [boxes[n].offset[0] for n in group], [boxes[n].end[0] for n in group], group)
    return _Node(-1, [0] * len(group), [1] * len(group), group)
