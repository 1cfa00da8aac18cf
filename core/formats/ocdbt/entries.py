"""The entries of an OCDBT database: every key with its value, or with the location of its value.

On disk::

    manifest.ocdbt      configuration, and where the root of the newest version lies
    d/<32 hex digits>   data files: values of more than ``max_inline_value_bytes`` as they are, and B-tree nodes
    ocdbt.process_0/    a database of one process, with the same files; the merged tree above points into its ``d/``

Reading walks the tree of the newest version from its root. A value that is not in a node is bytes
of a data file, raw.

Source: see ``core.formats.ocdbt.nodes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.errors import CheckpointingException, CorruptError, TruncatedError
from core.files.store import check_name
from core.formats.ocdbt.nodes import (
    OcdbtManifest,
    UnfoldBudget,
    ValueLocation,
    read_manifest,
    read_node,
)

if TYPE_CHECKING:
    from core.files.store import ReadStore

MANIFEST = "manifest.ocdbt"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_HEIGHT = 32


def entries_of(store: ReadStore, *, root: str = "") -> dict[str, bytes | ValueLocation]:
    """Return key → value, or the location of the value, in the order of the keys.

    Args:
        root: directory of the database in the store; "" or ends with "/". The paths of locations
            are relative to the store.

    Raises:
        MissingShardError: the manifest or a data file is missing.
        CorruptError, TruncatedError: a node contradicts itself, its parent or the size of its file.
        UnsupportedError: the version of the format is not supported.
        UnsafeError: a path leads outside the checkpoint, or the database unfolds to too much.
    """
    return _TreeWalk(store, root).entries()


class _TreeWalk:
    """Walks the tree of one database."""

    def __init__(self, store: ReadStore, root: str) -> None:
        self._store = store
        self._root = root
        self._budget = UnfoldBudget()
        self._sizes: dict[str, int] = {}
        self._visited: set[tuple[str, int]] = set()

    def entries(self) -> dict[str, bytes | ValueLocation]:
        """Return the entries of the newest version."""
        manifest = self._read_manifest()
        values: dict[str, bytes | ValueLocation] = {}
        if manifest.root is None:
            return values
        last = b""
        for key, value in self._walk_below(manifest.root, manifest.height, b""):
            if values and key <= last:
                raise CorruptError(
                    f"the key {key[:80]!r} follows {last[:80]!r}", file=self._root + MANIFEST
                )
            last = key
            try:
                values[key.decode("utf-8")] = value
            except UnicodeDecodeError as err:
                raise CorruptError(
                    f"the key {key[:80]!r} is not valid UTF-8", file=self._root + MANIFEST
                ) from err
        if len(values) != manifest.n_keys:
            raise CorruptError(
                f"the tree has {len(values)} keys, but the manifest states {manifest.n_keys}",
                file=self._root + MANIFEST,
            )
        return values

    def _read_manifest(self) -> OcdbtManifest:
        name = self._root + MANIFEST
        size = self._store.size(name)
        if size > _MAX_MANIFEST_BYTES:
            raise CorruptError(
                f"the manifest has {size >> 20:,} MiB, more than {_MAX_MANIFEST_BYTES >> 20}",
                file=name,
            )
        self._budget.earn(size)
        try:
            manifest = read_manifest(self._store.read(name, 0, size), self._budget)
            if manifest.height > _MAX_HEIGHT:
                raise CorruptError(f"the tree has {manifest.height} levels")
        except CheckpointingException as err:
            err.file = err.file or name
            raise
        return manifest

    def _walk_below(
        self, location: ValueLocation, height: int, prefix: bytes
    ) -> Iterator[tuple[bytes, bytes | ValueLocation]]:
        """Yield keys and values of the leaves below a node."""
        # Read the node; its stored bytes count once for the budget.
        path = self._checked_path(location)
        span = (location.offset, location.offset + location.n_bytes)
        if (path, location.offset) not in self._visited:  # several parents may share a node
            self._visited.add((path, location.offset))
            self._budget.earn(location.n_bytes)
        try:
            entries = read_node(
                self._store.read(path, location.offset, location.n_bytes),
                location,
                height,
                self._budget,
            )
        except CheckpointingException as err:
            err.file, err.span = err.file or path, err.span or span
            raise
        # Descend, or yield the values of a leaf.
        for entry in entries:
            if height:
                assert isinstance(entry.value, ValueLocation)
                yield from self._walk_below(
                    entry.value, height - 1, prefix + entry.key[: entry.n_common]
                )
            elif isinstance(entry.value, ValueLocation):
                value_location = entry.value
                yield (
                    prefix + entry.key,
                    ValueLocation(
                        "",
                        self._checked_path(value_location),
                        value_location.offset,
                        value_location.n_bytes,
                    ),
                )
            else:
                yield prefix + entry.key, entry.value

    def _checked_path(self, location: ValueLocation) -> str:
        """Return the path of a location's file in the store, after checking that the file reaches
        so far.
        """
        path = self._root + location.path
        size = self._sizes.get(path)
        if size is None:
            size = self._sizes[path] = self._store.size(
                check_name(path, found_in=self._root + MANIFEST)
            )
        if location.offset + location.n_bytes > size:
            raise TruncatedError(
                f"the file has {size} bytes, but the database has data up to byte {location.offset + location.n_bytes}",
                file=path,
                span=(location.offset, location.offset + location.n_bytes),
                hint="copy the checkpoint again, with all its files",
            )
        return path
