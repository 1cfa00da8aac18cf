"""What a signal ends: the state of waiting for stores when the process was asked to end.

A signal handler sets it, so it is set without a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Ending:
    """The state, which exists once.

    Attributes:
        is_asked: the process was asked to end.
        is_silent: a store did not answer in the time that it has since then.
        n_unanswered: number of calls that block in native code, waited for or not.
    """

    is_asked = False
    is_silent = False
    n_unanswered = 0


class _ThisThread(threading.local):
    is_stopped: Callable[[], bool] | None = None


ENDING = Ending()
THIS_THREAD = _ThisThread()
"""The function that tells whether the calling thread was stopped, for each thread."""


def end_requests() -> None:
    """Wait no longer than a moment from now on, for cleaning up; a signal's handler may call this.

    ``allow_requests`` ends this state.
    """
    ENDING.is_asked = True


def allow_requests() -> None:
    """Wait for stores again, after ``end_requests``."""
    ENDING.is_asked = ENDING.is_silent = False


def is_ending() -> bool:
    """Return whether the process was asked to end, so that no failed request is repeated."""
    return ENDING.is_asked


def n_unanswered() -> int:
    """Return the number of calls that block in native code, waited for or not."""
    return ENDING.n_unanswered


def stop_waiting_when(is_stopped: Callable[[], bool]) -> None:
    """Make the calling thread give up waiting for stores when ``is_stopped`` returns True.

    Such a thread does the work that a signal ends; after ``end_requests`` it calls no store.
    """
    THIS_THREAD.is_stopped = is_stopped
