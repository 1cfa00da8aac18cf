"""Compare the tensors of two checkpoints in one pass: band by band, in threads, in bounded memory.

Bands are compared as bytes first; only those that differ are converted to numbers. If one band of a
tensor differs, sums over the entire tensor (cosine, relative norm of the difference) need its equal
bands as well: these are read again, from A only.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import field
from functools import cache
from math import prod

from core.arrays.box import Box, Shape, flat_offset
from core.arrays.cast import check_cast, find_cast
from core.arrays.dtypes import itemsize
from core.engine.numbers.difference import (
    Tolerance,
    ValueDifference,
    compare_elements,
    element_value,
    has_nan,
    sum_squares,
)
from core.engine.numbers.tally import Tally
from core.engine.plan.box_reader import BoxReader, TensorReader, bands
from core.engine.scan.share import RankShare
from core.engine.team.threads import ThreadGroup
from core.errors import CheckpointingException, UnsupportedError
from core.values import dataclass

BAND_BYTES = 1 << 20
"""Maximum size of a band, in the larger dtype; two bands fit into the cache of a core."""
_GROUP = 32
"""Number of bands that a thread takes at a time."""

Advance = Callable[[int], None]
"""A callback of the comparing threads that gets the number of bytes of A and B just compared."""


@dataclass(frozen=True, slots=True)
class ComparedTensor:
    """A tensor of both checkpoints after its values have been compared.

    Args:
        key: name of the tensor.
        is_same_bytes: dtypes and all bytes are equal.
        values: differences of the values; None if there are none.
        is_cast: for different dtypes, the narrower tensor holds the wider one's values, rounded;
            None if there is no such cast.
        first: values of A and B at the first element that differs.
    """

    key: str
    is_same_bytes: bool
    values: ValueDifference | None = None
    is_cast: bool | None = None
    first: tuple[int | float | None, int | float | None] | None = None


@dataclass(slots=True)
class _TensorJob:
    """A tensor during its comparison.

    Args:
        key: name of the tensor.
        a, b: the tensor in A and in B.
        n_left: number of groups of bands that have not been processed yet.
        tally: the differences so far.
        equal: equal bands that may have to be summed up.
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
"""A tensor, a group of its bands, and whether the bands are equal and only to be summed up."""


def compared_of(key: str, dtypes: tuple[str, str], tally: Tally) -> ComparedTensor:
    """Build the result for a tensor whose bands have all been compared.

    Args:
        dtypes: dtypes in A and B.
        tally: its ``values`` get the sums.
    """
    is_same = not tally.differs and dtypes[0] == dtypes[1]
    first = tally.first[1] if tally.first is not None and tally.values.n_differing else None
    tally.sums.write_to(tally.values)
    return ComparedTensor(
        key, is_same, tally.values if tally.differs else None, tally.is_cast, first
    )


class TensorWork:
    """The comparison of tensors that have the same shape in both checkpoints.

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
        self._threads = ThreadGroup("diff")
        self._results: list[ComparedTensor] = []
        self._compared: list[_TensorJob] = []

    def run(self, threads: int) -> list[ComparedTensor]:
        """Compare everything; the calling thread waits, and handles signals meanwhile.

        Raises:
            CheckpointingException: the first error of a thread.
        """
        self._threads.run(self._work, threads)
        return self._results

    def run_share(self, threads: int) -> dict[str, tuple[tuple[str, str], Tally]]:
        """Compare the bands of this rank's share; ``sum_up`` has to follow.

        Returns:
            Key → (dtypes in A and B, tally).

        Raises:
            CheckpointingException: the first error of a thread.
        """
        self._threads.run(self._work, threads)
        return {job.key: (job.dtypes, job.tally) for job in self._compared}

    def equal_bytes(self, keys: Set[str]) -> int:
        """Return the number of bytes that ``sum_up`` will read."""
        jobs = [job for job in self._compared if job.key in keys]
        return sum(prod(box.shape) * itemsize(job.dtypes[0]) for job in jobs for box in job.equal)

    def sum_up(self, keys: Set[str], threads: int) -> dict[str, tuple[tuple[str, str], Tally]]:
        """Sum up the equal bands, in this rank's share, of tensors that differ somewhere.

        Returns:
            Key → (dtypes in A and B, tally of the equal bands only).

        Raises:
            CheckpointingException: the first error of a thread.
        """
        jobs = [job for job in self._compared if job.key in keys and job.equal]
        for job in jobs:
            job.tally = Tally()  # the lead has the other one already
        self._items = ((job, group, True) for job in jobs for group in _groups(job.equal))
        self._threads.run(self._work, threads)
        return {job.key: (job.dtypes, job.tally) for job in jobs}

    def _all_items(self, keys: Iterable[tuple[str, str]]) -> Iterator[_Item]:
        """Divide the tensors into groups of bands, and yield those of this rank's share."""
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
            else:
                job.a.expect()
                job.b.expect()
            # A tensor without bands is yielded too: it needs a result.
            groups = _groups(boxes) or [[]]
            job.n_left = len(groups)
            for group in groups:
                yield job, group, False

    def _next(self) -> _Item | None:
        """Return the next group of bands, or None at the end."""
        with self._lock:
            if self._threads.is_stopped():
                return None
            # Equal bands come first, so that their tensors are completed.
            return self._again.popleft() if self._again else next(self._items, None)

    def _work(self) -> None:
        """Process groups of bands until there are no more; runs in every thread."""
        comparer = _BandComparer(self._rule)
        while (item := self._next()) is not None:
            job, boxes, is_equal = item
            for box in boxes:
                if self._threads.is_stopped():
                    return
                process = comparer.sum_up if is_equal else comparer.compare
                n_bytes = process(job, box, lock=self._lock)
                # Without a share, the total of the progress does not include the second reading.
                if not is_equal or self._share is not None:
                    self._advance(n_bytes)
            if self._share is None:
                self._finish(job)
            elif not is_equal:
                # The lead decides whether the equal bands of the tensor have to be summed up.
                with self._lock:
                    job.n_left -= 1
                    if job.n_left == 0:
                        self._compared.append(job)

    def _finish(self, job: _TensorJob) -> None:
        """Record that a group of a tensor is complete; after the last one, queue its equal bands.

        The result of the tensor follows after the equal bands, if it differs and has such bands.
        """
        with self._lock:
            job.n_left -= 1
            if job.n_left:
                return
            if job.tally.differs and job.equal:
                boxes, job.equal = job.equal, []
                groups = _groups(boxes)
                job.n_left = len(groups)
                self._again.extend((job, group, True) for group in groups)
                return
            self._results.append(compared_of(job.key, job.dtypes, job.tally))


def _groups(boxes: list[Box]) -> list[list[Box]]:
    """Divide bands into groups of ``_GROUP``."""
    return [boxes[at : at + _GROUP] for at in range(0, len(boxes), _GROUP)]


def _own_boxes(boxes: Iterable[Box], job: _TensorJob, share: RankShare) -> list[Box]:
    """Select the bands that belong to a rank's share, by the offsets where they begin.

    A share counts the bytes of a tensor in A and in B together, as one span.
    """
    start, stop = share.spans[job.key]
    bytes_per_element = (stop - start) // (prod(job.shape) or 1)
    return [
        box
        for box in boxes
        if share.is_own(job.key, bytes_per_element * flat_offset(box, job.shape))
    ]


class _BandComparer:
    """One thread's comparison of bands, with its buffers."""

    def __init__(self, rule: Tolerance | None) -> None:
        self._rule = rule
        self._a, self._b, self._raw = (_Buffer() for _ in range(3))

    def compare(self, job: _TensorJob, box: Box, *, lock: threading.Lock) -> int:
        """Compare a band, add the result to its tensor's tally, and return the bytes read."""
        n = prod(box.shape)
        a = self._a.first(n * itemsize(job.dtypes[0]))
        b = self._b.first(n * itemsize(job.dtypes[1]))
        job.a.read(box, a, self._raw.view)
        job.b.read(box, b, self._raw.view)
        if self._is_equal(a, job):
            # Equal bands are summed up right away only if the tensor is known to differ: most
            # tensors are equal, and need no sums.
            with lock:
                if not job.tally.differs:
                    job.equal.append(box)
                    return len(a) + len(b)
            square = sum_squares(a, job.dtypes[0])
            with lock:
                job.tally.add_equal(n, square)
            return len(a) + len(b)
        # The bytes differ, so compare numbers. Everything costly happens outside the lock.
        difference = compare_elements(a, b, dtypes=job.dtypes, rule=self._rule)
        is_cast = self._is_cast(a, b, job)
        pair = None if difference.first is None else _pair(a, b, difference.first, job.dtypes)
        with lock:
            job.tally.add(difference, start=flat_offset(box, job.shape), is_cast=is_cast, pair=pair)
        return len(a) + len(b)

    def sum_up(self, job: _TensorJob, box: Box, *, lock: threading.Lock) -> int:
        """Add an equal band to the sums of its tensor, and return the number of bytes read."""
        n = prod(box.shape)
        a = self._a.first(n * itemsize(job.dtypes[0]))
        job.a.read(box, a, self._raw.view)
        square = sum_squares(a, job.dtypes[0])
        with lock:
            job.tally.add_equal(n, square)
        return len(a)

    def _is_equal(self, a: memoryview, job: _TensorJob) -> bool:
        """Return whether the two bands in the buffers are equal as bytes, and thus as numbers.

        Args:
            a: the band of A.
        """
        if job.dtypes[0] != job.dtypes[1] or not self._a.begins_as(self._b, len(a)):
            return False
        # Equal bytes of NaN are different numbers, if the tolerance says so.
        return self._rule is None or self._rule.equal_nan or not has_nan(a, job.dtypes[0])

    def _is_cast(self, a: memoryview, b: memoryview, job: _TensorJob) -> bool | None:
        """Return whether the band of the narrower dtype holds the other's values, rounded.

        Return None if the dtypes are equal, or if there is no such cast.
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
        rounded = self._raw.first(len(narrow))
        find_cast(wide_type, narrow_type)(wide, rounded)
        # A copy, because Python compares two memoryviews item by item.
        return bytearray(rounded) == narrow


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
        """Return whether two buffers begin with the same bytes."""
        # ctypes releases the interpreter's lock, so that other threads run meanwhile.
        return not _memcmp()(self._address, other._address, n_bytes)


@cache
def _memcmp() -> Callable[[int, int, int], int]:
    """Return the C library's memcmp, since Python compares memoryviews byte by byte."""
    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return memcmp


def _pair(
    a: memoryview, b: memoryview, index: int, dtypes: tuple[str, str]
) -> tuple[int | float | None, int | float | None]:
    """Return the values of the element at an index in both bands."""
    size_a, size_b = itemsize(dtypes[0]), itemsize(dtypes[1])
    return (
        element_value(a[index * size_a : (index + 1) * size_a], dtypes[0]),
        element_value(b[index * size_b : (index + 1) * size_b], dtypes[1]),
    )
