"""Slices [start, stop) of flattened shards. Pure integer geometry.

A distributed optimizer divides the flattened shard of a parameter between data-parallel ranks; the
slice that one of them holds has the shard's ``local_shape`` and a ``flattened_range`` within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A run of elements of a slice that stays contiguous in a narrowed shard.

    Args:
        held_start, held_stop: position in the held slice, in elements from its beginning.
        start, stop: flat element indices in the narrowed shard.
    """

    held_start: int
    held_stop: int
    start: int
    stop: int


def narrowed_pieces(
    shape: Shape, dim: int, start: int, length: int, *, held: range
) -> Iterator[FlatPiece]:
    """Yield the pieces of a slice that lie in the rows of the shard that a narrowing keeps.

    Those rows are one run of elements for every index before ``dim``, so along axis 0 there is at
    most one piece.

    Args:
        shape: of the shard, in elements.
        dim: axis, 0 <= dim < len(shape).
        start, length: rows, 0 <= start, start + length <= shape[dim].
        held: flat element indices of the slice, of step 1.

    Yields:
        Pieces in C order, none of them empty.
    """
    row = prod(shape[dim + 1 :])
    run = row * length
    for index in range(prod(shape[:dim])):
        first = (index * shape[dim] + start) * row
        begin, end = max(first, held.start), min(first + run, held.stop)
        if begin < end:
            moved = index * run - first
            yield FlatPiece(begin - held.start, end - held.start, begin + moved, end + moved)
