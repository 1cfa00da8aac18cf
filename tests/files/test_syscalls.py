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
    default_memory_bytes,
    drop_from_cache,
    flush,
    flush_content,
)

F_FULLFSYNC = 51  # its number on macOS; no command of Linux's fcntl


@pytest.fixture
def without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "sched_getaffinity",
        "sched_setaffinity",
        "posix_fadvise",
        "memfd_create",
        "fdatasync",
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


MIB = 1 << 20


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"memory.max": "max\n"}, None),
        ({"memory.max": f"{4096 * MIB}\n"}, 1024 * MIB),
        ({"memory.max": f"{1024 * MIB}\n"}, 512 * MIB),
        ({"memory/memory.limit_in_bytes": f"{4096 * MIB}\n"}, 1024 * MIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ({"slurm/job_7/memory.max": f"{4096 * MIB}\n"}, 1024 * MIB),
        ({"slurm/memory.max": f"{4096 * MIB}\n", "slurm/job_7/memory.max": "max\n"}, 1024 * MIB),
        ({"memory.max": "nonsense\n"}, None),
    ],
)
def test_the_default_memory_is_a_quarter_of_what_there_is(
    files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    """Of the machine, or of its control group (v2, v1, below the mount point) if that is less."""
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/\n0::/slurm/job_7/step\n")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = {"proc_dir": tmp_path / "proc", "cgroup_dir": tmp_path / "cgroup"}
    n_bytes = default_memory_bytes(**limits)
    assert n_bytes == max(512 * MIB, machine // 4 if expected is None else expected)
    assert default_memory_bytes(2, **limits) == max(512 * MIB, n_bytes // 2)
