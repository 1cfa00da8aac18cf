"""Check that boxes tile a region, find overlaps and holes, and find the boxes that overlap a box.

Checkpoints are cut into grids (10⁵ chunks of one tensor occur), so no function here compares all
pairs: boxes are grouped by their intervals along one axis after the other, and only boxes that this
does not separate are compared directly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from core.arrays.box import Box


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Return the indices of two boxes that have an element in common, or None.

    Args:
        boxes: boxes of one rank, none empty.
    """
    if len(boxes) < 2:
        return None
    rank = boxes[0].rank
    if rank == 0:
        return 0, 1
    # Groups of boxes (by index), the axis to cut each along next, and the number of axes that did
    # not cut it.
    pending = [(list(range(len(boxes))), 0, 0)]
    while pending:
        group, axis, n_tried = pending.pop()
        clusters = _cluster(boxes, group, axis)
        # Every cut gives all axes another chance. A group that no axis cuts is searched directly.
        if len(clusters) > 1:
            pending += [(cluster, (axis + 1) % rank, 0) for cluster in clusters if len(cluster) > 1]
        elif n_tried + 1 < rank:
            pending.append((group, (axis + 1) % rank, n_tried + 1))
        elif (overlap := _find_overlap(boxes, group)) is not None:
            return overlap
    return None


def _cluster(boxes: Sequence[Box], group: list[int], axis: int) -> list[list[int]]:
    """Cut a group of boxes into clusters whose intervals along ``axis`` do not overlap.

    Returns:
        Lists of indices into ``boxes``, in the order of their first index along the axis.
    """
    group = sorted(group, key=lambda number: boxes[number].offset[axis])
    clusters: list[list[int]] = []
    cluster_end = -1
    for number in group:
        start = boxes[number].offset[axis]
        if start >= cluster_end:
            clusters.append([])
        clusters[-1].append(number)
        cluster_end = max(cluster_end, start + boxes[number].shape[axis])
    return clusters


def _find_overlap(boxes: Sequence[Box], group: list[int]) -> tuple[int, int] | None:
    """Return the indices of two overlapping boxes of a group that no axis cuts, or None.

    Sweeps along the axis with the most distinct starts, and compares each box with those that have
    not ended at its start.
    """
    rank = boxes[group[0]].rank
    axis = max(range(rank), key=lambda a: len({boxes[number].offset[a] for number in group}))
    open_boxes: list[int] = []
    for number in sorted(group, key=lambda n: boxes[n].offset[axis]):
        box = boxes[number]
        open_boxes = [other for other in open_boxes if boxes[other].end[axis] > box.offset[axis]]
        for other in open_boxes:
            if box.intersect(boxes[other]) is not None:
                return min(other, number), max(other, number)
        open_boxes.append(number)
    return None


def first_hole(region: Box, boxes: Sequence[Box]) -> Box | None:
    """Return a part of ``region`` that no box covers, or None; boxes may overlap."""
    # Cut every box out of the parts of the region that are still uncovered.
    holes = [] if region.is_empty else [region]
    for box in sorted(boxes, key=lambda b: b.offset):
        if not holes:
            return None
        if not box.is_empty:
            holes = [part for hole in holes for part in hole.subtract(box)]
    return min(holes, key=lambda b: b.offset) if holes else None


def is_tiled(region: Box, boxes: Sequence[Box]) -> bool:
    """Return whether boxes, none empty, cover each element of ``region`` once and nothing else."""
    # Boxes inside the region, disjoint and of the same total size, leave no hole.
    return (
        sum(box.n_elements for box in boxes) == region.n_elements
        and all(region.contains(box) for box in boxes)
        and first_overlap(boxes) is None
    )


class BoxIndex:
    """An index that finds the boxes that overlap a given box without comparing it with all.

    Args:
        boxes: boxes of one rank, none empty; they may overlap.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        rank = boxes[0].rank if boxes else 0
        self._root = _build_node(boxes, list(range(len(boxes))), tuple(range(rank)))

    def meeting(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the index of each overlapping box and the common part, in no particular order."""
        pending = [self._root]
        while pending:
            node = pending.pop()
            # Boxes of rank 0 all have the interval [0, 1).
            start = box.offset[node.axis] if node.axis >= 0 else 0
            stop = start + box.shape[node.axis] if node.axis >= 0 else 1
            # Skip the children that end before the box, or begin after it.
            first = bisect_right(node.reaches, start)
            last = bisect_left(node.starts, stop)
            for child in node.children[first:last]:
                if isinstance(child, _Node):
                    pending.append(child)
                elif (common := self._boxes[child].intersect(box)) is not None:
                    yield child, common


class _Node:
    """Boxes or groups of boxes, sorted along one axis.

    Args:
        axis: the axis; -1 for boxes of rank 0, which have no order.
        starts: first index of each child's interval, ascending.
        stops: end of each child's interval.
        children: indices of boxes, or nodes.

    Attributes:
        reaches: the greatest end of each child's interval and all earlier intervals. Unlike the
            ends themselves, these ascend and can be searched.
    """

    __slots__ = ("axis", "children", "reaches", "starts")

    def __init__(
        self, axis: int, starts: list[int], stops: list[int], children: Sequence[_Node | int]
    ) -> None:
        self.axis = axis
        self.starts = starts
        self.reaches = list(accumulate(stops, max))
        self.children = children


def _build_node(boxes: Sequence[Box], group: list[int], axes: tuple[int, ...]) -> _Node:
    """Build the tree of a group of boxes, cutting it along the first of ``axes`` that cuts it."""
    # Along the first axis that cuts the group, build a node with a child for each cluster.
    for axis in axes:
        clusters = _cluster(boxes, group, axis)
        if len(clusters) > 1:
            other_axes = tuple(a for a in axes if a != axis)
            starts = [boxes[cluster[0]].offset[axis] for cluster in clusters]
            stops = [max(boxes[number].end[axis] for number in cluster) for cluster in clusters]
            children: list[_Node | int] = [
                cluster[0] if len(cluster) == 1 else _build_node(boxes, cluster, other_axes)
                for cluster in clusters
            ]
            return _Node(axis, starts, stops, children)
    # If no axis cuts the group, its boxes are the children, sorted along the first axis.
    if not group or not boxes[group[0]].rank:
        return _Node(-1, [0] * len(group), [1] * len(group), group)
    group = sorted(group, key=lambda number: boxes[number].offset[0])
    return _Node(0, [boxes[n].offset[0] for n in group], [boxes[n].end[0] for n in group], group)
