"""The entries of an OCDBT database: every key, and its value or where that lies.

On disk::

    manifest.ocdbt      configuration, and where the root of the newest version lies
    d/<32 hex digits>   data files: values of more than ``max_inline_value_bytes`` as they are, and B-tree nodes
    ocdbt.process_0/    a database of one process, with the same files; the merged tree above points into its ``d/``

Reading walks the tree of the newest version from its root. A value that is not in a node is bytes of a data file, raw.

Source: see ``core.formats.ocdbt.nodes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, CorruptError, TruncatedError
from core.files.store import check_name
from core.formats.ocdbt.nodes import Budget, Manifest, Place, read_manifest, read_node

if TYPE_CHECKING:
    from core.files.store import ReadStore

MANIFEST = "manifest.ocdbt"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_HEIGHT = 32


def entries_of(store: ReadStore, *, root: str = "") -> dict[str, bytes | Place]:
    """Key → value, or the place of the value, in the order of the keys.

    Args:
        root: directory of the database in the store; "" or ends with "/". The places' paths are relative to the store.

    Raises:
        MissingShardError: the manifest or a data file is absent.
        CorruptError, TruncatedError: a node contradicts itself, its parent or the size of its file.
        UnsupportedError: a version of the format that is not handled.
        UnsafeError: a path leaves the checkpoint, or the database unfolds to too much.
    """
    return _Walk(store, root).entries()


class _Walk:
    """One reading of one database."""

    def __init__(self, store: ReadStore, root: str) -> None:
        self._store = store
        self._root = root
        self._budget = Budget()
        self._sizes: dict[str, int] = {}
        self._seen: set[tuple[str, int]] = set()

    def entries(self) -> dict[str, bytes | Place]:
        manifest = self._manifest()
        found: dict[str, bytes | Place] = {}
        if manifest.root is None:
            return found
        last = b""
        for key, value in self._below(manifest.root, manifest.height, b""):
            if found and key <= last:
                raise CorruptError(f"the key {key[:80]!r} follows {last[:80]!r}", file=self._root + MANIFEST)
            last = key
            try:
                found[key.decode("utf-8")] = value
            except UnicodeDecodeError as err:
                raise CorruptError(f"the key {key[:80]!r} is no text", file=self._root + MANIFEST) from err
        if len(found) != manifest.n_keys:
            raise CorruptError(
                f"the tree has {len(found)} keys, but the manifest says {manifest.n_keys}", file=self._root + MANIFEST
            )
        return found

    def _manifest(self) -> Manifest:
        name = self._root + MANIFEST
        size = self._store.size(name)
        if size > _MAX_MANIFEST_BYTES:
            raise CorruptError(f"{size} bytes are too much for a manifest", file=name)
        self._budget.earn(size)
        try:
            found = read_manifest(self._store.read(name, 0, size), self._budget)
            if found.height > _MAX_HEIGHT:
                raise CorruptError(f"the tree has {found.height} levels")
        except CheckpointingException as err:
            err.file = err.file or name
            raise
        return found

    def _below(self, place: Place, height: int, prefix: bytes) -> Iterator[tuple[bytes, bytes | Place]]:
        """Keys and values of the leaves below a node."""
        path = self._checked(place)
        span = (place.offset, place.offset + place.n_bytes)
        if (path, place.offset) not in self._seen:  # several parents may share a node
            self._seen.add((path, place.offset))
            self._budget.earn(place.n_bytes)
        try:
            entries = read_node(self._store.read(path, place.offset, place.n_bytes), place, height, self._budget)
        except CheckpointingException as err:
            err.file, err.span = err.file or path, err.span or span
            raise
        for entry in entries:
            if height:
                assert isinstance(entry.value, Place)
                yield from self._below(entry.value, height - 1, prefix + entry.key[: entry.n_common])
            elif isinstance(entry.value, Place):
                where = entry.value
                yield prefix + entry.key, Place("", self._checked(where), where.offset, where.n_bytes)
            else:
                yield prefix + entry.key, entry.value

    def _checked(self, place: Place) -> str:
        """The path of the place's file in the store, once the file is known to reach so far."""
        path = self._root + place.path
        size = self._sizes.get(path)
        if size is None:
            size = self._sizes[path] = self._store.size(check_name(path, found_in=self._root + MANIFEST))
        if place.offset + place.n_bytes > size:
            raise TruncatedError(
                f"the file has {size} bytes, but the database has data up to byte {place.offset + place.n_bytes}",
                file=path,
                span=(place.offset, place.offset + place.n_bytes),
                hint="copy the checkpoint again, with all its files",
            )
        return path
