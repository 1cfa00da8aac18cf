"""Whether masters in a flat tensor round to the weights of a shard, both of them in many pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from core.arrays.box import Box, Shape, c_strides
from core.arrays.sharding import ShardPiece
from core.catalog.catalog import Catalog, Fragment
from core.catalog.stored import StoredArray, part_of
from core.files.store import ReadStore
from core.megatron.optimizer.flat.boxes import runs_in
from core.megatron.optimizer.proof import RUN, rounds_to, sample
from core.megatron.optimizer.sharded.bucket_keys import Stored


@dataclass(frozen=True, slots=True)
class _WeightSample:
    """Weights at a place of a shard: elements before them, their number, and their bytes."""

    start: int
    n: int
    dtype: str
    data: bytes


class WeightSamples:
    """Samples of a shard's weights: from the beginning and the end of each of its pieces.

    Args:
        store: where masters and weights are.
        model: the global form of the weights.
        key: the parameter.
        pieces: what the shard holds of it.
        shape: shape of the shard.
    """

    def __init__(
        self,
        store: ReadStore,
        model: Catalog,
        key: str,
        pieces: Sequence[ShardPiece],
        *,
        shape: Shape,
    ) -> None:
        self._store = store
        self._samples = list(_samples(store, model, key, pieces, shape))

    def hold(
        self, masters: Stored, start: int, *, bind: Callable[[ReadStore, StoredArray], StoredArray]
    ) -> bool:
        """Return whether masters that begin at an element of a flat tensor round to the weights."""
        for spot in self._samples:
            runs = runs_in(masters, start + spot.start, spot.n)
            parts = [part_of(run.array, run.at, (run.n,)) for run in runs]
            data = b"".join(sample(self._store, part, bind=bind) for part in parts)
            dtype = masters[0][1].dtype
            if not rounds_to(data, dtype, spot.data, spot.dtype):
                return False
        return True


def _samples(
    store: ReadStore, model: Catalog, key: str, pieces: Sequence[ShardPiece], shape: Shape
) -> Iterator[_WeightSample]:
    """Yield samples from the beginning and the end of each piece of a shard."""
    strides = c_strides(shape)
    fragments = model.fragments(key)
    for piece in pieces:
        for is_end in (False, True):
            weights = _weights(fragments, piece.box, is_end=is_end)
            if weights is None:
                continue
            part, index = weights
            local = (
                at + i - first
                for at, i, first in zip(piece.at, index, piece.box.offset, strict=True)
            )
            start = sum(i * stride for i, stride in zip(local, strides, strict=True))
            yield _WeightSample(
                start, prod(part.shape), part.dtype, sample(store, part, bind=model.bind)
            )


def _weights(
    fragments: Sequence[Fragment], box: Box, *, is_end: bool
) -> tuple[StoredArray, Shape] | None:
    """Return a few consecutive weights of a box, and the index of the first one.

    They are from its first or last row. None if no dense fragment has them.
    """
    n = min(box.shape[-1], RUN) if box.shape else 1
    if box.is_empty:
        return None
    index = (
        tuple(e - 1 for e in box.end[:-1]) + tuple(e - n for e in box.end[-1:])
        if is_end
        else box.offset
    )
    wanted = Box(index, (*(1 for _ in index[:-1]), *((n,) if index else ())))

    # Only dense fragments can be read directly; another spot of the shard will do.
    for fragment in fragments:
        common = fragment.box.intersect(wanted)
        array = fragment.array
        if common is None or array is None:
            continue
        if array.extent.encoding is not None:
            continue
        if array.extent.strides not in (None, c_strides(array.shape)):
            continue
        extra = len(array.shape) - len(common.offset)
        inside = (i - first for i, first in zip(common.offset, fragment.box.offset, strict=True))
        at = list(fragment.at)
        for axis, step in enumerate(inside):
            if axis + extra >= 0:
                at[axis + extra] += step
        start = sum(i * stride for i, stride in zip(at, c_strides(array.shape), strict=True))
        return part_of(array, start, (common.n_elements,)), common.offset
    return None
