"""Send a request, and repeat it as long as that is of use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
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
from core.files.requests.limiter import RequestLimiter
from core.files.requests.traffic import count_bytes, count_request
from core.files.requests.waiting import call_interruptibly, pause

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
                    f"the store is throttling requests, and asks to wait {pause_s:,.0f} s",
                    hint="run again later, or with fewer -j",
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
