"""The content of DCP's ``.metadata`` as columns.

A checkpoint may have 10⁶ chunks; they are a few integer arrays here instead of as many objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import NamedTuple

from core.arrays.box import Box, Shape
from core.values import dataclass


class DcpItem(NamedTuple):
    """Position of a stored item: bytes ``[offset, offset + n_bytes)`` of a checkpoint file."""

    file: str
    offset: int
    n_bytes: int


class DcpChunk(NamedTuple):
    """Box of a tensor and the item that stores it."""

    box: Box
    item: DcpItem


class DcpTensor(NamedTuple):
    """A global tensor and the rows of its chunks.

    Attributes:
        key: DCP's fqn.
        dtype: canonical dtype name.
        shape: global shape, in elements.
        requires_grad: as recorded in the file.
        first, n_chunks: its chunks are rows ``first … first + n_chunks - 1`` of the chunk columns.
        start: index of its first number in the columns ``offsets`` and ``sizes``, which hold
            ``len(shape)`` numbers per chunk.
    """

    key: str
    dtype: str
    shape: Shape
    requires_grad: bool
    first: int
    n_chunks: int
    start: int


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The content of a ``.metadata`` file.

    Every chunk is within its tensor's shape and has an item. Whether the chunks of a tensor cover
    it without overlap is not checked. The rows of chunks are in the order of ``tensors``.

    Args:
        tensors: by key, in the order of the file.
        offsets, sizes: chunk boxes in elements, one chunk after the other.
        files: names of the item files, relative to the checkpoint.
        file_index, item_offset, item_bytes: position of each chunk's item; ``file_index`` indexes
            ``files``, offset and size are in bytes.
        objects: non-tensor entries by key, in the order of the file.
        planner_data: fqn → path (str and int elements); None if the file has none.
        mcore_data: Megatron's attribute of that name; None if the file has none.
        version: None in files written before torch 2.3.
        extras: names of other attributes, such as ``all_local_plans``.
        orphans: fqns of items that no tensor or object refers to.
        descriptors: row of a chunk → the stream transforms applied to its item, as torch lists
            them; rows of plain items are absent.
        object_descriptors: the same for objects, by key.
        raw_files: indices into ``files`` of those whose chunks are bare elements at
            ``item_offset``, not torch zips.
    """

    tensors: dict[str, DcpTensor]
    offsets: array[int]
    sizes: array[int]
    files: list[str]
    file_index: array[int]
    item_offset: array[int]
    item_bytes: array[int]
    objects: dict[str, DcpItem]
    planner_data: dict[str, tuple[str | int, ...]] | None
    mcore_data: Mapping[str, object] | None
    version: str | None
    extras: tuple[str, ...]
    orphans: tuple[str, ...]
    descriptors: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    object_descriptors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    raw_files: frozenset[int] = frozenset()

    def chunk(self, tensor: DcpTensor, number: int) -> DcpChunk:
        """Return chunk ``number`` of a tensor, 0 <= number < n_chunks."""
        rank = len(tensor.shape)
        start = tensor.start + number * rank
        box = Box(
            tuple(self.offsets[start : start + rank]), tuple(self.sizes[start : start + rank])
        )
        row = tensor.first + number
        item = DcpItem(
            self.files[self.file_index[row]], self.item_offset[row], self.item_bytes[row]
        )
        return DcpChunk(box, item)

    def chunks(self, key: str) -> Iterator[DcpChunk]:
        """Return the chunks of a tensor, in the order of the file."""
        tensor = self.tensors[key]
        return (self.chunk(tensor, number) for number in range(tensor.n_chunks))
