"""Serve encoded arrays as files of dense bytes, beside the files of the source store.

Decoded units are cached; the least recently used ones are dropped first. Row bands of a tensor come
in order, so a unit is decoded once as long as those that lie side by side fit. An encoding that
reads encoded arrays itself (``core.quantize.source``) is given this store, so that all of them
share one cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Fragment
from core.catalog.stored import Extent, StoredArray
from core.device.device import Device
from core.errors import CorruptError

if TYPE_CHECKING:
    from core.catalog.stored import Encoding
    from core.files.store import ReadStore

DEFAULT_CACHE_BYTES = 64 << 20


class DecodedStore:
    """A read store that also serves encoded arrays.

    Args:
        store: the source's files.
        cache_bytes: maximum size of the cached units; one unit per reader stays in any case.
        device: the device for encodings that compute, or None.

    Attributes:
        device: the same.
    """

    def __init__(
        self,
        store: ReadStore,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        device: Device | None = None,
    ) -> None:
        self.device = device
        self._store = store
        self._cache_bytes = cache_bytes
        self._units: OrderedDict[tuple[str, int], _Unit] = OrderedDict()
        self._n_bytes = 0
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """Return the label of the source."""
        return self._store.label

    @property
    def entry(self) -> str | None:
        """Return the one file of the source, or None."""
        return self._store.entry

    def placed(self, array: StoredArray) -> StoredArray:
        """Return the array as plain bytes: as it is, or in a file that this store serves."""
        extent = array.extent
        if extent.encoding is None:
            return array
        return replace(array, extent=Extent(_ArrayName(array), 0))

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
            CorruptError: an array decodes to another length than it should have.
            CheckpointingException: the store or the encoding raises it.
        """
        if not isinstance(name, _ArrayName):
            self._store.read_into(name, offset, buffer)
            return
        encoding = _encoding_of(name.array)
        done = 0
        while done < len(buffer):
            number, start = divmod(offset + done, encoding.unit_bytes)
            unit = self._unit(name, number)
            n = min(len(unit) - start, len(buffer) - done)
            if n <= 0:
                raise CorruptError(
                    f"the {encoding.name} data end at byte {offset + done} of the array", file=name
                )
            buffer[done : done + n] = unit[start : start + n]
            done += n

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
        """Return the bytes of a unit, decoded by the first thread that asks for it."""
        key = (str(name), number)  # a plain string, which holds no array
        with self._lock:
            unit = self._units.get(key)
            if unit is None:
                unit = self._units[key] = _Unit()
            self._units.move_to_end(key)
        with unit.lock:
            data = unit.data
            if data is not None:
                return data
            try:
                data = memoryview(self._decoded(name.array, number)).toreadonly().cast("B")
            except BaseException:
                with self._lock:
                    self._units.pop(key, None)
                raise
            unit.data = data
        with self._lock:
            if self._units.get(key) is unit:
                self._n_bytes += len(data)
            self._make_room(keep=key)
        return data

    def _decoded(self, array: StoredArray, number: int) -> bytes | memoryview:
        """Decode a unit.

        Raises:
            CorruptError: it decodes to another length than it should have.
        """
        encoding = _encoding_of(array)
        data = encoding.decode(self, array, number)
        expected = min(encoding.unit_bytes, array.n_bytes - number * encoding.unit_bytes)
        n_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
        if n_bytes != expected:
            raise CorruptError(
                f"the {encoding.name} data of array {array.name!r} decode to {n_bytes} bytes, not {expected}",
                file=array.extent.file,
            )
        return data

    def _make_room(self, *, keep: tuple[str, int]) -> None:
        """Drop units, oldest first, until the rest fits; the caller holds the lock."""
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


def device_of(store: ReadStore) -> Device | None:
    """Return the device on which what a store serves is computed, or None for the CPU."""
    return store.device if isinstance(store, DecodedStore) else None


class _ArrayName(str):
    """The name of an encoded array's file.

    It holds the array, so that the store need not remember every one.

    Attributes:
        array: the encoded array.
    """

    __slots__ = ("array",)

    array: StoredArray

    def __new__(cls, array: StoredArray) -> _ArrayName:
        extent = array.extent
        # Arrays of one name may lie in one file: replicas, and what is computed from an array of its own name.
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
    assert array.extent.encoding is not None
    return array.extent.encoding


def decoding_bytes(fragments: Iterable[Fragment]) -> int:
    """Return the most memory that decoding one unit takes, the unit included; 0 without any."""
    n_bytes = 0
    for fragment in fragments:
        encoding = None if fragment.array is None else fragment.array.extent.encoding
        if fragment.array is not None and encoding is not None:
            unit = min(encoding.unit_bytes, fragment.array.n_bytes)
            n_bytes = max(n_bytes, unit + encoding.working_bytes)
    return n_bytes
