"""A command of ``ckpt`` in a fork of this process, which has imported everything: some ten
milliseconds a run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.disturb import nothing
from tests.faults.operations import Disturb, Operation, read_trace, watch

PATIENCE_S = 180


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended.

    Args:
        code: its exit code; minus the number of the signal that killed it; None if it hung and was
            stopped.
        output: what it printed, both streams.
        trace: the operations that it began.
    """

    code: int | None
    output: str
    trace: list[Operation]


def command(arguments: Sequence[str]) -> Callable[[], int]:
    """A command line of ``ckpt``, to be run."""

    def work() -> int:
        from ckpt_cli.app import main

        return main(list(arguments))

    return work


def run(
    work: Callable[[], int], *, root: Path, notes_dir: Path, disturb: Disturb = nothing
) -> Ended:
    """Does some work in a fork.

    Args:
        work: returns the exit code.
        root: the directory whose operations are watched.
        notes_dir: an existing directory elsewhere, for what is noted about the run.
        disturb: what happens at its file operations.
    """
    trace_path, output_path = notes_dir / "trace", notes_dir / "output"
    trace_path.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            fd = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout = open(1, "w", closefd=False)
            sys.stderr = open(2, "w", closefd=False, buffering=1)
            watch(root, trace_path, disturb)
            code = work()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = _waited(pid)
    return Ended(
        code,
        output_path.read_text(errors="replace"),
        read_trace(trace_path) if trace_path.exists() else [],
    )


def _waited(pid: int) -> int | None:
    until = time.monotonic() + PATIENCE_S
    pause = 0.001
    while time.monotonic() < until:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(pause * 1.2, 0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
