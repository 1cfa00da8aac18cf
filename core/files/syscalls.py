"""Call system functions that Python lacks, with a harmless fallback if they are missing."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from functools import lru_cache
from pathlib import Path
from typing import Any

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_SYNC_FILE_RANGE_WRITE = 2
_PR_SET_PDEATHSIG = 1
_MISSING = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@lru_cache
def _libc() -> Any:
    """Return the C library, with the argument types of the calls that it has."""
    libc = ctypes.CDLL(None, use_errno=True)
    offset = ctypes.c_int64
    for name, types in (
        ("fallocate64", [ctypes.c_int, ctypes.c_int, offset, offset]),
        ("sync_file_range", [ctypes.c_int, offset, offset, ctypes.c_uint]),
        (
            "renameat2",
            [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint],
        ),
    ):
        function = getattr(libc, name, None)
        if function is not None:
            function.argtypes = types
    return libc


def allocate(fd: int, n_bytes: int) -> None:
    """Set the length of a file, and reserve its space on the disk if the file system can.

    Raises:
        OSError: no space is left, or the file would be too large for the file system.
    """
    fallocate = getattr(_libc(), "fallocate64", None)
    if n_bytes and fallocate is not None:
        while fallocate(fd, 0, 0, n_bytes) != 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            # Do without: glibc's posix_fallocate would write to every block instead.
            if number in _MISSING:
                break
            raise OSError(number, os.strerror(number))
    os.ftruncate(fd, n_bytes)


def start_writeback(fd: int, offset: int, n_bytes: int) -> None:
    """Ask the kernel to start writing a range to the disk, so that fsync takes less time later."""
    sync_file_range = getattr(_libc(), "sync_file_range", None)
    if sync_file_range is not None:
        # The result does not matter: errors show up in fsync.
        sync_file_range(fd, offset, n_bytes, _SYNC_FILE_RANGE_WRITE)


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends.

    The process is killed at once if ``parent_pid`` has already ended.
    """
    prctl = getattr(_libc(), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before prctl took effect.
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file or directory to a free name.

    Raises:
        FileExistsError: the name is taken.
        OSError: as for ``os.rename``.
    """
    if not _renameat2(source, target, _RENAME_NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        # In a race, os.rename could only replace a file or an empty directory.
        os.rename(source, target)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step.

    Returns:
        False if the file system does not support this; nothing has changed then.

    Raises:
        OSError: as for ``os.rename``.
    """
    return _renameat2(first, second, _RENAME_EXCHANGE)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    """Call renameat2; return False if the kernel or the file system does not support the flags."""
    renameat2 = getattr(_libc(), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _MISSING:
        return False
    raise OSError(number, os.strerror(number), str(target))
