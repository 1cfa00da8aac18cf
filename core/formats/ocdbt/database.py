"""An OCDBT database as a store with a file per key, for the reader of zarr directories.

Values in data files are read from there; only those in the nodes of the tree are kept in memory.
The file of a key is called ``manifest.ocdbt#<key>``, a name that no other file has.

The zarr arrays of an Orbax checkpoint are in such a database, or in separate directories::

    params.dense.kernel/.zarray      zarr 2: metadata, and the chunks 0.0, 0.1 …
    params.dense.kernel/zarr.json    zarr 3: metadata, and the chunks (usually shards) c/0/0 …

Orbax writes one chunk per device shard or host shard, by default compressed with zstd. A chunk that
is absent has the fill value: Orbax up to 0.6 does not store such chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment
from core.errors import CorruptError, MissingShardError, TruncatedError
from core.files.json_object import read_small_file
from core.files.store import MemoryStore, ReadStore
from core.formats.ocdbt.entries import MANIFEST, list_entries
from core.formats.ocdbt.nodes import ValueLocation
from core.formats.zarr.chunks import Chunks, folder_chunks, fragments_of_chunks
from core.formats.zarr.decode import ChunkCoding, EncodedChunk
from core.formats.zarr.fill import fill_of
from core.formats.zarr.metadata2 import ARRAY_FILE, parse_zarray
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import Encoding
    from core.engine.catalog.tensor import Fragment
    from core.files.store import ReadStore
    from core.formats.zarr.array import ZarrArray


@dataclass(frozen=True, slots=True)
class InlineValue:
    """The encoding of an array whose value is stored in a node of the tree.

    The file of its extent is the manifest.

    Args:
        value: the value.
        offset: byte of the value at which the stored array begins.
        dense_bytes: size of the array's elements.
        inner: encoding of the array in the value; None if its elements are stored as they are.
    """

    value: bytes = field(repr=False)
    offset: int
    dense_bytes: int
    inner: Encoding | None

    @property
    def name(self) -> str:
        """Name of the encoding, for messages."""
        return "inline value" if self.inner is None else f"inline {self.inner.name}"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit in bytes; the complete array is one unit."""
        return max(self.dense_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """Memory for decoding in bytes."""
        return len(self.value) + (0 if self.inner is None else self.inner.working_bytes)

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Return the elements of the array in C order."""
        assert unit == 0, "the array is one unit"
        file = array.extent.file
        memory = MemoryStore({file: self.value})
        if self.inner is not None:
            return self.inner.decode(memory, replace(array, extent=Extent(file, self.offset)), unit)
        return memory.read(file, self.offset, self.dense_bytes)


class Database(ReadStore):
    """A read store with a file per key, in addition to the files of the checkpoint.

    Args:
        store: the checkpoint.
        root: directory of the database in it; "" or ends with "/".

    Raises:
        CheckpointingException: the database cannot be read, see
            ``core.formats.ocdbt.entries.list_entries``.
    """

    def __init__(self, store: ReadStore, root: str) -> None:
        self.is_remote = store.is_remote
        self._store = store
        self._prefix = f"{root}{MANIFEST}#"
        self._manifest = root + MANIFEST
        self._entries = list_entries(store, root=root)
        self._files: dict[str, dict[str, int]] = {"": {}}
        self._folders: dict[str, dict[str, None]] = {"": {}}
        for key, value in self._entries.items():
            folder, _, name = key.rpartition("/")
            self._folder(folder)[name] = (
                value.n_bytes if isinstance(value, ValueLocation) else len(value)
            )

    def _folder(self, folder: str) -> dict[str, int]:
        """Return the files of a directory, after creating it and its parents if necessary."""
        files = self._files.get(folder)
        if files is None:
            files = self._files[folder] = {}
            child = folder
            while child:
                parent, _, name = child.rpartition("/")
                is_new = parent not in self._folders
                self._folders.setdefault(parent, {})[name] = None
                # The ancestors of an existing parent exist too.
                if not is_new:
                    break
                child = parent
        return files

    @property
    def label(self) -> str:
        """Label of the checkpoint."""
        return self._store.label

    @property
    def entry(self) -> str | None:
        """Always None, as a database is a directory."""
        return None

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """Return the sizes of the files in a directory, in bytes, by name."""
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
        """Return the size of a file in bytes."""
        if not name.startswith(self._prefix):
            return self._store.size(name)
        value = self._value(name)
        return value.n_bytes if isinstance(value, ValueLocation) else len(value)

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """Read a range of a file.

        Raises:
            MissingShardError: the key does not exist.
            TruncatedError: the range exceeds the value.
        """
        if not name.startswith(self._prefix):
            return self._store.read(name, offset, n_bytes)
        value = self._value(name)
        if isinstance(value, ValueLocation):
            if offset + n_bytes > value.n_bytes:
                raise TruncatedError(f"the value is only {value.n_bytes} bytes long", file=name)
            return self._store.read(value.path, value.offset + offset, n_bytes)
        if offset + n_bytes > len(value):
            raise TruncatedError(f"the value is only {len(value)} bytes long", file=name)
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
        """Return the name in this store of a key, or of a directory of keys."""
        return self._prefix + key

    def _key(self, name: str) -> str:
        """Return the key of a file or directory."""
        return name.removeprefix(self._prefix)

    def _value(self, name: str) -> bytes | ValueLocation:
        """Return the value of a file's key; raise MissingShardError if it does not exist."""
        value = self._entries.get(self._key(name))
        if value is None:
            raise MissingShardError("the key is not in the database", file=name)
        return value

    def located(self, fragment: Fragment, coding: ChunkCoding) -> Fragment:
        """Address a fragment in the files of the checkpoint instead of those of this store.

        Args:
            fragment: a fragment of an array in this store.
            coding: encoding of the array's chunks.
        """
        array = fragment.array
        if array is None or not array.extent.file.startswith(self._prefix):
            return fragment
        extent = array.extent
        # A fill value is not stored in any file.
        if fill_of(array) is not None:
            return replace(
                fragment, array=replace(array, extent=replace(extent, file=self._manifest))
            )
        # A value in a data file is a range of that file; an inline value becomes an encoding.
        value = self._value(extent.file)
        if array.n_bytes == 0:
            new_extent = Extent(self._manifest, 0)
        elif isinstance(value, ValueLocation):
            new_extent = replace(extent, file=value.path, offset=value.offset + extent.offset)
        else:
            inner = extent.encoding
            # An encoding's result is dense, so elements with strides have to be copied by one.
            if inner is None and extent.strides is not None:
                inner = EncodedChunk(coding, coding.n_bytes)
            new_extent = Extent(
                self._manifest, 0, encoding=InlineValue(value, extent.offset, array.n_bytes, inner)
            )
        return replace(fragment, array=replace(array, extent=new_extent))


_MAX_METADATA_BYTES = 16 << 20
_MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class OrbaxArray:
    """An array of a checkpoint.

    Args:
        array: its zarr metadata.
        is_incomplete: whether some of its chunks are not stored.
        fragments: function that returns its fragments for a key; reads the indexes of shards.
    """

    array: ZarrArray
    is_incomplete: bool
    fragments: Callable[[str], list[Fragment]]


def arrays_in(store: ReadStore, root: str) -> dict[str, OrbaxArray]:
    """Return all arrays by name, sorted.

    Args:
        store: the checkpoint.
        root: directory of the item in the checkpoint; "" or ends with "/".

    Raises:
        MissingShardError: a chunk, a data file or the manifest is missing.
        CorruptError, TruncatedError: the files contradict each other.
        UnsupportedError: an array is stored in a way that is not supported.
        UnsafeError: a path leads outside the checkpoint, or the database inflates too much.
    """
    if store.exists(root + MANIFEST):
        database = Database(store, root)
        return _arrays(database, database.file_of(""), database)
    return _arrays(store, root, None)


def _arrays(store: ReadStore, root: str, database: Database | None) -> dict[str, OrbaxArray]:
    """Return the arrays under a directory, sorted by name.

    Args:
        store: the checkpoint, or the database as a store.
        root: directory in the store.
        database: the database, if the store is one.
    """
    from core.formats.zarr.fill import lost_files

    arrays: dict[str, OrbaxArray] = {}
    # In directories, a lost data file leaves traces; a database lists all its keys.
    lost = cache(partial(lost_files, store)) if database is None else tuple
    for name, file, array in _metadata_below(store, root):
        chunks = folder_chunks(store, root + name, array, key=name, fill=array.fill, lost=lost)
        arrays[name] = OrbaxArray(
            array, bool(chunks.absent), _fragment_maker(store, array, chunks, file, database)
        )
    return dict(sorted(arrays.items()))


def _fragment_maker(
    store: ReadStore, array: ZarrArray, chunks: Chunks, file: str, database: Database | None
) -> Callable[[str], list[Fragment]]:
    """Return the function that builds the fragments of an array.

    Fragments in a database are addressed in the files of the checkpoint instead.
    """

    def fragments(key: str) -> list[Fragment]:
        zarr_fragments = fragments_of_chunks(store, key, array, chunks, file=file)
        return (
            zarr_fragments
            if database is None
            else [database.located(fragment, array.coding) for fragment in zarr_fragments]
        )

    return fragments


def _metadata_below(store: ReadStore, root: str) -> list[tuple[str, str, ZarrArray]]:
    """Return name, metadata file and metadata of every array under a directory.

    Raises:
        CorruptError: a metadata file is malformed, or directories are nested too deeply.
        UnsupportedError: an array is stored in a way that is not supported.
    """
    rows = []
    names_to_visit = [""]
    while names_to_visit:
        name = names_to_visit.pop()
        prefix = f"{root}{name}/" if name else root
        # The directories under an array contain its chunks.
        array = _read_array_metadata(store, prefix, name)
        if array is not None:
            rows.append((name, *array))
            continue
        if name.count("/") > _MAX_DEPTH:
            raise CorruptError(f"arrays are nested more than {_MAX_DEPTH} levels deep", file=prefix)
        names_to_visit += [
            f"{name}/{folder}" if name else folder
            for folder in store.folders(prefix.removesuffix("/"))
        ]
    return rows


def _read_array_metadata(store: ReadStore, prefix: str, name: str) -> tuple[str, ZarrArray] | None:
    """Read the metadata of a directory's array, and name its file; None if it has no array."""
    from core.formats.zarr.metadata3 import METADATA_FILE, node_of, parse_array

    # zarr.json may also describe a group.
    for file in (prefix + ARRAY_FILE, prefix + METADATA_FILE):
        if not store.exists(file):
            continue
        data = read_small_file(store, file, max_bytes=_MAX_METADATA_BYTES, key=name)
        if file.endswith(ARRAY_FILE):
            return file, parse_zarray(data, file=file, key=name)
        kind, metadata = node_of(data, file=file)
        if kind == "array":
            return file, parse_array(metadata, file=file, key=name)
    return None
