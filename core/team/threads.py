"""Threads that work at one thing together: the first error stops all of them, and so does an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable

_WAIT_SECONDS = 0.5
"""The calling thread looks about so often, since a join without an end would keep signals out."""
_PATIENCE = 3
"""Interrupts until threads that were told to stop are no longer waited for."""


class Crew:
    """Some threads with one task.

    Args:
        name: what the threads are called after.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def is_stopped(self) -> bool:
        """Whether the threads are to stop."""
        return self._stop.is_set()

    def run(self, work: Callable[[], None], n_threads: int) -> None:
        """Runs ``work`` once in each thread; the calling thread waits and stays open to signals.

        No thread runs any more when this returns or raises (save after several interrupts).

        Args:
            work: takes pieces of the task until there are none, or ``is_stopped``.

        Raises:
            BaseException: the first error of a thread, or an interrupt of the calling one.
        """

        def guarded() -> None:
            try:
                work()
            except BaseException as err:
                with self._lock:
                    self._error = self._error or err
                self._stop.set()

        threads = [threading.Thread(target=guarded, name=f"{self._name}-{i}", daemon=True) for i in range(n_threads)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_WAIT_SECONDS)
        except BaseException:
            self._stop.set()
            _join([thread for thread in threads if thread.ident is not None])
            raise
        if self._error is not None:
            raise self._error


def _join(threads: list[threading.Thread]) -> None:
    """Waits for threads that were told to stop; a few interrupts are overheard: they still work with files."""
    patience = _PATIENCE
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join(_WAIT_SECONDS)
            except KeyboardInterrupt:
                patience -= 1
                if patience == 0:
                    raise
