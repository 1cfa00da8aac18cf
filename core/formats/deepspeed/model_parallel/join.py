"""Tensors that are joined from the shards of tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape
from core.engine.catalog.tensor import Fragment, Tensor
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class TensorParallelPiece:
    """A box of a shard, and its position in the parameter.

    Args:
        tp_rank: tensor-parallel rank of the shard.
        box: region of the shard, in elements.
        to: index of the region's first element in the parameter.
    """

    tp_rank: int
    box: Box
    to: Shape


def join_shards(
    shards: Sequence[Tensor], shape: Shape, pieces: Sequence[TensorParallelPiece]
) -> Tensor:
    """Return the tensor that consists of pieces of shards.

    Args:
        shards: by tensor-parallel rank.
        shape: shape of the result.
        pieces: disjoint in the result, which they cover.
    """

    def fragments() -> Sequence[Fragment]:
        parts = []
        for piece in pieces:
            delta = [to - start for to, start in zip(piece.to, piece.box.offset, strict=True)]
            for fragment in shards[piece.tp_rank].fragments():
                box = fragment.box.intersect(piece.box)
                if box is None or box.is_empty:
                    continue
                at = tuple(
                    first + start - old
                    for first, start, old in zip(
                        fragment.at, box.offset, fragment.box.offset, strict=True
                    )
                )
                parts.append(Fragment(box.shift(delta), fragment.array, at))
        return parts

    return Tensor(shards[0].dtype, shape, fragments)


def begin_alike(store: ReadStore, tensors: Sequence[Tensor], most_bytes: int) -> bool:
    """Return whether tensors have the same first bytes, as they are stored.

    It tells ranks of different checkpoints apart while one is opened, at little cost.

    Args:
        tensors: of one shape, each as its flat elements in order.
        most_bytes: bytes to compare.
    """
    if any((other.dtype, other.shape) != (tensors[0].dtype, tensors[0].shape) for other in tensors):
        return False
    first = _first_bytes(store, tensors[0], most_bytes)
    return all(_first_bytes(store, other, most_bytes) == first for other in tensors[1:])


def _first_bytes(store: ReadStore, tensor: Tensor, most_bytes: int) -> bytes:
    """Read the first bytes of a tensor whose fragments are dense and in order, replicas last."""
    data, n_elements = b"", 0
    for fragment in tensor.fragments():
        array = fragment.array
        if array is None or len(data) >= most_bytes or n_elements >= prod(tensor.shape):
            break
        n_elements += fragment.box.n_elements
        # A 16-bit array that is read as float32 has half as many bytes.
        n_bytes = array.n_bytes if array.extent.encoding is None else array.n_bytes // 2
        n_bytes = min(n_bytes, most_bytes - len(data))
        data += store.read(array.extent.file, array.extent.offset, n_bytes)
    return data
