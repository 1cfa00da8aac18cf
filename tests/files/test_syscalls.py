from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from core.files.syscalls import (
    allowed_cores,
    anonymous_file,
    bind_to_cores,
    drop_from_cache,
    flush,
    flush_content,
)

F_FULLFSYNC = 51  # its number on macOS; no command of Linux's fcntl


@pytest.fixture
def without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("sched_getaffinity", "sched_setaffinity", "posix_fadvise"),
        *("memfd_create", "fdatasync"),
    ):
        monkeypatch.delattr(os, name, raising=False)


@pytest.mark.usefixtures("without_linux")
def test_every_function_does_without_linux(tmp_path: Path) -> None:
    assert allowed_cores() == frozenset(range(os.cpu_count() or 1))
    assert not bind_to_cores({0})
    fd = anonymous_file("test")
    try:
        os.write(fd, b"abc")
        assert os.pread(fd, 8, 0) == b"abc" and os.fstat(fd).st_nlink == 0
        drop_from_cache(fd)
        flush(fd)
        flush_content(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("is_supported", [True, False])
def test_macos_flushes_the_cache_of_the_drive_too(
    is_supported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def control(fd: int, command: int) -> int:
        calls.append("full")
        if not is_supported:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", F_FULLFSYNC, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("plain"))
    flush(0)
    assert calls == (["full"] if is_supported else ["full", "plain"])
