"""Choose the store of a source: a local directory, or a prefix of an object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from core.files.remote_path import RemotePath
from core.files.remote_store import RemoteStore
from core.files.store import LocalStore

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
