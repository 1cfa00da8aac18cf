from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import suppress
from typing import cast

import pytest

from ckpt_cli.screen.failure import Terminated, end_on_signals, failure_of, raise_if_ended
from ckpt_cli.screen.terminal import Screen
from core import errors


@pytest.mark.parametrize(
    ("err", "code"),
    [
        (errors.UsageError("x"), 2),
        (errors.CorruptError("x"), 3),
        (errors.TruncatedError("x"), 3),
        (errors.MissingShardError("x"), 3),
        (errors.UnsupportedError("x"), 4),
        (errors.UnknownTensorError("x"), 4),
        (errors.UnsafeError("x"), 5),
        (errors.StorageError("x"), 6),
        (errors.CapacityError("x"), 7),
        (errors.WorkerError("x"), 8),
        (MemoryError(), 7),
        (RecursionError("maximum recursion depth exceeded"), 3),
        (OSError(errno.ENOSPC, "No space left on device", "/out/file"), 7),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 7),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 7),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 6),
        (FileNotFoundError(errno.ENOENT, "No such file", b"/out"), 6),
        (OSError("odd"), 6),
        (KeyError("bug"), 70),
        (ZeroDivisionError(), 70),
        (KeyboardInterrupt(), 130),
        (Terminated(signal.SIGTERM), 143),
        (Terminated(signal.SIGHUP), 129),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141),
    ],
)
def test_every_exception_has_its_exit_code(err: BaseException, code: int) -> None:
    assert failure_of(err).exit_code == code


def test_the_text_tells_what_where_and_what_to_do() -> None:
    err = errors.TruncatedError(
        "the file ends early", file="a.pt", key="w", span=(4, 8), hint="copy it again"
    )
    failure = failure_of(err)
    assert failure.line == "the file ends early (file a.pt, tensor w, bytes 4–8); copy it again"
    assert failure.text(Screen(80)) == (
        "error: the file ends early\n  at: file a.pt, tensor w, bytes 4–8\n  hint: copy it again"
    )
    assert failure.text(Screen(80), is_one_line=True) == f"error: {failure.line}"
    assert failure.fields == {
        "code": "truncated",
        "message": "the file ends early",
        "file": "a.pt",
        "key": "w",
        "hint": "copy it again",
        "span": [4, 8],
    }


def test_names_out_of_files_stay_in_one_line_and_move_no_cursor() -> None:
    line = failure_of(errors.CorruptError("bad\nname", key="\x1b[2Jkey\r")).line
    assert line == "bad\\nname (tensor \\x1b[2Jkey\\r)"
    assert failure_of(KeyError("a\nb")).line.isprintable()


def test_an_operating_system_error_names_its_file() -> None:
    line = failure_of(OSError(errno.ENOSPC, "No space left on device", "/out/file")).line
    assert line.startswith("no space left on device (file /out/file)")


def test_a_lack_of_memory_or_file_size_is_not_blamed_on_the_disk() -> None:
    hints = {
        name: failure_of(OSError(getattr(errno, name), "x")).hint
        for name in ("ENOSPC", "EFBIG", "ENOMEM")
    }
    assert "free some space" in hints["ENOSPC"]
    assert "ulimit -f" in hints["EFBIG"] and "free" not in hints["EFBIG"]
    assert "--memory" in hints["ENOMEM"] and "free" not in hints["ENOMEM"]


def test_a_bug_says_that_it_is_one() -> None:
    line = failure_of(AttributeError("'NoneType' object has no attribute 'x'")).line
    assert line.startswith("internal error, AttributeError: 'NoneType' object has no attribute 'x'")
    assert "--debug" in line


def test_a_broken_pipe_is_silent() -> None:
    assert failure_of(BrokenPipeError()).line == ""


def test_a_signal_whose_exception_was_dropped_still_ends_the_process() -> None:
    restore = end_on_signals()
    try:
        raise_if_ended()
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Terminated) as raised:
            raise_if_ended()
        assert raised.value.number == signal.SIGTERM
    finally:
        restore()
    raise_if_ended()


class SignallingLock:
    """A lock during whose acquisition or release a signal arrives."""

    def __init__(self, moment: str) -> None:
        self._lock = threading.Lock()
        self._moment = moment
        self.acquire, self.release, self.locked = (
            self._lock.acquire,
            self._lock.release,
            self._lock.locked,
        )

    def _reach(self, moment: str) -> None:
        if moment == self._moment:
            self._moment = ""
            os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._reach("enter")

    def __exit__(self, *_: object) -> None:
        self._reach("exit")
        self._lock.release()

    def _release_save(self) -> None:
        self._lock.release()
        self._reach("wait")

    def _acquire_restore(self, _: None) -> None:
        self._lock.acquire()

    def _is_owned(self) -> bool:
        return self._lock.locked()


@pytest.mark.parametrize("moment", ["enter", "exit", "wait"])
def test_a_signal_never_keeps_a_lock_that_other_threads_wait_for(moment: str) -> None:
    lock = SignallingLock(moment)
    changed = threading.Condition(cast("threading.Lock", lock))

    def wait() -> None:
        for _ in range(1000):
            with changed:
                changed.wait(0.01)

    restore = end_on_signals()
    try:
        with pytest.raises(Terminated) as raised:
            wait()
        assert raised.value.number == signal.SIGTERM
    finally:
        restore()
    assert not lock.locked()
