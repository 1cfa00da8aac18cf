"""Waiting for stores ends with the process, and what cleans up has time to do so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.errors import StorageError
from core.files.requests.ending import allow_requests, end_requests, stop_waiting_when
from core.files.requests.waiting import call_interruptibly


@pytest.fixture
def unanswered() -> Iterator[Callable[[], object]]:
    """Returns a call that a store never answers; it ends after the test."""
    is_over = threading.Event()
    yield is_over.wait
    is_over.set()
    allow_requests()


def call_as_worker(call: Callable[[], object]) -> None:
    """Make a call in a thread that ``stop_waiting_when`` ends."""

    def work() -> None:
        stop_waiting_when(lambda: False)
        call_interruptibly(call)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_work_begins_no_call_when_the_process_ends(unanswered: Callable[[], object]) -> None:
    end_requests()
    calls: list[None] = []
    with pytest.raises(StorageError, match="interrupted"):
        call_as_worker(lambda: calls.append(None))
    assert calls == []


def test_work_without_an_answer_leaves_time_to_clean_up(unanswered: Callable[[], object]) -> None:
    end_requests()
    with pytest.raises(StorageError, match="interrupted"):
        call_as_worker(unanswered)

    def clean_up() -> str:
        time.sleep(0.3)  # longer than one look for the answer
        return "cleaned"

    assert call_interruptibly(clean_up) == "cleaned"


def test_cleaning_up_gives_up_a_store_that_does_not_answer(
    unanswered: Callable[[], object],
) -> None:
    end_requests()
    with pytest.raises(StorageError, match="interrupted"):
        call_interruptibly(unanswered)
    begun = time.monotonic()
    with pytest.raises(StorageError, match="interrupted"):
        call_interruptibly(unanswered)
    assert time.monotonic() - begun < 1.0
