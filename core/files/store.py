"""Read and write files by name: the only module of ``core`` that opens a source file.

A store is a directory of files with relative names. Formats read through ``ReadStore``; the copy
engine also writes through ``WriteStore`` (a staging directory, or memory in tests). Names come from
untrusted files, so every one is checked: relative, without ``..``, NUL, backslash or empty
components. Symbolic links *inside* the directory are followed (the Hugging Face cache consists of
them); only regular files are opened.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from core.errors import (
    CapacityError,
    MissingShardError,
    SourceChangedError,
    StorageError,
    TruncatedError,
    UnsafeError,
)

if TYPE_CHECKING:
    from typing_extensions import override as override

    from core.files.ranges import FileRange
else:

    def override(method):
        """Return the method; ``core.files.sandbox`` imports this module without other packages."""
        return method


MAX_OPEN_FILES = 128
MAX_LINKED_FOLDERS = 10_000
MAX_IO_BYTES = 2**30
"""Maximum number of bytes to read or write in one call; macOS refuses 2 GiB and more."""
_IOV_MAX = 1024
_MOST_HOLES = 4096
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP, errno.ENAMETOOLONG)


class ReadStore(Protocol):
    """Read access to a directory of files.

    Attributes:
        is_remote: whether every read is a request, so that few and long ones are better. Who knows
            what will be read announces it, so that it arrives in few requests, several at a time;
            only remote stores take notice.
    """

    is_remote: bool = False

    @property
    def label(self) -> str:
        """Name of the store in messages, usually its path."""

    @property
    def entry(self) -> str | None:
        """Name of the one file that the user specified; None if it was a directory."""

    def files(self, under: str = "") -> list[str]:
        """Return the sorted names of the regular files in ``under``; [] if it is missing."""

    def folders(self, under: str = "") -> list[str]:
        """Return the sorted names of the directories in ``under``; [] if it is missing."""

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """Return name → bytes of the regular files directly in ``under``; {} if it is missing."""

    def exists(self, name: str) -> bool:
        """Return whether ``name`` is a regular file."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from ``offset`` on."""

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """Read ``n_bytes`` bytes of a file from ``offset`` on."""

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read several ranges of a file, given as (offset, number of bytes)."""

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """Fill consecutive buffers of ``n_bytes`` in total, from ``offset`` on."""

    def expect_ranges(self, ranges: Iterable[FileRange]) -> None:
        """Announce ranges that will be read soon, each once."""
        return

    def expect_headers(self, names: Iterable[str]) -> None:
        """Announce files whose metadata will be read next, in this order."""
        return

    def limit_reading(self, limit_bytes: int, *, threads: int) -> int:
        """Adapt to a process's memory limit, and return how much of it reading takes.

        Args:
            threads: number of threads that read.
        """
        return 0


class WriteStore(Protocol):
    """Write access to a directory of files; no file is visible to others before the commit."""

    def create(self, name: str, n_bytes: int) -> None:
        """Create a file of ``n_bytes`` zero bytes and allocate its space.

        An existing file of that size is kept unchanged.
        """

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at ``offset``."""


class TargetStore(WriteStore, Protocol):
    """The target of a copy, which can be read back while it is written.

    Attributes:
        is_readable: every byte that was written can be read back; otherwise only those of a held
            range can.
    """

    is_readable: bool = True

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes that were written, from ``offset`` on."""

    def zero(self, name: str, offset: int, n_bytes: int) -> None:
        """Take note that a range of a new file stays zero."""
        return

    def settle(self, name: str, offset: int, n_bytes: int) -> None:
        """Take note that a range will not change any more, so that it may go to the disk now."""
        return

    def hold(self, name: str, offset: int, n_bytes: int) -> None:
        """Keep a range readable until it is released; called before it is written to."""
        return

    def release(self, name: str, offset: int, n_bytes: int) -> None:
        """Take note that a range will not be read back any more."""
        return


def check_name(name: object, *, found_in: str | None = None) -> str:
    """Return ``name`` if it is a safe relative path, else raise.

    Args:
        name: a file name from a checkpoint.
        found_in: the file that contains the name, for the message.

    Raises:
        UnsafeError: not a string, absolute, or with ``..``, NUL, a backslash or an empty component.
    """
    is_safe = (
        isinstance(name, str)
        and name != ""
        and "\0" not in name
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )
    if not is_safe:
        raise UnsafeError(
            f"file name {name!r} is not a path inside the checkpoint",
            file=found_in,
            hint="do not trust this checkpoint; find out where it came from",
        )
    assert isinstance(name, str)
    return name


_READING = ("open", "read", "check")
CAPACITY_HINTS = {
    errno.ENOSPC: "free some space and run again",
    errno.EDQUOT: "free some space within the quota and run again",
    errno.EFBIG: (
        "raise the limit on file sizes (ulimit -f unlimited), or write to a file system that "
        "allows larger files"
    ),
    errno.ENOMEM: "lower --memory or --threads, or use a machine with more memory",
}
"""Error of the system for lack of capacity → hint."""
_HINTS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check the permissions"),
    errno.ELOOP: "replace the symbolic link by the file that it should lead to (see ls -l)",
}
"""Other error of the system → hint."""


@contextmanager
def translate_os_errors(label: str, *, doing: str) -> Iterator[None]:
    """Turn errors of the operating system into typed errors of the project.

    Args:
        label: the file, as the user knows it.
        doing: the attempted operation, an infinitive such as ``read``.

    Raises:
        MissingShardError: the file to read does not exist.
        CapacityError: disk, quota or memory are exhausted, or the file is too large.
        StorageError: any other error of the system.
    """
    try:
        yield
    except OSError as err:
        if isinstance(err, FileNotFoundError) and doing in _READING:
            raise MissingShardError(
                f"cannot {doing} {label}: the file does not exist", file=label
            ) from err
        reason = os.strerror(err.errno).lower() if err.errno else str(err)
        if err.errno in CAPACITY_HINTS:
            advice = CAPACITY_HINTS[err.errno]
            raise CapacityError(
                f"cannot {doing} {label}: {reason}", file=label, hint=advice
            ) from err
        hint = _HINTS.get(err.errno or 0)
        raise StorageError(f"cannot {doing} {label}: {reason}", file=label, hint=hint) from err


def _has_kind(is_kind: Callable[[], bool]) -> bool:
    """Call ``is_kind`` of a directory entry; return False for a link that leads to itself."""
    try:
        return is_kind()
    except OSError:
        return False


def leads_on(link: Path) -> bool:
    """Return whether a symbolic link leads to a directory that does not contain the link itself.

    Following a link to one of its own parents would never end.
    """
    target = os.path.realpath(link)
    parent = os.path.realpath(link.parent)
    return os.path.isdir(target) and not f"{parent}/".startswith(
        target if target.endswith("/") else f"{target}/"
    )


def list_files_below(store: ReadStore) -> dict[str, int]:
    """Return name → bytes of all regular files of a store, or of its ``entry`` alone."""
    if store.entry is not None:
        return {store.entry: store.size(store.entry)}

    # List the directories depth first, and sort the names at the end.
    sizes: dict[str, int] = {}
    folders = [""]
    while folders:
        under = folders.pop()
        prefix = f"{under}/" if under else ""
        sizes.update((prefix + name, size) for name, size in store.sizes(under).items())
        folders += [prefix + name for name in store.folders(under)]
    return dict(sorted(sizes.items()))


class LocalStore(ReadStore):
    """A directory of the local file system, read with ``pread`` from any number of threads.

    The first open of a file records its size, mtime and inode; ``verify_unchanged`` compares them
    at the end.

    Args:
        root: the directory.
        entry: name of the one file that the user specified; None for the directory.
        stamps: name → ``stamp`` of files as another process opened them. Sizes and times must
            match; inodes are not compared, as they may differ between hosts.

    Attributes:
        on_open: called with 1 when a file is opened that has not been opened before; None for no
            call.
    """

    entry: str | None = None
    on_open: Callable[[int], None] | None = None

    def __init__(
        self,
        root: Path,
        *,
        entry: str | None = None,
        stamps: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.root = root
        self.entry = entry
        self._stamps = stamps or {}
        self._open: OrderedDict[str, _UsedDescriptor] = OrderedDict()
        self._first_stamps: dict[str, tuple[int, int, int]] = {}
        self._links: set[tuple[str, str]] = set()
        """(parent, name) of the links to directories that have been listed."""
        self._lock = threading.Lock()

    @property
    @override
    def label(self) -> str:
        return str(self.root / self.entry if self.entry else self.root)

    def path(self, name: str) -> Path:
        """Return the path of a file, after checking its name."""
        return self.root / check_name(name)

    @override
    def files(self, under: str = "") -> list[str]:
        return [name for name, entry in self._entries(under) if _has_kind(entry.is_file)]

    @override
    def folders(self, under: str = "") -> list[str]:
        """Return the sorted names of the directories in ``under``, including links to directories.

        Raises:
            UnsafeError: so many links lead to directories that they may form an endless loop.
        """
        names: list[str] = []
        for name, entry in self._entries(under):
            # Two links that lead to each other's directories form a loop that ``leads_on`` cannot
            # detect; the limit ends it.
            if entry.is_symlink():
                if not leads_on(self.root / under / name):
                    continue
                self._links.add((under, name))
                if len(self._links) > MAX_LINKED_FOLDERS:
                    raise UnsafeError(
                        f"the directory contains more than {MAX_LINKED_FOLDERS:,} symbolic "
                        "links to directories",
                        file=under,
                        hint="remove the links; a checkpoint does not need symbolic links",
                    )
                names.append(name)
            elif _has_kind(entry.is_dir):
                names.append(name)
        return names

    def unreadable(self, under: str = "") -> list[str]:
        """Return the names in ``under`` that contain no data: pipes, sockets, broken links, …"""
        return [
            name
            for name, entry in self._entries(under)
            if not (_has_kind(entry.is_file) or _has_kind(entry.is_dir))
        ]

    @override
    def sizes(self, under: str = "") -> Mapping[str, int]:
        with translate_os_errors(
            str(self.path(under) if under else self.root), doing="list the directory"
        ):
            return {
                name: entry.stat().st_size
                for name, entry in self._entries(under)
                if _has_kind(entry.is_file)
            }

    def _entries(self, under: str) -> list[tuple[str, os.DirEntry[str]]]:
        """List a directory by name; return [] if it is missing."""
        folder = self.path(under) if under else self.root
        with translate_os_errors(str(folder), doing="list the directory"):
            try:
                with os.scandir(folder) as entries:
                    return sorted((entry.name, entry) for entry in entries)
            except (FileNotFoundError, NotADirectoryError):
                return []

    @override
    def exists(self, name: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(os.path.join(self.root, check_name(name))).st_mode)
        except OSError as err:
            if err.errno in _NO_SUCH_FILE:
                return False
            raise

    @override
    def size(self, name: str) -> int:
        """Return the size of a file in bytes, as it was when the file was first opened.

        Raises:
            MissingShardError: the file does not exist.
            UnsafeError: the file is not a regular file.
            SourceChangedError: the file differs from its entry in ``stamps``.
            StorageError: the file cannot be opened.
        """
        if name not in self._first_stamps:
            with self._file(name):
                pass
        return self._first_stamps[name][0]

    @property
    def opened(self) -> list[str]:
        """Names of the files that have been opened so far."""
        return list(self._first_stamps)

    def stamp(self, name: str) -> tuple[int, int, int]:
        """Return size, modification time (ns) and inode of a file when it was first opened."""
        self.size(name)
        return self._first_stamps[name]

    @override
    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """Read ``n_bytes`` bytes of a file from ``offset`` on.

        A range beyond the end of the file is rejected before memory is allocated for it.

        Raises:
            TruncatedError, MissingShardError, UnsafeError, StorageError: as for ``read_into``.
            CapacityError: the bytes do not fit in memory.
        """
        with self._file(name) as fd, translate_os_errors(name, doing="read"):
            size = self._first_stamps[name][0]
            if offset + n_bytes > size:
                raise _too_short(name, size, offset, n_bytes)
            try:
                data = os.pread(fd, n_bytes, offset)
                if len(data) == n_bytes:
                    return data
                # A signal arrived, or the range is longer than one call can read.
                buffer = bytearray(n_bytes)
            except (MemoryError, OverflowError) as err:
                raise CapacityError(
                    f"{n_bytes:,} bytes of this file must be read at once, but do not fit in "
                    "memory",
                    file=name,
                    hint="compare the file's size with the original's; if the size is right, "
                    "use a machine with more memory",
                ) from err
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes of a file from ``offset`` on.

        Raises:
            TruncatedError: the file ends before the buffer is full.
            MissingShardError, UnsafeError, StorageError: as for ``size``.
        """
        with self._file(name) as fd, translate_os_errors(name, doing="read"):
            # A call may read less than requested.
            done = 0
            while done < len(buffer):
                n_read = os.preadv(fd, [buffer[done : done + MAX_IO_BYTES]], offset + done)
                if n_read == 0:
                    raise _too_short(name, offset + done, offset, len(buffer))
                done += n_read

    @override
    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._file(name) as fd, translate_os_errors(name, doing="read"):
            parts = [os.pread(fd, n_bytes, offset) for offset, n_bytes in spans]
        # Repeat reads that a signal, or the end of the file, has cut short.
        for number, (offset, n_bytes) in enumerate(spans):
            if len(parts[number]) != n_bytes:
                parts[number] = self.read(name, offset, n_bytes)
        return parts

    @override
    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        # The kernel takes up to _IOV_MAX buffers in one call.
        for first in range(0, len(buffers), _IOV_MAX):
            batch = buffers[first : first + _IOV_MAX]
            batch_bytes = n_bytes if len(batch) == len(buffers) else sum(map(len, batch))
            with self._file(name) as fd, translate_os_errors(name, doing="read"):
                is_short = batch_bytes > MAX_IO_BYTES or os.preadv(fd, batch, offset) != batch_bytes
            # If they are too long for one call, after a signal, or at the end of the file, fill the
            # buffers one by one.
            if is_short:
                position = offset
                for buffer in batch:
                    self.read_into(name, position, buffer)
                    position += len(buffer)
            offset += batch_bytes

    def modified_ns(self, name: str) -> int:
        """Return the modification time of a file in nanoseconds since 1970, without opening it.

        Raises:
            OSError: the file does not exist or cannot be accessed.
        """
        return os.stat(self.path(name)).st_mtime_ns

    def disk_bytes(self, name: str) -> int:
        """Return how many bytes of a file are stored: fewer than its size if it has holes.

        Raises:
            OSError: the file does not exist or cannot be accessed.
        """
        # st_blocks counts units of 512 bytes, whatever the block size of the file system.
        return os.stat(self.path(name)).st_blocks << 9

    def holes(self, name: str) -> list[tuple[int, int]]:
        """Return the ranges of a file that were never written, at most ``_MOST_HOLES``.

        They read as zeros. A file system that does not record holes has none.

        Raises:
            MissingShardError, UnsafeError, StorageError: as for ``size``.
        """
        size, holes, stop = self.size(name), list[tuple[int, int]](), 0
        with self._file(name) as fd:
            while stop < size and len(holes) < _MOST_HOLES:
                try:
                    start = os.lseek(fd, stop, os.SEEK_HOLE)
                except OSError:
                    break  # the file system does not say
                if start >= size:
                    break
                try:
                    stop = os.lseek(fd, start, os.SEEK_DATA)
                except OSError:
                    stop = size  # no data to the end
                holes.append((start, stop))
        return holes

    def is_cached(self, name: str, offset: int) -> bool:
        """Return whether a byte of a file is in memory; False where the system does not tell.

        Raises:
            MissingShardError, UnsafeError, StorageError: as for ``size``.
        """
        # Imported here, as it loads ctypes, which few commands need.
        from core.files.syscalls import is_in_page_cache

        with self._file(name) as fd:
            return is_in_page_cache(fd, offset)

    def drop_cached(self, name: str, offset: int, n_bytes: int) -> None:
        """Ask the system to forget a range of a file, so that the disk is read the next time.

        Raises:
            MissingShardError, UnsafeError, StorageError: as for ``size``.
        """
        from core.files.syscalls import drop_from_cache

        with self._file(name) as fd, suppress(OSError):
            drop_from_cache(fd, offset, n_bytes)

    def verify_unchanged(self) -> None:
        """Raise if any file has changed since it was first opened.

        Raises:
            SourceChangedError: the size, modification time or inode of a file differs.
            MissingShardError: a file does not exist any more.
        """
        for name, before in self._first_stamps.items():
            with translate_os_errors(name, doing="check"):
                now = os.stat(self.path(name))
            if (now.st_size, now.st_mtime_ns, now.st_ino) != before:
                raise SourceChangedError(
                    "the file changed while it was being read",
                    file=name,
                    hint="run the command again when no other process is writing to the file",
                )

    def close(self) -> None:
        """Close every file; later reads open them again."""
        with self._lock:
            for opened in self._open.values():
                _close(opened.fd)
            self._open.clear()

    def __del__(self) -> None:
        self.close()  # a store that nobody closed does not keep its files open, as file objects do

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """Yield an open descriptor of ``name``; idle ones above ``MAX_OPEN_FILES`` are closed."""
        with self._lock:
            opened = self._open.get(name)
            if opened is None:
                opened = _UsedDescriptor(self._open_regular(name))
                self._open[name] = opened
            self._open.move_to_end(name)
            opened.n_users += 1

            # Close descriptors that have been idle longest, unless threads are using them.
            for old_name, old in list(self._open.items()):
                if len(self._open) <= MAX_OPEN_FILES:
                    break
                if old.n_users == 0:
                    del self._open[old_name]
                    _close(old.fd)
        try:
            yield opened.fd
        finally:
            with self._lock:
                opened.n_users -= 1

    def _open_regular(self, name: str) -> int:
        """Open a regular file, record its stamp, and return its descriptor."""
        with translate_os_errors(name, doing="open"):
            # O_NONBLOCK: otherwise opening a pipe would wait for a writer.
            fd = os.open(self.path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with translate_os_errors(name, doing="open"):
                status = os.fstat(fd)
        except BaseException:
            _close(fd)
            raise

        # Pipes and devices have no meaningful size, and reading them may never end.
        if not stat.S_ISREG(status.st_mode):
            _close(fd)
            raise UnsafeError(
                "this is not a regular file", file=name, hint="remove it from the checkpoint"
            )

        # On another host, the file must be the one for which the plan was made.
        expected = self._stamps.get(name)
        if expected is not None and tuple(expected[:2]) != (status.st_size, status.st_mtime_ns):
            _close(fd)
            raise SourceChangedError(
                "the file's size or modification time has changed since the plan was made",
                file=name,
                hint="make sure that all hosts see the same files and that nothing is writing "
                "to them",
            )
        if name not in self._first_stamps:
            self._first_stamps[name] = (status.st_size, status.st_mtime_ns, status.st_ino)
            if self.on_open is not None:
                self.on_open(1)
        return fd


def _close(fd: int) -> None:
    """Close a file that was only read: errors do not matter."""
    with suppress(OSError):
        os.close(fd)


def _too_short(name: str, end: int, offset: int, n_bytes: int) -> TruncatedError:
    """Return the error for a file that ends at byte ``end``, inside the range to read."""
    return TruncatedError(
        f"the file ends at byte {end:,}, {offset + n_bytes - end:,} bytes too early",
        file=name,
        span=(offset, offset + n_bytes),
        hint="copy the checkpoint again, or use an older one",
    )


class _UsedDescriptor:
    """An open descriptor and the number of threads that are using it."""

    __slots__ = ("fd", "n_users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.n_users = 0


class MemoryStore(ReadStore, TargetStore):
    """Files in memory, for tests and for live tensors; can be read and written.

    Args:
        contents: name → bytes; a memoryview is used in place, other bytes are copied.
    """

    entry: str | None = None
    label: str = "memory"

    def __init__(
        self,
        contents: Mapping[str, bytes | bytearray | memoryview] | None = None,
        *,
        entry: str | None = None,
    ) -> None:
        self.contents: dict[str, bytearray | memoryview] = {
            name: data if isinstance(data, memoryview) else bytearray(data)
            for name, data in (contents or {}).items()
        }
        self.entry = entry

    @override
    def files(self, under: str = "") -> list[str]:
        prefix = under + "/" if under else ""
        paths = (name[len(prefix) :] for name in self.contents if name.startswith(prefix))
        return sorted(path for path in paths if "/" not in path)

    @override
    def folders(self, under: str = "") -> list[str]:
        prefix = under + "/" if under else ""
        paths = (name[len(prefix) :] for name in self.contents if name.startswith(prefix))
        return sorted({path.split("/")[0] for path in paths if "/" in path})

    @override
    def sizes(self, under: str = "") -> Mapping[str, int]:
        prefix = under + "/" if under else ""
        return {name: len(self.contents[prefix + name]) for name in self.files(under)}

    @override
    def exists(self, name: str) -> bool:
        return name in self.contents

    @override
    def size(self, name: str) -> int:
        return len(self._content(name))

    @override
    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        data = bytes(self._content(name)[offset : offset + n_bytes])
        if len(data) != n_bytes:
            raise TruncatedError(f"the file ends at byte {offset + len(data):,}", file=name)
        return data

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        data = memoryview(self._content(name))[offset : offset + len(buffer)]
        if len(data) != len(buffer):
            raise TruncatedError(f"the file ends at byte {offset + len(data):,}", file=name)
        buffer[:] = data

    @override
    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read(name, offset, n_bytes) for offset, n_bytes in spans]

    @override
    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        for buffer in buffers:
            self.read_into(name, offset, buffer)
            offset += len(buffer)

    @override
    def create(self, name: str, n_bytes: int) -> None:
        if len(self.contents.get(name, b"\0")) != n_bytes or name not in self.contents:
            self.contents[name] = bytearray(n_bytes)

    @override
    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        self._content(name)[offset : offset + len(data)] = data

    def _content(self, name: str) -> bytearray | memoryview:
        """Return the content of a file, in place."""
        try:
            return self.contents[name]
        except KeyError as err:
            raise MissingShardError("the file does not exist", file=name) from err
