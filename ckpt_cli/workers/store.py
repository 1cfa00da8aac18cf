"""The one thread of a worker that makes requests to the store (``torch.distributed.TCPStore``).

A request to a store whose host has vanished blocks for a quarter of an hour in native code, where
signals are not handled. So only this thread makes requests; other threads wait for its answers in
Python, with a time limit. Between requests it runs the worker's *beat*, which shows the others that
the worker is alive and reads their beats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import monotonic
from typing import Any, TypeVar

from core.errors import CheckpointingException, WorkerError

T = TypeVar("T")

POLL_S = 0.1
"""Seconds between two checks of a waiting thread that its wait can still succeed."""


class GoneError(WorkerError):
    """Error of a worker that stops because another worker or the store is gone or silent.

    Attributes:
        is_of_lead: rank 0 may be gone, so another rank must print the error.
    """

    code = "gone"
    is_of_lead = False

    def of_lead(self) -> GoneError:
        """Mark the error as one of the lead's, and return it."""
        self.is_of_lead = True
        return self


class _Request:
    """A call for the thread to run with the store, and its answer."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.answered = Event()
        self.answer: Any = None
        self.error: Exception | None = None


class StoreLine:
    """The thread and its connection to the store.

    Args:
        connect: opens the connection; called in the thread.
        keeper: the process that runs the store and its address, for messages.
        timeout_s: time limit for one answer, in seconds.
    """

    def __init__(self, connect: Callable[[], Any], *, keeper: str, timeout_s: float) -> None:
        self._connect = connect
        self._keeper = keeper
        self._timeout_s = timeout_s
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._busy_since: float | None = monotonic()
        self._error: Exception | None = None
        self._beat: Callable[[Any], None] | None = None
        self._interval_s = 0.0
        Thread(target=self._run, name="store", daemon=True).start()

    def ask(self, work: Callable[[Any], T], *, within_s: float | None = None) -> T:
        """Run ``work(store)`` in the thread, and return its result.

        Args:
            within_s: time limit for this answer, in seconds, if shorter than the usual one.

        Raises:
            GoneError: the store is gone, or has not answered in time.
            CheckpointingException: ``connect`` raised this error.
        """
        request = _Request(work)
        self._requests.put(request)
        begun = monotonic()
        while not request.answered.wait(POLL_S):
            self.check()
            if within_s is not None and monotonic() - begun > within_s:
                raise self._silent_error(within_s)
        if request.error is not None:
            raise self._lost_error(request.error) from request.error
        answer: T = request.answer
        return answer

    def send(self, work: Callable[[Any], object]) -> None:
        """Queue ``work(store)`` for the thread and return at once.

        The result and errors of ``work`` are discarded.
        """
        self._requests.put(_Request(work))

    def know(self, *, keeper: str, timeout_s: float) -> None:
        """Set the keeper of the store, for messages, and the time limit for one answer."""
        self._keeper = keeper
        self._timeout_s = timeout_s

    def beat_every(self, interval_s: float, beat: Callable[[Any], None]) -> None:
        """Run ``beat(store)`` in the thread at every interval from now on, until it fails."""
        self._interval_s = interval_s
        self._beat = beat
        self._requests.put(None)  # wakes the thread, which waits for a request without a time limit

    @property
    def is_broken(self) -> bool:
        """True if the store is gone or silent; ``check`` raises the error."""
        since = self._busy_since  # read once, because the thread may set it to None meanwhile
        return self._error is not None or (
            since is not None and monotonic() - since > self._timeout_s
        )

    def check(self) -> None:
        """Raise if the store does not answer.

        Raises:
            GoneError: the store is gone or silent.
            CheckpointingException: ``connect`` raised this error.
        """
        if isinstance(self._error, CheckpointingException):
            raise self._error
        if self._error is not None:
            raise self._lost_error(self._error) from self._error
        if self.is_broken:
            raise self._silent_error(self._timeout_s)

    def _silent_error(self, seconds: float) -> GoneError:
        return GoneError(
            f"{self._keeper}, which runs the workers' store, has not answered for {seconds:g} s",
            hint="that host or its network is down; rerun the same command to continue",
        ).of_lead()

    def _lost_error(self, err: Exception) -> WorkerError:
        reason = str(err).split("\n")[0]
        return GoneError(
            f"lost contact with {self._keeper}, which runs the workers' store: {reason}",
            hint="rerun the same command to continue",
        ).of_lead()

    def _run(self) -> None:
        """Connect to the store, then serve requests and send beats until a beat fails."""
        try:
            store = self._connect()
            self._busy_since = None
            next_beat = 0.0
            while True:
                # Wait for a request, but only until the next beat is due.
                request = None
                wait_s = max(next_beat - monotonic(), 0.0) if self._beat else None
                with suppress(Empty):
                    request = self._requests.get(timeout=wait_s)
                # Everything from here may block in native code; waiting threads see for how long.
                self._busy_since = monotonic()
                if request is not None:
                    # A failed request is its caller's error, and the thread goes on.
                    try:
                        request.answer = request.work(store)
                    except Exception as err:
                        request.error = err
                    request.answered.set()
                if self._beat is not None and monotonic() >= next_beat:
                    self._beat(store)
                    next_beat = monotonic() + self._interval_s
                self._busy_since = None
        except Exception as err:  # ``check`` raises it in the threads that wait for this one
            self._error = err


class ScopedStore:
    """A ``torch.distributed.TCPStore`` under a prefix.

    Args:
        store: the store of torch.
        prefix: prefix of the names of all entries, without the slash that follows it.

    Attributes:
        sent_bytes: size of the names and values exchanged with the store, in both directions.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self.sent_bytes = 0

    def set(self, name: str, value: str | bytes) -> None:
        """Write an entry."""
        self._store.set(self._full([name])[0], value)
        self.sent_bytes += len(value)

    def get(self, name: str) -> bytes:
        """Return an entry, which must exist."""
        value = bytes(self._store.get(self._full([name])[0]))
        self.sent_bytes += len(value)
        return value

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Return entries, all of which must exist, with one request."""
        values = (
            [bytes(value) for value in self._store.multi_get(self._full(names))] if names else []
        )
        self.sent_bytes += sum(map(len, values))
        return values

    def check(self, names: Sequence[str]) -> bool:
        """Return True if all entries exist."""
        return bool(self._store.check(self._full(names)))

    def add(self, name: str, number: int) -> int:
        """Add a number to a numeric entry, atomically, and return the sum."""
        return int(self._store.add(self._full([name])[0], number))

    def _full(self, names: Sequence[str]) -> list[str]:
        """Return the names with the prefix, and count their bytes as sent."""
        full_names = [f"{self._prefix}/{name}" for name in names]
        self.sent_bytes += sum(map(len, full_names))
        return full_names
