"""Where files live: the only module of ``core`` that opens a source file.

A store is a directory of files with relative names. Formats read through ``ReadStore``; the copy engine also writes
through ``WriteStore`` (a stage directory, or memory in tests). Names come out of untrusted files, so every one is
checked: relative, no ``..``, no NUL, no backslash, no empty component. Symbolic links *inside* the directory are
followed (the Hugging Face cache is made of them); only regular files are opened.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from core.errors import (
    CapacityError,
    MissingShardError,
    SourceChangedError,
    StorageError,
    TruncatedError,
    UnsafeError,
)

MAX_OPEN_FILES = 128
MAX_LINKED_FOLDERS = 10_000
_IOV_MAX = 1024
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP, errno.ENAMETOOLONG)


class ReadStore(Protocol):
    """Read access to a directory of files."""

    @property
    def label(self) -> str:
        """How messages call the place, usually its path."""

    @property
    def entry(self) -> str | None:
        """The one file that the user pointed at, or None if it was a directory."""

    def files(self, under: str = "") -> list[str]:
        """Sorted names of the regular files directly in ``under``; [] if there is no such directory."""

    def folders(self, under: str = "") -> list[str]:
        """Sorted names (not paths) of the directories directly in ``under``; [] if there is no such directory."""

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """Name → bytes of the regular files directly in ``under``; {} if there is no such directory."""

    def exists(self, name: str) -> bool:
        """Whether ``name`` is a file."""

    def size(self, name: str) -> int:
        """Bytes of a file."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` from ``offset``."""

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """``n_bytes`` bytes from ``offset``."""

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Several pieces of a file: of each the offset and its number of bytes."""

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """Fills several buffers, together ``n_bytes`` long, one after the other from ``offset``."""


class WriteStore(Protocol):
    """Write access to a directory of files; no file is visible to others before the commit."""

    def create(self, name: str, n_bytes: int) -> None:
        """Makes (or keeps, if it has that size) a file of ``n_bytes`` zero bytes, its space allocated."""

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Writes all of ``data`` at ``offset``."""


def checked_name(name: object, *, found_in: str | None = None) -> str:
    """``name`` if it is a safe relative path, else an error.

    Args:
        name: a file name out of a checkpoint.
        found_in: the file that states the name, for the message.

    Raises:
        UnsafeError: not a string, absolute, contains ``..``, NUL, a backslash or an empty component.
    """
    ok = (
        isinstance(name, str)
        and name != ""
        and "\0" not in name
        and "\\" not in name
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )
    if not ok:
        raise UnsafeError(
            f"file name {name!r} is not a path inside the checkpoint",
            file=found_in,
            hint="do not trust this checkpoint; ask where it came from",
        )
    assert isinstance(name, str)
    return name


_READING = ("open", "read", "check")


@contextmanager
def translated(label: str, *, doing: str) -> Iterator[None]:
    """Turns the operating system's errors into the project's.

    Args:
        label: the file, as the user knows it.
        doing: what was tried, an infinitive: ``read``, ``write``.

    Raises:
        MissingShardError: the file to be read does not exist.
        CapacityError: no space left, or a quota.
        StorageError: anything else that the system refuses.
    """
    try:
        yield
    except OSError as err:
        if isinstance(err, FileNotFoundError) and doing in _READING:
            raise MissingShardError(f"cannot {doing}: the file does not exist", file=label) from err
        if err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CapacityError(
                f"cannot {doing}: {os.strerror(err.errno).lower()}", file=label, hint="free some space and run again"
            ) from err
        reason = os.strerror(err.errno).lower() if err.errno else str(err)
        hint = "check the permissions" if err.errno in (errno.EACCES, errno.EPERM) else None
        raise StorageError(f"cannot {doing}: {reason}", file=label, hint=hint) from err


def _is(kind: Callable[[], bool]) -> bool:
    """Whether a directory entry is of a kind; a link that leads to itself is of none."""
    try:
        return kind()
    except OSError:
        return False


def leads_on(link: Path) -> bool:
    """Whether a symbolic link leads to a directory, and to none of those that it lies in: those would never end."""
    target = os.path.realpath(link)
    here = os.path.realpath(link.parent)
    return os.path.isdir(target) and not f"{here}/".startswith(target if target.endswith("/") else f"{target}/")


def files_below(store: ReadStore) -> dict[str, int]:
    """Every regular file of a store with its size, by name; the one file, if the store is one."""
    if store.entry is not None:
        return {store.entry: store.size(store.entry)}
    found: dict[str, int] = {}
    folders = [""]
    while folders:
        under = folders.pop()
        prefix = f"{under}/" if under else ""
        found.update((prefix + name, size) for name, size in store.sizes(under).items())
        folders += [prefix + name for name in store.folders(under)]
    return dict(sorted(found.items()))


class LocalStore:
    """A directory of the local file system, read with ``pread`` from any number of threads.

    Args:
        root: the directory.
        entry: the one file in it that the user pointed at, if so.
        stamps: of files as another process has seen them, see ``stamp``; inodes are not compared, as they may differ
            between hosts.

    The first open of a file remembers its size, mtime and inode; ``verify_unchanged`` compares them at the end.
    """

    def __init__(
        self, root: Path, *, entry: str | None = None, stamps: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self.root = root
        self.entry = entry
        self._stamps = stamps or {}
        self._open: OrderedDict[str, _OpenFile] = OrderedDict()
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._links: set[tuple[str, str]] = set()
        """Directories that are links, as they were listed: (directory above, name)."""
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """The path of the directory, or of the file if the user pointed at one."""
        return str(self.root / self.entry if self.entry else self.root)

    def path(self, name: str) -> Path:
        """The path of a (checked) name."""
        return self.root / checked_name(name)

    def files(self, under: str = "") -> list[str]:
        """See ReadStore; symbolic links to regular files count."""
        return [name for name, entry in self._entries(under) if _is(entry.is_file)]

    def folders(self, under: str = "") -> list[str]:
        """See ReadStore; symbolic links to directories count where they lead on (``leads_on``).

        Raises:
            UnsafeError: so many directories are reached by links that they may lead round for ever.
        """
        found: list[str] = []
        for name, entry in self._entries(under):
            if entry.is_symlink():
                if not leads_on(self.root / under / name):
                    continue
                self._links.add((under, name))
                if len(self._links) > MAX_LINKED_FOLDERS:
                    raise UnsafeError(
                        f"more than {MAX_LINKED_FOLDERS} directories are reached by links",
                        file=under,
                        hint="remove the links; directories that lead into each other are no checkpoint",
                    )
                found.append(name)
            elif _is(entry.is_dir):
                found.append(name)
        return found

    def unreadable(self, under: str = "") -> list[str]:
        """Return the names directly in ``under`` that hold no data: pipes, sockets, devices, links to nothing."""
        return [name for name, entry in self._entries(under) if not (_is(entry.is_file) or _is(entry.is_dir))]

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """See ReadStore; one pass over the directory, no file is opened."""
        with translated(str(self.path(under) if under else self.root), doing="list the directory"):
            return {name: entry.stat().st_size for name, entry in self._entries(under) if _is(entry.is_file)}

    def _entries(self, under: str) -> list[tuple[str, os.DirEntry[str]]]:
        folder = self.path(under) if under else self.root
        with translated(str(folder), doing="list the directory"):
            try:
                with os.scandir(folder) as entries:
                    return sorted((entry.name, entry) for entry in entries)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def exists(self, name: str) -> bool:
        """See ReadStore."""
        try:
            return stat.S_ISREG(os.stat(os.path.join(self.root, checked_name(name))).st_mode)
        except OSError as err:
            if err.errno in _NO_SUCH_FILE:
                return False
            raise

    def size(self, name: str) -> int:
        """See ReadStore.

        Raises:
            MissingShardError: no such file.
            UnsafeError: it is not a regular file.
            StorageError: it cannot be opened.
        """
        if name not in self._seen:
            with self._file(name):
                pass
        return self._seen[name][0]

    @property
    def opened(self) -> list[str]:
        """Names of the files that have been opened."""
        return list(self._seen)

    def stamp(self, name: str) -> tuple[int, int, int]:
        """Size, modification time (ns) and inode of a file, as they were when it was first opened."""
        self.size(name)
        return self._seen[name]

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """See ReadStore and ``read_into``; what the file does not hold is refused before memory is taken for it.

        Raises:
            CapacityError: it is more than fits in memory.
        """
        with self._file(name) as fd, translated(name, doing="read"):
            size = self._seen[name][0]
            if offset + n_bytes > size:
                raise _too_short(name, size, offset, n_bytes)
            try:
                found = os.pread(fd, n_bytes, offset)
                if len(found) == n_bytes:
                    return found
                buffer = bytearray(n_bytes)  # a signal, or more than one call reads
            except (MemoryError, OverflowError) as err:
                raise CapacityError(
                    f"{n_bytes} bytes are to be read at once, which do not fit in memory", file=name
                ) from err
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See ReadStore.

        Raises:
            TruncatedError: the file ends before the buffer is full.
            MissingShardError, UnsafeError, StorageError: as for ``size``.
        """
        with self._file(name) as fd, translated(name, doing="read"):
            done = 0
            while done < len(buffer):
                n = os.preadv(fd, [buffer[done:]], offset + done)
                if n == 0:
                    raise _too_short(name, offset + done, offset, len(buffer))
                done += n

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """See ReadStore.

        Raises:
            TruncatedError, MissingShardError, UnsafeError, StorageError: as for ``read_into``.
        """
        with self._file(name) as fd, translated(name, doing="read"):
            found = [os.pread(fd, n_bytes, offset) for offset, n_bytes in spans]
        for number, (offset, n_bytes) in enumerate(spans):
            if len(found[number]) != n_bytes:  # a signal, or the end of the file
                found[number] = self.read(name, offset, n_bytes)
        return found

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """See ReadStore: one system call per 1024 buffers.

        Raises:
            TruncatedError, MissingShardError, UnsafeError, StorageError: as for ``read_into``.
        """
        for first in range(0, len(buffers), _IOV_MAX):
            part = buffers[first : first + _IOV_MAX]
            wanted = n_bytes if len(part) == len(buffers) else sum(map(len, part))
            with self._file(name) as fd, translated(name, doing="read"):
                is_short = os.preadv(fd, part, offset) != wanted
            if is_short:  # a signal, or the end of the file
                at = offset
                for buffer in part:
                    self.read_into(name, at, buffer)
                    at += len(buffer)
            offset += wanted

    def verify_unchanged(self) -> None:
        """Compares every file that was opened with what it was at first.

        Raises:
            SourceChangedError: size, modification time or inode of a file differ.
        """
        for name, before in self._seen.items():
            with translated(name, doing="check"):
                now = os.stat(self.path(name))
            if (now.st_size, now.st_mtime_ns, now.st_ino) != before:
                raise SourceChangedError(
                    "the file changed while it was read", file=name, hint="run again when nothing writes to it"
                )

    def close(self) -> None:
        """Closes every file; the store can be used again."""
        with self._lock:
            for opened in self._open.values():
                _close(opened.fd)
            self._open.clear()

    @contextmanager
    def _file(self, name: str) -> Iterator[int]:
        """An open descriptor of ``name``; at most ``MAX_OPEN_FILES`` idle ones are kept."""
        with self._lock:
            opened = self._open.get(name)
            if opened is None:
                opened = _OpenFile(self._open_regular(name))
                self._open[name] = opened
            self._open.move_to_end(name)
            opened.n_users += 1
            for old, other in list(self._open.items()):
                if len(self._open) <= MAX_OPEN_FILES:
                    break
                if other.n_users == 0:
                    del self._open[old]
                    _close(other.fd)
        try:
            yield opened.fd
        finally:
            with self._lock:
                opened.n_users -= 1

    def _open_regular(self, name: str) -> int:
        with translated(name, doing="open"):
            fd = os.open(self.path(name), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with translated(name, doing="open"):
                status = os.fstat(fd)
        except BaseException:
            _close(fd)
            raise
        if not stat.S_ISREG(status.st_mode):
            _close(fd)
            raise UnsafeError("not a regular file", file=name, hint="remove it from the checkpoint")
        wanted = self._stamps.get(name)
        if wanted is not None and tuple(wanted[:2]) != (status.st_size, status.st_mtime_ns):
            _close(fd)
            raise SourceChangedError(
                "the file is not the one that the plan was made for",
                file=name,
                hint="all hosts must see the same files, and nothing may write to them",
            )
        self._seen.setdefault(name, (status.st_size, status.st_mtime_ns, status.st_ino))
        return fd


def _close(fd: int) -> None:
    """Closes a file that was only read: nothing can be lost by it."""
    with suppress(OSError):
        os.close(fd)


def _too_short(name: str, end: int, offset: int, n_bytes: int) -> TruncatedError:
    return TruncatedError(
        f"the file ends at byte {end}, {offset + n_bytes - end} bytes too early",
        file=name,
        span=(offset, offset + n_bytes),
        hint="copy the checkpoint again, or use an older one",
    )


class _OpenFile:
    """A descriptor and how many threads are using it."""

    __slots__ = ("fd", "n_users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.n_users = 0


class MemoryStore:
    """Files in memory, for tests and for live tensors: read and write.

    Args:
        contents: name → bytes; a memoryview is used in place, other bytes are copied.
    """

    def __init__(
        self, contents: Mapping[str, bytes | bytearray | memoryview] | None = None, *, entry: str | None = None
    ) -> None:
        self.contents: dict[str, bytearray | memoryview] = {
            name: data if isinstance(data, memoryview) else bytearray(data) for name, data in (contents or {}).items()
        }
        self.entry = entry
        self.label = "memory"

    def files(self, under: str = "") -> list[str]:
        """See ReadStore."""
        prefix = under + "/" if under else ""
        rest = (name[len(prefix) :] for name in self.contents if name.startswith(prefix))
        return sorted(name for name in rest if "/" not in name)

    def folders(self, under: str = "") -> list[str]:
        """See ReadStore."""
        prefix = under + "/" if under else ""
        rest = (name[len(prefix) :] for name in self.contents if name.startswith(prefix))
        return sorted({name.split("/")[0] for name in rest if "/" in name})

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """See ReadStore."""
        prefix = under + "/" if under else ""
        return {name: len(self.contents[prefix + name]) for name in self.files(under)}

    def exists(self, name: str) -> bool:
        """See ReadStore."""
        return name in self.contents

    def size(self, name: str) -> int:
        """See ReadStore."""
        return len(self._content(name))

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """See ReadStore."""
        found = bytes(self._content(name)[offset : offset + n_bytes])
        if len(found) != n_bytes:
            raise TruncatedError(f"the file ends at byte {offset + len(found)}", file=name)
        return found

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See ReadStore."""
        found = memoryview(self._content(name))[offset : offset + len(buffer)]
        if len(found) != len(buffer):
            raise TruncatedError(f"the file ends at byte {offset + len(found)}", file=name)
        buffer[:] = found

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """See ReadStore."""
        return [self.read(name, offset, n_bytes) for offset, n_bytes in spans]

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """See ReadStore."""
        for buffer in buffers:
            self.read_into(name, offset, buffer)
            offset += len(buffer)

    def create(self, name: str, n_bytes: int) -> None:
        """See WriteStore."""
        if len(self.contents.get(name, b"\0")) != n_bytes or name not in self.contents:
            self.contents[name] = bytearray(n_bytes)

    def write(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """See WriteStore."""
        self._content(name)[offset : offset + len(data)] = data

    def settle(self, name: str, offset: int, n_bytes: int) -> None:
        """See ``core.copy.output.TargetStore``; memory needs nothing."""

    def _content(self, name: str) -> bytearray | memoryview:
        try:
            return self.contents[checked_name(name)]
        except KeyError as err:
            raise MissingShardError("the file does not exist", file=name) from err
