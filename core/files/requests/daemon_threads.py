"""Run calls in threads that nothing has to wait for.

The threads of ``ThreadPoolExecutor`` keep a process alive until they are done. A thread that waits
for the answer of a store may need a minute for that, in native code where no signal reaches it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class DaemonThreads(Executor):
    """An executor whose threads neither ``shutdown`` nor the end of the process waits for.

    Args:
        most: maximum number of threads.
        name: prefix of their names.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._n_threads = 0
        self._n_idle = 0
        self._is_shut = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as err:
                future.set_exception(err)
            else:
                future.set_result(result)

        with self._changed:
            if self._is_shut:
                raise RuntimeError("the threads have been shut down")
            self._calls.append(run)
            if self._n_idle < len(self._calls) and self._n_threads < self._most:
                self._n_threads += 1
                name = f"{self._name}-{self._n_threads}"
                threading.Thread(target=self._work, name=name, daemon=True).start()
            self._changed.notify()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the threads when they have run what was submitted; return at once."""
        with self._changed:
            self._is_shut = True
            if cancel_futures:
                self._calls.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        _this_thread.is_daemon = True
        while True:
            with self._changed:
                self._n_idle += 1
                while not self._calls:
                    if self._is_shut:
                        return
                    self._changed.wait()
                self._n_idle -= 1
                run = self._calls.popleft()
            run()
            del run  # holds the result, which may be large


class _ThreadKind(threading.local):
    is_daemon = False


_this_thread = _ThreadKind()


def is_daemon_thread() -> bool:
    """Return whether the calling thread is one of ``DaemonThreads``: it may block in a call."""
    return _this_thread.is_daemon
