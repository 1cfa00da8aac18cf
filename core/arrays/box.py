"""N-dimensional boxes: half-open intervals of element indices.

Pure integer geometry. A box of rank 0 is the single element of a scalar; a box with a zero extent
is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import prod

from core.values import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The elements ``offset[i] <= index[i] < offset[i] + shape[i]`` of a tensor.

    Args:
        offset: first index per axis, in elements, >= 0.
        shape: extent per axis, in elements, >= 0.

    Raises:
        ValueError: the ranks differ or a number is negative.
    """

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(
                f"box offset {self.offset} and shape {self.shape} have different ranks"
            )
        if self.shape and (min(self.offset) < 0 or min(self.shape) < 0):
            raise ValueError(f"box offset {self.offset} or shape {self.shape} is negative")

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def end(self) -> Shape:
        """Index after the last one per axis, in elements."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def n_elements(self) -> int:
        """Number of elements, which is 1 for rank 0."""
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """True if some extent is zero."""
        return 0 in self.shape

    def intersect(self, other: Box) -> Box | None:
        """Return the box of the common elements, or None if there are none.

        Raises:
            ValueError: the ranks differ.
        """
        if len(self.shape) != len(other.shape):
            raise ValueError(f"boxes of rank {self.rank} and {other.rank} cannot be intersected")
        offset = []
        shape = []
        for o1, n1, o2, n2 in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start = max(o2, o1)
            stop = min(o1 + n1, o2 + n2)
            if stop <= start:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def contains(self, other: Box) -> bool:
        """Return whether every element of ``other`` is in this box.

        An empty box is in every box that contains its offset, at the end included.
        """
        return all(
            o1 <= o2 and o2 + n2 <= o1 + n1
            for o1, n1, o2, n2 in zip(
                self.offset, self.shape, other.offset, other.shape, strict=True
            )
        )

    def shift(self, delta: Iterable[int]) -> Box:
        """Return the box moved by ``delta`` elements per axis.

        Raises:
            ValueError: the box would begin below zero.
        """
        return Box(tuple(o + d for o, d in zip(self.offset, delta, strict=True)), self.shape)

    def subtract(self, other: Box) -> list[Box]:
        """Return disjoint boxes that hold the elements of this box outside ``other``.

        Returns:
            At most ``2 * rank`` boxes, none empty; ``[self]`` if the two are disjoint.

        Raises:
            ValueError: the ranks differ.
        """
        common = self.intersect(other)
        if common is None:
            return [] if self.is_empty else [self]
        boxes = []
        offset = list(self.offset)
        shape = list(self.shape)
        # Axis by axis, cut off the slabs before and after the common part. What remains has the
        # extent of the common part on this axis.
        for axis in range(self.rank):
            n_before = common.offset[axis] - offset[axis]
            if n_before:
                boxes.append(Box(tuple(offset), (*shape[:axis], n_before, *shape[axis + 1 :])))
            n_after = offset[axis] + shape[axis] - common.end[axis]
            if n_after:
                start = (*offset[:axis], common.end[axis], *offset[axis + 1 :])
                boxes.append(Box(start, (*shape[:axis], n_after, *shape[axis + 1 :])))
            offset[axis] = common.offset[axis]
            shape[axis] = common.shape[axis]
        return boxes

    def split(self, axis: int, sizes: Iterable[int]) -> list[Box]:
        """Cut the box along ``axis`` into consecutive boxes with the extents ``sizes``.

        Raises:
            ValueError: the sizes do not add up to the extent.
        """
        sizes = list(sizes)
        if sum(sizes) != self.shape[axis]:
            raise ValueError(
                f"sizes {sizes} do not add up to {self.shape[axis]}, the extent of axis {axis}"
            )
        cuts = [self.offset[axis]]
        for size in sizes:
            cuts.append(cuts[-1] + size)
        return [
            Box(
                (*self.offset[:axis], start, *self.offset[axis + 1 :]),
                (*self.shape[:axis], stop - start, *self.shape[axis + 1 :]),
            )
            for start, stop in pairwise(cuts)
        ]


def full_box(shape: Shape) -> Box:
    """Return the box of all elements of a tensor."""
    return Box((0,) * len(shape), shape)


def c_strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of a C-order array."""
    strides = []
    step = 1
    # An extent of 0 counts as 1, so that an empty array has positive strides too.
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def flat_offset(box: Box, shape: Shape) -> int:
    """Return the index of a box's first element in the flattened C-order tensor of ``shape``."""
    return sum(i * step for i, step in zip(box.offset, c_strides(shape), strict=True))


def is_c_contiguous(shape: Shape, strides: Shape) -> bool:
    """Return whether ``strides`` (in elements) address ``shape`` in C order without gaps.

    The strides of axes of extent 1 do not matter.
    """
    expected = 1
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def boxes_of_flat_range(shape: Shape, start: int, stop: int) -> list[Box]:
    """Return the boxes that together hold elements [start, stop) of a C-order tensor.

    Needed for distributed-optimizer shards, which are cut from the flattened tensor.

    Args:
        shape: tensor shape, in elements.
        start, stop: flat element indices, 0 <= start <= stop <= prod(shape).

    Returns:
        At most ``2 * len(shape) - 1`` disjoint boxes, in C order; [] if start == stop.

    Raises:
        ValueError: the range is not inside the tensor.
    """
    if not 0 <= start <= stop <= prod(shape):
        raise ValueError(f"flat range {start}–{stop} is not inside a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    # Positions as (row of axis 0, element within the row).
    row_size = prod(shape[1:])
    first, head = divmod(start, row_size)
    last, tail = divmod(stop, row_size)

    def boxes_in_row(row: int, row_start: int, row_stop: int) -> list[Box]:
        inner_boxes = boxes_of_flat_range(shape[1:], row_start, row_stop)
        return [Box((row, *inner.offset), (1, *inner.shape)) for inner in inner_boxes]

    if first == last:
        return boxes_in_row(first, head, tail)
    # A partial first row, the complete rows in one box, and a partial last row.
    boxes = []
    if head:
        boxes += boxes_in_row(first, head, row_size)
        first += 1
    if last > first:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if tail:
        boxes += boxes_in_row(last, 0, tail)
    return boxes
