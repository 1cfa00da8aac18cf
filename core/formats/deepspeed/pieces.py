"""Parameters that lie in pieces of flat tensors, and their fragments.

ZeRO concatenates flattened parameters and cuts the result among ranks without regard to rows. A
range of flat elements is up to ``2 * rank - 1`` boxes of the parameter (``core.arrays.box``), each
of which is a dense array of its own in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape, boxes_of_flat_range, full_box
from core.arrays.dtypes import itemsize
from core.catalog.catalog import Fragment
from core.catalog.stored import Extent, StoredArray

if TYPE_CHECKING:
    from core.formats.deepspeed.partition import Partition


@dataclass(frozen=True, slots=True)
class PartitionPiece:
    """Elements [start, start + n) of a flattened tensor, which lie in an array from element ``at``
    on.

    Args:
        array: has one axis and no gaps.
    """

    array: StoredArray
    at: int
    start: int
    n: int


@dataclass(frozen=True, slots=True)
class UnkeyedTensor:
    """A tensor of the catalog, before it has a key.

    Args:
        dtype, shape: dtype and shape of the tensor.
        fragments: returns the fragments for a key.
    """

    dtype: str
    shape: Shape
    fragments: Callable[[str], Sequence[Fragment]]


def tensor_of_array(array: StoredArray) -> UnkeyedTensor:
    """Return a tensor that is one stored array."""

    def fragments(key: str) -> Sequence[Fragment]:
        return (Fragment(key, full_box(array.shape), array, (0,) * len(array.shape)),)

    return UnkeyedTensor(array.dtype, array.shape, fragments)


def tensor_of_pieces(
    dtype: str, shape: Shape, pieces: Callable[[], Iterable[PartitionPiece]]
) -> UnkeyedTensor:
    """Return a tensor that lies in pieces of flat arrays."""

    def fragments(key: str) -> Sequence[Fragment]:
        return tuple(
            fragment for piece in pieces() for fragment in fragments_of_piece(key, shape, piece)
        )

    return UnkeyedTensor(dtype, shape, fragments)


def tensor_in_groups(
    partition: Partition, name: str, shape: Shape, flat: Sequence[Sequence[StoredArray]]
) -> UnkeyedTensor:
    """Return a parameter, or a state of it, that lies in the flat groups of all ranks.

    Args:
        flat: rank → flat group → array.
    """

    def pieces() -> Iterator[PartitionPiece]:
        for run in partition.runs(name):
            yield PartitionPiece(flat[run.rank][run.group], run.at, run.start, run.n)

    groups = partition.groups_of(name)
    return tensor_of_pieces(flat[0][groups[0] if groups else 0].dtype, shape, pieces)


def fragments_of_piece(key: str, shape: Shape, piece: PartitionPiece) -> list[Fragment]:
    """Return the fragments of one range of flat elements, in C order."""
    extent = piece.array.extent
    assert extent.strides is None and len(piece.array.shape) == 1
    size = itemsize(piece.array.dtype)
    position = piece.at
    fragments = []
    for box in boxes_of_flat_range(shape, piece.start, piece.start + piece.n):
        box_extent = Extent(extent.file, extent.offset + position * size)
        array = replace(
            piece.array,
            name=f"{piece.array.name}[{position}:{position + box.n_elements}]",
            shape=box.shape,
            extent=box_extent,
        )
        fragments.append(Fragment(key, box, array, (0,) * len(box.shape)))
        position += box.n_elements
    return fragments


def reshaped(array: StoredArray, shape: Shape) -> StoredArray:
    """Return the same elements with another shape; the array has no gaps and as many elements."""
    assert array.extent.strides is None and prod(shape) == prod(array.shape)
    return replace(array, shape=shape)
