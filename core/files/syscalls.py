"""Call system functions that Python or the system may lack, with a harmless fallback.

Python has the functions of this module only on some systems (macOS has none of them), or not at
all. No other module uses them directly (``tests/repository/test_platform.py``)::

    function          Linux                macOS
    allowed_cores     sched_getaffinity    all cores
    bind_to_cores     sched_setaffinity    nothing
    flush             fsync                F_FULLFSYNC, as fsync leaves bytes in the drive's cache
    flush_content     fdatasync            F_FULLFSYNC
    drop_from_cache   posix_fadvise        nothing
    is_in_page_cache  RWF_NOWAIT           False
    open_nameless     O_TMPFILE            a temporary file whose name is removed at once
    anonymous_file    memfd_create         a temporary file without a name
    allocate          fallocate            a longer file without reserved space
    start_writeback   sync_file_range      nothing
    die_with_parent   prctl                only a check that the parent is alive
    rename_new        renameat2            a check, then a rename
    exchange          renameat2            False
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_SYNC_FILE_RANGE_WRITE = 2
_PR_SET_PDEATHSIG = 1
_MISSING = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
_LEAST_MEMORY_BYTES = 512 << 20
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL)


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


def allowed_cores() -> frozenset[int]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def default_memory_bytes(
    n_processes: int = 1,
    *,
    proc_dir: Path = Path("/proc"),
    cgroup_dir: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the memory that a process may use unless the user says otherwise.

    It is a quarter of the memory that the machine or the control group has, but at least 512 MiB.

    Args:
        n_processes: number of processes of this program that share the machine.
        proc_dir, cgroup_dir: mount points of the kernel's file systems.
    """
    return max(_LEAST_MEMORY_BYTES, _memory_bytes(proc_dir, cgroup_dir) // 4 // n_processes)


@lru_cache
def _memory_bytes(proc_dir: Path, cgroup_dir: Path) -> int:
    """Return the memory of the machine, or that of the control group if it is less."""
    sizes = []
    with suppress(OSError, ValueError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # A container sees the limits of its group at the mount point; a job of a batch system is in a
    # group below it, and each group above limits it, too. v1 has another file, with a huge number
    # where there is no limit.
    folders = [cgroup_dir, cgroup_dir / "memory"]
    with suppress(OSError, ValueError):
        for line in (proc_dir / "self/cgroup").read_text("utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                group = cgroup_dir / controllers / path.strip("/")
                folders += [group, *group.parents]
    for folder in dict.fromkeys(folders):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):
                sizes.append(int((folder / name).read_text("ascii")))
    return min((size for size in sizes if size > 0), default=0)


def bind_to_cores(cores: Collection[int]) -> bool:
    """Let this process and its future threads run on these cores only.

    Returns:
        False if the system cannot bind processes; nothing has changed then.
    """
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, cores)
    return True


def flush(fd: int) -> None:
    """Wait until a file or directory is on the disk.

    Raises:
        OSError: the system could not write it.
    """
    full_sync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_sync is not None:
        try:
            fcntl.fcntl(fd, full_sync)
            return
        except OSError as err:
            # Network file systems and directories may not support it.
            if err.errno not in (*_MISSING, errno.ENOTTY):
                raise
    os.fsync(fd)


def flush_content(fd: int) -> None:
    """Wait until the bytes of a file are on the disk, but not its times.

    Raises:
        OSError: the system could not write them.
    """
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        flush(fd)


def drop_from_cache(fd: int, offset: int = 0, n_bytes: int = 0) -> None:
    """Drop a range of a file from the page cache, except for bytes that are not on the disk yet.

    Args:
        n_bytes: length of the range; 0 for all up to the end of the file.

    Raises:
        OSError: the file system refuses.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)


def is_in_page_cache(fd: int, offset: int) -> bool:
    """Return whether a byte of a file is in memory; False where the system does not tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def open_nameless(folder: Path) -> int:
    """Create a file without a name in a directory; nothing is left even if the process is killed.

    Raises:
        OSError: the directory does not exist, or cannot be written to.
    """
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as err:
            if err.errno not in _NO_TMPFILE or not folder.is_dir():
                raise
    # File systems without such files, such as NFS: remove the name at once.
    import tempfile

    fd, path = tempfile.mkstemp(prefix=".ckpt-speed-", dir=folder)
    os.unlink(path)
    return fd


def anonymous_file(name: str) -> int:
    """Create an empty file without a name, in memory if the system can; return its descriptor.

    Args:
        name: shown by tools that list open files.

    Raises:
        OSError: too many files are open, or no space is left.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    import tempfile

    fd, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return fd


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
