"""Choose the store of a source: a local directory, a prefix of an object store, or several of them.

Several checkpoints are one store for a result that is computed from them (``JoinedStore``).
The files of the first checkpoint keep their names, so that everything about it works as usual. The
files of the others are called by their complete paths::

    model.safetensors             in the first checkpoint
    /runs/b/model.safetensors     in another one
    s3://bucket/c/model.pt        in a third

No checkpoint can claim such a name: ``core.files.store.check_name`` refuses a path that is not
relative, and each store checks the names of its own files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from core.errors import CheckpointingException
from core.files.remote_path import is_remote
from core.files.store import LocalStore, ReadStore, override

if TYPE_CHECKING:
    from core.files.ranges import FileRange
    from core.files.remote_store import RemoteStore


def joined_prefix(store: LocalStore | RemoteStore) -> str:
    """Return what comes before the names of a store's files in a store that it is joined to."""
    return f"{store.root.absolute()}/"


class JoinedStore(ReadStore):
    """The files of several stores.

    Args:
        first: the store whose files keep their names.
        others: the other stores.
    """

    def __init__(
        self, first: LocalStore | RemoteStore, others: Sequence[LocalStore | RemoteStore]
    ) -> None:
        self.is_remote = any(store.is_remote for store in (first, *others))
        self._first = first
        # The longest prefix first: a checkpoint may lie in the directory of another one.
        self._others = sorted(
            ((joined_prefix(store), store) for store in others), key=lambda pair: -len(pair[0])
        )

    @property
    def root(self) -> Path:
        """Directory of the first store."""
        return self._first.root

    @property
    def other_roots(self) -> tuple[Path, ...]:
        """Directories of the other stores."""
        return tuple(store.root for _, store in self._others)

    @property
    @override
    def label(self) -> str:
        return self._first.label

    @property
    @override
    def entry(self) -> str | None:
        return self._first.entry

    @property
    def on_open(self) -> Callable[[int], None] | None:
        """Called when a file is opened that has not been opened before (``LocalStore``)."""
        return self._first.on_open

    @on_open.setter
    def on_open(self, callback: Callable[[int], None] | None) -> None:
        for store in self._stores:
            store.on_open = callback

    @property
    def _stores(self) -> tuple[LocalStore | RemoteStore, ...]:
        return (self._first, *(store for _, store in self._others))

    def _find(self, name: str) -> tuple[LocalStore | RemoteStore, str, str]:
        """Return the store of a file, the file's name in it, and the store's prefix."""
        for prefix, store in self._others:
            if name.startswith(prefix):
                return store, name[len(prefix) :], prefix
        return self._first, name, ""

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        store, name, _ = self._find(name)
        return store.path(name)

    @override
    def files(self, under: str = "") -> list[str]:
        return self._first.files(under)

    @override
    def folders(self, under: str = "") -> list[str]:
        return self._first.folders(under)

    def unreadable(self, under: str = "") -> list[str]:
        """Return the names in ``under`` that contain no data, as ``LocalStore`` does."""
        return self._first.unreadable(under)

    @override
    def sizes(self, under: str = "") -> Mapping[str, int]:
        return self._first.sizes(under)

    @override
    def exists(self, name: str) -> bool:
        store, name, _ = self._find(name)
        return store.exists(name)

    @override
    def size(self, name: str) -> int:
        store, name, prefix = self._find(name)
        with _PrefixedErrors(prefix):
            return store.size(name)

    @property
    def opened(self) -> list[str]:
        """Names of the files that have been opened so far."""
        names = list(self._first.opened)
        return names + [prefix + name for prefix, store in self._others for name in store.opened]

    def stamp(self, name: str) -> tuple[int, int, int]:
        """Return size, modification time (ns) and inode of a file, as ``LocalStore`` does."""
        store, name, prefix = self._find(name)
        with _PrefixedErrors(prefix):
            return store.stamp(name)

    def modified_ns(self, name: str) -> int:
        """Return the modification time of a file in nanoseconds since 1970."""
        store, name, _ = self._find(name)
        return store.modified_ns(name)

    def disk_bytes(self, name: str) -> int:
        """Return how many bytes of a file are stored."""
        store, name, _ = self._find(name)
        return store.disk_bytes(name)

    def holes(self, name: str) -> list[tuple[int, int]]:
        """Return the ranges of a file that were never written."""
        store, name, _ = self._find(name)
        return store.holes(name)

    def is_cached(self, name: str, offset: int) -> bool:
        """Return whether a byte of a file is in memory."""
        store, name, _ = self._find(name)
        return store.is_cached(name, offset)

    def drop_cached(self, name: str, offset: int, n_bytes: int) -> None:
        """Ask the system to forget a range of a file."""
        store, name, _ = self._find(name)
        store.drop_cached(name, offset, n_bytes)

    @override
    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        store, name, prefix = self._find(name)
        with _PrefixedErrors(prefix):
            return store.read(name, offset, n_bytes)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        store, name, prefix = self._find(name)
        with _PrefixedErrors(prefix):
            store.read_into(name, offset, buffer)

    @override
    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        store, name, prefix = self._find(name)
        with _PrefixedErrors(prefix):
            return store.read_spans(name, spans)

    @override
    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        store, name, prefix = self._find(name)
        with _PrefixedErrors(prefix):
            store.read_vector(name, offset, buffers, n_bytes)

    @override
    def expect_ranges(self, ranges: Iterable[FileRange]) -> None:
        if not self.is_remote:
            return
        ranges_of: dict[int, list[FileRange]] = {}
        stores = {}
        for name, start, stop in ranges:
            store, name, _ = self._find(name)
            stores[id(store)] = store
            ranges_of.setdefault(id(store), []).append((name, start, stop))
        for number, store in stores.items():
            store.expect_ranges(ranges_of[number])

    @override
    def limit_reading(self, limit_bytes: int, *, threads: int) -> int:
        stores = self._stores
        return sum(
            store.limit_reading(limit_bytes // len(stores), threads=threads) for store in stores
        )

    def verify_unchanged(self) -> None:
        """Raise if any file has changed since it was first opened.

        Raises:
            SourceChangedError, MissingShardError: as for ``LocalStore``.
        """
        self._first.verify_unchanged()
        for prefix, store in self._others:
            with _PrefixedErrors(prefix):
                store.verify_unchanged()

    def close(self) -> None:
        """Close every file; later reads open them again."""
        for store in self._stores:
            store.close()


class _PrefixedErrors:
    """Context that puts a store's prefix before the file of an error."""

    __slots__ = ("_prefix",)

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, err: BaseException | None, trace: object) -> None:
        if self._prefix and isinstance(err, CheckpointingException):
            if err.file is not None and not err.file.startswith(self._prefix):
                err.file = self._prefix + err.file


SourceStore: TypeAlias = "LocalStore | RemoteStore | JoinedStore"


def open_store(
    root: Path,
    *,
    entry: str | None = None,
    stamps: Mapping[str, Sequence[int]] | None = None,
) -> LocalStore | RemoteStore:
    """Return read access to a directory.

    Args:
        root: the directory, local or remote.
        entry: name of the one file that the user specified; None for the directory.
        stamps: name → ``stamp`` of files as another process saw them.
    """
    if is_remote(root):
        from core.files.remote_store import RemoteStore

        return RemoteStore(root, entry=entry, stamps=stamps)
    return LocalStore(root, entry=entry, stamps=stamps)


def join_stores(first: SourceStore, others: Sequence[SourceStore]) -> JoinedStore:
    """Join the stores of several checkpoints; the files of the first one keep their names."""
    assert not any(isinstance(store, JoinedStore) for store in (first, *others))
    return JoinedStore(first, others)  # type: ignore[arg-type]


def other_roots(store: SourceStore) -> tuple[Path, ...]:
    """Return the directories of the stores that were joined to a store, absolute; else ()."""
    roots = store.other_roots if isinstance(store, JoinedStore) else ()
    return tuple(root.absolute() for root in roots)


def open_joined(
    root: Path, other_roots: Sequence[Path], *, stamps: Mapping[str, Sequence[int]]
) -> SourceStore:
    """Return read access to the directories of one checkpoint or several.

    Args:
        root: the directory of the first one.
        other_roots: the directories of the others; () for a single checkpoint.
        stamps: name → ``stamp`` of files as another process saw them.
    """
    first = open_store(root, stamps=stamps)
    if not other_roots:
        return first
    others = []
    for other in other_roots:
        prefix = joined_prefix(open_store(other))
        own = {
            name[len(prefix) :]: stamp for name, stamp in stamps.items() if name.startswith(prefix)
        }
        others.append(open_store(other, stamps=own))
    return join_stores(first, others)
