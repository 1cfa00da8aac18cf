"""The one pass over the tensors of two checkpoints: band by band, in several threads, in bounded memory.

Bands that are equal byte for byte are compared as bytes and not looked at any further; numbers are made only of those
that differ. Sums over a whole tensor (cosine, relative length of the difference) need its equal bands as well, once one
band of it differs: those are read again, of A alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from math import prod

from core.box import Box, Shape, c_strides
from core.box_reader import BoxReader, TensorReader, bands
from core.cast import cast_of, check_cast
from core.crew import Crew
from core.diff_values import Tolerance, Values, compared, holds_nan, shown, square_sum
from core.dtypes import itemsize
from core.errors import CheckpointingException, UnsupportedError

BAND_BYTES = 1 << 20
"""Of the larger type; two bands then stay in the cache of a core while they are compared."""
_GROUP = 32
"""Bands that a thread takes at a time."""

Advance = Callable[[int], None]
"""Told from the comparing threads about bytes of A and B that have been compared."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A tensor of both checkpoints.

    Args:
        key: its name.
        is_same_bytes: every byte is equal, and the types are.
        values: what differs; None if every byte is equal.
        is_cast: of different types: whether B is A rounded (or widened) to B's type, None where that is no cast.
        first: values of A and B at the first element that differs.
    """

    key: str
    is_same_bytes: bool
    values: Values | None = None
    is_cast: bool | None = None
    first: tuple[int | float | None, int | float | None] | None = None


@dataclass(slots=True)
class _Job:
    """One tensor while it is compared."""

    key: str
    a: TensorReader
    b: TensorReader
    n_left: int = 1
    values: Values = field(default_factory=Values)
    differs: bool = False
    is_cast: bool | None = None
    equal: list[Box] = field(default_factory=list)
    first: tuple[int, tuple[int | float | None, int | float | None]] | None = None

    @property
    def shape(self) -> Shape:
        return self.a.shape

    @property
    def dtypes(self) -> tuple[str, str]:
        return self.a.dtype, self.b.dtype


_Item = tuple[_Job, list[Box], bool]
"""A tensor, some bands of it, and whether they are known to be equal and only to be summed up."""


class TensorWork:
    """Compares tensors that both checkpoints have, with one shape.

    Args:
        a, b: the readers.
        keys: (key in A, key in B) of what to compare.
        rule: None for exact.
        advance: told about progress.
    """

    def __init__(
        self,
        a: BoxReader,
        b: BoxReader,
        keys: Iterable[tuple[str, str]],
        *,
        rule: Tolerance | None = None,
        advance: Advance | None = None,
    ) -> None:
        self._a, self._b = a, b
        self._rule = rule
        self._advance = advance or (lambda n_bytes: None)
        self._items = self._all_items(keys)
        self._again: deque[_Item] = deque()
        self._lock = threading.Lock()
        self._crew = Crew("diff")
        self._done: list[Compared] = []

    def run(self, threads: int) -> list[Compared]:
        """Does all of it; the calling thread waits and stays open to signals.

        Raises:
            CheckpointingException: the first error of a thread.
        """
        self._crew.run(self._work, threads)
        return self._done

    def _all_items(self, keys: Iterable[tuple[str, str]]) -> Iterator[_Item]:
        for key, other in keys:
            try:
                job = _Job(key, self._a.tensor(key), self._b.tensor(other))
            except CheckpointingException as err:
                err.key = err.key or key
                raise
            boxes = list(bands(job.shape, max(map(itemsize, job.dtypes)), BAND_BYTES))
            groups = [boxes[at : at + _GROUP] for at in range(0, len(boxes), _GROUP)] or [[]]
            job.n_left = len(groups)
            for group in groups:
                yield job, group, False

    def _next(self) -> _Item | None:
        with self._lock:
            if self._crew.is_stopped():
                return None
            return self._again.popleft() if self._again else next(self._items, None)

    def _work(self) -> None:
        hand = _Hand(self._rule)
        while (item := self._next()) is not None:
            job, boxes, is_equal = item
            for box in boxes:
                if self._crew.is_stopped():
                    return
                if is_equal:
                    hand.sum_up(job, box, lock=self._lock)
                else:
                    self._advance(hand.compare(job, box, lock=self._lock))
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        """One group of a tensor is done; the last one may call for its equal bands."""
        with self._lock:
            job.n_left -= 1
            if job.n_left:
                return
            if job.differs and job.equal:
                boxes, job.equal = job.equal, []
                groups = [boxes[at : at + _GROUP] for at in range(0, len(boxes), _GROUP)]
                job.n_left = len(groups)
                self._again.extend((job, group, True) for group in groups)
                return
            is_same = not job.differs and job.dtypes[0] == job.dtypes[1]
            first = job.first[1] if job.first is not None and job.values.n_differing else None
            values = job.values if job.differs else None
            self._done.append(Compared(job.key, is_same, values, job.is_cast, first))


class _Hand:
    """The buffers of one thread, and what is done with them."""

    def __init__(self, rule: Tolerance | None) -> None:
        self._rule = rule
        self._a, self._b, self._raw = (_Buffer() for _ in range(3))

    def compare(self, job: _Job, box: Box, *, lock: threading.Lock) -> int:
        """Compares a band; returns the bytes read."""
        n = prod(box.shape)
        a, b = self._a.first(n * itemsize(job.dtypes[0])), self._b.first(n * itemsize(job.dtypes[1]))
        job.a.read(box, a, self._raw.view)
        job.b.read(box, b, self._raw.view)
        start = sum(i * step for i, step in zip(box.offset, c_strides(job.shape), strict=True))
        if self._is_equal(a, job):
            with lock:
                if not job.differs:
                    job.equal.append(box)
                    return len(a) + len(b)
            square = square_sum(a, job.dtypes[0])
            with lock:
                job.values.add_equal(n, square)
            return len(a) + len(b)
        found = compared(a, b, dtypes=job.dtypes, rule=self._rule)
        is_cast = self._is_cast(a, b, job)
        with lock:
            job.differs = True
            job.is_cast = is_cast if job.is_cast is None else job.is_cast and is_cast
            job.values.add(found, start=start)
            if found.first is not None and (job.first is None or start + found.first < job.first[0]):
                job.first = start + found.first, _pair(a, b, found.first, job.dtypes)
        return len(a) + len(b)

    def sum_up(self, job: _Job, box: Box, *, lock: threading.Lock) -> None:
        """Adds an equal band to the sums of a tensor that differs elsewhere."""
        n = prod(box.shape)
        a = self._a.first(n * itemsize(job.dtypes[0]))
        job.a.read(box, a, self._raw.view)
        square = square_sum(a, job.dtypes[0])
        with lock:
            job.values.add_equal(n, square)

    def _is_equal(self, a: memoryview, job: _Job) -> bool:
        """Whether nothing in the two bands that were read last needs a closer look.

        Args:
            a: A's.
        """
        if job.dtypes[0] != job.dtypes[1] or not self._a.begins_as(self._b, len(a)):
            return False
        return self._rule is None or self._rule.equal_nan or not holds_nan(a, job.dtypes[0])

    def _is_cast(self, a: memoryview, b: memoryview, job: _Job) -> bool | None:
        """Whether the narrower of two types holds the other's values, rounded; None for one type, or no such cast."""
        (wide, wide_type), (narrow, narrow_type) = (a, job.dtypes[0]), (b, job.dtypes[1])
        if itemsize(wide_type) < itemsize(narrow_type):
            (wide, wide_type), (narrow, narrow_type) = (narrow, narrow_type), (wide, wide_type)
        if wide_type == narrow_type:
            return None
        try:
            check_cast(wide_type, narrow_type)
        except UnsupportedError:
            return None
        cast_of(wide_type, narrow_type)(wide, self._raw.first(len(narrow)))
        return bytearray(self._raw.first(len(narrow))) == narrow  # as memoryviews they would be taken apart


class _Buffer:
    """Memory of one band."""

    def __init__(self) -> None:
        self._bytes = bytearray(BAND_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self.view = memoryview(self._bytes)

    def first(self, n_bytes: int) -> memoryview:
        """Its first bytes."""
        return self.view[:n_bytes]

    def begins_as(self, other: _Buffer, n_bytes: int) -> bool:
        """Whether two buffers begin with the same bytes; other threads run meanwhile."""
        return not _memcmp()(self._address, other._address, n_bytes)


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    """The C library's; comparing memoryviews in Python takes them apart byte by byte."""
    found = ctypes.CDLL(None).memcmp
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return found


def _pair(
    a: memoryview, b: memoryview, index: int, dtypes: tuple[str, str]
) -> tuple[int | float | None, int | float | None]:
    """The values of one element on both sides."""
    size_a, size_b = itemsize(dtypes[0]), itemsize(dtypes[1])
    return (
        shown(a[index * size_a : (index + 1) * size_a], dtypes[0]),
        shown(b[index * size_b : (index + 1) * size_b], dtypes[1]),
    )
