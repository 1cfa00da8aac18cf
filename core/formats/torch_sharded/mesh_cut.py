"""Which boxes of a tensor a rank of a device mesh holds. Pure integer geometry.

Each cut divides one axis of a tensor over one axis of the mesh. A cut applies to what the cuts
before it have left, so the elements of an axis that a rank holds are a list of ranges, which its
local tensor contains one after the other:

* ``Shard``: as ``torch.chunk``: all parts but the last ones have ceil(n / parts) elements. The last
  ones may be shorter or empty.
* ``_StridedShard`` with a split factor f: the range is chunked into f pieces, each piece into the
  parts, and a rank holds its part of every piece. FSDP2 uses it for tensors that tensor parallelism
  has cut along the same axis before.

Source: torch 2.13 ``torch/distributed/tensor/placement_types.py``; tensors that it wrote, in
tests/golden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from core.arrays.box import Box, Shape
from core.arrays.sharding import ShardPiece
from core.errors import UnsupportedError
from core.values import dataclass

_MOST_BOXES = 1 << 16
"""Maximum number of boxes that a rank may hold of one tensor; a forged file could ask for 2⁶⁰."""

_Range = tuple[int, int]
"""First element of an axis, and the element after the last one."""


@dataclass(frozen=True, slots=True)
class MeshCut:
    """A cut of a tensor over one axis of a device mesh.

    Args:
        axis: axis of the tensor.
        n_parts: extent of the mesh axis.
        part: coordinate of the rank on the mesh axis.
        split_factor: number of pieces that are cut one by one; 1 for a plain ``Shard``.
    """

    axis: int
    n_parts: int
    part: int
    split_factor: int = 1


def local_boxes(shape: Shape, cuts: Iterable[MeshCut]) -> tuple[Shape, list[ShardPiece]]:
    """Return the shape of a rank's local tensor, and the boxes of the global one that are in it.

    Args:
        shape: shape of the global tensor, in elements.
        cuts: cuts in the order in which they are applied.

    Raises:
        UnsupportedError: the rank holds implausibly many boxes.
    """
    ranges: list[list[_Range]] = [[(0, extent)] for extent in shape]
    for cut in cuts:
        if cut.split_factor > _MOST_BOXES:
            raise UnsupportedError(f"DTensor with a split factor of {cut.split_factor}")
        ranges[cut.axis] = _taken(ranges[cut.axis], cut)
    if prod(map(len, ranges)) > _MOST_BOXES:
        raise UnsupportedError("DTensor that is split into too many boxes per rank")
    local_shape = tuple(sum(stop - start for start, stop in of_axis) for of_axis in ranges)
    return local_shape, [_held_box(parts) for parts in product(*map(_with_positions, ranges))]


def _taken(ranges: Sequence[_Range], cut: MeshCut) -> list[_Range]:
    """Return the elements of an axis that remain after a cut.

    Args:
        ranges: the elements before it.
    """
    n = sum(stop - start for start, stop in ranges)
    taken: list[_Range] = []
    for start, stop in _chunks(n, cut.split_factor):
        first, last = _chunk(stop - start, cut.n_parts, cut.part)
        for part in _selected(ranges, start + first, start + last):
            # Ranges that continue each other are one range.
            if taken and taken[-1][1] == part[0]:
                part = (taken.pop()[0], part[1])
            taken.append(part)
    return taken


def _chunks(n: int, n_chunks: int) -> Iterator[_Range]:
    """Yield the chunks of ``n`` elements that are not empty, by the rule of ``torch.chunk``."""
    size = max(1, -(-n // n_chunks))
    for start in range(0, n, size):
        yield start, min(start + size, n)


def _chunk(n: int, n_chunks: int, number: int) -> _Range:
    """Return one chunk of ``n`` elements, which may be empty."""
    size = -(-n // n_chunks)
    return min(number * size, n), min((number + 1) * size, n)


def _selected(ranges: Sequence[_Range], first: int, last: int) -> Iterator[_Range]:
    """Yield elements ``first`` to ``last`` of the elements that a list of ranges consists of."""
    before = 0
    for start, stop in ranges:
        low, high = max(first - before, 0), min(last - before, stop - start)
        if low < high:
            yield start + low, start + high
        before += stop - start


def _with_positions(ranges: Sequence[_Range]) -> list[tuple[_Range, int]]:
    """Return each range of an axis with its position in the local tensor."""
    placed = []
    position = 0
    for start, stop in ranges:
        placed.append(((start, stop), position))
        position += stop - start
    return placed


def _held_box(parts: Sequence[tuple[_Range, int]]) -> ShardPiece:
    """Build a box from one range per axis."""
    box = Box(
        tuple(start for (start, _), _ in parts), tuple(stop - start for (start, stop), _ in parts)
    )
    return ShardPiece(box, tuple(position for _, position in parts))
