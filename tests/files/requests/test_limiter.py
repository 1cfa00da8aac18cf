"""core.files.requests.limiter: fewer requests for a store that throttles, more after a while."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from core.errors import StorageError
from core.files.requests import ending, waiting
from core.files.requests.limiter import RequestLimiter


def test_no_more_requests_are_in_flight_than_the_limit() -> None:
    limiter = RequestLimiter(3)
    lock, counts = threading.Lock(), []
    n_now = 0

    def send() -> None:
        nonlocal n_now
        with limiter.slot():
            with lock:
                n_now += 1
                counts.append(n_now)
            threading.Event().wait(0.01)
            with lock:
                n_now -= 1

    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(counts) <= 3
    assert len(counts) == 12


def test_requests_that_are_throttled_together_halve_the_limit_once() -> None:
    limiter = RequestLimiter(64)
    with ExitStack() as stack:
        sent = [stack.enter_context(limiter.slot()) for _ in range(10)]
        assert [limiter.slow_down(at) for at in sent] == [True] + 9 * [False]
        assert limiter.limit == 5  # half of those that were in flight


def test_successes_raise_the_limit_by_one_up_to_the_maximum() -> None:
    limiter = RequestLimiter(4)
    with limiter.slot() as sent_at:
        limiter.slow_down(sent_at)
    limits = []
    for _ in range(20):
        limiter.note_success()
        limits.append(limiter.limit)
    assert limits[:6] == [2, 2, 3, 3, 3, 4]
    assert limits[-1] == 4


def test_who_waits_for_a_slot_can_be_stopped() -> None:
    limiter = RequestLimiter(1)
    errors = []

    def wait() -> None:
        ending.stop_waiting_when(lambda: True)
        try:
            with limiter.slot():
                pass
        except StorageError as err:
            errors.append(err)

    with limiter.slot():
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(20)
    assert len(errors) == 1


def test_after_the_end_of_the_process_was_asked_for_waits_are_short() -> None:
    silent = threading.Event()
    ending.end_requests()
    try:
        assert waiting.call_interruptibly(lambda: 1) == 1
        with pytest.raises(StorageError, match="interrupted"):
            waiting.call_interruptibly(silent.wait)
        # The store is known to be silent: nobody waits again.
        with pytest.raises(StorageError, match="interrupted"):
            waiting.call_interruptibly(silent.wait)
    finally:
        ending.allow_requests()
        silent.set()
    assert waiting.call_interruptibly(lambda: 2) == 2
