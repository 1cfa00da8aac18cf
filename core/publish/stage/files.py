"""Write the files of a staging directory: create them at full size, fill them, sync them."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from core.errors import StorageError, TruncatedError, UnsupportedError
from core.files.folders import SYNC_THREADS, sync_file, sync_folders
from core.files.store import MAX_IO_BYTES, TargetStore, check_name, translate_os_errors
from core.files.syscalls import allocate, flush, start_writeback
from core.progress import OnProgress, Phase, count_steps

MAX_OPEN_FILES = 128
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class StageStore(TargetStore):
    """A directory that is being written, from any number of threads.

    Args:
        root: the directory, which exists.
        is_durable: the files will be synced in the end, so finished ranges are sent to the disk
            while others are still being filled.
    """

    def __init__(self, root: Path, *, is_durable: bool = True) -> None:
        self.root = root
        self._is_durable = is_durable
        self._open: OrderedDict[str, _StageFile] = OrderedDict()
        self._names: set[str] = set()
        self._name_of: dict[int, str] = {}  # inode → the name that created it
        self._linked: set[str] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def create(self, name: str, n_bytes: int) -> None:
        """Create a file of zero bytes and reserve its space; keep an existing file of this size.

        Raises:
            CapacityError: the disk is full, or a limit on file sizes is reached.
            UnsupportedError: the file system takes the name for that of another file.
            StorageError: the file cannot be created.
        """
        path = self.root / check_name(name)
        with translate_os_errors(name, doing="create"):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, _FLAGS | os.O_CREAT, 0o666))
            with self._file(name) as fd:
                status = os.fstat(fd)
                # Names that differ in case are one file on macOS and on many network shares.
                other = self._name_of.setdefault(status.st_ino, name)
                if other != name:
                    raise UnsupportedError(
                        f"the file system does not distinguish this file name from {other}",
                        file=name,
                        hint="write to a case-sensitive file system",
                    )
                size = status.st_size
                if size != n_bytes:
                    # Old bytes of another size are discarded. An empty file is not truncated
                    # again: another process may be filling it right now.
                    if size:
                        os.ftruncate(fd, 0)
                    # Set the size in one step; reserving space may lengthen the file gradually.
                    os.ftruncate(fd, n_bytes)
                    allocate(fd, n_bytes)
        self._names.add(name)

    def link(self, name: str, existing: Path) -> None:
        """Create a hard link to an existing file; of a symbolic link, to the file that it leads to.

        Raises:
            UnsupportedError: the two directories are on different file systems, or their file
                system has no hard links.
            StorageError: the link cannot be created.
        """
        path = self.root / check_name(name)
        with translate_os_errors(name, doing="link"):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # link(2) of Linux would link the symbolic link, whose relative target is elsewhere.
                os.link(os.path.realpath(existing), path)
            except OSError as err:
                if err.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
                    raise
                raise UnsupportedError(
                    f"cannot create a hard link to this file: {err.strerror}",
                    file=str(existing),
                    hint="write to the source's file system, or omit --metadata-only",
                ) from err
        self._linked.add(name)

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at ``offset``.

        Raises:
            CapacityError: the disk is full.
            StorageError: the file cannot be written.
        """
        with self._file(name) as fd, translate_os_errors(name, doing="write"):
            # The system may write less than requested.
            view, done = memoryview(data), 0
            while done < len(view):
                done += os.pwrite(fd, view[done : done + MAX_IO_BYTES], offset + done)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from ``offset`` on.

        Raises:
            TruncatedError: the file is too short.
            StorageError: the file cannot be read.
        """
        with self._file(name) as fd, translate_os_errors(name, doing="read back"):
            done = 0
            while done < len(buffer):
                n = os.preadv(fd, [buffer[done : done + MAX_IO_BYTES]], offset + done)
                if n == 0:
                    raise TruncatedError("the unfinished file is too short", file=name)
                done += n

    def settle(self, name: str, offset: int, n_bytes: int) -> None:
        """Start to write a finished range to the disk, without waiting for it."""
        if self._is_durable:
            with self._file(name) as fd:
                start_writeback(fd, offset, n_bytes)

    def sync(self, name: str) -> None:
        """Wait until the bytes of a file are on the disk.

        Raises:
            StorageError: the system could not write them.
        """
        with self._file(name) as fd, translate_os_errors(name, doing="sync"):
            flush(fd)

    def sync_files(self, progress: OnProgress | None = None) -> None:
        """Sync every file that was created, opened or linked here.

        Args:
            progress: called with the number of files that have been synced.

        Raises:
            StorageError: the system could not write them.
        """
        n_files = len(self._names) + len(self._linked)
        step = count_steps(progress, Phase.SYNCING, n_files, unit="files") or (
            lambda n_synced: None
        )
        with ThreadPoolExecutor(SYNC_THREADS) as pool:
            for _ in pool.map(self.sync, sorted(self._names)):
                step(1)
            for _ in pool.map(sync_file, [self.root / name for name in sorted(self._linked)]):
                step(1)

    def sync_all(self, progress: OnProgress | None = None) -> None:
        """Sync the files, then the directories, the innermost first.

        Args:
            progress: as for ``sync_files``.

        Raises:
            StorageError: the system could not write them.
        """
        self.sync_files(progress)
        sync_folders(self.root)

    def close(self) -> None:
        """Close every file; no file can be opened afterwards.

        A file that a thread still uses is closed when that thread has finished with it.

        Raises:
            StorageError: a write that was still pending failed.
        """
        with self._lock:
            self._is_closed = True
            idle = [name for name, file in self._open.items() if file.n_users == 0]
            for name in idle:
                self._close(name)

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """Yield a descriptor of a file; about ``MAX_OPEN_FILES`` descriptors are kept open."""
        with self._lock:
            if self._is_closed:
                raise StorageError("the staging directory is closed", file=name)
            opened = self._open.get(name)
            if opened is None:
                with translate_os_errors(name, doing="open"):
                    opened = _StageFile(os.open(self.root / check_name(name), _FLAGS))
                self._open[name] = opened
                # ``sync_files`` also syncs files that another process has created.
                self._names.add(name)
                self._close_idle()
            self._open.move_to_end(name)
            opened.n_users += 1
        try:
            yield opened.fd
        finally:
            self._release(name, opened)

    def _release(self, name: str, opened: _StageFile) -> None:
        """Close a file after its last use, if ``close`` had to skip it."""
        with self._lock:
            opened.n_users -= 1
            if self._is_closed and opened.n_users == 0:
                self._close(name)

    def _close_idle(self) -> None:
        """Close the longest unused files above ``MAX_OPEN_FILES``, except the one opened last."""
        excess = len(self._open) - MAX_OPEN_FILES
        if excess > 0:
            for name in [name for name, file in self._open.items() if file.n_users == 0][:excess]:
                if self._open[name] is not next(reversed(self._open.values())):
                    self._close(name)

    def _close(self, name: str) -> None:
        # Network file systems report failed writes when the file is closed.
        with translate_os_errors(name, doing="close"):
            os.close(self._open.pop(name).fd)


class _StageFile:
    """An open descriptor and the number of threads that use it."""

    __slots__ = ("fd", "n_users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.n_users = 0
