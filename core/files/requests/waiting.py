"""Wait for blocking calls so that the wait can end before the call does.

obstore's calls block in native code, where Python handles no signal. They run in threads of their
own, and who waits for them looks up a few times per second. A call that nobody waits for any more
goes on until its own time limit; its result is dropped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from time import monotonic
from typing import TypeVar

from core.errors import StorageError
from core.files.requests.daemon_threads import DaemonThreads, is_daemon_thread
from core.files.requests.ending import ENDING, THIS_THREAD

S = TypeVar("S")
T = TypeVar("T")

_POLL_S = 0.1
_LAST_S = 2.0
"""Time that a store has to answer after the process was asked to end."""
_MOST_CALLS = 1024


_threads = DaemonThreads(_MOST_CALLS, "ckpt-request")
_count_lock = threading.Lock()


def call_interruptibly(call: Callable[[], T], *, grace_s: float = 0.0) -> T:
    """Return the result of a blocking call; signals and ``stop_waiting_when`` end the wait.

    Args:
        call: runs in another thread, and may go on after this function has raised.
        grace_s: seconds that a call may still take when a signal comes while it runs.

    Raises:
        StorageError: the wait was given up; or the process was asked to end before the call was
            begun, and this thread does not clean up.
    """

    def counted() -> T:
        with _count_lock:
            ENDING.n_unanswered += 1
        try:
            return call()
        finally:
            with _count_lock:
                ENDING.n_unanswered -= 1

    # Begin nothing that only the end of the process would end: a store that leaves it unanswered
    # would pass for one that answers nothing, and the cleaning up would be given up.
    if ENDING.is_asked and THIS_THREAD.is_stopped is not None:
        raise _interrupted()
    # Nobody has to wait for these threads, so that the call may block one of them.
    return counted() if is_daemon_thread() else wait_for(_threads.submit(counted), grace_s=grace_s)


def wait_for(future: Future[T], *, grace_s: float = 0.0) -> T:
    """Return the result of a future; signals and ``stop_waiting_when`` end the wait.

    Args:
        future: what is waited for.
        grace_s: seconds to wait on when a signal comes during the wait.

    Raises:
        StorageError: the wait was given up.
    """
    give_up_at = last_moment()
    grace_until: float | None = None
    while True:
        try:
            return future.result(timeout=0 if ENDING.is_silent else _POLL_S)
        except TimeoutError:
            if future.done():
                raise  # an error of the call itself
        if grace_s and give_up_at is None and ENDING.is_asked and not ENDING.is_silent:
            if grace_until is None:
                grace_until = monotonic() + grace_s
            if monotonic() < grace_until:
                continue
        check_wait(give_up_at)


def map_in(threads: Executor, call: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return the results of a call for each item; the calls run side by side.

    Raises:
        StorageError: the wait was given up.
        Exception: the first error of a call.
    """
    return [wait_for(future) for future in [threads.submit(call, item) for item in items]]


def pause(seconds: float) -> None:
    """Wait before a request is repeated; signals and ``stop_waiting_when`` end the wait.

    Raises:
        StorageError: the wait was given up.
    """
    stop_at = monotonic() + seconds
    give_up_at = last_moment()
    while (rest_s := stop_at - monotonic()) > 0:
        check_wait(give_up_at)
        threading.Event().wait(min(rest_s, _POLL_S))


def last_moment() -> float | None:
    """Return until when a wait that begins now may last, of ``monotonic``; None if it is endless.

    It has an end after ``end_requests`` only.
    """
    return monotonic() + _LAST_S if ENDING.is_asked else None


def check_wait(give_up_at: float | None) -> None:
    """Raise if it is no use to wait on.

    Args:
        give_up_at: what ``last_moment`` returned at the beginning of the wait.

    Raises:
        StorageError: the thread was stopped, or the process was asked to end.
    """
    is_stopped = THIS_THREAD.is_stopped
    if is_stopped is not None and is_stopped():
        raise StorageError("the work was stopped while it was waiting for the store")
    if not ENDING.is_asked:
        return
    if give_up_at is not None and monotonic() > give_up_at:
        ENDING.is_silent = True
    # What was begun before is given up at once; what cleans up, when the store takes too long.
    if give_up_at is None or ENDING.is_silent:
        raise _interrupted()


def _interrupted() -> StorageError:
    return StorageError("the command was interrupted while it was waiting for the store")


def _forget_threads() -> None:
    """Begin anew in a forked process, which has no threads but its first one."""
    global _threads, _count_lock
    _threads = DaemonThreads(_MOST_CALLS, "ckpt-request")
    _count_lock = threading.Lock()
    ENDING.n_unanswered = 0


os.register_at_fork(after_in_child=_forget_threads)
