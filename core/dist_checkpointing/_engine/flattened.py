"""Slices [start, stop) of flattened shards. Pure integer geometry.

A distributed optimizer divides the flattened shard of a parameter between data-parallel ranks. The
slice of one rank has the shard's ``local_shape`` and a ``flattened_range`` within it.
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
        held_start, held_stop: position in the rank's slice, in elements from its beginning.
        start, stop: flat element indices in the narrowed shard.
    """

    held_start: int
    held_stop: int
    start: int
    stop: int


def narrowed_pieces(
    shape: Shape, dim: int, start: int, length: int, *, held: range
) -> Iterator[FlatPiece]:
    """Yield the runs of a slice that are in the rows of its shard that a narrowing keeps.

    The rows form one run of elements for every index of the axes before ``dim``, so along axis 0
    there is at most one run.

    Args:
        shape: of the shard, in elements.
        dim: axis, 0 <= dim < len(shape).
        start, length: rows, 0 <= start, start + length <= shape[dim].
        held: flat element indices of the slice, of step 1.

    Yields:
        Non-empty runs in C order.
    """
    row_elements = prod(shape[dim + 1 :])
    run_elements = row_elements * length
    for index in range(prod(shape[:dim])):
        # Cut the run of rows to the slice. All positions are in the complete shard.
        run_start = (index * shape[dim] + start) * row_elements
        begin, end = max(run_start, held.start), min(run_start + run_elements, held.stop)
        if begin < end:
            # In the narrowed shard, runs follow each other without gaps.
            shift = index * run_elements - run_start
            yield FlatPiece(begin - held.start, end - held.start, begin + shift, end + shift)
