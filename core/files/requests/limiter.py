"""Limit the requests to a bucket to what its store can take.

::

    64 ┐    ┌ throttled: half of those in flight, once for all requests that were sent before
       │    │        ┌── one more after as many successes as the limit is
    32 └────┴──┐  ┌──┘
    16         └──┘                                             time →
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from core.files.requests.waiting import check_wait, last_moment

_WAIT_S = 0.1


class RequestLimiter:
    """The requests to one bucket that may be in flight; safe for use by many threads.

    Args:
        most: maximum number of requests in flight.

    Attributes:
        most: this maximum.
        limit: number of requests that may be in flight now.
        has_answered: the store has answered a request.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = most
        self.has_answered = False
        self._n_in_flight = 0
        self._n_successes = 0
        self._slowed_at = 0.0
        self._resume_at = 0.0
        self._changed = threading.Condition()

    @contextmanager
    def slot(self) -> Iterator[float]:
        """Wait until a request may be sent; yield the time at which it is.

        Raises:
            StorageError: the wait was given up; see ``core.files.requests.waiting``.
        """
        give_up_at = last_moment()
        while True:
            with self._changed:
                rest_s = self._resume_at - monotonic()
                if self._n_in_flight < self.limit and rest_s <= 0:
                    self._n_in_flight += 1
                    break
                self._changed.wait(_WAIT_S if rest_s <= 0 else min(rest_s, _WAIT_S))
            check_wait(give_up_at)
        try:
            yield monotonic()
        finally:
            with self._changed:
                self._n_in_flight -= 1
                self._changed.notify()

    def note_success(self) -> None:
        """Count a request that the store has answered; let more be in flight after many of them."""
        with self._changed:
            self.has_answered = True
            self._n_successes += 1
            if self._n_successes >= self.limit and self.limit < self.most:
                self.limit += 1
                self._n_successes = 0
                self._changed.notify()

    def slow_down(self, sent_at: float) -> bool:
        """Let half as many requests be in flight; the store has refused one as one too many.

        Args:
            sent_at: when the request was sent.

        Returns:
            Whether the limit is lower now. It is not, if it was lowered after that time.
        """
        with self._changed:
            self.has_answered = True
            self._n_successes = 0
            if sent_at <= self._slowed_at:
                return False
            self._slowed_at = monotonic()
            self.limit = max(1, min(self.limit, self._n_in_flight) // 2)
            return True

    def pause_until(self, resume_at: float) -> None:
        """Send nothing before a time (of ``monotonic``)."""
        with self._changed:
            self._resume_at = max(self._resume_at, resume_at)

    @property
    def resume_at(self) -> float:
        """Time (of ``monotonic``) before which nothing is sent."""
        return self._resume_at
