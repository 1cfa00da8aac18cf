"""Read arrays separately from their files: strided ones band by band, encoded ones unit by unit."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import xxhash

from core.arrays.box import c_strides
from core.arrays.checksum import RunSum
from core.arrays.dtypes import itemsize
from core.arrays.gather import StridedLayout, dense_layout, read_box
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.stored import has_checksum
from core.engine.scan.sums import Sum, WantedSums
from core.engine.scan.windows import WINDOW_BYTES, SeparateArray
from core.errors import CapacityError, CorruptError, UnsupportedError

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

BAND_BYTES = 4 << 20
_CACHE_BYTES = 16 << 20
_MAX_REPEATS = 64
"""Maximum number of times that an array may repeat its stored bytes, as expanded tensors do."""
_MIB = 1 << 20

Feed = Callable[[int, memoryview], None]
"""Receives a run of elements: the index of the first in C order, and the elements."""


class MemoryBudget:
    """Amount of memory that threads share.

    Args:
        n_bytes: maximum bytes in use at once.
    """

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._free_bytes = n_bytes
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, n_bytes: int, array: StoredArray) -> Iterator[None]:
        """Wait until this many bytes are free, and reserve them for the block.

        Raises:
            CapacityError: the complete budget is smaller.
        """
        # A request above the budget would wait forever.
        if n_bytes > self._n_bytes:
            raise CapacityError(
                f"reading this array needs {n_bytes / _MIB:,.1f} MiB of memory, "
                f"but the limit is {self._n_bytes / _MIB:,.1f} MiB",
                key=array.name,
                file=array.extent.file,
                hint="raise the memory limit (--memory)",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._free_bytes >= n_bytes)
            self._free_bytes -= n_bytes
        try:
            yield
        finally:
            with self._changed:
                self._free_bytes += n_bytes
                self._changed.notify_all()


class SeparateReader:
    """Reader of separate arrays, with the buffers of one thread.

    Args:
        store: the files.
        budget: memory for decoding, shared by all threads.
        is_stopped: called between runs; True if the scan has been stopped.
    """

    def __init__(
        self, store: ReadStore, budget: MemoryBudget, *, is_stopped: Callable[[], bool]
    ) -> None:
        self._store = store
        self._budget = budget
        self._is_stopped = is_stopped
        self._band: memoryview | None = None
        self._raw: memoryview | None = None

    def read(self, separate: SeparateArray, feed: Feed, wanted: WantedSums) -> Sum | None:
        """Pass on all elements of an array, in order.

        Returns:
            The sums of the array's dense bytes; None if the scan was stopped.

        Raises:
            CheckpointingException: the array cannot be read.
        """
        array = separate.bound
        size = itemsize(array.dtype)
        run = RunSum(0, array.n_bytes, crc=wanted.crc, digest=wanted.has_digest(array))
        # Bands and units consist of complete elements; observers get them in smaller runs.
        blocks = self._bands(array) if array.extent.encoding is None else self._units(array)
        for block in blocks:
            for start in range(0, len(block), WINDOW_BYTES):
                if self._is_stopped():
                    return None
                data = block[start : start + WINDOW_BYTES]
                feed(run.n_bytes // size, data)
                run.feed(data)
        digest = (
            xxhash.xxh3_128_hexdigest(b"".join(run.blocks)) if wanted.has_digest(array) else None
        )
        return Sum(run.n_bytes, run.crc if wanted.crc else None, digest)

    def _units(self, array: StoredArray) -> Iterator[memoryview]:
        """Yield the decoded units of an encoded array."""
        extent = array.extent
        assert extent.encoding is not None
        encoding = extent.encoding

        # Observers receive complete elements, so that every unit must contain complete elements.
        if encoding.unit_bytes < array.n_bytes and encoding.unit_bytes % itemsize(array.dtype):
            raise UnsupportedError(
                f"the {encoding.name} data's chunk size is not a multiple of the element size",
                file=extent.file,
                key=array.name,
            )

        # Threads wait here until a unit and its decoding fit into the shared memory.
        with self._budget.reserve(
            min(encoding.unit_bytes, array.n_bytes) + encoding.working_bytes, array
        ):
            store = DecodedStore(self._store, cache_bytes=_CACHE_BYTES)
            for number in range(-(-array.n_bytes // encoding.unit_bytes)):
                data = memoryview(encoding.decode(store, array, number)).cast("B")
                n_bytes = min(encoding.unit_bytes, array.n_bytes - number * encoding.unit_bytes)
                if len(data) != n_bytes:
                    raise CorruptError(
                        f"the {encoding.name} data decodes to {len(data)} bytes instead of "
                        f"{n_bytes}",
                        file=extent.file,
                        key=array.name,
                    )
                yield data

    def _bands(self, array: StoredArray) -> Iterator[memoryview]:
        """Yield the elements of a strided array, gathered in bands in C order."""
        extent = array.extent
        size = itemsize(array.dtype)
        strides = tuple(step * size for step in extent.strides or c_strides(array.shape))

        # Strides of 0 repeat elements; a few stored bytes must not become endless work.
        stored = size + sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
        if array.n_bytes > _MAX_REPEATS * stored + BAND_BYTES:
            raise CapacityError(
                f"the array's strides expand {stored:,} stored bytes to {array.n_bytes:,} bytes",
                file=extent.file,
                key=array.name,
            )

        # The buffers are allocated for the first strided array: most checkpoints have none.
        if self._band is None or self._raw is None:
            self._band, self._raw = (memoryview(mmap.mmap(-1, BAND_BYTES)) for _ in range(2))
        for index, shape in split_into_bands(array.shape, BAND_BYTES // size):
            data = self._band[: prod(shape) * size]
            read_box(
                lambda address, buffer: self._store.read_into(extent.file, address, buffer),
                StridedLayout(
                    extent.offset + sum(i * step for i, step in zip(index, strides, strict=True)),
                    strides,
                ),
                data,
                dense_layout(shape, size),
                shape=shape,
                itemsize=size,
                raw=self._raw,
            )
            yield data


def is_checked(array: StoredArray) -> bool:
    """Return whether decoding an array verifies a checksum."""
    encoding = array.extent.encoding
    return encoding is not None and has_checksum(encoding)


def split_into_bands(shape: Shape, most_elements: int) -> Iterator[tuple[Shape, Shape]]:
    """Split an array into boxes that are consecutive runs of its C order.

    Args:
        shape: shape of the array, in elements.
        most_elements: maximum elements of a box.

    Yields:
        The index of the first element, and the shape, of each box.
    """
    # Trailing axes that fit stay uncut; the axis before them is cut into runs of rows.
    axis = len(shape)
    inner = 1
    while axis > 0 and inner * shape[axis - 1] <= most_elements:
        axis -= 1
        inner *= shape[axis]
    if axis == 0:
        yield (0,) * len(shape), shape
        return
    rows = max(1, most_elements // inner)
    inner_shape = shape[axis:]
    for index in product(*map(range, shape[: axis - 1])):
        for first in range(0, shape[axis - 1], rows):
            n = min(rows, shape[axis - 1] - first)
            yield (*index, first, *(0,) * len(inner_shape)), (*(1,) * (axis - 1), n, *inner_shape)
