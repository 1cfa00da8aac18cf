"""What a scan finds out about bytes: CRC-32s and digests of files, of arrays, and of what the checkpoint states itself.

Every byte goes through the CRC once: it is computed of the pieces between all borders, and those are combined.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from core.arrays.checksum import ArrayPart, ArraySum, RunSum, crc32, crc32_combine, digest_of
from core.catalog.stored import StoredArray
from core.scan.windows import FilePlan, Line, Stated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from core.arrays.checksum import ReadArray
    from core.errors import CheckpointingException
    from core.files.store import ReadStore
    from core.team.protocol import Figures


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which sums are made.

    Args:
        crc: CRC-32s, of everything; without them nothing that is stated is checked.
        array_digests, file_digests: digests as in ``core.arrays.checksum``.
        digests_of: names of arrays of which digests are made in any case.
    """

    crc: bool = True
    array_digests: bool = False
    file_digests: bool = False
    digests_of: frozenset[str] = frozenset()

    def has_digest(self, array: StoredArray) -> bool:
        """Whether an array's digest is made."""
        return self.array_digests or array.name in self.digests_of


@dataclass(frozen=True, slots=True)
class Sum:
    """The sums of a file, or of the dense bytes of an array; None for what was not asked for.

    Args:
        n_bytes: how many bytes.
        crc: CRC-32.
        digest: in hexadecimal digits.
    """

    n_bytes: int
    crc: int | None
    digest: str | None


def sum_of_nothing(array: StoredArray, wanted: Wanted) -> Sum:
    """The sums of an array without elements."""
    return Sum(0, 0 if wanted.crc else None, digest_of(b"").hex() if wanted.has_digest(array) else None)


@dataclass(frozen=True, slots=True)
class WrongCrc:
    """Bytes that do not have the CRC-32 that the checkpoint states.

    Args:
        file: that holds them.
        stated: where, and which CRC.
        found: the CRC that they have.
        arrays: names of arrays that lie in them.
    """

    file: str
    stated: Stated
    found: int
    arrays: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """What could not be read.

    Args:
        file: the file.
        array: the array, or None if it is the file.
        error: why.
    """

    file: str
    array: StoredArray | None
    error: CheckpointingException


@dataclass(slots=True)
class Scanned:
    """What a scan found out.

    Args:
        files: sums by file name; only of files that were read to the end.
        arrays: sums by array name; only of arrays that were read to the end.
        wrong: what does not have the CRC that is stated.
        n_stated: stated CRCs that were compared.
        problems: what could not be read.
        covered: files of which something is checked by a checksum that they state.
        read_bytes: bytes of files that were read in line.
        made_bytes: bytes of arrays that were read by themselves.
        figures: of the workers that divided the work; none of a process that works alone.
    """

    files: dict[str, Sum] = field(default_factory=dict)
    arrays: dict[str, Sum] = field(default_factory=dict)
    wrong: list[WrongCrc] = field(default_factory=list)
    n_stated: int = 0
    problems: list[Problem] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)
    read_bytes: int = 0
    made_bytes: int = 0
    figures: tuple[Figures, ...] = ()

    def add(self, other: Scanned) -> None:
        """Takes what another rank of a team has found."""
        self.files |= other.files
        self.arrays |= other.arrays
        self.wrong += other.wrong
        self.n_stated += other.n_stated
        self.problems += other.problems
        self.covered |= other.covered
        self.read_bytes += other.read_bytes
        self.made_bytes += other.made_bytes


@dataclass(frozen=True, slots=True)
class FilePart:
    """What one rank of a team has of a file that it shares with others.

    Args:
        of_file: sums of the file's bytes.
        of_lines: of what lies in it and is not complete, by its number among ``FilePlan.lines``.
    """

    of_file: ArrayPart
    of_lines: Mapping[int, ArrayPart]


class SegmentSums:
    """The sums of one segment of a file, fed in order.

    Args:
        plan: the file.
        start: where the segment begins.
        lines: what lies in it, by address.
        wanted: which sums.
    """

    def __init__(self, plan: FilePlan, start: int, lines: Sequence[Line], wanted: Wanted) -> None:
        self._crc = wanted.crc
        self._at = start
        self.of_file = RunSum(start, plan.n_bytes, crc=False, digest=wanted.file_digests)
        self.of_lines = [(line, _run(line, start, wanted)) for line in lines]
        self._borders = sorted({place for line in lines for place in (line.start, line.stop)})
        self._n_begun = 0
        self._open: list[tuple[Line, RunSum]] = []

    def feed(self, data: memoryview) -> None:
        """Takes the next bytes of the segment."""
        start, stop = self._at, self._at + len(data)
        self._at = stop
        borders = self._borders[bisect_right(self._borders, start) : bisect_left(self._borders, stop)]
        for begin, end in zip((start, *borders), (*borders, stop), strict=True):
            self._feed_piece(data[begin - start : end - start], begin, end)

    def _feed_piece(self, data: memoryview, start: int, stop: int) -> None:
        """Takes bytes that no border cuts."""
        crc = crc32(data) if self._crc else 0
        _append(self.of_file, data, crc)
        while self._n_begun < len(self.of_lines) and self.of_lines[self._n_begun][0].start <= start:
            self._open.append(self.of_lines[self._n_begun])
            self._n_begun += 1
        is_ended = False
        for line, run in self._open:
            _append(run, data, crc)
            is_ended |= line.stop <= stop
        if is_ended:
            self._open = [pair for pair in self._open if pair[0].stop > stop]


def _run(line: Line, start: int, wanted: Wanted) -> RunSum:
    offset = max(0, start - line.start)
    return RunSum(offset, line.stop - line.start, crc=False, digest=_has_digest(line, wanted))


def _has_digest(line: Line, wanted: Wanted) -> bool:
    return isinstance(line.what, StoredArray) and wanted.has_digest(line.what)


def _append(run: RunSum, data: memoryview, crc: int) -> None:
    """Feeds a run bytes whose CRC is known."""
    run.crc = crc32_combine(run.crc, crc, len(data)) if run.n_bytes else crc
    run.feed(data)


class FileSums:
    """The sums of one file, whose segments are read by any threads, in any order.

    Args:
        plan: the file.
        wanted: which sums.
        result: gets what is complete.
        lock: guards the result, and this.
    """

    def __init__(self, plan: FilePlan, wanted: Wanted, result: Scanned, lock: threading.Lock) -> None:
        self._plan = plan
        self._wanted = wanted
        self._result = result
        self._lock = lock
        self._file = ArraySum(plan.n_bytes, crc=wanted.crc, digest=wanted.file_digests)
        self._lines: dict[int, ArraySum] = {}

    def add(self, sums: SegmentSums, store: ReadStore) -> list[StoredArray]:
        """Takes a segment that was read to its end.

        Args:
            store: blocks that two segments share are read again for digests.

        Returns:
            The arrays of which all elements have been read now.
        """
        with self._lock:
            self._result.read_bytes += sums.of_file.n_bytes
            self._file.add(sums.of_file)
            is_read = self._file.is_complete
            for line, run in sums.of_lines:
                self._line(line).add(run)
            done = [(line, made) for line, _ in sums.of_lines if (made := self._completed(line)) is not None]
        return self._noted(done, store, is_read=is_read)

    @property
    def is_complete(self) -> bool:
        """Whether every byte of the file has been read."""
        return self._file.is_complete

    def part(self, store: ReadStore) -> FilePart:
        """What has been added of the file and of what is not complete; for ``join`` in another process."""
        by_line = {id(line): number for number, line in enumerate(self._plan.lines)}
        lines = {by_line[key]: made for key, made in self._lines.items()}
        return FilePart(
            self._file.part(self._read(0, store)),
            {number: made.part(self._read(self._plan.lines[number].start, store)) for number, made in lines.items()},
        )

    def join(self, part: FilePart, store: ReadStore) -> list[StoredArray]:
        """Takes what another process has of the file.

        Returns:
            The arrays of which all elements have been read now.
        """
        self._file.join(part.of_file)
        lines = [self._plan.lines[number] for number in part.of_lines]
        for line, found in zip(lines, part.of_lines.values(), strict=True):
            self._line(line).join(found)
        done = [(line, made) for line in lines if (made := self._completed(line)) is not None]
        return self._noted(done, store, is_read=self._file.is_complete)

    def _noted(self, done: Sequence[tuple[Line, ArraySum]], store: ReadStore, *, is_read: bool) -> list[StoredArray]:
        """Notes what is complete; returns the arrays of it."""
        if is_read:
            self.finish(store)
        arrays = []
        for line, made in done:
            found = self._sum(made, line.start, store)
            if isinstance(line.what, StoredArray):
                arrays.append(line.what)
                with self._lock:
                    self._result.arrays[line.what.name] = found
            else:
                self._compare(line.what, found.crc)
        return arrays

    def finish(self, store: ReadStore) -> None:
        """Notes the sums of the file, all of which has been read."""
        found = self._sum(self._file, 0, store)
        with self._lock:
            self._result.files[self._plan.file] = found

    def _line(self, line: Line) -> ArraySum:
        """The sums of a line so far; the lock is held."""
        known = self._lines.get(id(line))
        if known is None:
            n_bytes = line.stop - line.start
            known = self._lines[id(line)] = ArraySum(
                n_bytes, crc=self._wanted.crc, digest=_has_digest(line, self._wanted)
            )
        return known

    def _completed(self, line: Line) -> ArraySum | None:
        """The sums of a line, taken away, if they are complete; the lock is held."""
        return self._lines.pop(id(line)) if self._lines[id(line)].is_complete else None

    def _read(self, base: int, store: ReadStore) -> ReadArray:
        return lambda offset, buffer: store.read_into(self._plan.file, base + offset, buffer)

    def _sum(self, made: ArraySum, base: int, store: ReadStore) -> Sum:
        crc, digest = made.finish(self._read(base, store))
        return Sum(made.n_bytes, crc if self._wanted.crc else None, digest.hex() or None)

    def _compare(self, stated: Stated, crc: int | None) -> None:
        if crc is None:
            return
        with self._lock:
            self._result.n_stated += 1
            if crc != stated.crc:
                self._result.wrong.append(WrongCrc(self._plan.file, stated, crc, self._arrays_in(stated)))

    def _arrays_in(self, stated: Stated) -> tuple[str, ...]:
        return tuple(
            line.what.name
            for line in self._plan.lines
            if isinstance(line.what, StoredArray) and line.start < stated.stop and stated.start < line.stop
        )
