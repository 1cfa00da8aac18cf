"""Every file operation of this process, counted, listed, and open to being disturbed.

``watch`` replaces the functions of ``os``, ``io`` and libc by which the project touches files. What
they do below one directory is an ``Operation``; it is written down in a trace (by the real
functions, so that it survives SIGKILL) and then handed to a ``Disturb`` together with a ``Call``
that does it. There is no way back: this is for a process that is forked for one case.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import io
import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.files import syscalls as linux

REAL = {name: getattr(os, name) for name in ("open", "close", "write", "fstat")}
_IO_OPEN = io.open

WRITES = ("write", "pwrite")
READS = ("read", "pread", "preadv")
SYNCS = ("fsync", "fdatasync")
RENAMES = ("rename", "replace", "renameat2")
REMOVALS = ("unlink", "remove", "rmdir")
LISTINGS = ("scandir", "listdir")
LOOKS = ("stat", "lstat", "fstat", "statvfs")
CHANGES = (*WRITES, *RENAMES, *REMOVALS, "create", "mkdir", "link", "ftruncate", "fallocate64")
"""Operations after which the directory is another one."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call.

    Args:
        number: counts from 0.
        name: of the function; ``create`` is an ``open`` that may make the file.
        path: what it is about, relative to the watched directory; of a rename or link the old name.
        target: the new name, or "".
        n_bytes: to be written or read; 0 for others.
        offset: where in the file, or -1.
    """

    number: int
    name: str
    path: str
    target: str = ""
    n_bytes: int = 0
    offset: int = -1


@dataclass(frozen=True, slots=True)
class Call:
    """What an operation does.

    Args:
        do: does it, and returns what the caller gets.
        half: of a write or a read: does the first half of it.
        fail: makes the caller see an errno, and does nothing.
    """

    do: Callable[[], object]
    half: Callable[[], object]
    fail: Callable[[int], object]


Disturb = Callable[[Operation, Call], object]


def read_trace(path: Path) -> list[Operation]:
    """The operations that a process has begun."""
    return [
        Operation(**json.loads(line))
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]


def watch(root: Path, trace_path: Path, disturb: Disturb) -> None:
    """Watches all operations below ``root`` from now on, for the rest of this process's life."""
    watched = _Watched(
        root,
        REAL["open"](trace_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC),
        disturb,
    )
    for name in (
        *WRITES,
        *READS,
        *SYNCS,
        "ftruncate",
        *LISTINGS,
        *LOOKS,
        *REMOVALS,
        "mkdir",
        "close",
    ):
        setattr(os, name, watched.on_path(name, getattr(os, name)))
    for name in ("rename", "replace", "link"):
        setattr(os, name, watched.on_two(name, getattr(os, name)))
    os.open = watched.opened(os.open)
    fcntl.flock = watched.on_path("flock", fcntl.flock)
    io.open = builtins.open = watched.io_open  # type: ignore[assignment]
    libc = linux._libc()
    libc.fallocate64 = watched.on_libc(
        "fallocate64", libc.fallocate64, lambda fd, mode, offset, n: (fd, "", n, offset)
    )
    libc.renameat2 = watched.on_libc(
        "renameat2", libc.renameat2, lambda a, old, b, new, flags: (old, new, 0, -1)
    )
    libc.sync_file_range = watched.on_libc(
        "sync_file_range", libc.sync_file_range, lambda fd, offset, n, flags: (fd, "", 0, offset)
    )


class _Watched:
    def __init__(self, root: Path, trace_fd: int, disturb: Disturb) -> None:
        self._root = os.path.realpath(root)
        self._trace_fd = trace_fd
        self._disturb = disturb
        self._lock = threading.Lock()
        self._number = 0
        self._paths: dict[int, str] = {}
        self._local = threading.local()

    def path_of(self, place: Any, dir_fd: int | None = None) -> str | None:
        """The path below the root, None if it lies elsewhere."""
        if isinstance(place, int):
            return self._paths.get(place)
        text = os.fsdecode(place)
        if dir_fd is not None and not os.path.isabs(text):
            folder = self._paths.get(dir_fd)
            return None if folder is None else os.path.normpath(f"{folder}/{text}")
        text = os.path.abspath(text)
        if text != self._root and not text.startswith(self._root + "/"):
            return None
        return os.path.relpath(text, self._root)

    def happen(
        self,
        name: str,
        path: str,
        call: Call,
        *,
        target: str = "",
        n_bytes: int = 0,
        offset: int = -1,
    ) -> Any:
        """Numbers an operation, writes it down, and has it done or disturbed."""
        if getattr(self._local, "is_inside", False):  # what a disturber does itself
            return call.do()
        with self._lock:
            operation = Operation(self._number, name, path, target, n_bytes, offset)
            self._number += 1
            REAL["write"](self._trace_fd, json.dumps(asdict(operation)).encode() + b"\n")
        self._local.is_inside = True
        try:
            return self._disturb(operation, call)
        finally:
            self._local.is_inside = False

    def on_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose first argument is a path or a descriptor."""

        def called(place: Any = ".", *rest: Any, **options: Any) -> Any:
            path = self.path_of(place, options.get("dir_fd"))
            if path is None:
                return real(place, *rest, **options)

            def do() -> Any:
                if name == "close":
                    self._paths.pop(place, None)
                return real(place, *rest, **options)

            def fail(number: int) -> Any:
                if name == "close":
                    do()  # Linux closes whatever it says
                raise OSError(number, os.strerror(number), path)

            n_bytes, offset, half = 0, -1, do
            if name in WRITES:
                n_bytes, offset = len(rest[0]), rest[1] if name == "pwrite" else -1
                half = lambda: real(place, memoryview(rest[0])[: max(1, n_bytes // 2)], *rest[1:])
            elif name in ("read", "pread"):
                n_bytes = rest[0]
                half = lambda: real(place, max(1, n_bytes // 2), *rest[1:]) if n_bytes else do()
            elif name == "preadv":
                n_bytes = sum(map(len, rest[0]))
                half = lambda: real(place, [rest[0][0][: max(1, len(rest[0][0]) // 2)]], *rest[1:])
            elif name == "ftruncate":
                n_bytes = rest[0]
            return self.happen(name, path, Call(do, half, fail), n_bytes=n_bytes, offset=offset)

        return called

    def on_two(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """A function of an old and a new name."""

        def called(old: Any, new: Any, **options: Any) -> Any:
            path, target = self.path_of(old), self.path_of(new)
            if path is None or target is None:
                return real(old, new, **options)

            def do() -> Any:
                return real(old, new, **options)

            def fail(number: int) -> Any:
                raise OSError(number, os.strerror(number), path)

            return self.happen(name, path, Call(do, do, fail), target=target)

        return called

    def opened(self, real: Callable[..., int]) -> Callable[..., int]:
        """``os.open``; what it opens is known from then on."""

        def called(place: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            path = self.path_of(place, dir_fd)
            if path is None:
                return real(place, flags, mode, dir_fd=dir_fd)

            def do() -> int:
                fd = real(place, flags, mode, dir_fd=dir_fd)
                self._paths[fd] = path
                return fd

            def fail(number: int) -> int:
                raise OSError(number, os.strerror(number), path)

            descriptor: int = self.happen(
                "create" if flags & os.O_CREAT else "open", path, Call(do, do, fail)
            )
            return descriptor

        return called

    def io_open(self, file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        """``io.open``: binary files that are written go through ``os.write``."""
        if isinstance(file, int) or self.path_of(file) is None:
            return _IO_OPEN(file, mode, *rest, **options)
        if mode == "wb":
            fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            return io.BufferedWriter(_Written(fd))
        return _IO_OPEN(
            file, mode, *rest, opener=lambda name, flags: os.open(name, flags, 0o666), **options
        )

    def on_libc(
        self, name: str, real: Any, parts: Callable[..., tuple[Any, Any, int, int]]
    ) -> Callable[..., int]:
        """A function of libc: -1 and errno in place of an exception."""

        def called(*arguments: Any) -> int:
            first, second, n_bytes, offset = parts(*arguments)
            path = self.path_of(first)
            if path is None:
                return int(real(*arguments))

            def fail(number: int) -> int:
                ctypes.set_errno(number)
                return -1

            target = (self.path_of(second) or "") if second else ""
            do = lambda: int(real(*arguments))
            return int(
                self.happen(
                    name, path, Call(do, do, fail), target=target, n_bytes=n_bytes, offset=offset
                )
            )

        return called


class _Written(io.RawIOBase):
    """A file whose bytes go through the functions that are watched."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        return os.write(self._fd, memoryview(data).cast("B"))

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def is_errno_of(operation: Operation, number: int) -> bool:
    """Whether the kernel may answer an operation so."""
    name = operation.name
    if number == errno.ENOSPC:
        return name in (
            *WRITES,
            *RENAMES,
            "create",
            "mkdir",
            "link",
            "ftruncate",
            "fallocate64",
            *SYNCS,
        )
    if number == errno.EIO:
        return name not in ("flock", "sync_file_range")
    if number == errno.EACCES:
        return name in (
            "open",
            "create",
            "mkdir",
            "link",
            *RENAMES,
            *REMOVALS,
            *LISTINGS,
            "stat",
            "lstat",
        )
    if number == errno.EMFILE:
        return name in ("open", "create", *LISTINGS)
    if number == errno.ENOSYS:
        return name in ("fallocate64", "renameat2", "sync_file_range")
    return False
