"""Create directories, empty them, and flush them and their files to the disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from core.files.store import translate_os_errors
from core.files.syscalls import flush, rename_new

SYNC_THREADS = 4
"""Number of files or directories that are synced at the same time."""
PART_SUFFIX = ".ckpt-part"
"""Suffix of a file that is being written; a killed run leaves such a file behind."""


def make_folders(folder: Path) -> list[Path]:
    """Create a directory and its missing parents, and return those that were created.

    Returns:
        The new directories, the outermost first.

    Raises:
        StorageError: a directory cannot be created; those created before have been removed again.
    """
    new_folders: list[Path] = []
    try:
        with translate_os_errors(str(folder), doing="create"):
            # Find the missing directories upwards, then create them downwards.
            missing = []
            while not folder.exists():
                missing.append(folder)
                folder = folder.parent
            for path in reversed(missing):
                # Another process may have created the directory in the meantime.
                with suppress(FileExistsError):
                    path.mkdir()
                    new_folders.append(path)
    except BaseException:
        remove_empty(new_folders)
        raise
    return new_folders


def nearest_folder(path: Path) -> Path:
    """Return the innermost existing path among a path and its parents."""
    path = Path(os.path.abspath(path))
    return next(folder for folder in (path, *path.parents) if folder.exists())


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove nested directories, the last (innermost) first, until one is not empty."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return


def empty_folder(folder: Path, *, keep: Container[str] = ()) -> None:
    """Remove everything from a directory except the names in ``keep``, without following links.

    Raises:
        StorageError: an entry cannot be removed.
    """
    with translate_os_errors(str(folder), doing="empty"):
        for entry in os.scandir(folder):
            if entry.name in keep:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def write_whole(path: Path, pieces: Iterable[bytes | memoryview], *, replace: bool = True) -> None:
    """Write a file completely or not at all; only its name is not on the disk yet.

    Args:
        path: the file, whose directory exists.
        pieces: consecutive parts of the content.
        replace: replace an existing file.

    Raises:
        FileExistsError: the file exists, and ``replace`` is false.
        OSError: the system cannot write; an earlier file is unchanged.
    """
    # Write a hidden file next to the target and rename it, so that no reader sees a part of it.
    partial_path = path.with_name(f".{path.name}{PART_SUFFIX}")
    # Remove the file of a killed run: it could be a link, and writing would follow it.
    partial_path.unlink(missing_ok=True)
    try:
        with partial_path.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            flush(file.fileno())
        if replace:
            os.replace(partial_path, path)
        else:
            rename_new(partial_path, path)
    except BaseException:
        with suppress(OSError):
            partial_path.unlink(missing_ok=True)
        raise


def sync_tree(root: Path) -> None:
    """Flush every file below a directory to the disk, then its directories, the innermost first.

    Raises:
        StorageError: the system could not write.
    """
    files = [Path(folder, name) for folder, _, names in os.walk(root) for name in names]
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        for _ in pool.map(sync_file, files):
            pass
    sync_folders(root)


def sync_folders(root: Path) -> None:
    """Flush a directory and all directories below it to the disk, the innermost first.

    Raises:
        StorageError: the system could not write.
    """
    for folder, _, _ in os.walk(root, topdown=False):
        sync_folder(Path(folder))


def sync_folder(folder: Path) -> None:
    """Flush the names in one directory to the disk, but not the content of its files.

    Raises:
        StorageError: the system could not write.
    """
    _sync(folder, os.O_DIRECTORY)


def sync_file(file: Path) -> None:
    """Flush one file to the disk; it need not be writable.

    Raises:
        StorageError: the system could not write.
    """
    _sync(file)


def _sync(path: Path, flags: int = 0) -> None:
    """Open a file or directory, and flush it to the disk."""
    with translate_os_errors(str(path), doing="sync"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            flush(fd)
        finally:
            os.close(fd)
