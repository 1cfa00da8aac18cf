"""An OCDBT database as a store: every key is a file, so that the reader of zarr directories can
read it.

Values in a data file are passed through at their address; only those in the tree's nodes are kept
in memory. A key's file is called ``manifest.ocdbt#<key>``, which no directory of this store has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from core.catalog.catalog import Fragment
from core.catalog.stored import Extent, StoredArray
from core.errors import MissingShardError, TruncatedError
from core.files.store import MemoryStore
from core.formats.ocdbt.entries import MANIFEST, entries_of
from core.formats.ocdbt.nodes import ValueLocation
from core.formats.zarr.decode import ChunkCoding, EncodedChunk
from core.formats.zarr.fill import fill_of

if TYPE_CHECKING:
    from core.catalog.stored import Encoding
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class InlineValue:
    """The encoding of an array that lies in a value of the tree itself.

    The extent names the manifest.

    Args:
        value: the value.
        offset: byte of the value at which the stored array begins.
        dense_bytes: size of the array as a dense one.
        inner: encoding of the array in the value, or None if its elements are stored as they are.
    """

    value: bytes = field(repr=False)
    offset: int
    dense_bytes: int
    inner: Encoding | None

    @property
    def name(self) -> str:
        """Return the name of the encoding."""
        return "inline value" if self.inner is None else f"inline {self.inner.name}"

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of a unit: the whole array."""
        return max(self.dense_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """Return the memory for decoding."""
        return len(self.value) + (0 if self.inner is None else self.inner.working_bytes)

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Return the dense bytes of the array."""
        assert unit == 0
        file = array.extent.file
        memory = MemoryStore({file: self.value})
        if self.inner is not None:
            return self.inner.decode(memory, replace(array, extent=Extent(file, self.offset)), unit)
        return memory.read(file, self.offset, self.dense_bytes)


class Database:
    """A read store with a file per key, and the data files that hold the values.

    Args:
        store: the checkpoint.
        root: directory of the database in it; "" or ends with "/".

    Raises:
        CheckpointingException: as for ``core.formats.ocdbt.entries.entries_of``.
    """

    def __init__(self, store: ReadStore, root: str) -> None:
        self._store = store
        self._prefix = f"{root}{MANIFEST}#"
        self._manifest = root + MANIFEST
        self._entries = entries_of(store, root=root)
        self._files: dict[str, dict[str, int]] = {"": {}}
        self._folders: dict[str, dict[str, None]] = {"": {}}
        for key, value in self._entries.items():
            folder, _, name = key.rpartition("/")
            self._folder(folder)[name] = (
                value.n_bytes if isinstance(value, ValueLocation) else len(value)
            )

    def _folder(self, folder: str) -> dict[str, int]:
        """Return the files of a directory; create it with its parents."""
        files = self._files.get(folder)
        if files is None:
            files = self._files[folder] = {}
            child = folder
            while child:
                parent, _, name = child.rpartition("/")
                is_new = parent not in self._folders
                self._folders.setdefault(parent, {})[name] = None
                if not is_new:
                    break
                child = parent
        return files

    @property
    def label(self) -> str:
        """Return the label of the checkpoint."""
        return self._store.label

    @property
    def entry(self) -> str | None:
        """Return None: a database is a directory."""
        return None

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """Return key below a directory of keys → bytes of the value."""
        return self._files.get(self._key(under), {})

    def files(self, under: str = "") -> list[str]:
        """Return the names of the files in a directory."""
        return sorted(self.sizes(under))

    def folders(self, under: str = "") -> list[str]:
        """Return the names of the directories in a directory."""
        return sorted(self._folders.get(self._key(under), {}))

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return (
            self._key(name) in self._entries
            if name.startswith(self._prefix)
            else self._store.exists(name)
        )

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        if not name.startswith(self._prefix):
            return self._store.size(name)
        value = self._value(name)
        return value.n_bytes if isinstance(value, ValueLocation) else len(value)

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """Read some bytes of a file."""
        if not name.startswith(self._prefix):
            return self._store.read(name, offset, n_bytes)
        value = self._value(name)
        if isinstance(value, ValueLocation):
            if offset + n_bytes > value.n_bytes:
                raise TruncatedError(f"the value has only {value.n_bytes} bytes", file=name)
            return self._store.read(value.path, value.offset + offset, n_bytes)
        if offset + n_bytes > len(value):
            raise TruncatedError(f"the value has only {len(value)} bytes", file=name)
        return value[offset : offset + n_bytes]

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Read bytes of a file into a buffer."""
        buffer[:] = self.read(name, offset, len(buffer))

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges of a file."""
        return [self.read(name, offset, n_bytes) for offset, n_bytes in spans]

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """Read consecutive bytes of a file into several buffers."""
        for buffer in buffers:
            self.read_into(name, offset, buffer)
            offset += len(buffer)

    def file_of(self, key: str) -> str:
        """Return this store's name for the value of a key (or a directory of keys)."""
        return self._prefix + key

    def _key(self, name: str) -> str:
        return name.removeprefix(self._prefix)

    def _value(self, name: str) -> bytes | ValueLocation:
        value = self._entries.get(self._key(name))
        if value is None:
            raise MissingShardError("the key is not in the database", file=name)
        return value

    def located(self, fragment: Fragment, coding: ChunkCoding) -> Fragment:
        """Return a fragment of an array of this store as one of the checkpoint's files.

        Args:
            coding: how the array's chunks are stored.
        """
        array = fragment.array
        if array is None or not array.extent.file.startswith(self._prefix):
            return fragment
        extent = array.extent
        # The fill value is in no data file.
        if fill_of(array) is not None:
            return replace(
                fragment, array=replace(array, extent=replace(extent, file=self._manifest))
            )
        # Values in data files are moved as they are; inline ones become an encoding.
        value = self._value(extent.file)
        if array.n_bytes == 0:
            moved = Extent(self._manifest, 0)
        elif isinstance(value, ValueLocation):
            moved = replace(extent, file=value.path, offset=value.offset + extent.offset)
        else:
            inner = extent.encoding
            if inner is None and extent.strides is not None:
                inner = EncodedChunk(coding, coding.n_bytes)
            moved = Extent(
                self._manifest, 0, encoding=InlineValue(value, extent.offset, array.n_bytes, inner)
            )
        return replace(fragment, array=replace(array, extent=moved))
