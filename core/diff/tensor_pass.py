"""Compare the tensors of two checkpoints in one pass: band by band, in threads, in bounded memory.

Bands that are equal byte for byte are compared as bytes and not examined any further; only those
that differ are turned into numbers. Sums over a whole tensor (cosine, relative length of the
difference) need its equal bands as well, once one band of it differs: those are read again, of A
alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cache
from math import prod

from core.arrays.box import Box, Shape, flat_offset
from core.arrays.cast import cast_of, check_cast
from core.arrays.dtypes import itemsize
from core.errors import CheckpointingException, UnsupportedError
from core.numbers.difference import (
    Tolerance,
    ValueDifference,
    compare_elements,
    element_value,
    has_nan,
    sum_squares,
)
from core.numbers.tally import Tally
from core.plan.box_reader import BoxReader, TensorReader, bands
from core.scan.share import RankShare
from core.team.threads import ThreadGroup

BAND_BYTES = 1 << 20
"""Size of a band in the larger type, so that two bands fit into the cache of a core."""
_GROUP = 32
"""Number of bands that a thread takes at a time."""

Advance = Callable[[int], None]
"""A callback of the comparing threads that gets the number of bytes of A and B just compared."""


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """A tensor of both checkpoints after its values have been compared.

    Args:
        key: name of the tensor.
        is_same_bytes: every byte is equal, and so are the types.
        values: how the values differ; None if every byte is equal.
        is_cast: for different types, whether B is A rounded (or widened) to B's type; None where
        there is no such cast.
        first: values of A and B at the first element that differs.
    """

    key: str
    is_same_bytes: bool
    values: ValueDifference | None = None
    is_cast: bool | None = None
    first: tuple[int | float | None, int | float | None] | None = None


@dataclass(slots=True)
class _TensorJob:
    """One tensor while it is compared.

    Args:
        key: name of the tensor.
        a, b: the tensor in A and in B.
        n_left: number of groups of bands that have not been compared.
        tally: the differences so far.
        equal: bands that are equal, and may have to be summed up.
    """

    key: str
    a: TensorReader
    b: TensorReader
    n_left: int = 1
    tally: Tally = field(default_factory=Tally)
    equal: list[Box] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        return self.a.shape

    @property
    def dtypes(self) -> tuple[str, str]:
        return self.a.dtype, self.b.dtype


_Item = tuple[_TensorJob, list[Box], bool]
"""A tensor, some of its bands, and whether these are equal and only to be summed up."""


def compared_of(key: str, dtypes: tuple[str, str], tally: Tally) -> ComparedTensor:
    """Return the result for a tensor whose bands have all been compared."""
    is_same = not tally.differs and dtypes[0] == dtypes[1]
    first = tally.first[1] if tally.first is not None and tally.values.n_differing else None
    tally.sums.write_to(tally.values)
    return ComparedTensor(
        key, is_same, tally.values if tally.differs else None, tally.is_cast, first
    )


class TensorWork:
    """Compares tensors that both checkpoints have in one shape.

    Args:
        a, b: readers of the two checkpoints.
        keys: (key in A, key in B) of each tensor to compare.
        rule: the tolerance; None for an exact comparison.
        advance: called with the number of bytes just compared.
        share: a rank's share of the work, by A's keys; None for everything.
    """

    def __init__(
        self,
        a: BoxReader,
        b: BoxReader,
        keys: Iterable[tuple[str, str]],
        *,
        rule: Tolerance | None = None,
        advance: Advance | None = None,
        share: RankShare | None = None,
    ) -> None:
        self._a, self._b = a, b
        self._rule = rule
        self._advance = advance or (lambda n_bytes: None)
        self._share = share
        self._items = self._all_items(keys)
        self._again: deque[_Item] = deque()
        self._lock = threading.Lock()
        self._crew = ThreadGroup("diff")
        self._done: list[ComparedTensor] = []
        self._held: list[_TensorJob] = []

    def run(self, threads: int) -> list[ComparedTensor]:
        """Compare everything; the calling thread waits and stays open to signals.

        Raises:
            CheckpointingException: the first error of a thread.
        """
        self._crew.run(self._work, threads)
        return self._done

    def run_share(self, threads: int) -> dict[str, tuple[tuple[str, str], Tally]]:
        """Compare the bands of this rank's share; ``sum_up`` comes afterwards.

        Returns:
            Key → (types of A and B, tally).

        Raises:
            CheckpointingException: the first error of a thread.
        """
        self._crew.run(self._work, threads)
        return {job.key: (job.dtypes, job.tally) for job in self._held}

    def equal_bytes(self, keys: Set[str]) -> int:
        """Return how many bytes ``sum_up`` will read."""
        jobs = [job for job in self._held if job.key in keys]
        return sum(prod(box.shape) * itemsize(job.dtypes[0]) for job in jobs for box in job.equal)

    def sum_up(self, keys: Set[str], threads: int) -> dict[str, tuple[tuple[str, str], Tally]]:
        """Add up the equal bands, in this rank's share, of tensors that differ somewhere.

        Raises:
            CheckpointingException: the first error of a thread.
        """
        jobs = [job for job in self._held if job.key in keys and job.equal]
        for job in jobs:
            job.tally = Tally()
        self._items = (
            (job, job.equal[at : at + _GROUP], True)
            for job in jobs
            for at in range(0, len(job.equal), _GROUP)
        )
        self._crew.run(self._work, threads)
        return {job.key: (job.dtypes, job.tally) for job in jobs}

    def _all_items(self, keys: Iterable[tuple[str, str]]) -> Iterator[_Item]:
        """Yield the tensors in groups of bands, those of this rank's share only."""
        for key, other in keys:
            if self._share is not None and not self._share.meets(key):
                continue
            try:
                job = _TensorJob(key, self._a.tensor(key), self._b.tensor(other))
            except CheckpointingException as err:
                err.key = err.key or key
                raise
            boxes = list(bands(job.shape, max(map(itemsize, job.dtypes)), BAND_BYTES))
            if self._share is not None:
                boxes = _own_boxes(boxes, job, self._share)
                if not boxes and not self._share.is_own(key):
                    continue
            groups = [boxes[at : at + _GROUP] for at in range(0, len(boxes), _GROUP)] or [[]]
            job.n_left = len(groups)
            for group in groups:
                yield job, group, False

    def _next(self) -> _Item | None:
        """Return the next group of bands, or None at the end."""
        with self._lock:
            if self._crew.is_stopped():
                return None
            return self._again.popleft() if self._again else next(self._items, None)

    def _work(self) -> None:
        """Compare groups of bands until there are none left; runs in every thread."""
        comparer = _BandComparer(self._rule)
        while (item := self._next()) is not None:
            job, boxes, is_equal = item
            for box in boxes:
                if self._crew.is_stopped():
                    return
                process = comparer.sum_up if is_equal else comparer.compare
                n_bytes = process(job, box, lock=self._lock)
                if not is_equal or self._share is not None:
                    self._advance(n_bytes)
            if self._share is None:
                self._finish(job)
            elif not is_equal:
                self._hold(job)

    def _hold(self, job: _TensorJob) -> None:
        """Record that a group of this rank's bands of a tensor is done."""
        with self._lock:
            job.n_left -= 1
            if job.n_left == 0:
                self._held.append(job)

    def _finish(self, job: _TensorJob) -> None:
        """Record that a group of a tensor is done; the last one may queue its equal bands."""
        with self._lock:
            job.n_left -= 1
            if job.n_left:
                return
            if job.tally.differs and job.equal:
                boxes, job.equal = job.equal, []
                groups = [boxes[at : at + _GROUP] for at in range(0, len(boxes), _GROUP)]
                job.n_left = len(groups)
                self._again.extend((job, group, True) for group in groups)
                return
            self._done.append(compared_of(job.key, job.dtypes, job.tally))


def _own_boxes(boxes: Iterable[Box], job: _TensorJob, share: RankShare) -> list[Box]:
    """Return the bands that belong to a rank's share.

    The bytes of a tensor on both sides are a range in the work of all ranks.
    """
    start, stop = share.spans[job.key]
    unit = (stop - start) // (prod(job.shape) or 1)
    return [box for box in boxes if share.is_own(job.key, unit * flat_offset(box, job.shape))]


class _BandComparer:
    """The buffers of one thread, with which it compares bands."""

    def __init__(self, rule: Tolerance | None) -> None:
        self._rule = rule
        self._a, self._b, self._raw = (_Buffer() for _ in range(3))

    def compare(self, job: _TensorJob, box: Box, *, lock: threading.Lock) -> int:
        """Compare a band, and return the number of bytes read."""
        n = prod(box.shape)
        a, b = (
            self._a.first(n * itemsize(job.dtypes[0])),
            self._b.first(n * itemsize(job.dtypes[1])),
        )
        job.a.read(box, a, self._raw.view)
        job.b.read(box, b, self._raw.view)
        if self._is_equal(a, job):
            # Equal bands are summed up at once only if the tensor is known to differ.
            with lock:
                if not job.tally.differs:
                    job.equal.append(box)
                    return len(a) + len(b)
            square = sum_squares(a, job.dtypes[0])
            with lock:
                job.tally.add_equal(n, square)
            return len(a) + len(b)
        difference = compare_elements(a, b, dtypes=job.dtypes, rule=self._rule)
        is_cast = self._is_cast(a, b, job)
        pair = None if difference.first is None else _pair(a, b, difference.first, job.dtypes)
        with lock:
            job.tally.add(difference, start=flat_offset(box, job.shape), is_cast=is_cast, pair=pair)
        return len(a) + len(b)

    def sum_up(self, job: _TensorJob, box: Box, *, lock: threading.Lock) -> int:
        """Add an equal band to the sums of its tensor, and return the bytes read."""
        n = prod(box.shape)
        a = self._a.first(n * itemsize(job.dtypes[0]))
        job.a.read(box, a, self._raw.view)
        square = sum_squares(a, job.dtypes[0])
        with lock:
            job.tally.add_equal(n, square)
        return len(a)

    def _is_equal(self, a: memoryview, job: _TensorJob) -> bool:
        """Return whether the two bands that were read last are equal.

        Args:
            a: the band of A.
        """
        if job.dtypes[0] != job.dtypes[1] or not self._a.begins_as(self._b, len(a)):
            return False
        return self._rule is None or self._rule.equal_nan or not has_nan(a, job.dtypes[0])

    def _is_cast(self, a: memoryview, b: memoryview, job: _TensorJob) -> bool | None:
        """Return whether the narrower of two types holds the other's values, rounded.

        None means that the types are the same, or that there is no such cast.
        """
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
        return (
            bytearray(self._raw.first(len(narrow))) == narrow
        )  # two memoryviews are compared item by item


class _Buffer:
    """Memory of one band."""

    def __init__(self) -> None:
        self._bytes = bytearray(BAND_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self.view = memoryview(self._bytes)

    def first(self, n_bytes: int) -> memoryview:
        """Return the first bytes of the buffer."""
        return self.view[:n_bytes]

    def begins_as(self, other: _Buffer, n_bytes: int) -> bool:
        """Return whether two buffers begin with the same bytes; other threads run meanwhile."""
        return not _memcmp()(self._address, other._address, n_bytes)


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    """Return the C library's memcmp; Python compares memoryviews byte by byte."""
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return memcmp


def _pair(
    a: memoryview, b: memoryview, index: int, dtypes: tuple[str, str]
) -> tuple[int | float | None, int | float | None]:
    """Return the values of one element on both sides."""
    size_a, size_b = itemsize(dtypes[0]), itemsize(dtypes[1])
    return (
        element_value(a[index * size_a : (index + 1) * size_a], dtypes[0]),
        element_value(b[index * size_b : (index + 1) * size_b], dtypes[1]),
    )
