"""Add up the bytes of each array that a copy has written, and their checksums."""

from __future__ import annotations

import threading
from array import array as columns
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from core.arrays.checksum import ArrayPart, ArraySum, ReadArray, RunSum, crc32_combine, digest_of
from core.engine.plan.addresses import RecordCrc
from core.errors import CorruptError
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.plan.positions import Places
    from core.files.store import TargetStore


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """A run of an array that an item has written.

    Args:
        array: number in ``Places``.
        offset, n_bytes: bytes of the array.
        crc: CRC-32 of these bytes.
    """

    array: int
    offset: int
    n_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run of source bytes whose array has a recorded CRC.

    Args:
        record: the CRC that the source records.
        offset, n_bytes: bytes of the source array.
        crc: CRC-32 of these bytes, as read.
    """

    record: RecordCrc
    offset: int
    n_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """The runs that one item has written, and those that it has read and checked."""

    written: tuple[WrittenRun, ...] = ()
    checked: tuple[CheckedRun, ...] = ()


class _SourceRuns:
    """The runs that have been read from one source array.

    Parts of an array may be read several times, each for another destination.
    """

    def __init__(self) -> None:
        self._longest: dict[int, CheckedRun] = {}  # by offset
        self._n_bytes = 0

    def __iter__(self) -> Iterator[CheckedRun]:
        return iter(self._longest.values())

    def add(self, run: CheckedRun) -> None:
        """Add a run; of several with one offset the longest counts."""
        previous = self._longest.get(run.offset)
        if previous is None or previous.n_bytes < run.n_bytes:
            self._longest[run.offset] = run
            self._n_bytes += run.n_bytes - (previous.n_bytes if previous else 0)

    def crc_of(self, n_bytes: int) -> int | None:
        """Combine the CRC-32 of the array of ``n_bytes``; None until the runs tile it."""
        if self._n_bytes < n_bytes:
            return None
        crc = reached = 0
        while reached < n_bytes:
            run = self._longest.get(reached)
            if run is None or not run.n_bytes:
                return None
            crc = crc32_combine(crc, run.crc, run.n_bytes)
            reached += run.n_bytes
        return crc if reached == n_bytes else None


@dataclass(frozen=True, slots=True)
class LedgerState:
    """The ledger of one worker, in a form small enough to be sent to the lead.

    Args:
        numbers: numbers of the arrays that the worker has written completely.
        crcs: their CRC-32s.
        digests: 16 bytes of each; empty if switched off.
        open: checksums of arrays that other workers also write to, by number.
        checked: runs of source arrays that other workers read the rest of.
        overflows: tensor → number of its elements that a cast of this run made infinite.
    """

    numbers: columns[int]
    crcs: columns[int]
    digests: bytes
    open: dict[int, ArrayPart]
    checked: tuple[CheckedRun, ...]
    overflows: dict[str, int]

    @property
    def unsummed_arrays(self) -> list[int]:
        """Numbers of the arrays with bytes that no checksum covers."""
        return [number for number, part in self.open.items() if part.n_unsummed]


class Ledger:
    """The checksums of all arrays of a copy, from the runs of its items; safe for threads.

    Args:
        places: file positions of the target arrays.
        stage: the files that are written; blocks that two items share are read back from it.
        crc, digest: compute CRC-32s, and content digests.
        on_array: called with the number and the CRC-32 of each array that has been written
            completely, from any thread.

    Attributes:
        crcs: CRC-32 by array number.
        digests: 16 bytes per array number.
        overflows: tensor → number of its elements that a cast of this run made infinite.
    """

    def __init__(
        self,
        places: Places,
        stage: TargetStore,
        *,
        crc: bool,
        digest: bool,
        on_array: Callable[[int, int], None] | None = None,
    ) -> None:
        self._places = places
        self._on_array = on_array
        self._stage = stage
        self._crc = crc
        self._digest = digest
        self._lock = threading.Lock()
        self._open: dict[int, ArraySum] = {}
        self._checked: dict[tuple[str, str], _SourceRuns] = {}
        self._closed = columns("q")
        self.overflows: dict[str, int] = {}
        self.crcs = columns("I", bytes(4 * len(places)))
        self.digests = bytearray(16 * len(places)) if digest else bytearray()
        if digest:
            for number in range(len(places)):
                if places.bytes_of(number) == 0:
                    self.digests[16 * number : 16 * number + 16] = digest_of(b"")

    def add(self, number: int, run: RunSum) -> None:
        """Add a run of an array that has been fed to its end."""
        with self._lock:
            array = self._array(number)
            array.add(run)
        self._close_if_complete(number, array)

    def add_unsummed(self, number: int, n_bytes: int) -> None:
        """Add bytes of an array that were written piecemeal, without checksums."""
        with self._lock:
            array = self._array(number)
            array.add_unsummed(n_bytes)
        self._close_if_complete(number, array)

    def _array(self, number: int) -> ArraySum:
        array = self._open.get(number)
        if array is None:
            array = self._open[number] = ArraySum(
                self._places.bytes_of(number), crc=self._crc, digest=self._digest
            )
        return array

    def _close_if_complete(self, number: int, array: ArraySum) -> None:
        """Compute the checksums of an array as soon as all of its bytes have been added."""
        with self._lock:
            if not array.is_complete or self._open.pop(number, None) is None:
                return
        # Blocks that two items share are read back here, outside of the lock.
        crc, digest = array.finish(self._reader(number))
        with self._lock:
            self._closed.append(number)
            self.crcs[number] = crc
            if digest:
                self.digests[16 * number : 16 * number + 16] = digest
        places = self._places
        self._stage.release(
            places.file_of(number), places.offset_of(number), places.bytes_of(number)
        )
        if self._on_array is not None:
            self._on_array(number, crc)

    def _reader(self, number: int) -> ReadArray:
        """Bind a function that reads an array back from the staging directory."""
        file, base = self._places.file_of(number), self._places.offset_of(number)
        return lambda offset, buffer: self._stage.read_into(file, base + offset, buffer)

    def state(self) -> LedgerState:
        """Return the checksums of this worker, after all its items are done."""
        digests = (
            b"".join(self.digests[16 * n : 16 * n + 16] for n in self._closed)
            if self._digest
            else b""
        )
        return LedgerState(
            self._closed,
            columns("I", (self.crcs[n] for n in self._closed)),
            digests,
            {number: array.part(self._reader(number)) for number, array in self._open.items()},
            tuple(run for runs in self._checked.values() for run in runs),
            self.overflows,
        )

    def join(self, state: LedgerState) -> None:
        """Add the ledger of another worker; compute the checksums of arrays that are complete now.

        Raises:
            CorruptError: a source array that several workers have read does not have its recorded
                CRC.
            TruncatedError, StorageError: bytes that two workers share cannot be read back.
        """
        # Arrays that the other worker has written completely.
        for row, number in enumerate(state.numbers):
            self._closed.append(number)
            self.crcs[number] = state.crcs[row]
            if self._digest:
                self.digests[16 * number : 16 * number + 16] = state.digests[
                    16 * row : 16 * row + 16
                ]
            if self._on_array is not None:
                self._on_array(number, state.crcs[row])
        # Arrays that several workers write are complete when the last part is added.
        for number, part in state.open.items():
            with self._lock:
                array = self._array(number)
                array.join(part)
            self._close_if_complete(number, array)
        self.check(state.checked)
        self.add_overflows(state.overflows)

    def add_overflows(self, overflows: Mapping[str, int]) -> None:
        """Add numbers of elements that became infinite, by tensor."""
        with self._lock:
            for key, n_elements in overflows.items():
                self.overflows[key] = self.overflows.get(key, 0) + n_elements

    @property
    def is_complete(self) -> bool:
        """True if every array that has bytes has been written completely."""
        n_arrays = sum(self._places.bytes_of(number) > 0 for number in range(len(self._places)))
        return not self._open and len(set(self._closed)) == n_arrays

    def check(self, runs: Iterable[CheckedRun]) -> None:
        """Add runs of source arrays, and compare the CRC of each array that is complete.

        Raises:
            CorruptError: the CRC differs from the one that the source records.
        """
        for run in runs:
            record = run.record
            with self._lock:
                source_runs = self._checked.setdefault((record.file, record.array), _SourceRuns())
                source_runs.add(run)
                crc = source_runs.crc_of(record.n_bytes)
                if crc is None:
                    continue
                del self._checked[record.file, record.array]
            if crc != record.crc:
                raise CorruptError(
                    f"checksum mismatch: the bytes have CRC-32 {crc:08x}, "
                    f"but the file records {record.crc:08x}",
                    file=record.file,
                    key=record.array,
                    span=(record.start, record.start + record.n_bytes),
                    hint="the checkpoint is damaged; copy it again, or use an older checkpoint",
                )
