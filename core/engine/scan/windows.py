"""Plan the windows in which a scan reads a file, from the positions of its arrays.

::

    file      |header|  array a  |gap|      array b, large        |directory|
    windows   |        1         |    2    |    3    |    4       |

Arrays whose elements are consecutive in the file are passed on as the windows reach them. Arrays
that overlap (views of one storage) are passed on together, as long as the elements of one do not
straddle those of another. All others are read *separately*: strided, encoded and straddling arrays.

A window ends where no element is cut: anywhere in a gap; in an array at multiples of
``WINDOW_BYTES`` from its start. Everything here is integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter

from core.arrays.box import is_c_contiguous
from core.arrays.checksum import BLOCK_BYTES
from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import StoredArray
from core.errors import CapacityError, CheckpointingException, CorruptError, TruncatedError
from core.values import dataclass

WINDOW_BYTES = BLOCK_BYTES
"""Bytes of a file that a thread holds at once, and of the blocks of large arrays."""
MAX_SHARING = 64
"""Maximum ratio of the arrays' bytes to the file's: thousands of views would take forever."""
SEGMENT_BYTES = 32 << 20
"""Approximate number of bytes that a thread reads before it takes the next work item."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes of a file: an array, or bytes whose CRC is recorded.

    Args:
        start, stop: byte addresses in the file.
        content: the array whose elements these bytes are, or their recorded CRC.
    """

    start: int
    stop: int
    content: StoredArray | StatedCrc


@dataclass(frozen=True, slots=True)
class SeparateArray:
    """An array that must be read separately from the rest of its file.

    Args:
        array: the array as the catalog has it.
        bound: the array with its position in the file.
    """

    array: StoredArray
    bound: StoredArray


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Plan for reading a file.

    Args:
        file: name of the file.
        n_bytes: size of the file.
        ranges: arrays and recorded CRCs of the file that have bytes, by address.
        clusters: disjoint regions, by address, that windows may only cut at multiples of
            ``WINDOW_BYTES`` from their start.
        separate: arrays to be read separately.
        empty: arrays without elements.
    """

    file: str
    n_bytes: int
    ranges: tuple[FileRange, ...]
    clusters: tuple[tuple[int, int], ...]
    separate: tuple[SeparateArray, ...]
    empty: tuple[StoredArray, ...]

    def segments(
        self, most_bytes: int = SEGMENT_BYTES
    ) -> Iterator[tuple[int, int, tuple[FileRange, ...]]]:
        """Yield the segments of a file, each a work item, by address; none for an empty file.

        Args:
            most_bytes: approximate length of a segment, at least ``WINDOW_BYTES``.

        Yields:
            Start and stop of the segment, and the ranges that overlap it.
        """
        active: list[FileRange] = []
        n_taken = start = 0
        while start < self.n_bytes:
            stop = self._cut(start, most_bytes)
            active = [file_range for file_range in active if file_range.stop > start]
            while n_taken < len(self.ranges) and self.ranges[n_taken].start < stop:
                active.append(self.ranges[n_taken])
                n_taken += 1
            yield start, stop, tuple(active)
            start = stop

    def windows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield start and stop of the windows of a segment, by address."""
        while start < stop:
            end = min(self._cut(start, WINDOW_BYTES), stop)
            yield start, end
            start = end

    def _cut(self, start: int, most_bytes: int) -> int:
        """Return the end of a segment or window that begins at ``start`` (0, or a previous end)."""
        limit = start + most_bytes
        if limit >= self.n_bytes:
            return self.n_bytes
        number = bisect_right(self.clusters, limit, key=itemgetter(0)) - 1
        if number < 0:
            return limit
        # In a cluster, cut at a multiple of the window size from its start; in a gap, anywhere.
        begin, end = self.clusters[number]
        return limit if limit >= end else begin + (limit - begin) // WINDOW_BYTES * WINDOW_BYTES


def plan_file(
    file: str,
    n_bytes: int,
    arrays: Sequence[tuple[StoredArray, StoredArray]],
    stated: Iterable[StatedCrc],
) -> tuple[FilePlan, list[tuple[StoredArray, CheckpointingException]]]:
    """Plan how a file is read.

    Args:
        file: name of the file.
        n_bytes: size of the file.
        arrays: every array in the file, as the catalog has it and with its position.
        stated: CRCs that the file records.

    Returns:
        The plan; and the arrays that exceed the file or share its bytes too often, with the errors.
    """
    # Decide which arrays are passed on as the windows reach them, and which are read separately.
    arranged = _arrange_arrays(arrays, n_bytes)
    ranges, clusters, straddling = _cluster_ranges(
        sorted(arranged.ranges, key=attrgetter("start", "stop"))
    )
    separate = arranged.separate
    if straddling:
        bound_by_name = {array.name: bound for array, bound in arrays}
        separate += [SeparateArray(array, bound_by_name[array.name]) for array in straddling]

    # Recorded CRCs are ranges too, but windows may cut them anywhere.
    ranges += [
        FileRange(crc.start, crc.stop, crc)
        for crc in stated
        if 0 <= crc.start < crc.stop <= n_bytes
    ]
    ranges.sort(key=attrgetter("start", "stop"))
    plan = FilePlan(
        file, n_bytes, tuple(ranges), tuple(clusters), tuple(separate), tuple(arranged.empty)
    )
    return plan, arranged.errors


@dataclass(frozen=True, slots=True)
class _ArrangedArrays:
    """Arrays of a file by the way in which they are read.

    Args:
        ranges: arrays whose elements are consecutive.
        separate: strided and encoded arrays.
        empty: arrays without elements.
        errors: arrays that cannot be read, with the reasons.
    """

    ranges: list[FileRange]
    separate: list[SeparateArray]
    empty: list[StoredArray]
    errors: list[tuple[StoredArray, CheckpointingException]]


def _arrange_arrays(
    arrays: Sequence[tuple[StoredArray, StoredArray]], n_bytes: int
) -> _ArrangedArrays:
    """Sort the arrays of a file of ``n_bytes`` by the way in which they are read."""
    arranged = _ArrangedArrays([], [], [], [])
    total = 0
    for array, bound in arrays:
        extent = bound.extent
        assert not extent.is_late, "bound before"
        if array.n_bytes == 0:
            arranged.empty.append(array)
        # Encoded arrays are not views of the file; their bounds are checked when they are decoded.
        elif extent.encoding is not None:
            arranged.separate.append(SeparateArray(array, bound))
        elif err := _error_if_outside(bound, n_bytes):
            arranged.errors.append((array, err))
        elif (total := total + array.n_bytes) > MAX_SHARING * n_bytes:
            too_many = CapacityError(
                f"the arrays up to this one add up to {total:,} bytes, "
                f"but the file is only {n_bytes:,} bytes long",
                file=extent.file,
                key=bound.name,
            )
            arranged.errors.append((array, too_many))
        elif extent.strides is None or is_c_contiguous(bound.shape, extent.strides):
            arranged.ranges.append(FileRange(extent.offset, extent.offset + array.n_bytes, array))
        else:
            arranged.separate.append(SeparateArray(array, bound))
    return arranged


def _cluster_ranges(
    ranges: Sequence[FileRange],
) -> tuple[list[FileRange], list[tuple[int, int]], list[StoredArray]]:
    """Join overlapping arrays into clusters.

    Args:
        ranges: arrays, by address.

    Returns:
        The arrays that are passed on as windows reach them, the regions that they cover, and the
        arrays whose elements straddle those of others.
    """
    regular: list[FileRange] = []
    clusters: list[tuple[int, int]] = []
    straddling: list[StoredArray] = []
    for file_range in ranges:
        assert isinstance(file_range.content, StoredArray)
        # An overlapping array joins the cluster if its elements are aligned to its start.
        begin, end = clusters[-1] if clusters else (0, 0)
        if file_range.start >= end:
            clusters.append((file_range.start, file_range.stop))
        elif (file_range.start - begin) % itemsize(file_range.content.dtype):
            straddling.append(file_range.content)
            continue
        else:
            clusters[-1] = (begin, max(end, file_range.stop))
        regular.append(file_range)
    return regular, clusters, straddling


def _error_if_outside(bound: StoredArray, n_bytes: int) -> CorruptError | None:
    """Return an error if an array exceeds its file or has negative strides, else None."""
    extent = bound.extent
    # Without negative strides, the last element has the highest address.
    steps = extent.strides
    if steps is None:
        end = extent.offset + bound.n_bytes
    else:
        last = sum((n - 1) * step for n, step in zip(bound.shape, steps, strict=True))
        end = extent.offset + (last + 1) * itemsize(bound.dtype)
    if steps is not None and any(step < 0 for step in steps):
        return CorruptError(
            f"the array has negative strides: {steps}", file=extent.file, key=bound.name
        )
    if extent.offset < 0 or end > n_bytes:
        return TruncatedError(
            f"the array ends at byte {end}, but the file already ends at byte {n_bytes}",
            file=extent.file,
            key=bound.name,
            span=(extent.offset, end),
            hint="copy the checkpoint again, or use an older one",
        )
    return None


@dataclass(frozen=True, slots=True)
class StatedCrc:
    """CRC-32 that a checkpoint records for some bytes of a file.

    Args:
        start, stop: byte addresses in the file.
        crc: the recorded CRC-32.
        name: name of the bytes for messages: ``record data/0``.
    """

    start: int
    stop: int
    crc: int
    name: str
