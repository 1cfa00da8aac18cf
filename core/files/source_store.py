"""Choose the store of a source: a local directory, or a prefix of an object store.

Every read of an object store is a request. Who knows what will be read says so here, so that it
arrives in few requests, several at a time; other stores take no notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from core.files.ranges.read_ahead import FileRange
from core.files.remote_path import RemotePath
from core.files.remote_store import RemoteStore
from core.files.store import LocalStore, ReadStore

SourceStore: TypeAlias = LocalStore | RemoteStore


def open_store(
    root: Path,
    *,
    entry: str | None = None,
    stamps: Mapping[str, Sequence[int]] | None = None,
) -> SourceStore:
    """Return read access to a directory.

    Args:
        root: the directory, local or remote.
        entry: name of the one file that the user specified; None for the directory.
        stamps: name → ``stamp`` of files as another process saw them.
    """
    if isinstance(root, RemotePath):
        return RemoteStore(root, entry=entry, stamps=stamps)
    return LocalStore(root, entry=entry, stamps=stamps)


def is_remote(store: ReadStore) -> bool:
    """Return whether every read of a store is a request, so that few and long ones are better."""
    return isinstance(store, RemoteStore)


def expect_ranges(store: ReadStore, ranges: Iterable[FileRange]) -> None:
    """Announce ranges that will be read soon, each once."""
    if isinstance(store, RemoteStore):
        store.expect(ranges)


def expect_headers(store: ReadStore, names: Sequence[str]) -> None:
    """Announce files whose metadata will be read next, in this order."""
    if isinstance(store, RemoteStore):
        store.expect_headers(names)


def limit_reading(store: ReadStore, limit_bytes: int, *, threads: int) -> int:
    """Adapt a store to the memory limit of a process, and return how much of it reading takes.

    Args:
        limit_bytes: memory limit of the process.
        threads: number of threads that read.
    """
    if isinstance(store, RemoteStore):
        return store.limit_memory(limit_bytes, threads=threads)
    return 0
