"""Fetch ranges before they are read: several at a time, in few requests, in bounded memory.

Who reads a store piece by piece announces what will be read::

    announced     ├── a ──┤├─ b ─┤        ├──── c ────┤      ranges, merged if they are close
    parts         ├────────┤├────┤        ├────────┤├─┤      one request each, oldest first
    read_into          ├──┤                                  waits for its part, or fetches it

A part is dropped as soon as all its announced bytes have been read.

The memory for reading an object store is divided among all readers, and pages of objects that were
read are kept, up to a number of bytes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import field

from core.files.requests.waiting import wait_for
from core.values import dataclass

MERGE_BYTES = 32 << 10
"""Ranges with no more than this between them are read by one request."""
_N_TURNS = 32
"""Parts that were announced so many announcements ago make room for others: their reader is gone.
"""

FileRange = tuple[str, int, int]
"""Name of a file, first byte, byte after the last."""


@dataclass(slots=True, eq=False)
class _Part:
    """A range that one request fetches.

    Args:
        n_left: number of announced bytes that have not been read.
        turn: number of the announcement.
        data: its bytes, as soon as they are requested.
    """

    name: str
    start: int
    stop: int
    n_left: int
    turn: int
    data: Future[memoryview] = field(default_factory=Future)
    is_started: bool = False


class ReadAhead:
    """The ranges of one store that are fetched before they are read.

    Args:
        fetch: reads a range: name, first byte, number of bytes.
        executor: runs the requests.
        memory: bounds the bytes of the parts that are in memory.
    """

    def __init__(
        self,
        fetch: Callable[[str, int, int], memoryview],
        executor: Callable[[], Executor],
        memory: ReadingMemory,
    ) -> None:
        self.memory = memory
        self._fetch = fetch
        self._executor = executor
        self._lock = threading.Lock()
        self._starts: dict[str, list[int]] = {}
        """Name → first bytes of the parts, in order."""
        self._parts: dict[tuple[str, int], _Part] = {}
        self._waiting: OrderedDict[_Part, None] = OrderedDict()
        self._n_bytes = 0
        """Bytes of the parts that are in flight or in memory."""
        self._turn = 0

    def expect(self, ranges: Iterable[FileRange]) -> None:
        """Announce ranges, each of which will be read once, roughly in this order of files."""
        by_name: dict[str, list[FileRange]] = {}
        for item in ranges:
            by_name.setdefault(item[0], []).append(item)
        ordered = [item for group in by_name.values() for item in sorted(group)]
        with self._lock:
            self._turn += 1
            for part in self._cut(ordered):
                self._parts[part.name, part.start] = part
                insort(self._starts.setdefault(part.name, []), part.start)
                self._waiting[part] = None
        self._start_more()

    def read_into(
        self,
        name: str,
        offset: int,
        buffer: memoryview,
        read_rest: Callable[[int, memoryview], None],
    ) -> None:
        """Fill a buffer from the parts.

        Args:
            read_rest: reads what was not announced: offset, buffer.
        """
        position, stop = offset, offset + len(buffer)
        while position < stop:
            with self._lock:
                part, end = self._part_at(name, position, stop)
                is_mine = part is not None and self._claim(part)
            view = buffer[position - offset : end - offset]
            if part is None:
                read_rest(position, view)
            else:
                if is_mine:
                    self._run(part)
                first = position - part.start
                view[:] = wait_for(part.data)[first : first + len(view)]
                self._use(part, len(view))
            position = end

    def find(self, name: str, position: int) -> tuple[int, int] | None:
        """Return first byte and end of the part that holds a byte; None if there is none."""
        with self._lock:
            part, _ = self._part_at(name, position, position + 1)
            return None if part is None else (part.start, part.stop)

    def clear(self) -> None:
        """Forget all parts."""
        with self._lock:
            self._starts.clear()
            self._parts.clear()
            self._waiting.clear()
            self._n_bytes = 0

    def _cut(self, ranges: list[FileRange]) -> Iterable[_Part]:
        """Yield new parts for ranges, sorted by file; what parts hold already is only counted."""
        part: _Part | None = None
        for name, start, stop in ranges:
            while start < stop:
                holder, end = self._part_at(name, start, stop)
                if holder is not None:
                    holder.n_left += end - start
                    start = end
                    continue
                # Go on with the part before it, if that is close; a part overlaps no other one.
                is_near = (
                    part is not None and part.name == name and start <= part.stop + MERGE_BYTES
                )
                if part is not None and is_near:
                    begin = min(start, part.stop)
                    if start < part.stop:
                        part.n_left += min(end, part.stop) - start
                        start = min(end, part.stop)
                        continue
                    room = part.start + self.memory.part_bytes - start
                    if room > 0 and self._part_at(name, begin, start) == (None, start):
                        n_bytes = min(room, end - start)
                        part.stop, part.n_left = start + n_bytes, part.n_left + n_bytes
                        start += n_bytes
                        continue
                if part is not None:
                    yield part
                n_bytes = min(self.memory.part_bytes, end - start)
                part = _Part(name, start, start + n_bytes, n_bytes, self._turn)
                start += n_bytes
        if part is not None:
            yield part

    def _part_at(self, name: str, position: int, stop: int) -> tuple[_Part | None, int]:
        """Return the part that holds a byte, or None, and where it ends before ``stop``."""
        starts = self._starts.get(name, [])
        index = bisect_right(starts, position)
        if index:
            part = self._parts[name, starts[index - 1]]
            if position < part.stop:
                return part, min(stop, part.stop)
        return None, min(stop, starts[index]) if index < len(starts) else stop

    def _claim(self, part: _Part) -> bool:
        """Return whether the caller has to fetch a part."""
        if part.is_started:
            return False
        part.is_started = True
        self._waiting.pop(part, None)
        self._n_bytes += part.stop - part.start
        return True

    def _start_more(self) -> None:
        """Start requests for waiting parts, oldest first, as far as there is memory."""
        with self._lock:
            while self._waiting:
                part = next(iter(self._waiting))
                n_bytes = part.stop - part.start
                if self._n_bytes and self._n_bytes + n_bytes > self.memory.ahead_bytes:
                    if not self._drop_abandoned():
                        return
                    continue
                self._claim(part)
                self._executor().submit(self._run, part)

    def _run(self, part: _Part) -> None:
        """Fetch a part; its readers get the error, if there is one."""
        try:
            part.data.set_result(self._fetch(part.name, part.start, part.stop - part.start))
        except BaseException as err:
            part.data.set_exception(err)

    def _use(self, part: _Part, n_bytes: int) -> None:
        """Record that bytes of a part have been read; drop it after the last ones."""
        with self._lock:
            part.n_left -= n_bytes
            if part.n_left > 0 or self._parts.get((part.name, part.start)) is not part:
                return
            self._drop(part)
        self._start_more()

    def _drop(self, part: _Part) -> None:
        del self._parts[part.name, part.start]
        starts = self._starts[part.name]
        del starts[bisect_right(starts, part.start) - 1]
        if not starts:
            del self._starts[part.name]
        if part.is_started:
            self._n_bytes -= part.stop - part.start

    def _drop_abandoned(self) -> bool:
        """Drop the parts that nobody has come for; return whether there were any."""
        abandoned = [
            part
            for part in self._parts.values()
            if part.turn + _N_TURNS < self._turn and (part in self._waiting or part.data.done())
        ]
        for part in abandoned:
            self._waiting.pop(part, None)
            self._drop(part)
        return bool(abandoned)


MIB = 1 << 20
MAX_PART_BYTES = 4 * MIB
"""Number of bytes of a request; longer ranges are divided."""
_MIN_PART_BYTES = MIB
_MAX_BYTES, _MIN_BYTES = 80 * MIB, 9 * MIB
_AMPLE_LIMIT, _SCARCE_LIMIT = 512 * MIB, 192 * MIB
"""Memory limits of a process from which on, and up to which, reading takes the most and the least
memory.
"""


@dataclass(frozen=True, slots=True)
class ReadingMemory:
    """The memory that reading one store takes.

    Args:
        kept_bytes: pages of metadata that are kept.
        ahead_bytes: ranges in flight, and those that have arrived and not been used.
        part_bytes: bytes of a request.
    """

    kept_bytes: int
    ahead_bytes: int
    part_bytes: int

    def n_bytes(self, threads: int) -> int:
        """Return the total; each reading thread may wait for one part of its own beside it."""
        return self.kept_bytes + self.ahead_bytes + threads * self.part_bytes


def divide_memory(limit_bytes: int | None, *, n_requests: int) -> ReadingMemory:
    """Divide the part of a process's memory that reading a store may take.

    Args:
        limit_bytes: memory limit of the process; None for no limit.
        n_requests: maximum number of requests at the same time.
    """
    # The share grows with the limit only between the two, so that a limit that is too low can be
    # answered with one that suffices.
    n_bytes = _MAX_BYTES
    if limit_bytes is not None and limit_bytes < _AMPLE_LIMIT:
        above = max(0, limit_bytes - _SCARCE_LIMIT)
        n_bytes = _MIN_BYTES + (_MAX_BYTES - _MIN_BYTES) * above // (_AMPLE_LIMIT - _SCARCE_LIMIT)
    kept_bytes = n_bytes // 5
    ahead_bytes = n_bytes - kept_bytes
    part_bytes = max(_MIN_PART_BYTES, min(MAX_PART_BYTES, ahead_bytes // n_requests))
    return ReadingMemory(kept_bytes, ahead_bytes, part_bytes)


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
