"""The entries of an OCDBT database: every key with its value, or with the location of its value.

On disk::

    manifest.ocdbt      configuration, and the location of the root of the newest version
    d/<32 hex digits>   data files: values of more than ``max_inline_value_bytes``, uncompressed,
                        and B-tree nodes
    ocdbt.process_0/    a database of one process, with the same files; the merged tree refers to
                        its ``d/``

Reading walks the tree of the newest version from its root.

Source: see ``core.formats.ocdbt.nodes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from core.errors import UNLIKE_ANY_WRITER, CorruptError, TruncatedError, placing_errors
from core.files.store import check_name
from core.formats.ocdbt.nodes import (
    OcdbtManifest,
    UnfoldBudget,
    ValueLocation,
    parse_newest_version,
    parse_node,
)

if TYPE_CHECKING:
    from core.files.store import ReadStore

MANIFEST = "manifest.ocdbt"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_HEIGHT = 32


def list_entries(store: ReadStore, *, root: str = "") -> dict[str, bytes | ValueLocation]:
    """Return the values of all keys, or the locations of the values, in the order of the keys.

    Args:
        store: the checkpoint.
        root: directory of the database in the store; "" or ends with "/". The paths of locations
            are relative to the store.

    Raises:
        MissingShardError: the manifest or a data file is missing.
        CorruptError, TruncatedError: a node contradicts itself, its parent or the size of its file.
        UnsupportedError: the version of the format is not supported.
        UnsafeError: a path leads outside the checkpoint, or the database inflates too much.
    """
    return _TreeWalk(store, root).entries()


class _TreeWalk:
    """Reader of the tree of one database."""

    def __init__(self, store: ReadStore, root: str) -> None:
        self._store = store
        self._root = root
        self._budget = UnfoldBudget()
        self._sizes: dict[str, int] = {}
        self._visited: set[tuple[str, int]] = set()

    def entries(self) -> dict[str, bytes | ValueLocation]:
        """Return the entries of the newest version; raises the errors of ``list_entries``."""
        manifest = self._read_manifest()
        values: dict[str, bytes | ValueLocation] = {}
        if manifest.root is None:
            return values
        # Nodes only check their own keys, so check the order across nodes here.
        previous_key = b""
        for key, value in self._walk_below(manifest.root, manifest.height, b""):
            if values and key <= previous_key:
                raise CorruptError(
                    f"keys are not in order: {key[:80]!r} follows {previous_key[:80]!r}",
                    file=self._root + MANIFEST,
                )
            previous_key = key
            try:
                values[key.decode("utf-8")] = value
            except UnicodeDecodeError as err:
                raise CorruptError(
                    f"the key {key[:80]!r} is not valid UTF-8", file=self._root + MANIFEST
                ) from err
        if len(values) != manifest.n_keys:
            raise CorruptError(
                f"the tree has {len(values)} keys, but the manifest lists {manifest.n_keys}",
                file=self._root + MANIFEST,
            )
        return values

    def _read_manifest(self) -> OcdbtManifest:
        """Read the manifest and check its height."""
        name = self._root + MANIFEST
        size = self._store.size(name)
        if size > _MAX_MANIFEST_BYTES:
            raise CorruptError(
                f"the manifest is {size >> 20:,} MiB long; the limit is "
                f"{_MAX_MANIFEST_BYTES >> 20} MiB",
                file=name,
                hint=UNLIKE_ANY_WRITER,
            )
        self._budget.earn(size)
        with placing_errors(file=name):
            manifest = parse_newest_version(self._store.read(name, 0, size), self._budget)
            if manifest.height > _MAX_HEIGHT:
                raise CorruptError(
                    f"the tree has {manifest.height} levels, but at most {_MAX_HEIGHT} are allowed"
                )
        return manifest

    def _walk_below(
        self, location: ValueLocation, height: int, prefix: bytes
    ) -> Iterator[tuple[bytes, bytes | ValueLocation]]:
        """Yield keys and values of the leaves under a node.

        Args:
            location: position of the node.
            height: height of the node, 0 for a leaf.
            prefix: beginning of all keys, which is not part of the keys in the node.
        """
        # Read the node. Several parents may share it, but its bytes count once for the budget.
        path = self._checked_path(location)
        span = (location.offset, location.offset + location.n_bytes)
        if (path, location.offset) not in self._visited:
            self._visited.add((path, location.offset))
            self._budget.earn(location.n_bytes)
        with placing_errors(file=path, span=span):
            data = self._store.read(path, location.offset, location.n_bytes)
            entries = parse_node(data, location, height, self._budget)

        # Descend, or yield the values of a leaf.
        for entry in entries:
            value = entry.value
            if height:
                assert isinstance(value, ValueLocation)
                yield from self._walk_below(value, height - 1, prefix + entry.key[: entry.n_common])
                continue
            if isinstance(value, ValueLocation):
                value = replace(value, base="", path=self._checked_path(value))
            yield prefix + entry.key, value

    def _checked_path(self, location: ValueLocation) -> str:
        """Return the path of a location's file in the store after checking the file's size.

        Raises:
            MissingShardError: the file does not exist.
            TruncatedError: the file ends before the location does.
            UnsafeError: the path leads outside the checkpoint.
        """
        path = self._root + location.path
        size = self._sizes.get(path)
        if size is None:
            size = self._sizes[path] = self._store.size(
                check_name(path, found_in=self._root + MANIFEST)
            )
        end = location.offset + location.n_bytes
        if end > size:
            raise TruncatedError(
                f"the file is {size} bytes long, but the database refers to data up to byte {end}",
                file=path,
                span=(location.offset, end),
                hint="copy the checkpoint again, with all its files",
            )
        return path
