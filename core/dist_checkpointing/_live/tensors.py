"""Tensors in memory as a format: a catalog of a process's parts of global tensors.

::

    global tensor ── box: the chunk that this process has
                      └── flat: elements [start, stop) of the flattened chunk, if it has only these
                           └── memory: the bytes of the elements; strides if not in C order

The engine reads (``live_source``) and writes (``live_target``) them as it does files: each live
tensor is a file of a ``MemoryStore`` and holds one array per box. Nothing here needs torch: memory
is a memoryview.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from core.arrays.box import Box, Shape, boxes_of_flat_range, is_c_contiguous
from core.arrays.dtypes import itemsize
from core.engine.catalog.catalog import Catalog, TargetCatalog
from core.engine.catalog.file_image import FileImage, PlacedArray
from core.engine.catalog.stored import Extent, PlannedArray, StoredArray
from core.engine.catalog.tensor import Fragment, TargetFragment, Tensor, bind_argument, whole_tensor
from core.errors import UsageError
from core.files.store import MemoryStore
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region of a global tensor that a process holds; without data, to be exchanged.

    Args:
        key: the tensor.
        dtype: canonical dtype name.
        shape: global shape, in elements.
        box: the region, in elements.
        flat: elements [start, stop) of the flattened region, in C order, that the process holds;
            None for all of them.
        flexible: the global shape may differ from that in a checkpoint (``allow_shape_mismatch``).
    """

    key: str
    dtype: str
    shape: Shape
    box: Box
    flat: tuple[int, int] | None = None
    flexible: bool = False

    @property
    def n_elements(self) -> int:
        """Number of elements that the process holds."""
        return self.box.n_elements if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def n_bytes(self) -> int:
        """Number of bytes of the held elements, stored densely."""
        return self.n_elements * itemsize(self.dtype)

    def runs(self) -> list[tuple[int, Box]]:
        """Return the held elements as boxes of the global tensor, in C order.

        Returns:
            Pairs of the number of elements in earlier boxes, and the box.
        """
        if self.flat is None:
            return [(0, self.box)]
        # A flat range can begin and end within a row, so it takes several boxes.
        runs = []
        before = 0
        for box in boxes_of_flat_range(self.box.shape, *self.flat):
            runs.append((before, box.shift(self.box.offset)))
            before += box.n_elements
        return runs


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A chunk and the memory that holds it.

    Args:
        chunk: the elements that the memory holds.
        memory: bytes, from the first element to the end of the last one.
        strides: elements per axis of the chunk's box; None for C order, as for every flat range.
    """

    chunk: Chunk
    memory: memoryview
    strides: Shape | None = None

    @property
    def is_dense(self) -> bool:
        """True if the elements are stored in C order without gaps."""
        return self.strides is None or is_c_contiguous(self.chunk.box.shape, self.strides)


def live_source(
    tensors: Sequence[LiveTensor], streams: Sequence[tuple[str, bytes]] = ()
) -> tuple[Catalog, MemoryStore]:
    """Return the catalog of a process's tensors and a store that reads their memory.

    Args:
        tensors: chunks and their memory; chunks with the same key may be replicas of each other.
        streams: (key, bytes) of serialized objects, which become hidden tensors.

    Raises:
        UsageError: two chunks of one key disagree on dtype or shape.
    """
    files: dict[str, memoryview] = {}
    fragments: dict[str, list[Fragment]] = {}
    # Each tensor is a file, and each of its boxes an array in that file. Strides apply only to a
    # chunk that is a single box, as flat ranges are dense.
    for number, tensor in enumerate(tensors):
        chunk, file = tensor.chunk, str(number)
        files[file] = tensor.memory
        for before, box in chunk.runs():
            extent = Extent(
                file, before * itemsize(chunk.dtype), None if tensor.is_dense else tensor.strides
            )
            array = StoredArray(f"{file}+{before}", chunk.dtype, box.shape, extent)
            fragments.setdefault(chunk.key, []).append(Fragment(box, array, (0,) * box.rank))
    # Objects are files too. The catalog lists them as hidden, because they are not model tensors.
    hidden = {}
    for key, data in streams:
        files[f"stream {key}"] = memoryview(data)
        array = StoredArray(f"stream {key}", "uint8", (len(data),), Extent(f"stream {key}", 0))
        hidden[key] = whole_tensor(array)
    catalog = Catalog(
        format="live",
        version=None,
        tensors=_with_fragments(metas_of_chunks(tensor.chunk for tensor in tensors), fragments),
        hidden=hidden,
    )
    return catalog, MemoryStore(files)


def live_target(
    tensors: Sequence[LiveTensor],
) -> tuple[TargetCatalog, list[FileImage], MemoryStore]:
    """Return the target catalog, file layouts and store for filling tensors in memory.

    Args:
        tensors: dense tensors to fill.

    Raises:
        UsageError: two chunks of one key disagree on dtype or shape.
    """
    files: dict[str, memoryview] = {}
    fragments: dict[str, list[TargetFragment]] = {}
    images = []
    # As in ``live_source``: each tensor is a file. Its boxes follow each other without gaps.
    for number, tensor in enumerate(tensors):
        assert tensor.is_dense, "a strided tensor is filled through a dense copy"
        chunk, file = tensor.chunk, str(number)
        files[file] = tensor.memory
        placed = []
        for before, box in chunk.runs():
            array = PlannedArray(f"{file}+{before}", chunk.dtype, box.shape)
            placed.append(PlacedArray(before * itemsize(chunk.dtype), array))
            fragments.setdefault(chunk.key, []).append(Fragment(box, array, (0,) * box.rank))
        images.append(FileImage(file, chunk.n_bytes, placed))
    catalog: TargetCatalog = Catalog(
        format="live",
        version=None,
        tensors=_with_fragments(metas_of_chunks(tensor.chunk for tensor in tensors), fragments),
    )
    return catalog, images, MemoryStore(files)


def _with_fragments(
    tensors: Mapping[str, Tensor[Any]], fragments: Mapping[str, Sequence[Fragment[Any]]]
) -> dict[str, Tensor[Any]]:
    """Return tensors with their fragments; a tensor without a key among them has none."""
    return {
        key: replace(tensor, tiling=bind_argument(tuple, fragments.get(key, ())))
        for key, tensor in tensors.items()
    }


def metas_of_chunks(chunks: Iterable[Chunk]) -> dict[str, Tensor[Any]]:
    """Return the global tensors that the chunks belong to, by key, in order of first occurrence.

    Raises:
        UsageError: two chunks of one key disagree on dtype or shape.
    """
    tensors: dict[str, Tensor[Any]] = {}
    for chunk in chunks:
        tensor = tensors.get(chunk.key)
        if tensor is None:
            tensors[chunk.key] = Tensor(chunk.dtype, chunk.shape, flexible=chunk.flexible)
        elif (tensor.dtype, tensor.shape) != (chunk.dtype, chunk.shape):
            raise UsageError(
                "shards of this tensor have different dtypes or global shapes: "
                f"{tensor.dtype} {tensor.shape} and {chunk.dtype} {chunk.shape}",
                key=chunk.key,
                hint="use a different key for each dtype and global shape",
            )
    return tensors
