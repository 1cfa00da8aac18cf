"""A guard that ends the launcher if torch's agent waits longer than the limits of this module.

After a failure the agent ends its workers and meets the other agents again. It waits ten minutes
for a host that has vanished, as for one that has not come yet; and if that host ran the rendezvous,
every request to it blocks until its own time limit, in native code that handles no signals. So a
thread watches the results of the workers. It reports the error and ends the process

- if workers have failed and were not restarted within a limit,
- if all workers have done their work and the agent still waits for the other agents,
- if a signal asked the process to end and native code keeps it from being handled.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_cli.host.results import read_results
from ckpt_cli.launch.agent import LaunchHistory
from core.values import dataclass

_POLL_S = 0.5
_QUIET_S = 15.0
"""Seconds of waiting for other hosts before the user is informed; importing torch alone takes
some."""
_DONE_S = 60.0
"""Seconds that the agent may wait for other hosts after its own workers are done."""
_UNHANDLED_S = 5.0
"""Seconds that a signal may stay unhandled."""
_END_S = 5.0
"""Seconds that remaining workers may take to exit after each signal."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LEAVE_S = 15.0
"""Seconds that the agent may take to leave the rendezvous after the last failure of its workers."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """The reason why the launcher ends although its agent does not.

    Args:
        is_done: the workers have done their work; otherwise they have failed.
        is_rejoin: the failed workers should have been restarted.
        seconds: time since the workers were done or failed, or since the signal.
        signal: signal that asked the process to end and was not handled; None without one.
    """

    is_done: bool
    is_rejoin: bool
    seconds: float
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a launch.

    Args:
        rejoin_s: seconds within which failed workers must be restarted.
        shutdown_s: seconds within which the agent must end the other workers after a failure.
        max_restarts: how often workers are restarted.
    """

    rejoin_s: float
    shutdown_s: float
    max_restarts: int


@dataclass(slots=True)
class AgentDeadlines:
    """The deadlines of an agent for restarting failed workers and for ending.

    Args:
        limits: the time limits.
    """

    limits: Limits
    _attempt: int = -1
    _failed_at: float | None = None
    _done_at: float | None = None

    def check(self, history: LaunchHistory, now: float) -> Overdue | None:
        """Return what is overdue at the time ``now`` (in seconds); None if nothing is."""
        if not history.attempts:
            return None
        # Record when the workers of the last attempt failed or were done. A restart begins anew.
        attempt = history.attempts[-1]
        if attempt.number != self._attempt:
            self._attempt, self._failed_at, self._done_at = attempt.number, None, None
        results = read_results(attempt.results_dir)
        if history.first is not None or any(not result.is_verdict for result in results.values()):
            self._failed_at = now if self._failed_at is None else self._failed_at
        elif len(results) == len(attempt.ranks):
            self._done_at = now if self._done_at is None else self._done_at
        # Compare with the limit for what the agent has to do next: restart the workers, end after
        # their last failure, or end after their success. A failure counts even if all are done.
        if self._failed_at is not None:
            is_rejoin = attempt.n_restarts < self.limits.max_restarts
            limit_s = self.limits.rejoin_s if is_rejoin else self.limits.shutdown_s + _LEAVE_S
            overdue = Overdue(False, is_rejoin, now - self._failed_at)
        elif self._done_at is not None:
            limit_s = _DONE_S
            overdue = Overdue(True, False, now - self._done_at)
        else:
            return None
        return overdue if overdue.seconds > limit_s else None


class SignalWatch:
    """A watch for signals to end that stay unhandled while native code blocks the main thread.

    Python runs signal handlers only in the main thread, but writes a byte for each signal to a file
    descriptor at once (``signal.set_wakeup_fd``).

    Args:
        limits: the time limits after the handlers have run.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._number: int | None = None
        self._received_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._before: int | None = None
        for end in (self._reader, self._writer):
            end.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def check(self, now: float) -> Overdue | None:
        """Return the signal that is overdue at the time ``now`` (in seconds); None without one."""
        # Read the numbers of the signals received since the last check; the first one counts.
        if self._number is None:
            with suppress(BlockingIOError):
                self._number = next(
                    (number for number in self._reader.recv(64) if number in _ENDING), None
                )
            self._received_at = now
        if self._number is None:
            return None
        # The handlers of ``ckpt_cli.screen.failure.end_on_signals`` make the process ignore later
        # signals, which shows that they have run. The agent then needs time to end its workers.
        is_handled = signal.getsignal(self._number) is signal.SIG_IGN
        limit_s = self._limits.shutdown_s + _LEAVE_S if is_handled else _UNHANDLED_S
        seconds = now - self._received_at
        return Overdue(False, False, seconds, self._number) if seconds > limit_s else None

    def close(self) -> None:
        """Stop watching for signals."""
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        self._reader.close()
        self._writer.close()


@contextmanager
def guard_agent(
    history: LaunchHistory,
    limits: Limits,
    *,
    on_wait: Callable[[], None],
    end: Callable[[Overdue], int],
) -> Iterator[None]:
    """End the process if the agent that runs in the block hangs.

    Args:
        history: the history of the launch, which the agent's hooks update.
        limits: the time limits.
        on_wait: called at most once, if no workers have been started for a while.
        end: reports what is overdue and returns the exit code.
    """
    is_over = threading.Event()
    deadlines = AgentDeadlines(limits)
    signals = SignalWatch(limits)

    def watch() -> None:
        begun = time.monotonic()
        has_waited = False
        while not is_over.wait(_POLL_S):
            if not has_waited and not history.attempts and time.monotonic() - begun > _QUIET_S:
                has_waited = True
                on_wait()
            overdue = signals.check(time.monotonic()) or deadlines.check(history, time.monotonic())
            # The main thread is stuck in native code, so only os._exit ends the process. The
            # workers end first: in sessions of their own, they would outlive it.
            if overdue is not None:
                _end_children()
                history.close()
                os._exit(end(overdue))

    thread = threading.Thread(target=watch, name="launch guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        signals.close()


def _end_children() -> None:
    """End the remaining workers and their process groups: by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _END_S
        remaining = find_worker_processes()
        for pid in remaining:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        while remaining and time.monotonic() < deadline:
            time.sleep(0.1)
            remaining = [pid for pid in remaining if pid in find_worker_processes()]
        if not remaining:
            return


def find_worker_processes() -> list[int]:
    """Return the living child processes that lead a process group of their own, as workers do."""
    return [
        pid
        for pid, parent, group, state in _processes()
        if parent == os.getpid() and group == pid and not state.startswith("Z")
    ]


def _processes(proc_dir: Path = Path("/proc")) -> Iterator[tuple[int, int, int, str]]:
    """Yield (process, parent, process group, state) of the processes of this host.

    Args:
        proc_dir: Linux's table of processes; without one (macOS), ``ps`` is asked.
    """
    if not (proc_dir / "self" / "stat").exists():
        command = ["ps", "-A", "-o", "pid=,ppid=,pgid=,state="]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            pid, parent, group, state = line.split()[:4]
            yield int(pid), int(parent), int(group), state
        return
    for path in proc_dir.glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            # The second field is the name in parentheses, which may itself contain them and spaces.
            text = path.read_text("ascii", "replace")
            state, parent, group = text[text.rindex(")") + 2 :].split()[:3]
            yield int(path.parent.name), int(parent), int(group), state
