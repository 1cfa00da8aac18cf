"""The zarr arrays of an Orbax checkpoint: in an OCDBT database, or in separate directories.

::

    params.dense.kernel/.zarray      zarr 2: metadata, and the chunks 0.0, 0.1 …
    params.dense.kernel/zarr.json    zarr 3: metadata, and the chunks (usually shards) c/0/0 …

Orbax writes one chunk per device shard or host shard, by default compressed with zstd. A chunk that
is absent has the fill value: Orbax up to 0.6 does not store such chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING

from core.errors import CorruptError
from core.files.json_object import read_small_file
from core.formats.ocdbt.database import Database
from core.formats.ocdbt.entries import MANIFEST
from core.formats.zarr.chunks import Chunks, folder_chunks, fragments_of_chunks
from core.formats.zarr.metadata2 import ARRAY_FILE, parse_zarray
from core.values import dataclass

if TYPE_CHECKING:
    from core.catalog.tensor import Fragment
    from core.files.store import ReadStore
    from core.formats.zarr.array import ZarrArray

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
            raise CorruptError(f"arrays are nested deeper than {_MAX_DEPTH} levels", file=prefix)
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
