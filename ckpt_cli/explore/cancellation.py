"""Ask work in another thread to end, at its next step or while it waits for a store."""

from __future__ import annotations

import threading

from core.files.requests.ending import stop_waiting_when


class Cancelled(BaseException):
    """Raised in work that was asked to end; no ``except Exception`` on the way stops it."""


class Cancellation:
    """A request to end some work, which may never come."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Ask the work to end."""
        self._event.set()

    def is_cancelled(self) -> bool:
        """Return whether the work was asked to end."""
        return self._event.is_set()

    def check(self, *_: object) -> None:
        """Raise if the work was asked to end; any callback for progress can be this method.

        Raises:
            Cancelled: it was.
        """
        if self._event.is_set():
            raise Cancelled

    def watch_this_thread(self) -> None:
        """Make the calling thread give up waiting for object stores, too, when asked to end."""
        stop_waiting_when(self.is_cancelled)
