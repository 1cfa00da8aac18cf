"""core.files.sandbox: the caller survives whatever the contained work does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.files.sandbox import run_contained

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containment is for Linux")

MIB = 1 << 20


def contained(work: Callable[[], bytes], *, memory_bytes: int = 256 * MIB, cpu_s: int = 5) -> bytes | None:
    """run_contained; pytest-xdist's own thread holds no lock that the work takes."""
    return run_contained(work, memory_bytes=memory_bytes, cpu_s=cpu_s, beside_threads=True)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No descriptor and no child process outlives a call."""
    before, children = os.listdir("/proc/self/fd"), _children()
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert _children() == children


def _children() -> set[str]:
    """Processes that this one has started, unreaped ones included; other tests may have left a server of theirs."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def test_the_result_comes_back() -> None:
    assert contained(lambda: b"done") == b"done"


def test_an_empty_result_is_a_result() -> None:
    assert contained(lambda: b"") == b""


def test_a_result_larger_than_the_pipe_comes_back_whole() -> None:
    data = os.urandom(5 * MIB + 3)
    assert contained(lambda: data) == data


def test_an_exception_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert contained(lambda: bytes(1 // 0)) is None
    assert capfd.readouterr() == ("", "")


def test_a_segmentation_fault_is_none() -> None:
    def crash() -> bytes:
        os.kill(os.getpid(), signal.SIGSEGV)
        return b"still here"

    assert contained(crash) is None


def test_sys_exit_is_none() -> None:
    assert contained(lambda: sys.exit(0)) is None


def test_an_early_clean_exit_is_none() -> None:
    assert contained(lambda: os._exit(0)) is None


def test_more_memory_than_allowed_is_none() -> None:
    assert contained(lambda: bytes(len(bytearray(300 * MIB)) & 1), memory_bytes=200 * MIB) is None


def test_memory_within_the_limit_is_given() -> None:
    assert contained(lambda: b"x" * (len(bytearray(100 * MIB)) & 1), memory_bytes=200 * MIB) == b""


def test_endless_work_is_stopped_by_the_processor_limit() -> None:
    def spin() -> bytes:
        while True:
            pass

    assert contained(spin, cpu_s=1) is None


def test_work_that_only_waits_is_stopped_too() -> None:
    def wait() -> bytes:
        time.sleep(600)
        return b""

    assert contained(wait, cpu_s=1) is None


def test_no_file_can_be_opened_written_or_inherited(tmp_path: Path) -> None:
    inherited = os.open(tmp_path / "inherited", os.O_CREAT | os.O_RDWR)

    def work() -> bytes:
        outcomes = []
        attempts: tuple[Callable[[], object], ...] = (
            lambda: os.open(tmp_path / "marker", os.O_CREAT | os.O_WRONLY),
            lambda: os.write(inherited, b"x"),
            lambda: os.write(1, b"x"),
            lambda: os.pipe(),
        )
        for attempt in attempts:
            try:
                attempt()
                outcomes.append("done")
            except OSError:
                outcomes.append("refused")
        return " ".join(outcomes).encode()

    try:
        assert contained(work) == b"refused refused refused refused"
    finally:
        os.close(inherited)
    assert not (tmp_path / "marker").exists()


def test_changes_of_the_work_are_lost() -> None:
    seen: list[int] = []

    def work() -> bytes:
        seen.append(1)
        return b"ok"

    assert contained(work) == b"ok"
    assert seen == []


def test_with_another_thread_nothing_is_run() -> None:
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        assert run_contained(lambda: b"ran", memory_bytes=64 * MIB, cpu_s=1) is None
    finally:
        release.set()
        thread.join()


INTERRUPTED = """
import os, signal, sys, time
from core.files.sandbox import run_contained

def work():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)
    return b""

try:
    run_contained(work, memory_bytes=1 << 28, cpu_s=60)
except KeyboardInterrupt:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("interrupted, no child left")
"""


def test_an_interrupt_ends_the_child_and_is_raised(repo_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=repo_dir, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted, no child left\n", "")


HANDLERS = """
import atexit, os, signal, sys
from core.files.sandbox import run_contained

signal.signal(signal.SIGTERM, lambda *_: print("handler ran", flush=True))
atexit.register(print, "exit of", "parent")
sys.stdout.write("buffered ")

def work():
    os.kill(os.getpid(), signal.SIGTERM)
    return b"survived"

print(run_contained(work, memory_bytes=1 << 28, cpu_s=5))
"""


def test_signal_and_exit_handlers_of_the_caller_do_not_run_in_the_child(repo_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANDLERS], cwd=repo_dir, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "buffered None\nexit of parent\n", "")
