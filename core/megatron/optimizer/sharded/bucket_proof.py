"""The proof that master weights in a flat tensor belong to a shard: they round to its weights.

Both the flat tensor and the shard may be stored as many arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from core.arrays.box import Box, Shape, c_strides
from core.arrays.sharding import ShardPiece
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.flat_runs import runs_in
from core.engine.catalog.stored import StoredArray, narrow_array
from core.engine.catalog.tensor import Fragment
from core.files.store import ReadStore
from core.megatron.optimizer.proof import RUN, rounds_to, sample_array
from core.megatron.optimizer.sharded.bucket_keys import Stored
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class _WeightSample:
    """Consecutive weights of a shard.

    Args:
        start: number of elements of the shard before the weights.
        n: number of weights.
        data: bytes of the weights.
    """

    start: int
    n: int
    dtype: str
    data: bytes


class WeightSamples:
    """Samples of a shard's weights, from the beginning and the end of each of its regions.

    Args:
        store: store that holds master weights and weights.
        model: the global form of the weights.
        key: key of the parameter.
        pieces: regions of the parameter in the shard.
        shape: shape of the shard.

    Raises:
        MissingShardError: a file is missing or too short.
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
        self._samples = list(_read_samples(store, model, key, pieces, shape))

    def hold(self, masters: Stored, start: int) -> bool:
        """Return whether the shard's master weights may begin at an element of a flat tensor.

        Args:
            masters: arrays of the flat tensor of master weights.
            start: number of elements before the shard.
        """
        for weights in self._samples:
            runs = runs_in(masters, start + weights.start, weights.n)
            parts = [narrow_array(run.array, run.at, (run.n,)) for run in runs]
            data = b"".join(sample_array(self._store, part) for part in parts)
            dtype = masters[0][1].dtype
            if not rounds_to(data, dtype, weights.data, weights.dtype):
                return False
        return True


def _read_samples(
    store: ReadStore, model: Catalog, key: str, pieces: Sequence[ShardPiece], shape: Shape
) -> Iterator[_WeightSample]:
    """Yield samples from the beginning and the end of each region of a shard."""
    strides = c_strides(shape)
    fragments = model.fragments(key)
    for piece in pieces:
        for is_end in (False, True):
            weights = _find_weights(fragments, piece.box, is_end=is_end)
            if weights is None:
                continue

            # Element number of the first weight in the flattened shard.
            part, index = weights
            local = (
                at + i - first
                for at, i, first in zip(piece.at, index, piece.box.offset, strict=True)
            )
            start = sum(i * stride for i, stride in zip(local, strides, strict=True))
            yield _WeightSample(start, prod(part.shape), part.dtype, sample_array(store, part))


def _find_weights(
    fragments: Sequence[Fragment], box: Box, *, is_end: bool
) -> tuple[StoredArray, Shape] | None:
    """Return up to ``RUN`` consecutive weights of a box, and the index of the first one.

    They are from the box's first or last row. None if no dense fragment has them.
    """
    if box.is_empty:
        return None
    n = min(box.shape[-1], RUN) if box.shape else 1
    shape = (1,) * len(box.shape[:-1]) + (n,) * len(box.shape[-1:])
    if is_end:
        offset = tuple(end - extent for end, extent in zip(box.end, shape, strict=True))
    else:
        offset = box.offset
    wanted = Box(offset, shape)

    # Only dense fragments can be read directly; the sample may be missing from others.
    for fragment in fragments:
        common = fragment.box.intersect(wanted)
        array = fragment.array
        if common is None or array is None or not _is_dense(array):
            continue

        # The array may have more axes than the tensor (a stack of layers), which come first.
        n_more = len(array.shape) - len(common.offset)
        steps = (i - first for i, first in zip(common.offset, fragment.box.offset, strict=True))
        at = list(fragment.at)
        for axis, step in enumerate(steps, start=n_more):
            if axis >= 0:
                at[axis] += step
        start = sum(i * stride for i, stride in zip(at, c_strides(array.shape), strict=True))
        return narrow_array(array, start, (common.n_elements,)), common.offset
    return None


def _is_dense(array: StoredArray) -> bool:
    extent = array.extent
    return extent.encoding is None and extent.strides in (None, c_strides(array.shape))
