"""Ends a launcher whose agent has lost the others: no wait of torch's is longer than what is said here.

After a failure the agent ends its workers and meets the other agents again. A host that has vanished is waited for as
for one that has not come yet, ten minutes, and where it was the one that kept the rendezvous, every question to it
takes its own time limit, in native code that hears no signal. So a thread looks at what the workers have left: when
they have failed, and no new ones were started within a limit, it reports that and ends the process. The same when all
of them have done their work and the agent still waits for the other agents, and when a signal asked the process to end
and native code does not let it.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.host.results import results_in
from ckpt_cli.launch.agent import Course

_LOOK_S = 0.5
_QUIET_S = 15.0
"""How long nothing is said of waiting for other hosts: torch alone takes some seconds to import."""
_DONE_S = 60.0
"""How long the agent may wait for the others when the workers of its host are done."""
_DEAF_S = 5.0
"""How long a signal may go unheard."""
_END_S = 5.0
"""How long workers may take to end, when they are left over."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEAVE_S = 15.0
"""How long the agent may take to leave the others, when its workers have failed for the last time."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """Why the launcher ends although its agent does not.

    Args:
        is_done: the workers have done their work; else they have failed.
        is_rejoin: they were to be started again.
        seconds: how long they are done, or have failed.
        signal: that asked the process to end, if that is what has not happened.
    """

    is_done: bool
    is_rejoin: bool
    seconds: float
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """How long things may take.

    Args:
        rejoin_s: seconds in which workers that failed are to be started again.
        shutdown_s: seconds in which the agent ends the workers beside one that failed.
        max_restarts: how often they are started again.
    """

    rejoin_s: float
    shutdown_s: float
    max_restarts: int


@dataclass(slots=True)
class Patience:
    """Since when something is to happen.

    Args:
        limits: how long it may take.
    """

    limits: Limits
    _attempt: int = -1
    _failed_at: float | None = None
    _done_at: float | None = None

    def look(self, course: Course, now: float) -> Overdue | None:
        """What is overdue at the time ``now``, in seconds; None while there is nothing."""
        if not course.attempts:
            return None
        attempt = course.attempts[-1]
        if attempt.number != self._attempt:
            self._attempt, self._failed_at, self._done_at = attempt.number, None, None
        results = results_in(attempt.results_dir)
        if course.first is not None or any(not result.is_verdict for result in results.values()):
            self._failed_at = now if self._failed_at is None else self._failed_at
        elif len(results) == len(attempt.ranks):
            self._done_at = now if self._done_at is None else self._done_at
        if self._failed_at is not None:
            is_rejoin = attempt.n_restarts < self.limits.max_restarts
            limit = self.limits.rejoin_s if is_rejoin else self.limits.shutdown_s + _LEAVE_S
            return Overdue(False, is_rejoin, now - self._failed_at) if now - self._failed_at > limit else None
        if self._done_at is not None and now - self._done_at > _DONE_S:
            return Overdue(True, False, now - self._done_at)
        return None


class Signals:
    """Signals that ask this process to end, heard beside a main thread that native code keeps busy.

    Python's handlers run in the main thread only; the byte that it writes for each signal comes at once. The handlers
    of ``ckpt_cli.screen.failure.end_on_signals`` make later signals be ignored, which tells that they have run.

    Args:
        limits: how long things may take once they have.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._number: int | None = None
        self._heard_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._before: int | None = None
        for end in (self._reader, self._writer):
            end.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def look(self, now: float) -> Overdue | None:
        """What is overdue at the time ``now``, in seconds; None while there is nothing."""
        if self._number is None:
            with suppress(BlockingIOError):
                self._number = next((one for one in self._reader.recv(64) if one in _ENDING), None)
            self._heard_at = now
        if self._number is None:
            return None
        is_seen = signal.getsignal(self._number) is signal.SIG_IGN
        limit = self._limits.shutdown_s + _LEAVE_S if is_seen else _DEAF_S
        seconds = now - self._heard_at
        return Overdue(False, False, seconds, self._number) if seconds > limit else None

    def close(self) -> None:
        """Hears nothing any more."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        self._reader.close()
        self._writer.close()


@contextmanager
def guarded(
    course: Course, limits: Limits, *, on_wait: Callable[[], None], end: Callable[[Overdue], int]
) -> Iterator[None]:
    """Ends the process if the agent that runs in the block comes to no end.

    Args:
        course: what happens to the workers.
        limits: how long things may take.
        on_wait: told once, if no workers are started for a while.
        end: tells what happened; the exit code.
    """
    over = threading.Event()
    patience = Patience(limits)
    heard = Signals(limits)

    def watch() -> None:
        begun = time.monotonic()
        is_told = False
        while not over.wait(_LOOK_S):
            if not is_told and not course.attempts and time.monotonic() - begun > _QUIET_S:
                is_told = True
                on_wait()
            found = heard.look(time.monotonic()) or patience.look(course, time.monotonic())
            if found is not None:
                _end_children()
                course.close()
                os._exit(end(found))

    thread = threading.Thread(target=watch, name="launch guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        heard.close()


def _end_children() -> None:
    """Ends the workers that are left, each with the processes of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _END_S
        left = children()
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = [pid for pid in left if pid in children()]
        if not left:
            return


def children() -> list[int]:
    """Child processes of this one that lead a group of their own, as workers do, and have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            text = path.read_text("ascii", "replace")
            state, parent, group = text[text.rindex(")") + 2 :].split()[:3]
            pid = int(path.parent.name)
            if int(parent) == os.getpid() and int(group) == pid and state != "Z":
                found.append(pid)
    return found
