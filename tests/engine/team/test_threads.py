"""An interrupt ends the wait for threads only when they have ended."""

from __future__ import annotations

import threading
import time

import pytest

from core.engine.team.threads import RunningThreads, ThreadGroup
from tests.support.interrupts import interrupt_in


def test_an_interrupted_group_waits_for_the_work_under_way() -> None:
    group = ThreadGroup("test")
    ended: list[bool] = []

    def work() -> None:
        interrupt_in(threading.Thread.join)
        while not group.is_stopped():
            time.sleep(0.001)
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        group.run(work, 1)
    assert ended == [True]


def test_interrupts_of_the_wait_do_not_end_it_at_first() -> None:
    group = ThreadGroup("test")
    ended: list[bool] = []

    def work() -> None:
        interrupt_in(threading.Thread.join)
        for _ in range(2):
            time.sleep(0.1)
            interrupt_in(RunningThreads.wait)
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        group.run(work, 1)
    assert ended == [True]


def test_a_wait_can_be_repeated_after_an_interrupt() -> None:
    running = RunningThreads()
    ended: list[bool] = []

    def work() -> None:
        with running.include():
            begun.set()
            interrupt_in(RunningThreads.wait)
            time.sleep(0.3)
            ended.append(True)

    begun = threading.Event()
    threading.Thread(target=work, daemon=True).start()
    begun.wait()
    with pytest.raises(KeyboardInterrupt):
        running.wait()
    running.wait(0.001)
    assert ended == []
    running.wait()
    assert ended == [True]


def test_a_thread_that_starts_after_the_interrupt_does_no_work() -> None:
    group = ThreadGroup("test")
    group._stop.set()
    group.run(lambda: pytest.fail("it works"), 1)
