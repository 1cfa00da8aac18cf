"""The caller of the sandbox survives whatever the function does that is run in it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.files.sandbox import run_sandboxed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

MIB = 1 << 20


def sandboxed(
    name: str, data: bytes = b"", *, memory_bytes: int = 256 * MIB, cpu_s: int = 5
) -> bytes | None:
    return run_sandboxed(
        f"tests.support.sandboxed:{name}", data, memory_bytes=memory_bytes, cpu_s=cpu_s
    )


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No descriptor and no child process outlives a call."""
    gc.collect()  # files of earlier tests are closed now, or while this one runs
    descriptors, children = set(os.listdir("/proc/self/fd")), _children()
    yield
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert _children() == children


def _children() -> set[str]:
    """Processes that this one has started, unreaped ones included; other tests may have left a
    server of theirs.
    """
    return {
        pid
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    }


@pytest.mark.parametrize(
    "data", [b"done", b"", os.urandom(5 * MIB + 3)], ids=["short", "empty", "large"]
)
def test_the_result_comes_back(data: bytes) -> None:
    assert sandboxed("echo", data) == data


@pytest.mark.parametrize("name", ["fail", "crash", "leave", "leave_at_once", "no_such_function"])
def test_a_failure_is_none_and_says_nothing(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert sandboxed(name) is None
    assert capfd.readouterr() == ("", "")


def test_more_memory_than_allowed_is_none() -> None:
    assert sandboxed("take_300_mib", memory_bytes=200 * MIB) is None


def test_memory_within_the_limit_is_given() -> None:
    assert sandboxed("take_100_mib", memory_bytes=200 * MIB) == b""


@pytest.mark.parametrize("name", ["spin", "wait"])
def test_endless_work_is_stopped(name: str) -> None:
    assert sandboxed(name, cpu_s=1) is None


def test_no_file_can_be_opened_written_or_inherited(tmp_path: Path) -> None:
    inherited = os.open(tmp_path / "inherited", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(inherited, True)
    try:
        assert sandboxed("try_to_open", os.fsencode(tmp_path / "marker")) == b" ".join(
            [b"refused"] * 4
        )
        assert sandboxed("open_files") == b"[1]"
    finally:
        os.close(inherited)
    assert not (tmp_path / "marker").exists()


def test_neither_the_environment_nor_other_packages_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "__init__.py").write_text("raise SystemExit('not this one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert sandboxed("modules_of_others") == b""


def test_the_sandbox_works_beside_other_threads() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert sandboxed("echo", b"read") == b"read"
    finally:
        release.set()
        thread.join()


INTERRUPTED = """
import os
from core.files.sandbox import run_sandboxed

try:
    function = "tests.support.sandboxed:interrupt_the_parent"
    run_sandboxed(function, b"", memory_bytes=1 << 28, cpu_s=60)
except KeyboardInterrupt:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("interrupted, no child left")
"""


def test_an_interrupt_ends_the_child_and_is_raised(repo_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        cwd=repo_dir,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted, no child left\n", "")
