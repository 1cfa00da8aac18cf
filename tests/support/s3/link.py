"""A limit to the bytes per second of all connections together, as of a network."""

from __future__ import annotations

import threading
import time


class Link:
    """One direction of a network.

    Args:
        bytes_per_s: its rate; 0 for no limit.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._is_free_at = 0.0

    def carry(self, n_bytes: int) -> None:
        """Wait as long as these bytes take, behind those of other connections."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._is_free_at = max(now, self._is_free_at) + n_bytes / self._bytes_per_s
            seconds = self._is_free_at - now
        time.sleep(seconds)
