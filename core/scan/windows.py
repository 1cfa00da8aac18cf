"""Where the arrays of a file lie, and the windows in which a scan reads it.

::

    file      |header|  array a  |gap|      array b, large        |directory|
    windows   |        1         |    2    |    3    |    4       |

Arrays whose elements follow each other in the file (*in line*) are handed out as they pass by. Those that overlap
(views of one storage) pass by together, as long as the elements of one do not straddle those of another. All others
are read *apart*: strided, encoded and straddling ones.

A window ends where no element is cut: in gaps anywhere, in an array at multiples of ``WINDOW_BYTES`` from its start.
Everything here is integers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from core.arrays.box import is_c_contiguous
from core.arrays.checksum import BLOCK_BYTES
from core.arrays.dtypes import itemsize
from core.catalog.stored import StoredArray
from core.errors import CapacityError, CheckpointingException, CorruptError, TruncatedError

WINDOW_BYTES = BLOCK_BYTES
"""Most bytes of a file that a thread holds at once, and the blocks in which large arrays are handed out."""
MAX_SHARING = 64
"""How many times over the arrays may share the bytes of a file; thousands of views of one storage would never end."""
SEGMENT_BYTES = 32 << 20
"""About how many bytes of a file a thread reads before it takes the next piece of work."""


@dataclass(frozen=True, slots=True)
class Line:
    """Something that lies in a file as one run of bytes.

    Args:
        start, stop: byte addresses in the file.
        what: the array whose elements they are, or what the checkpoint states of them.
    """

    start: int
    stop: int
    what: StoredArray | Stated


@dataclass(frozen=True, slots=True)
class Apart:
    """An array that must be read by itself.

    Args:
        array: as the catalog has it.
        bound: with its place.
    """

    array: StoredArray
    bound: StoredArray


@dataclass(frozen=True, slots=True)
class FilePlan:
    """How a file is read.

    Args:
        file: its name.
        n_bytes: its size.
        lines: what lies in it, by address; nothing without bytes.
        clusters: regions that windows must not cut anywhere but at multiples of ``WINDOW_BYTES`` from their start; by
            address, disjoint.
        apart: arrays to be read by themselves.
        empty: arrays without elements.
    """

    file: str
    n_bytes: int
    lines: tuple[Line, ...]
    clusters: tuple[tuple[int, int], ...]
    apart: tuple[Apart, ...]
    empty: tuple[StoredArray, ...]

    def segments(self, most_bytes: int = SEGMENT_BYTES) -> Iterator[tuple[int, int, tuple[Line, ...]]]:
        """(start, stop, the lines in between) of pieces of work, by address; none for an empty file.

        Args:
            most_bytes: about how long a piece is, at least ``WINDOW_BYTES``.
        """
        active: list[Line] = []
        taken = start = 0
        while start < self.n_bytes:
            stop = self._cut(start, most_bytes)
            active = [line for line in active if line.stop > start]
            while taken < len(self.lines) and self.lines[taken].start < stop:
                active.append(self.lines[taken])
                taken += 1
            yield start, stop, tuple(active)
            start = stop

    def windows(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The windows of a segment, by address."""
        while start < stop:
            end = min(self._cut(start, WINDOW_BYTES), stop)
            yield start, end
            start = end

    def _cut(self, start: int, most_bytes: int) -> int:
        """Where a piece that begins at ``start`` ends; ``start`` is an end of an earlier one, or 0."""
        limit = start + most_bytes
        if limit >= self.n_bytes:
            return self.n_bytes
        number = bisect_right(self.clusters, limit, key=_first) - 1
        if number < 0:
            return limit
        begin, end = self.clusters[number]
        return limit if limit >= end else begin + (limit - begin) // WINDOW_BYTES * WINDOW_BYTES


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


def plan_file(
    file: str, n_bytes: int, arrays: Sequence[tuple[StoredArray, StoredArray]], stated: Iterable[Stated]
) -> tuple[FilePlan, list[tuple[StoredArray, CheckpointingException]]]:
    """How a file is read.

    Args:
        file: its name.
        n_bytes: its size.
        arrays: of every array in it, as the catalog has it and with its place.
        stated: CRCs that it states.

    Returns:
        The plan, and the arrays that do not lie in the file, or of which there are too many.
    """
    lines: list[Line] = []
    apart: list[Apart] = []
    empty: list[StoredArray] = []
    wrong: list[tuple[StoredArray, CheckpointingException]] = []
    total = 0
    for array, bound in arrays:
        extent = bound.extent
        assert not extent.is_late, "bound before"
        if array.n_bytes == 0:
            empty.append(array)
        elif extent.encoding is not None:
            apart.append(Apart(array, bound))
        elif err := _outside(bound, n_bytes) or _too_many(bound, total := total + array.n_bytes, n_bytes):
            wrong.append((array, err))
        elif extent.strides is None or is_c_contiguous(bound.shape, extent.strides):
            lines.append(Line(extent.offset, extent.offset + array.n_bytes, array))
        else:
            apart.append(Apart(array, bound))
    lines.sort(key=attrgetter("start", "stop"))
    kept, clusters, straddling = _clustered(lines)
    if straddling:
        places = {array.name: bound for array, bound in arrays}
        apart += [Apart(array, places[array.name]) for array in straddling]
    kept += [Line(one.start, one.stop, one) for one in stated if 0 <= one.start < one.stop <= n_bytes]
    kept.sort(key=attrgetter("start", "stop"))
    return FilePlan(file, n_bytes, tuple(kept), tuple(clusters), tuple(apart), tuple(empty)), wrong


def _clustered(lines: list[Line]) -> tuple[list[Line], list[tuple[int, int]], list[StoredArray]]:
    """(arrays in line, regions of those that overlap, arrays that straddle the elements of others)."""
    kept: list[Line] = []
    clusters: list[tuple[int, int]] = []
    straddling: list[StoredArray] = []
    for line in lines:
        assert isinstance(line.what, StoredArray)
        begin, end = clusters[-1] if clusters else (0, 0)
        if line.start >= end:
            clusters.append((line.start, line.stop))
        elif (line.start - begin) % itemsize(line.what.dtype):
            straddling.append(line.what)
            continue
        else:
            clusters[-1] = (begin, max(end, line.stop))
        kept.append(line)
    return kept, clusters, straddling


def _outside(bound: StoredArray, n_bytes: int) -> CorruptError | None:
    """What is wrong with an array that does not lie in its file."""
    extent = bound.extent
    steps = extent.strides
    if steps is None:
        end = extent.offset + bound.n_bytes
    else:
        last = sum((n - 1) * step for n, step in zip(bound.shape, steps, strict=True))
        end = extent.offset + (last + 1) * itemsize(bound.dtype)
    if steps is not None and any(step < 0 for step in steps):
        return CorruptError(f"strides {steps} are negative", file=extent.file, key=bound.name)
    if extent.offset < 0 or end > n_bytes:
        return TruncatedError(
            f"the array ends at byte {end}, the file at byte {n_bytes}",
            file=extent.file,
            key=bound.name,
            span=(extent.offset, end),
            hint="copy the checkpoint again, or use an older one",
        )
    return None


def _too_many(bound: StoredArray, total_bytes: int, n_bytes: int) -> CapacityError | None:
    """What is wrong with an array that is one view too many of the bytes of its file."""
    if total_bytes <= MAX_SHARING * n_bytes:
        return None
    extent = bound.extent
    return CapacityError(
        f"the arrays up to this one have {total_bytes} bytes in a file of {n_bytes}", file=extent.file, key=bound.name
    )


@dataclass(frozen=True, slots=True)
class Stated:
    """Bytes of a file of which the checkpoint states the CRC-32.

    Args:
        start, stop: byte addresses in the file.
        crc: as stated.
        name: what they are, for people: ``record data/0``.
    """

    start: int
    stop: int
    crc: int
    name: str
