"""A store that serves encoded arrays as files of dense bytes, in addition to the source's files.

Decoded units are cached; the least recently used units are dropped first. Row bands of a tensor are
read in order, so each unit is decoded once as long as adjacent units fit in the cache. An encoding
that reads encoded arrays itself (``core.engine.quantize.source``) gets this store, so that all
share one cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.box import c_strides
from core.engine.catalog.stored import (
    Extent,
    StoredArray,
    stored_bytes_of,
    strides_with_axes,
    without_axes,
)
from core.engine.catalog.tensor import Fragment
from core.engine.device.device import Device
from core.errors import CorruptError
from core.files.store import ReadStore

if TYPE_CHECKING:
    from core.engine.catalog.stored import Encoding
    from core.files.ranges import FileRange

DEFAULT_CACHE_BYTES = 64 << 20


class DecodedStore(ReadStore):
    """A read store that also serves encoded arrays.

    Args:
        store: the source's files.
        cache_bytes: maximum size of the cached units; one unit per reader is kept in any case.
        device: the device for encodings that compute, or None for the CPU.
    """

    def __init__(
        self,
        store: ReadStore,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        device: Device | None = None,
    ) -> None:
        self.device = device
        self.is_remote = store.is_remote
        self._store = store
        self._cache_bytes = cache_bytes
        self._units: OrderedDict[tuple[str, int], _Unit] = OrderedDict()
        self._expected: set[str] = set()
        """Names of the arrays whose encoded bytes are announced."""
        self._n_bytes = 0
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """Label of the source."""
        return self._store.label

    @property
    def entry(self) -> str | None:
        """File that is the source, or None if the source is a directory."""
        return self._store.entry

    def placed(self, array: StoredArray) -> StoredArray:
        """Return the array as plain bytes: unchanged, or as a decoded file of this store."""
        extent = array.extent
        if extent.encoding is None:
            return array
        # The decoded bytes have the axes of the stored array, a view of it another order of them.
        decoded = without_axes(array)
        axes = extent.axes
        strides = None if axes is None else strides_with_axes(c_strides(decoded.shape), axes)
        return replace(array, extent=Extent(_ArrayName(decoded), 0, strides))

    def files(self, under: str = "") -> list[str]:
        """Return the files of the source; decoded arrays are not listed."""
        return self._store.files(under)

    def folders(self, under: str = "") -> list[str]:
        """Return the folders of the source."""
        return self._store.folders(under)

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """Return the sizes of the source's files; decoded arrays are not listed."""
        return self._store.sizes(under)

    def exists(self, name: str) -> bool:
        """Return whether a file or a decoded array exists."""
        return isinstance(name, _ArrayName) or self._store.exists(name)

    def size(self, name: str) -> int:
        """Return the size of a file or of a decoded array, in bytes."""
        return name.array.n_bytes if isinstance(name, _ArrayName) else self._store.size(name)

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """Return bytes of a file or of a decoded array."""
        if not isinstance(name, _ArrayName):
            return self._store.read(name, offset, n_bytes)
        buffer = bytearray(n_bytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Read bytes of a file or of a decoded array into a buffer.

        Raises:
            CorruptError: an array decodes to a wrong length, or the span ends after the array.
            CheckpointingException: any error of the store or the encoding.
        """
        if not isinstance(name, _ArrayName):
            self._store.read_into(name, offset, buffer)
            return
        encoding = _encoding_of(name.array)
        n_done = 0
        while n_done < len(buffer):
            number, start = divmod(offset + n_done, encoding.unit_bytes)
            unit = self._unit(name, number)
            n_bytes = min(len(unit) - start, len(buffer) - n_done)
            if n_bytes <= 0:
                raise CorruptError(
                    f"the {encoding.name} data ends early, at byte {offset + n_done} of the array",
                    file=name,
                )
            buffer[n_done : n_done + n_bytes] = unit[start : start + n_bytes]
            n_done += n_bytes

    def expect_ranges(self, ranges: Iterable[FileRange]) -> None:
        """Announce ranges that will be read soon; of a decoded array, its encoded bytes."""
        self._store.expect_ranges(self._ranges_of_files(ranges))

    def _ranges_of_files(self, ranges: Iterable[FileRange]) -> Iterator[FileRange]:
        """Yield ranges of files for ranges of files and of decoded arrays."""
        for name, start, stop in ranges:
            if not isinstance(name, _ArrayName):
                yield name, start, stop
                continue
            encoding, extent = _encoding_of(name.array), name.array.extent
            n_bytes = stored_bytes_of(encoding)
            # An encoding with several units reads by itself what it needs.
            if n_bytes is None or encoding.unit_bytes < name.array.n_bytes:
                continue
            # The unit is read once, however many ranges of it are announced.
            with self._lock:
                is_new = name not in self._expected and (name, 0) not in self._units
                self._expected.add(name)
            if is_new:
                yield extent.file, extent.offset, extent.offset + n_bytes

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of several spans of a file or of a decoded array."""
        return [self.read(name, offset, n_bytes) for offset, n_bytes in spans]

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """Read consecutive bytes of a file or of a decoded array into several buffers."""
        if not isinstance(name, _ArrayName):
            self._store.read_vector(name, offset, buffers, n_bytes)
            return
        for buffer in buffers:
            self.read_into(name, offset, buffer)
            offset += len(buffer)

    def _unit(self, name: _ArrayName, number: int) -> memoryview:
        """Return the bytes of a unit, which the first thread to need it decodes."""
        # A plain string as key, because ``name`` would keep the array alive.
        key = (str(name), number)
        with self._lock:
            unit = self._units.get(key)
            if unit is None:
                unit = self._units[key] = _Unit()
            self._units.move_to_end(key)
        # Other threads that need the unit wait for its own lock; all other units stay available.
        with unit.lock:
            data = unit.data
            if data is not None:
                return data
            self._expected.discard(name)
            try:
                data = memoryview(self._decode(name.array, number)).toreadonly().cast("B")
            except BaseException:
                # The next thread to need the unit tries again.
                with self._lock:
                    self._units.pop(key, None)
                raise
            unit.data = data
        # Count the unit, unless another thread has dropped it meanwhile.
        with self._lock:
            if self._units.get(key) is unit:
                self._n_bytes += len(data)
            self._make_room(keep=key)
        return data

    def _decode(self, array: StoredArray, number: int) -> bytes | memoryview:
        """Decode a unit.

        Raises:
            CorruptError: the unit decodes to a wrong length.
        """
        encoding = _encoding_of(array)
        data = encoding.decode(self, array, number)
        expected = min(encoding.unit_bytes, array.n_bytes - number * encoding.unit_bytes)
        n_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
        if n_bytes != expected:
            raise CorruptError(
                f"the {encoding.name} data of array {array.name!r} decodes to {n_bytes:,} bytes"
                f" instead of {expected:,}",
                file=array.extent.file,
            )
        return data

    def _make_room(self, *, keep: tuple[str, int]) -> None:
        """Drop units, least recently used first, until the others fit in the cache.

        The caller holds the lock.

        Args:
            keep: key of the unit that is in use.
        """
        while self._n_bytes > self._cache_bytes:
            oldest = next(
                (key for key, unit in self._units.items() if key != keep and unit.data is not None),
                None,
            )
            if oldest is None:
                return
            data = self._units.pop(oldest).data
            assert data is not None
            self._n_bytes -= len(data)


def is_decoded(file: str) -> bool:
    """Return whether a name is that of a decoded array."""
    return isinstance(file, _ArrayName)


def find_device(store: ReadStore) -> Device | None:
    """Return the device on which a store's encodings compute, or None for the CPU."""
    return store.device if isinstance(store, DecodedStore) else None


class _ArrayName(str):
    """The name of an encoded array's file.

    The name holds the array, so that the store need not keep a list of all arrays.

    Attributes:
        array: the encoded array.
    """

    __slots__ = ("array",)

    array: StoredArray

    def __new__(cls, array: StoredArray) -> _ArrayName:
        extent = array.extent
        # Several arrays of one name may be in one file (replicas, and an array that is computed
        # from another of the same name), so the name contains encoding and offset.
        name = super().__new__(
            cls, f"{extent.file}#{_encoding_of(array).name}@{extent.offset}#{array.name}"
        )
        name.array = array
        return name


class _Unit:
    """A decoded unit, or one that a thread is decoding."""

    __slots__ = ("data", "lock")

    def __init__(self) -> None:
        self.data: memoryview | None = None
        self.lock = threading.Lock()


def _encoding_of(array: StoredArray) -> Encoding:
    """Return the encoding of an array that is known to be encoded."""
    assert array.extent.encoding is not None
    return array.extent.encoding


def decoding_bytes(fragments: Iterable[Fragment]) -> int:
    """Return the maximum memory for decoding one unit, the unit included; 0 without encodings."""
    n_bytes = 0
    for fragment in fragments:
        encoding = None if fragment.array is None else fragment.array.extent.encoding
        if fragment.array is not None and encoding is not None:
            unit = min(encoding.unit_bytes, fragment.array.n_bytes)
            n_bytes = max(n_bytes, unit + encoding.working_bytes)
    return n_bytes
