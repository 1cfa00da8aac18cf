"""Count the requests to object stores of this process."""

from __future__ import annotations

import threading

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers of requests; the difference of two is what was sent between them.

    Args:
        n_requests: requests that were sent, repeated ones included.
        n_retries: those of them that repeat a request that failed.
        n_bytes: bytes of data that were received or sent by requests that succeeded.
    """

    n_requests: int = 0
    n_retries: int = 0
    n_bytes: int = 0

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            self.n_requests - earlier.n_requests,
            self.n_retries - earlier.n_retries,
            self.n_bytes - earlier.n_bytes,
        )


_lock = threading.Lock()
_total = Traffic()


def traffic_so_far() -> Traffic:
    """Return the requests to all stores since this process began."""
    return _total


def count_request(*, is_retry: bool) -> None:
    """Add a request that is sent now."""
    _add(Traffic(1, int(is_retry)))


def count_bytes(n_bytes: int) -> None:
    """Add the data of a request that succeeded."""
    _add(Traffic(n_bytes=n_bytes))


def _add(more: Traffic) -> None:
    global _total
    with _lock:
        _total = Traffic(
            _total.n_requests + more.n_requests,
            _total.n_retries + more.n_retries,
            _total.n_bytes + more.n_bytes,
        )
