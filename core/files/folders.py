"""Directories: emptied, and on the disk with what is in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from core.files.store import translated

_SYNC_THREADS = 4


def make_folders(folder: Path, made: list[Path]) -> None:
    """Makes a directory and those above it that are missing.

    Args:
        folder: the directory.
        made: gets those that were made here, the outermost first, as they are made.

    Raises:
        StorageError: the system refuses.
    """
    with translated(str(folder), doing="create"):
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another process makes it at this moment
                folder.mkdir()
                made.append(folder)


def remove_empty(made: list[Path]) -> None:
    """Removes directories that ``make_folders`` made, the innermost first, as long as they are empty."""
    for folder in reversed(made):
        try:
            folder.rmdir()
        except OSError:
            return


def empty_folder(folder: Path, *, keep: Container[str] = ()) -> None:
    """Removes everything that is in a directory, save what has one of these names; links are not followed.

    Raises:
        StorageError: the system refuses.
    """
    with translated(str(folder), doing="empty"):
        for entry in os.scandir(folder):
            if entry.name in keep:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def sync_tree(root: Path) -> None:
    """Syncs every file below a directory, then the directories, the innermost first.

    Raises:
        StorageError: the system could not write.
    """
    files = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        for _ in pool.map(sync_file, files):
            pass
    sync_folders(root)


def sync_folders(root: Path) -> None:
    """Syncs a directory and all below it, the innermost first.

    Raises:
        StorageError: the system could not write.
    """
    for folder, _, _ in os.walk(root, topdown=False):
        sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """Syncs one directory: the names in it are on the disk afterwards.

    Raises:
        StorageError: the system could not write.
    """
    _sync(folder, os.O_DIRECTORY)


def sync_file(file: Path) -> None:
    """Syncs one file, which need not be writable.

    Raises:
        StorageError: the system could not write.
    """
    _sync(file)


def _sync(path: Path, flags: int = 0) -> None:
    with translated(str(path), doing="sync"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
