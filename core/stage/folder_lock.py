"""A directory that one process at a time may work in: the lock of a stage.

The lock is ``flock`` on the directory itself. It goes with the process that holds it, however that ends, so a directory
left behind by a killed process carries none.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core.errors import StorageError
from core.files.store import translate_os_errors

WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
NO_LOCKS = "the file system has no locks: make sure that nobody else writes this destination"


@dataclass(frozen=True, slots=True)
class FolderLock:
    """A directory that this process may work in.

    Args:
        fd: its descriptor; closing it ends the lock.
        is_sure: whether others are kept out; False where the file system has no locks.
    """

    fd: int
    is_sure: bool


def lock_folder(folder: Path, *, dst: Path) -> FolderLock:
    """Makes a directory, if it is missing, and locks it.

    Args:
        folder: the directory.
        dst: what is written with its help, for messages.

    Raises:
        StorageError: another process has locked it, or the system refuses.
    """
    with translate_os_errors(str(folder), doing="create"):
        while True:
            is_made = False
            fd = -1
            try:
                with suppress(FileExistsError):
                    folder.mkdir()
                    is_made = True
                try:
                    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:  # its owner has just finished
                    continue
                is_sure = _lock(fd, folder, dst)
                if is_current(fd, folder):
                    return FolderLock(fd, is_sure)
            except BaseException:
                _give_up(folder, fd, is_made=is_made)
                raise
            _close(fd)


def _give_up(folder: Path, fd: int, *, is_made: bool) -> None:
    """Leaves a directory, and removes it if it was made here; one with something in it is somebody else's by now."""
    if is_made:
        with suppress(OSError):
            folder.rmdir()
    if fd >= 0:
        _close(fd)


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)


def _lock(fd: int, folder: Path, dst: Path) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise StorageError(
            "another process is writing this destination",
            file=str(dst),
            hint=f"wait for it; it holds {folder.name}",
        ) from err
    except OSError as err:
        if err.errno not in WITHOUT_LOCKS:
            raise
        return False
    return True


def is_current(fd: int, folder: Path) -> bool:
    """Whether the locked directory still has its name, and no other directory got it."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(folder))
    except FileNotFoundError:
        return False
