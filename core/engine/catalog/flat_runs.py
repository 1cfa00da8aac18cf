"""Tensors in flat arrays: the boxes that a run of a flattened tensor, or of a shard of it, holds.

Distributed optimizers (Megatron's, ZeRO) flatten and join tensors, and cut the result at arbitrary
elements, so one stored array holds a run of a tensor's elements, in C order. A run is at most a few
boxes::

    shard of shape (4, 5), elements 3–16        . . . 3 4      end of a row
                                                5 6 7 8 9      complete rows
                                                10 11 12 13 14
                                                15 16 . . .    beginning of a row

The elements of each box are consecutive in the array too, so
``core.engine.catalog.stored.narrow_array`` gives the part of the array that has the box's shape.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter

from core.arrays.box import Box, Shape, boxes_of_flat_range, c_strides
from core.arrays.sharding import ShardPiece, replicated_pieces
from core.engine.catalog.stored import StoredArray, narrow_array
from core.engine.catalog.tensor import Fragment, Tensor
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class FlatRun:
    """Consecutive elements of a flattened tensor or shard, and where they are stored.

    Args:
        start: number of elements of the tensor or shard before the run.
        n: number of elements in the run.
        array: the array that holds the run.
        at: number of elements of the array before the run.
    """

    start: int
    n: int
    array: StoredArray
    at: int


def fragments_of_run(
    run: FlatRun, pieces: Sequence[ShardPiece], *, shape: Shape
) -> Iterator[Fragment]:
    """Yield the fragments of a global tensor that a run of one of its shards holds.

    Args:
        run: a run of the shard.
        pieces: regions of the tensor in the shard, with their position (``core.arrays.sharding``);
            elements outside of them (vocabulary padding) are in no fragment.
        shape: shape of the shard, in elements.

    Yields:
        Fragments with disjoint boxes, in C order of the shard; every array is a part of
        ``run.array``.

    Raises:
        ValueError: the run is not inside the shard.
        CorruptError, UnsupportedError: as for ``core.engine.catalog.stored.narrow_array``.
    """
    strides = c_strides(shape)
    for local in boxes_of_flat_range(shape, run.start, run.start + run.n):
        # Elements of the run before this box.
        before = (
            sum(offset * stride for offset, stride in zip(local.offset, strides, strict=True))
            - run.start
        )

        # Intersect the box with the shard's regions, which have positions of their own globally.
        part: StoredArray | None = None
        for piece in pieces:
            common = local.intersect(Box(piece.at, piece.box.shape))
            if common is None:
                continue
            part = narrow_array(run.array, run.at + before, local.shape) if part is None else part
            delta = (
                global_start - local_start
                for global_start, local_start in zip(piece.box.offset, piece.at, strict=True)
            )
            at = tuple(
                index - first for index, first in zip(common.offset, local.offset, strict=True)
            )
            yield Fragment(common.shift(delta), part, at)


def tensor_of_runs(dtype: str, shape: Shape, runs: Callable[[], Iterable[FlatRun]]) -> Tensor:
    """Return a tensor whose elements are stored in several flat arrays.

    Args:
        runs: returns the runs that together are the tensor; called when fragments are requested.
    """

    def fragments() -> list[Fragment]:
        pieces = replicated_pieces(shape)
        return [
            fragment for run in runs() for fragment in fragments_of_run(run, pieces, shape=shape)
        ]

    return Tensor(dtype, shape, fragments)


def runs_in(stored: Sequence[tuple[int, StoredArray]], start: int, n: int) -> Iterator[FlatRun]:
    """Yield the parts of a run of a flat tensor that is stored as several arrays.

    Args:
        stored: (first element, array of one axis), in increasing order, without gaps.
        start, n: first element and number of elements of the run.

    Yields:
        Runs in order; their ``start`` counts from the beginning of the requested run.
    """
    place = max(bisect_right(stored, start, key=itemgetter(0)) - 1, 0)
    while place < len(stored) and stored[place][0] < start + n:
        first, array = stored[place]
        low, high = max(start, first), min(start + n, first + array.shape[0])
        if low < high:
            yield FlatRun(low - start, high - low, array, low - first)
        place += 1
