"""Lock a staging directory, so that only one process at a time works in it.

The lock is ``flock`` on the directory itself. The system releases it when the process ends in any
way, so a directory left behind by a killed process is not locked.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from core.errors import StorageError
from core.files.store import translate_os_errors
from core.values import dataclass

WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
NO_LOCKS = (
    "the file system does not support locks: make sure that nothing else writes to this destination"
)


def stage_dir_of(dst: Path) -> Path:
    """Return the path of a destination's staging directory."""
    return dst.parent / f".{dst.name}.ckpt-stage"


@dataclass(frozen=True, slots=True)
class FolderLock:
    """Lock of a directory that this process may work in.

    Args:
        fd: descriptor of the directory; closing it releases the lock.
        is_sure: other processes are kept out; False if the file system does not support locks.
    """

    fd: int
    is_sure: bool


def lock_folder(folder: Path, *, dst: Path) -> FolderLock:
    """Create a directory, if it is missing, and lock it.

    Args:
        folder: the directory.
        dst: the destination that is written through the directory, for messages.

    Raises:
        StorageError: another process has locked the directory, or the system refuses.
    """
    with translate_os_errors(str(folder), doing="create"):
        while True:
            is_created = False
            fd = -1
            try:
                with suppress(FileExistsError):
                    folder.mkdir()
                    is_created = True
                try:
                    fd = os.open(
                        folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    )
                except FileNotFoundError:
                    # Its owner has just removed it: try again.
                    continue
                is_sure = _lock(fd, folder, dst)
                # Between opening and locking, the owner may have removed the directory.
                if is_current(fd, folder):
                    return FolderLock(fd, is_sure)
            except BaseException:
                # Remove a directory created here, unless another process uses it by now.
                if is_created:
                    with suppress(OSError):
                        folder.rmdir()
                if fd >= 0:
                    _close(fd)
                raise
            _close(fd)


def _close(fd: int) -> None:
    """Close a descriptor, ignoring errors."""
    with suppress(OSError):
        os.close(fd)


def _lock(fd: int, folder: Path, dst: Path) -> bool:
    """Lock a directory; return False if the file system does not support locks.

    Raises:
        StorageError: another process has locked the directory.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        raise StorageError(
            "another process is writing to this destination",
            file=str(dst),
            hint=f"wait until it has finished; it has locked {folder.name}",
        ) from err
    except OSError as err:
        if err.errno not in WITHOUT_LOCKS:
            raise
        return False
    return True


def is_current(fd: int, folder: Path) -> bool:
    """Return whether an open directory or file still exists under its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(folder))
    except FileNotFoundError:
        return False
