"""Send a request, and repeat it as long as that is of use.

The requests to a bucket are limited to what its store can take::

    64 ┐    ┌ throttled: half of those in flight, once for all requests that were sent before
       │    │        ┌── one more after as many successes as the limit is
    32 └────┴──┐  ┌──┘
    16         └──┘                                             time →
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TypeVar

from core.errors import StorageError
from core.files.requests.ending import is_ending
from core.files.requests.failure import (
    MOST_RETRIES,
    MOST_RETRIES_UNREACHED,
    PATIENCE_S,
    FailureKind,
    back_off_s,
    describe_failure,
)
from core.files.requests.traffic import count_bytes, count_request
from core.files.requests.waiting import call_interruptibly, check_wait, last_moment, pause

T = TypeVar("T")

_LONGEST_PAUSE_S = 300.0
"""A store that asks for a longer pause is not waited for."""


def with_retries(
    limiter: RequestLimiter,
    send: Callable[[], T],
    *,
    n_bytes: int = 0,
    is_counted: bool = True,
    ask_retry_after: Callable[[], float | None] | None = None,
) -> T:
    """Send a request when the limiter allows it, and repeat it while its failures pass.

    Signals end the wait in the main thread, and those of ``core.files.requests.waiting`` in others.

    Args:
        limiter: the limiter of the bucket.
        send: sends the request once and returns the answer, with all its data; the client must not
            repeat it. It may run in another thread, and go on after this function has raised.
        n_bytes: bytes of data that the request moves, to be counted.
        is_counted: count the request; False if its client does.
        ask_retry_after: asks a store that throttles how many seconds to wait; None if it tells
            none.

    Raises:
        Exception: the last error of ``send``.
        StorageError: the wait was given up, or the store asks to wait for too long.
    """
    give_up_at = monotonic() + PATIENCE_S
    n_failures = 0
    while True:
        with limiter.slot() as sent_at:
            if is_counted:
                count_request(is_retry=n_failures > 0)
            try:
                result = call_interruptibly(send)
            except Exception as err:
                failure = describe_failure(err)
                n_failures += 1
                if (
                    not _is_worth_repeating(failure.kind, n_failures, limiter)
                    or is_ending()
                    or monotonic() > give_up_at
                ):
                    raise
                is_throttled = failure.kind is FailureKind.THROTTLED
                is_slowed = is_throttled and limiter.slow_down(sent_at)
            else:
                limiter.note_success()
                count_bytes(n_bytes)
                return result

        # One of the requests that were throttled together asks how long all shall wait; that time
        # does not count.
        pause_s = failure.retry_after_s
        if pause_s is None and is_slowed and ask_retry_after is not None:
            with suppress(Exception):  # it is only a question; the request itself is repeated
                pause_s = call_interruptibly(ask_retry_after)
        if pause_s is not None:
            # Send nothing for as long as the store asks, unless that is too long.
            if pause_s > _LONGEST_PAUSE_S:
                raise StorageError(
                    f"the store is throttling requests and asks clients to wait {pause_s:,.0f} s",
                    hint="run the command again later, or with a lower -j",
                )
            limiter.pause_until(monotonic() + pause_s)
            give_up_at += pause_s
        pause(back_off_s(n_failures))


def _is_worth_repeating(kind: FailureKind, n_failures: int, limiter: RequestLimiter) -> bool:
    """Return whether a request that failed for the n-th time may succeed yet."""
    # An address that has never answered is probably wrong.
    is_unknown = kind is FailureKind.UNREACHABLE and not limiter.has_answered
    most = MOST_RETRIES_UNREACHED if is_unknown else MOST_RETRIES
    return kind is not FailureKind.LASTING and n_failures <= most


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
