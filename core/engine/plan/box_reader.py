"""Read boxes of a checkpoint's tensors as dense bytes, wherever and however they are stored.

::

    key, box ── match ──▶ fragments that meet it ────┬── consecutive in file and buffer:
                                                     │     one read, into the buffer
                                                     ├── long rows: one vectored read
                                                     └── anything else: read as a block, then
                                                           copied (``core.arrays.gather``)

Of several replicas the first is read. Memory is the caller's two buffers, and a bounded cache of
decoded units for arrays that are compressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from core.arrays.box import Box, Shape, full_box
from core.arrays.coverage import BoxIndex
from core.arrays.dtypes import itemsize
from core.arrays.gather import (
    StridedLayout,
    copy_box,
    dense_layout,
    inner_run,
    is_dense,
    list_addresses,
    read_box,
)
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DEFAULT_CACHE_BYTES, DecodedStore, decoding_bytes
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import Fragment, Tensor, whole_tensor
from core.engine.plan.addresses import Source, source_in
from core.engine.plan.bands import cut_rows, row_bands
from core.engine.plan.match import match
from core.engine.plan.memory import DECODER_BYTES
from core.errors import in_checkpoint
from core.files.store import ReadStore
from core.values import dataclass

_MIN_VECTOR_BYTES = 16 << 10
"""Shorter rows are cheaper to copy in memory than to pass to the kernel one by one."""
_FEW = 8
"""Number of fragments up to which a linear search is faster than an index."""


def bands(shape: Shape, size: int, band_bytes: int) -> Iterator[Box]:
    """Yield boxes that tile a tensor in C order, each consecutive in its dense form.

    Args:
        shape: shape of the tensor, in elements.
        size: bytes per element.
        band_bytes: maximum size of a box, unless one element is longer.
    """
    if 0 not in shape:
        yield from row_bands(full_box(shape), *cut_rows(shape, size, band_bytes))


class BoxReader:
    """Access to the tensors of one checkpoint.

    Args:
        catalog: the checkpoint's metadata.
        store: the checkpoint's files.
        cache_bytes: maximum size of the cached decoded units.
    """

    def __init__(
        self, catalog: Catalog, store: ReadStore, *, cache_bytes: int = DEFAULT_CACHE_BYTES
    ) -> None:
        self._catalog = catalog
        self._store = DecodedStore(store, cache_bytes=cache_bytes)

    def tensor(self, key: str) -> TensorReader:
        """Return access to one tensor, visible or hidden, whose fragments are proven to cover it.

        Raises:
            KeyError: the checkpoint has no such tensor.
            MissingShardError: a part of the tensor is missing.
            CorruptError, UnsupportedError: the fragments of the tensor contradict each other.
        """
        # Match the checkpoint with a target that is the dense tensor in memory.
        tensor = self._catalog.tensor(key)
        array = PlannedArray(f"dense:{key}", tensor.dtype, tensor.shape)
        with in_checkpoint(self._store.label):
            work = match(key, tensor, whole_tensor(array))
            fragments = [
                _AddressedFragment(box, self._source(key, fragment, box))
                for box, fragment in work.pieces
            ]
        return TensorReader(self._store, work.dtype, tensor.shape, fragments)

    def _source(self, key: str, fragment: Fragment, box: Box) -> Source:
        """Return the addresses of a part of a fragment."""
        if fragment.array is None:
            return Source(None, 0, (0,) * box.rank)
        return source_in(key, self._store.placed(fragment.array.locate(self._store)), fragment, box)


@dataclass(frozen=True, slots=True)
class _AddressedFragment:
    """A box of a tensor, and the addresses of its elements."""

    box: Box
    source: Source


class TensorReader:
    """Access to one tensor, read box by box from any number of threads.

    Attributes:
        dtype: canonical dtype name of the bytes that are read.
        shape: shape in elements.
    """

    def __init__(
        self, store: DecodedStore, dtype: str, shape: Shape, fragments: Sequence[_AddressedFragment]
    ) -> None:
        self._store = store
        self.dtype = dtype
        self.shape = shape
        self._fragments = fragments
        self._size = itemsize(dtype)
        self._index = (
            BoxIndex([fragment.box for fragment in fragments]) if len(fragments) > _FEW else None
        )

    def expect(self) -> None:
        """Announce that the tensor will be read once, band by band."""
        ranges = []
        for fragment in self._fragments:
            shape, source = fragment.box.shape, fragment.source
            # Of scattered elements, the bytes between them are not wanted.
            if source.file is not None and is_dense(shape, self._size, source.strides):
                n_bytes = prod(shape) * self._size
                ranges.append((source.file, source.start, source.start + n_bytes))
        self._store.expect_ranges(ranges)

    def read(self, box: Box, out: memoryview, raw: memoryview) -> None:
        """Fill a buffer with the elements of a box in C order.

        Args:
            box: a box inside the tensor.
            out: a buffer of the box's size.
            raw: scratch space; the larger it is, the fewer reads scattered elements need.

        Raises:
            TruncatedError, MissingShardError, StorageError: a file is too short, missing or
                unreadable.
            CorruptError: an encoded array cannot be decoded.
        """
        target = dense_layout(box.shape, self._size)
        for fragment, common in self._meeting(box):
            # Address of the common box in the file, and in the buffer.
            delta = [a - b for a, b in zip(common.offset, fragment.box.offset, strict=True)]
            source = StridedLayout(fragment.source.at(delta), fragment.source.strides)
            position = sum(
                (a - b) * step
                for a, b, step in zip(common.offset, box.offset, target.strides, strict=True)
            )
            with in_checkpoint(self._store.label):
                self._fill(
                    fragment.source.file,
                    source,
                    out,
                    StridedLayout(position, target.strides),
                    common.shape,
                    raw,
                )

    def _meeting(self, box: Box) -> Iterator[tuple[_AddressedFragment, Box]]:
        """Yield the fragments that meet a box, each with the common box."""
        if self._index is not None:
            yield from (
                (self._fragments[number], common) for number, common in self._index.meeting(box)
            )
            return
        for fragment in self._fragments:
            common = fragment.box.intersect(box)
            if common is not None:
                yield fragment, common

    def _fill(
        self,
        file: str | None,
        source: StridedLayout,
        out: memoryview,
        target: StridedLayout,
        shape: Shape,
        raw: memoryview,
    ) -> None:
        """Read one part of a box into its position in the buffer."""
        # Zeros by rule are not in any file.
        if file is None:
            n_axes, n_bytes = inner_run(shape, self._size, target)
            zeros = bytes(n_bytes)
            for (start,) in list_addresses(shape[:n_axes], target):
                out[start : start + n_bytes] = zeros
            return

        # A part that is consecutive on both sides takes one read.
        n_axes, n_bytes = inner_run(shape, self._size, source, target)
        if n_axes == 0:
            self._store.read_into(file, source.start, out[target.start : target.start + n_bytes])
            return

        # A part that is consecutive in the file is read into its rows, or via the scratch space.
        total = prod(shape) * self._size
        if inner_run(shape, self._size, source)[0] == 0:
            if n_bytes >= _MIN_VECTOR_BYTES:
                rows = [
                    out[start : start + n_bytes]
                    for (start,) in list_addresses(shape[:n_axes], target)
                ]
                self._store.read_vector(file, source.start, rows, total)
                return
            if total <= len(raw):
                self._store.read_into(file, source.start, raw[:total])
                copy_box(
                    raw,
                    StridedLayout(0, source.strides),
                    out,
                    target,
                    shape=shape,
                    itemsize=self._size,
                )
                return

        # Everything else is gathered from as few reads as the scratch space allows.
        read_box(
            lambda address, buffer: self._store.read_into(file, address, buffer),
            source,
            out,
            target,
            shape=shape,
            itemsize=self._size,
            raw=raw,
        )


@dataclass(frozen=True, slots=True)
class ThreadFit:
    """The reading threads that fit into a memory.

    Args:
        n_threads: their number; 0 if not even one fits.
        cache_bytes: the size of each reader's cache; 0 if nothing is encoded.
        decoder_bytes: memory of the decoders, whatever the number of threads.
        thread_bytes: memory of a thread and the units that it decodes.
    """

    n_threads: int
    cache_bytes: int
    decoder_bytes: int
    thread_bytes: int

    def needed_bytes(self, n_threads: int) -> int:
        """Return the memory that a number of threads needs."""
        return self.decoder_bytes + n_threads * self.thread_bytes


def fit_threads(
    tensors: Iterable[Tensor],
    threads: int,
    memory_bytes: int,
    *,
    thread_bytes: int,
    n_readers: int = 1,
) -> ThreadFit:
    """Reduce a number of reading threads until they fit into the memory.

    Args:
        tensors: what they read; the largest unit of it (zarr chunk, deflated record) counts.
        threads: the number of threads that is wanted.
        memory_bytes: memory for threads, decoders and the caches of decoded units.
        thread_bytes: memory of a thread without the units that it decodes.
        n_readers: number of readers that a thread reads with; each has a cache of its own.
    """
    unit_bytes = max((decoding_bytes(tensor.fragments()) for tensor in tensors), default=0)
    decoder_bytes = DECODER_BYTES if unit_bytes else 0
    thread_bytes += n_readers * unit_bytes
    n_threads = max(0, min(threads, (memory_bytes - decoder_bytes) // thread_bytes))
    spare_bytes = memory_bytes - decoder_bytes - n_threads * thread_bytes
    cache_bytes = min(DEFAULT_CACHE_BYTES, spare_bytes // n_readers) if unit_bytes else 0
    return ThreadFit(n_threads, max(0, cache_bytes), decoder_bytes, thread_bytes)
