"""Compute CRC-32s and digests of files and arrays, and compare CRCs that the checkpoint records.

Every byte goes through the CRC once: CRCs are computed for the runs between all borders, and then
combined.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from dataclasses import field
from typing import TYPE_CHECKING

from core.arrays.checksum import (
    BLOCK_BYTES,
    ArrayPart,
    ArraySum,
    RunSum,
    crc32,
    crc32_combine,
    digest_of,
    digest_of_blocks,
)
from core.engine.catalog.stored import StoredArray
from core.engine.scan.windows import FilePlan, FileRange, StatedCrc
from core.values import dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from core.arrays.checksum import ReadArray
    from core.engine.team.protocol import Figures
    from core.errors import CheckpointingException
    from core.files.store import ReadStore


@dataclass(frozen=True, slots=True)
class WantedSums:
    """The sums that a scan computes.

    Args:
        crc: CRC-32s of everything; without them no recorded CRC is checked.
        array_digests, file_digests: digests as in ``core.arrays.checksum``.
        digests_of: names of arrays whose digests are computed in any case.
    """

    crc: bool = True
    array_digests: bool = False
    file_digests: bool = False
    digests_of: frozenset[str] = frozenset()

    def has_digest(self, array: StoredArray) -> bool:
        """Return whether the digest of an array is computed."""
        return self.array_digests or array.name in self.digests_of


@dataclass(frozen=True, slots=True)
class Sum:
    """Sums of a file, or of the dense bytes of an array.

    Args:
        n_bytes: number of bytes.
        crc: CRC-32; None if it was not requested.
        digest: digest in hexadecimal digits; None if it was not requested.
    """

    n_bytes: int
    crc: int | None
    digest: str | None


def read_sum(store: ReadStore, file: str, start: int, n_bytes: int) -> Sum:
    """Read a range of a file, 1 MiB at a time, and return its sums.

    Raises:
        CheckpointingException: the range cannot be read.
    """
    run = RunSum(0, n_bytes, crc=True, digest=True)
    buffer = memoryview(bytearray(min(BLOCK_BYTES, n_bytes)))
    for offset in range(0, n_bytes, BLOCK_BYTES):
        block = buffer[: min(BLOCK_BYTES, n_bytes - offset)]
        store.read_into(file, start + offset, block)
        run.feed(block)
    return Sum(n_bytes, run.crc, digest_of_blocks(run.blocks).hex())


def empty_sum(array: StoredArray, wanted: WantedSums) -> Sum:
    """Return the sums of an array without elements."""
    return Sum(
        0, 0 if wanted.crc else None, digest_of(b"").hex() if wanted.has_digest(array) else None
    )


@dataclass(frozen=True, slots=True)
class CrcMismatch:
    """Bytes whose CRC-32 differs from the one that the checkpoint records.

    Args:
        file: the file that contains the bytes.
        stated: position of the bytes, and the recorded CRC.
        actual_crc: CRC of the bytes.
        arrays: names of arrays that overlap the bytes.
    """

    file: str
    stated: StatedCrc
    actual_crc: int
    arrays: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReadProblem:
    """A file or an array that could not be read.

    Args:
        file: the file.
        array: the array; None if the complete file could not be read.
        error: the reason.
    """

    file: str
    array: StoredArray | None
    error: CheckpointingException


@dataclass(slots=True)
class ScanResult:
    """Results of a scan.

    Args:
        files: sums by file name; only for files that were read to the end.
        arrays: sums by array name; only for arrays that were read to the end.
        mismatches: bytes whose CRC differs from the recorded one.
        n_stated: number of recorded CRCs that were compared.
        problems: files and arrays that could not be read.
        covered: files with a recorded checksum that protects at least some of their bytes.
        read_bytes: bytes of files that were read in order.
        separate_bytes: bytes of arrays that were read separately.
        figures: figures of the workers that divided the work; empty without a team.
    """

    files: dict[str, Sum] = field(default_factory=dict)
    arrays: dict[str, Sum] = field(default_factory=dict)
    mismatches: list[CrcMismatch] = field(default_factory=list)
    n_stated: int = 0
    problems: list[ReadProblem] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)
    read_bytes: int = 0
    separate_bytes: int = 0
    figures: tuple[Figures, ...] = ()

    def add(self, other: ScanResult) -> None:
        """Add the results of another rank."""
        self.files |= other.files
        self.arrays |= other.arrays
        self.mismatches += other.mismatches
        self.n_stated += other.n_stated
        self.problems += other.problems
        self.covered |= other.covered
        self.read_bytes += other.read_bytes
        self.separate_bytes += other.separate_bytes


@dataclass(frozen=True, slots=True)
class FilePart:
    """One rank's sums of a file that it shares with others.

    Args:
        of_file: sums of the file's bytes.
        of_ranges: sums of incomplete ranges, by index in ``FilePlan.ranges``.
    """

    of_file: ArrayPart
    of_ranges: Mapping[int, ArrayPart]


class SegmentSums:
    """Sums of one segment of a file, fed in order.

    Args:
        plan: the order in which the file is read.
        start: byte address at which the segment begins.
        ranges: ranges that overlap the segment, by address.
        wanted: the sums to compute.
    """

    def __init__(
        self, plan: FilePlan, start: int, ranges: Sequence[FileRange], wanted: WantedSums
    ) -> None:
        self._crc = wanted.crc
        self._position = start
        self.of_file = RunSum(start, plan.n_bytes, crc=False, digest=wanted.file_digests)
        # A range may have begun in an earlier segment: its sums start at an offset then.
        self.of_ranges = [
            (
                file_range,
                RunSum(
                    max(0, start - file_range.start),
                    file_range.stop - file_range.start,
                    crc=False,
                    digest=_has_digest(file_range, wanted),
                ),
            )
            for file_range in ranges
        ]
        self._borders = sorted(
            {border for file_range in ranges for border in (file_range.start, file_range.stop)}
        )
        self._n_begun = 0
        self._open: list[tuple[FileRange, RunSum]] = []

    def feed(self, data: memoryview) -> None:
        """Add the next bytes of the segment."""
        start, stop = self._position, self._position + len(data)
        self._position = stop
        # Between two borders the same ranges are open, so that one CRC counts for all of them.
        borders = self._borders[
            bisect_right(self._borders, start) : bisect_left(self._borders, stop)
        ]
        for begin, end in zip((start, *borders), (*borders, stop), strict=True):
            self._feed_piece(data[begin - start : end - start], begin, end)

    def _feed_piece(self, data: memoryview, start: int, stop: int) -> None:
        """Add bytes that contain no border."""
        # One pass over the bytes; the CRCs of all open ranges are combined with the result.
        crc = crc32(data) if self._crc else 0
        _feed_with_crc(self.of_file, data, crc)

        # Open the ranges that begin here.
        while (
            self._n_begun < len(self.of_ranges) and self.of_ranges[self._n_begun][0].start <= start
        ):
            self._open.append(self.of_ranges[self._n_begun])
            self._n_begun += 1

        # Feed all open ranges, and close those that end here.
        is_any_complete = False
        for file_range, run in self._open:
            _feed_with_crc(run, data, crc)
            is_any_complete |= file_range.stop <= stop
        if is_any_complete:
            self._open = [pair for pair in self._open if pair[0].stop > stop]


def _has_digest(file_range: FileRange, wanted: WantedSums) -> bool:
    """Return whether a range is an array whose digest is computed."""
    return isinstance(file_range.content, StoredArray) and wanted.has_digest(file_range.content)


def _feed_with_crc(run: RunSum, data: memoryview, crc: int) -> None:
    """Add bytes whose CRC has already been computed to a run."""
    run.crc = crc32_combine(run.crc, crc, len(data)) if run.n_bytes else crc
    run.feed(data)


class FileSums:
    """Sums of one file, whose segments are read by any threads, in any order.

    Args:
        plan: the order in which the file is read.
        wanted: the sums to compute.
        result: receives the sums that are complete.
        lock: guards the result and these sums.
    """

    def __init__(
        self, plan: FilePlan, wanted: WantedSums, result: ScanResult, lock: threading.Lock
    ) -> None:
        self._plan = plan
        self._wanted = wanted
        self._result = result
        self._lock = lock
        self._file = ArraySum(plan.n_bytes, crc=wanted.crc, digest=wanted.file_digests)
        self._ranges: dict[int, ArraySum] = {}

    def add(self, sums: SegmentSums, store: ReadStore) -> list[StoredArray]:
        """Add a segment that was read to its end.

        Args:
            store: blocks that two segments share are read again for digests.

        Returns:
            The arrays whose elements have now all been read.
        """
        # Under the lock, only collect: finishing sums may read the file, and locks again.
        with self._lock:
            self._result.read_bytes += sums.of_file.n_bytes
            self._file.add(sums.of_file)
            is_read = self._file.is_complete
            for file_range, run in sums.of_ranges:
                self._sums_of(file_range).add(run)
            complete = self._take_complete([file_range for file_range, _ in sums.of_ranges])
        return self._record(complete, store, is_read=is_read)

    @property
    def is_complete(self) -> bool:
        """True if every byte of the file has been read."""
        return self._file.is_complete

    def part(self, store: ReadStore) -> FilePart:
        """Return the sums of the file and its incomplete ranges, for ``join`` elsewhere."""
        # Every process numbers the ranges alike: the plans are equal.
        numbers = {id(file_range): number for number, file_range in enumerate(self._plan.ranges)}
        sums = {numbers[key]: range_sums for key, range_sums in self._ranges.items()}
        return FilePart(
            self._file.part(self._reader(0, store)),
            {
                number: range_sums.part(self._reader(self._plan.ranges[number].start, store))
                for number, range_sums in sums.items()
            },
        )

    def join(self, part: FilePart, store: ReadStore) -> list[StoredArray]:
        """Add another process's sums of the file.

        Returns:
            The arrays whose elements have now all been read.
        """
        self._file.join(part.of_file)
        ranges = [self._plan.ranges[number] for number in part.of_ranges]
        for file_range, range_sums in zip(ranges, part.of_ranges.values(), strict=True):
            self._sums_of(file_range).join(range_sums)
        return self._record(self._take_complete(ranges), store, is_read=self._file.is_complete)

    def _record(
        self, complete: Sequence[tuple[FileRange, ArraySum]], store: ReadStore, *, is_read: bool
    ) -> list[StoredArray]:
        """Add complete sums to the result, and return the arrays that are complete."""
        if is_read:
            self.finish(store)
        arrays = []
        for file_range, range_sums in complete:
            total = self._finish_sum(range_sums, file_range.start, store)
            if isinstance(file_range.content, StoredArray):
                arrays.append(file_range.content)
                with self._lock:
                    self._result.arrays[file_range.content.name] = total
            else:
                self._compare(file_range.content, total.crc)
        return arrays

    def finish(self, store: ReadStore) -> None:
        """Add the sums of the file, which has been read completely, to the result."""
        total = self._finish_sum(self._file, 0, store)
        with self._lock:
            self._result.files[self._plan.file] = total

    def _sums_of(self, file_range: FileRange) -> ArraySum:
        """Return the sums of a range so far; the caller holds the lock."""
        sums = self._ranges.get(id(file_range))
        if sums is None:
            n_bytes = file_range.stop - file_range.start
            sums = self._ranges[id(file_range)] = ArraySum(
                n_bytes, crc=self._wanted.crc, digest=_has_digest(file_range, self._wanted)
            )
        return sums

    def _take_complete(self, ranges: Sequence[FileRange]) -> list[tuple[FileRange, ArraySum]]:
        """Remove and return the sums of complete ranges; the caller holds the lock."""
        return [
            (file_range, self._ranges.pop(id(file_range)))
            for file_range in ranges
            if self._ranges[id(file_range)].is_complete
        ]

    def _reader(self, base: int, store: ReadStore) -> ReadArray:
        """Return a function that reads the file from address ``base`` on."""
        return lambda offset, buffer: store.read_into(self._plan.file, base + offset, buffer)

    def _finish_sum(self, sums: ArraySum, base: int, store: ReadStore) -> Sum:
        """Return the final sums of a range; blocks that two segments share are read again."""
        crc, digest = sums.finish(self._reader(base, store))
        return Sum(sums.n_bytes, crc if self._wanted.crc else None, digest.hex() or None)

    def _compare(self, stated: StatedCrc, crc: int | None) -> None:
        """Compare the CRC of some bytes with the recorded one, unless it was not computed."""
        if crc is None:
            return
        with self._lock:
            self._result.n_stated += 1
            if crc != stated.crc:
                arrays = tuple(
                    file_range.content.name
                    for file_range in self._plan.ranges
                    if isinstance(file_range.content, StoredArray)
                    and file_range.start < stated.stop
                    and stated.start < file_range.stop
                )
                self._result.mismatches.append(CrcMismatch(self._plan.file, stated, crc, arrays))
