"""Run threads that work at one task and stop together, at the first error or interrupt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from core.files.requests.ending import stop_waiting_when

Item = TypeVar("Item")
_WAIT_SECONDS = 0.5
"""Timeout of one join; without a timeout, the calling thread would not handle signals."""
_POLL_SECONDS = 0.005
_PATIENCE = 3
"""Number of interrupts after which ``run`` no longer waits for threads that were asked to stop."""


class RunningThreads:
    """The threads that are at work, for a wait that an interrupt cannot end too early.

    ``Thread.join`` may return early: before Python 3.13, a join that a signal interrupts marks its
    thread as ended, also for ``Thread.is_alive`` (CPython's remedy for bpo-45274; seen in 3.11.7
    and 3.12.1).
    """

    def __init__(self) -> None:
        self._idents: set[int] = set()

    @contextmanager
    def include(self) -> Iterator[None]:
        """Count the calling thread as running within the context.

        A thread may enter it after a ``wait``, so it must then look whether it was asked to stop.
        """
        self._idents.add(threading.get_ident())
        try:
            yield
        finally:
            self._idents.discard(threading.get_ident())

    def wait(self, timeout_s: float = float("inf")) -> None:
        """Wait until no thread is running, or for some seconds; it can be called again."""
        give_up_at = time.monotonic() + timeout_s
        while self._idents and time.monotonic() < give_up_at:
            time.sleep(_POLL_SECONDS)


class ThreadGroup:
    """A group of threads that share one task and stop together.

    Args:
        name: prefix of the threads' names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._running = RunningThreads()

    def is_stopped(self) -> bool:
        """Return True if the threads have been asked to stop."""
        return self._stop.is_set()

    def share(self, items: Iterable[Item]) -> Iterator[Item]:
        """Return an iterator from which the threads take the items, each of them once.

        It ends early if they are asked to stop. One thread at a time asks ``items`` for the next.
        """
        return _SharedItems(items, self.is_stopped)

    def run(self, work: Callable[[], None], n_threads: int) -> None:
        """Run ``work`` once in each thread; the calling thread waits and handles signals.

        All threads have ended when this returns or raises (except after several interrupts).

        Args:
            work: takes parts of the task until none remain or ``is_stopped`` returns True.

        Raises:
            BaseException: the first error of a thread, or an interrupt of the calling thread.
        """

        def guarded() -> None:
            stop_waiting_when(self.is_stopped)
            with self._running.include():
                try:
                    if not self.is_stopped():  # it may have been started by an interrupted start()
                        work()
                except BaseException as err:
                    with self._lock:
                        self._error = self._error or err
                    self._stop.set()

        threads = [
            threading.Thread(target=guarded, name=f"{self._name}-{i}", daemon=True)
            for i in range(n_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            # Join with a timeout, so that the calling thread can handle signals.
            for thread in threads:
                while thread.is_alive():
                    thread.join(_WAIT_SECONDS)
        except BaseException:
            # An interrupt, or a thread could not be started: stop the running threads.
            self._stop.set()
            self._wait_for_stopped()
            raise
        if self._error is not None:
            raise self._error

    def _wait_for_stopped(self) -> None:
        """Wait for threads that were asked to stop, or until too many interrupts have come."""
        # The first interrupts are ignored, since the threads still use files.
        for n_left in reversed(range(_PATIENCE)):
            try:
                self._running.wait()
                return
            except KeyboardInterrupt:
                if not n_left:
                    raise


class _SharedItems(Iterator[Item]):
    """An iterator that several threads use."""

    def __init__(self, items: Iterable[Item], is_stopped: Callable[[], bool]) -> None:
        self._items = iter(items)
        self._is_stopped = is_stopped
        self._lock = threading.Lock()

    def __next__(self) -> Item:
        with self._lock:
            if self._is_stopped():
                raise StopIteration
            return next(self._items)
