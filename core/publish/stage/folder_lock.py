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
from typing import TypeVar

from core.errors import StorageError
from core.files.store import translate_os_errors
from core.values import dataclass

AnyPath = TypeVar("AnyPath", bound=Path)
WORKERS_LOCK = "workers.lock"
"""Name of the lock that several workers share in a staging directory (``workers_lock``)."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL)
NO_LOCKS = (
    "the file system does not support locks, so make sure that nothing else writes to this "
    "destination"
)


def stage_dir_of(dst: AnyPath) -> AnyPath:
    """Return the staging directory of a destination, or its prefix in an object store."""
    return dst.parent / f".{dst.name}.ckpt-stage"


@dataclass(slots=True)
class FolderLock:
    """Lock of a directory that this process may work in.

    Args:
        fd: descriptor of the directory; closing it releases the lock.
        is_sure: other processes are kept out; False if the file system does not support locks.
    """

    fd: int
    is_sure: bool

    def close(self) -> None:
        """Release the lock."""
        fd, self.fd = self.fd, -1
        close_quietly(fd)


def lock_stage(dst: Path) -> FolderLock:
    """Create the staging directory of a local destination, if it is missing, and lock it.

    Raises:
        StorageError: another process has locked the directory, or the system refuses.
    """
    stage_dir = stage_dir_of(dst)
    refusal = StorageError(
        "another process is writing to this destination",
        file=str(dst),
        hint=f"wait until that process has finished; it has locked {stage_dir.name}",
    )
    return lock_folder(stage_dir, refusal=refusal)


def lock_folder(folder: Path, *, refusal: StorageError) -> FolderLock:
    """Create a directory, if it is missing, and lock it.

    Args:
        folder: the directory.
        refusal: the error to raise if another process has locked the directory.

    Raises:
        StorageError: the ``refusal``, or the system refuses.
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
                is_locked = try_lock(fd, fcntl.LOCK_EX)
                if is_locked is False:
                    raise refusal
                # Between opening and locking, the owner may have removed the directory.
                if is_current(fd, folder):
                    return FolderLock(fd, is_sure=is_locked is True)
            except BaseException:
                # Remove a directory created here, unless another process uses it by now.
                if is_created:
                    with suppress(OSError):
                        folder.rmdir()
                close_quietly(fd)
                raise
            close_quietly(fd)


def try_lock(fd: int, kind: int) -> bool | None:
    """Lock an open file or directory without waiting.

    Args:
        fd: the descriptor.
        kind: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``.

    Returns:
        False if other processes hold the lock, None if the file system does not support locks.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as err:
        if err.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if err.errno in _WITHOUT_LOCKS:
            return None
        raise
    return True


def close_quietly(fd: int) -> None:
    """Close a descriptor, ignoring errors; do nothing if it is negative."""
    if fd >= 0:
        with suppress(OSError):
            os.close(fd)


def is_current(fd: int, folder: Path) -> bool:
    """Return whether an open directory or file still exists under its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(folder))
    except FileNotFoundError:
        return False
