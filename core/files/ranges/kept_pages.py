"""Keep pages of objects that were read, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict


class KeptPages:
    """Pages of objects; those of the object that was used longest ago are forgotten first.

    Attributes:
        max_bytes: number of bytes that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._pages: OrderedDict[str, dict[int, bytes]] = OrderedDict()
        """Name → offset → bytes; the object used longest ago comes first."""
        self._n_bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._pages

    def find(self, name: str, offset: int, n_bytes: int) -> memoryview | None:
        """Return a range of an object, if one page holds all of it."""
        with self._lock:
            for start, page in self._pages.get(name, {}).items():
                if start <= offset and offset + n_bytes <= start + len(page):
                    self._pages.move_to_end(name)
                    return memoryview(page)[offset - start : offset - start + n_bytes]
        return None

    def find_pieces(self, name: str, offset: int, n_bytes: int) -> list[tuple[int, memoryview]]:
        """Return what pages hold of a range: disjoint pieces with their offsets, in order."""
        pieces = []
        position, stop = offset, offset + n_bytes
        with self._lock:
            for start, page in sorted(self._pages.get(name, {}).items()):
                first, last = max(start, position), min(start + len(page), stop)
                if first < last:
                    pieces.append((first, memoryview(page)[first - start : last - start]))
                    position = last
        return pieces

    def keep(self, name: str, offset: int, page: bytes) -> None:
        """Keep a page, and forget what was used longest ago."""
        with self._lock:
            pages = self._pages.setdefault(name, {})
            self._n_bytes += len(page) - len(pages.get(offset, b""))
            pages[offset] = page
            self._pages.move_to_end(name)
            self._forget()

    def limit(self, max_bytes: int) -> None:
        """Keep no more than a number of bytes from now on."""
        with self._lock:
            self.max_bytes = max_bytes
            self._forget()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._pages.clear()
            self._n_bytes = 0

    def _forget(self) -> None:
        while self._n_bytes > self.max_bytes and len(self._pages) > 1:
            _, pages = self._pages.popitem(last=False)
            self._n_bytes -= sum(map(len, pages.values()))
