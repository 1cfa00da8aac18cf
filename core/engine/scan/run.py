"""Scan a checkpoint: one pass over every byte, in several threads, in bounded memory.

Files are read in segments, each byte once, and passed on while they are in the processor's cache:
to the sums (``core.engine.scan.sums``) and, array by array, to *observers*. Arrays whose elements
are not consecutive in their file, or must be decoded, are read separately
(``core.engine.scan.separate_arrays``) and passed on as dense elements, whose sums are computed too.

What cannot be read is recorded as a problem, and the scan goes on. Errors of observers end the
scan, unless they are subclasses of ``CheckpointingException``.

The ranks of a team divide the files (``core.engine.scan.share``); the lead joins their results, as
if it had read everything.

Memory: a window of 1 MiB per thread; for strided arrays two bands more; for encoded arrays one unit
and the memory for decoding it, within ``memory_bytes``; about half a kilobyte for every array.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import StoredArray
from core.engine.device.device import Device
from core.engine.device.lane import host_buffer, uploaded_once
from core.engine.scan.observer import FileObserver, Observer
from core.engine.scan.separate_arrays import MemoryBudget, SeparateReader, is_checked
from core.engine.scan.share import Meter, ScanPart, divide_files
from core.engine.scan.sums import (
    FilePart,
    FileSums,
    ReadProblem,
    ScanResult,
    SegmentSums,
    Sum,
    WantedSums,
    empty_sum,
)
from core.engine.scan.windows import WINDOW_BYTES, FilePlan, FileRange, SeparateArray, plan_file
from core.engine.team.agreement import require_agreement
from core.engine.team.protocol import (
    ALONE,
    Figures,
    StoppedError,
    Team,
    broadcast_result,
    gather_results,
    is_lead,
)
from core.engine.team.threads import ThreadGroup
from core.errors import CheckpointingException
from core.files.store import list_files_below
from core.files.syscalls import allowed_cores, default_memory_bytes
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.engine.scan.windows import StatedCrc
    from core.errors import Report
    from core.files.store import ReadStore

DEFAULT_MEMORY_BYTES = default_memory_bytes()
CRCS = WantedSums()
Progress = Callable[[int, int], None]
"""Receives the bytes read so far and the bytes of all files; called from reading threads."""


class StatedIn(Protocol):
    """A reader of the CRCs that files record for their parts."""

    def __call__(self, file: str, n_bytes: int, *, report: Report) -> Iterable[StatedCrc]:
        """Return the CRCs that a file records.

        Args:
            n_bytes: size of the file.
            report: receives the errors in parts of the file that are skipped.
        """


def scan(
    catalog: Catalog | None,
    store: ReadStore,
    observers: Sequence[Observer] = (),
    *,
    files: Mapping[str, int] | None = None,
    file_observers: Sequence[FileObserver] = (),
    wanted: WantedSums = CRCS,
    stated_in: StatedIn | None = None,
    arrays: Iterable[StoredArray] | None = None,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> ScanResult:
    """Read every file once.

    Args:
        catalog: its arrays are passed to observers; None if the metadata cannot be read: then only
            files are scanned.
        store: the checkpoint's files.
        observers: receive the elements of arrays.
        files: size by name of the files to read; None for all files of the store.
        file_observers: receive the bytes of files.
        wanted: the sums to compute.
        stated_in: reads the CRCs that files record; without it none is compared.
        arrays: arrays to read instead of all arrays of the catalog; an array whose name occurred
            before is skipped.
        threads: number of threads; None for the number of processors.
        memory_bytes: maximum bytes that decoding may take at once.
        progress: called with the bytes that this rank has read.
        team: divides the work; each rank calls this with the same arguments, and observers of its
            own.
        device: the device on which observers work; the bytes to send are pinned, and sent to it
            once for all observers.

    Returns:
        The results; on ranks other than the lead only those of their shares. The lead's observers
        have received everything.

    Raises:
        WorkerError: the ranks of a team do not see the same files.
        StoppedError: another rank has failed.
    """
    # Fragments without an array are zeros: there is nothing to read.
    if arrays is None:
        candidates = (
            () if catalog is None else (fragment.array for fragment in catalog.all_fragments())
        )
        arrays = (array for array in candidates if array is not None)

    def prepare() -> ScanRun:
        """List the files, and group the arrays by file; several fragments may share an array."""
        names: set[str] = set()
        by_file: dict[str, list[StoredArray]] = {}
        for array in arrays:
            if array.name not in names:
                names.add(array.name)
                by_file.setdefault(array.extent.file, []).append(array)
        return ScanRun(
            store,
            list_files_below(store) if files is None else files,
            by_file,
            observers=observers,
            file_observers=file_observers,
            wanted=wanted,
            stated_in=stated_in,
            memory_bytes=memory_bytes
            - store.limit_reading(memory_bytes, threads=threads or len(allowed_cores())),
            progress=progress,
            team=team,
            device=device,
        )

    # The ranks divide the work without communication: this needs equal metadata everywhere.
    run = require_agreement(team, prepare, ScanRun.observed_state, subject=store.label)

    # Read. The lead then joins the results of all ranks.
    n_threads = threads or len(allowed_cores())
    if team.size == 1:
        run.run_threads(n_threads)
        return run.result
    parts = gather_results(team, lambda: run.read_share(n_threads))
    broadcast_result(team, lambda: run.join(parts or []))
    return run.result


@dataclass(frozen=True, slots=True)
class _ScannedFile:
    """A file that is being read.

    Args:
        plan: the order in which the file is read.
        sums: the sums of the file.
        readers: observers of the file's bytes.
        observers: observers by array name, for the arrays that any observer needs.
    """

    plan: FilePlan
    sums: FileSums
    readers: Sequence[FileObserver]
    observers: Mapping[str, Sequence[Observer]]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A work item: a part of a file."""

    file: _ScannedFile
    start: int
    stop: int
    ranges: Sequence[FileRange]


@dataclass(frozen=True, slots=True)
class _SeparateItem:
    """A work item: an array that is read separately."""

    file: _ScannedFile
    array: SeparateArray


_Errors = list[tuple[StoredArray | None, CheckpointingException]]
"""Arrays that cannot be read (None for the complete file), with the reasons."""


class ScanRun:
    """The state that the threads of one scan share."""

    def __init__(
        self,
        store: ReadStore,
        files: Mapping[str, int],
        arrays: dict[str, list[StoredArray]],
        *,
        observers: Sequence[Observer],
        file_observers: Sequence[FileObserver],
        wanted: WantedSums,
        stated_in: StatedIn | None,
        memory_bytes: int,
        progress: Progress | None,
        team: Team,
        device: Device | None,
    ) -> None:
        self._device = device
        self.result = ScanResult()
        self._store = store
        self._arrays = arrays
        self._observers = observers
        self._file_observers = file_observers
        self._wanted = wanted
        self._stated_in = stated_in
        self._progress = progress
        self._budget = MemoryBudget(memory_bytes)
        self._team = team
        self._share = divide_files(team, files, arrays)
        self._meter = Meter()
        # The files that several ranks read; None if the file cannot be read.
        self._divided_files: dict[str, _ScannedFile | None] = {}
        self._n_bytes = sum(files.values())
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadGroup("scan")
        self._items = self._threads.share(self._all_items())

    def run_threads(self, n_threads: int) -> None:
        """Read in threads; the calling thread waits and stays responsive to signals."""
        self._threads.run(self._work, n_threads)

    def observed_state(self) -> object:
        """Return the metadata that must be equal on all ranks, for their shares to fit together."""
        names = [(file, [array.name for array in arrays]) for file, arrays in self._arrays.items()]
        return self._share.spans, names

    def read_share(self, n_threads: int) -> ScanPart:
        """Read this rank's share and return the results for the lead."""
        start_time = time.monotonic()
        self._meter = Meter(self._team, self._share.n_bytes)
        self.run_threads(n_threads)
        self._meter.finish()

        # The lead keeps its results and observers; only its figures are needed.
        rank, n_bytes = self._team.rank, self.result.read_bytes + self.result.separate_bytes
        files = {} if is_lead(self._team) else dict(self._parts_of_divided_files())
        figures = Figures(rank, self._team.hosts[rank], n_bytes, 0, time.monotonic() - start_time)
        if is_lead(self._team):
            return ScanPart(figures)
        states = [observer.state() for observer in self._observers]
        file_states = [observer.state() for observer in self._file_observers]
        return ScanPart(figures, self.result, files, states, file_states)

    def _parts_of_divided_files(self) -> Iterator[tuple[str, FilePart]]:
        """Yield, by name, this rank's sums of files that it shares with other ranks."""
        for name, file in self._divided_files.items():
            if file is None or file.sums.is_complete:
                continue
            try:
                part = file.sums.part(self._store)
            except CheckpointingException as err:
                self._note(name, None, err)
                continue
            # The rank may have planned the file without reading any of it.
            if part.of_file.runs:
                yield name, part

    def join(self, parts: Sequence[ScanPart]) -> None:
        """Add the results of all ranks, by rank; called at the lead."""
        # To join the sums of other ranks, the lead also plans files that it has not read itself.
        for name in self._share.spans:
            if name not in self._divided_files and any(name in part.files for part in parts):
                self._divided_files[name] = self._open_file(
                    name, self._arrays.get(name, []), is_owner=False
                )

        # Complete files first, then those that several ranks have read.
        for part in parts[1:]:
            self._merge(part)
        for name, file in self._divided_files.items():
            if file is not None:
                self._join_file(name, file, parts)

        # Sort: the result must not depend on the number of ranks.
        order = {name: number for number, name in enumerate(self._share.spans)}
        self.result.mismatches.sort(
            key=lambda mismatch: (order[mismatch.file], mismatch.stated.start)
        )
        self.result.figures = tuple(part.figures for part in parts)

    def _merge(self, part: ScanPart) -> None:
        """Add the complete results and the observers' states of another rank."""
        assert part.scanned is not None
        self.result.add(part.scanned)
        for observer, state in zip(self._observers, part.states, strict=True):
            observer.merge(state)
        for reader, state in zip(self._file_observers, part.file_states, strict=True):
            reader.merge(state)

    def _join_file(self, name: str, file: _ScannedFile, parts: Sequence[ScanPart]) -> None:
        """Add the other ranks' sums of a file."""
        for part in parts:
            if name not in part.files:
                continue
            try:
                for array in file.sums.join(part.files[name], self._store):
                    for observer in file.observers.get(array.name, ()):
                        observer.finish(array)
            except CheckpointingException as err:
                self._note(name, None, err)

    def _all_items(self) -> Iterator[_Segment | _SeparateItem]:
        """Yield this rank's work items, file by file; each file is planned at its turn."""
        for name in self._share.spans:
            if not self._share.meets(name):
                continue
            is_owner = self._share.is_own(name)
            file = self._open_file(name, self._arrays.get(name, []), is_owner=is_owner)
            if len(self._share.owners(name)) > 1:
                self._divided_files[name] = file
            if file is not None:
                yield from self._items_of_file(name, file, is_owner=is_owner)

    def _items_of_file(
        self, name: str, file: _ScannedFile, *, is_owner: bool
    ) -> Iterator[_Segment | _SeparateItem]:
        """Yield this rank's work items of a file."""
        share = self._share
        for array in file.plan.empty if is_owner else ():
            self._finish(file, array, empty_sum(array, self._wanted))

        # For observers that need the bytes in order, the file is one item.
        if any(reader.in_order for reader in file.readers) and file.plan.n_bytes:
            if is_owner:
                yield _Segment(file, 0, file.plan.n_bytes, file.plan.ranges)
        else:
            for start, stop, ranges in file.plan.segments(share.piece_bytes):
                if share.is_own(name, start):
                    yield _Segment(file, start, stop, ranges)

        # The bytes of separate arrays count as if they followed those of the file.
        offset = file.plan.n_bytes
        for separate in file.plan.separate:
            if share.is_own(name, offset):
                yield _SeparateItem(file, separate)
            offset += separate.array.n_bytes

    def _open_file(
        self, name: str, arrays: list[StoredArray], *, is_owner: bool
    ) -> _ScannedFile | None:
        """Plan how a file is read, and find the observers that need it.

        Args:
            is_owner: this rank records the problems of the file, which several ranks may plan.

        Returns:
            The file; None if it cannot be read at all.
        """
        try:
            n_bytes = self._store.size(name)
        except CheckpointingException as err:
            self._note_all(name, [(None, err)], is_owner=is_owner)
            return None

        # Plan the file from its arrays and its recorded CRCs.
        bound, bind_errors = self._locate_arrays(name, arrays)
        stated, stated_errors = self._read_stated(name, n_bytes)
        plan, plan_errors = plan_file(name, n_bytes, bound, stated)
        self._note_all(name, [*bind_errors, *stated_errors, *plan_errors], is_owner=is_owner)
        if stated or any(is_checked(separate.bound) for separate in plan.separate):
            self.result.covered.add(name)

        # Find the observers that need its bytes or arrays.
        observers = self._observers_of(array for array, _ in bound)
        readers = [observer for observer in self._file_observers if observer.reads(name, n_bytes)]
        sums = FileSums(plan, self._wanted, self.result, self._lock)

        # An empty file has no segment that could finish it.
        if n_bytes == 0 and is_owner:
            sums.finish(self._store)
            for observer in filter(lambda reader: reader.in_order, readers):
                observer.finish_file(name)
        return _ScannedFile(plan, sums, readers, observers)

    def _locate_arrays(
        self, file: str, arrays: Iterable[StoredArray]
    ) -> tuple[list[tuple[StoredArray, StoredArray]], _Errors]:
        """Find the positions of arrays in their file.

        Returns:
            The arrays as the catalog has them and with their positions; and the arrays without a
            position, with the reasons.
        """
        bound, errors = [], _Errors()
        for array in arrays:
            try:
                bound.append((array, array.locate(self._store)))
            except CheckpointingException as err:
                errors.append((array, err))
        return bound, errors

    def _read_stated(self, name: str, n_bytes: int) -> tuple[list[StatedCrc], _Errors]:
        """Return the CRCs that a file records, and the errors in these records."""
        stated: list[StatedCrc] = []
        errors = _Errors()
        if self._stated_in is not None:
            try:
                stated += self._stated_in(
                    name, n_bytes, report=lambda err: errors.append((None, err))
                )
            except CheckpointingException as err:
                errors.append((None, err))
        return stated, errors

    def _observers_of(self, arrays: Iterable[StoredArray]) -> dict[str, list[Observer]]:
        """Return the observers of each array, by name, for arrays that any observer needs."""
        observers = {
            array.name: [observer for observer in self._observers if observer.sees(array)]
            for array in arrays
        }
        return {name: interested for name, interested in observers.items() if interested}

    def _note_all(self, file: str, errors: _Errors, *, is_owner: bool) -> None:
        """Record problems of a file, on its owner only: other ranks find the same ones."""
        for array, error in errors if is_owner else ():
            self._note(file, array, error)

    def _note(self, file: str, array: StoredArray | None, error: CheckpointingException) -> None:
        """Record a problem."""
        with self._lock:
            self.result.problems.append(ReadProblem(file, array, error))

    def _finish(self, file: _ScannedFile, array: StoredArray, total: Sum) -> None:
        """Record the sums of an array that was read separately, and notify its observers."""
        with self._lock:
            self.result.arrays[array.name] = total
        for observer in file.observers.get(array.name, ()):
            observer.finish(array)

    def _work(self) -> None:
        """Read work items until there are none; the task of one thread."""
        # Each thread reuses one window; it is pinned if a device works on its bytes.
        window = host_buffer(
            self._device if self._device is not None and self._device.work else None, WINDOW_BYTES
        )
        reader = SeparateReader(self._store, self._budget, is_stopped=self._threads.is_stopped)
        for item in self._items:
            array = item.array.array if isinstance(item, _SeparateItem) else None
            try:
                if isinstance(item, _SeparateItem):
                    self._read_separate(item, reader)
                else:
                    self._read_segment(item, window)
            except StoppedError:
                # Another rank has failed: this is not a problem of the file.
                raise
            except CheckpointingException as err:
                self._note(item.file.plan.file, array, err)

    def _read_segment(self, item: _Segment, window: memoryview) -> None:
        """Read a segment window by window, and pass each window on while it is in the cache."""
        file, name = item.file, item.file.plan.file
        sums = SegmentSums(file.plan, item.start, item.ranges, self._wanted)
        feeder = _SegmentFeeder(file, item.ranges)
        self._store.expect_ranges([(name, item.start, item.stop)])
        for start, stop in file.plan.windows(item.start, item.stop):
            if self._threads.is_stopped():
                return
            data = window[: stop - start]
            self._store.read_into(name, start, data)
            for reader in file.readers:
                reader.feed_file(name, start, data)
            sums.feed(data)
            # With a device, all observers of the window share one copy to it.
            with uploaded_once(self._device, data):
                feeder.feed(data, start)
            self._report(len(data))

        # Segments may finish in any order: the last one to finish completes an array.
        for array in file.sums.add(sums, self._store):
            for observer in file.observers.get(array.name, ()):
                observer.finish(array)
        if item.stop == file.plan.n_bytes:
            for reader in filter(lambda reader: reader.in_order, file.readers):
                reader.finish_file(name)

    def _read_separate(self, item: _SeparateItem, reader: SeparateReader) -> None:
        """Read an array separately and feed it to its observers."""
        array = item.array.array
        observers = item.file.observers.get(array.name, ())

        def feed(start: int, data: memoryview) -> None:
            for observer in observers:
                observer.feed(array, start, data)
            self._meter.advance(len(data))

        total = reader.read(item.array, feed, self._wanted)
        if total is not None:
            self._finish(item.file, array, total)
            with self._lock:
                self.result.separate_bytes += total.n_bytes

    def _report(self, n_bytes: int) -> None:
        """Report bytes that were read, to the team and to the caller."""
        self._meter.advance(n_bytes)
        if self._progress is not None:
            with self._lock:
                self._done_bytes += n_bytes
                done = self._done_bytes
            self._progress(done, max(done, self._n_bytes))


class _SegmentFeeder:
    """Passes the arrays of a segment to their observers, window by window."""

    def __init__(self, file: _ScannedFile, ranges: Iterable[FileRange]) -> None:
        self._waiting = iter(
            [
                (file_range, file.observers[file_range.content.name])
                for file_range in ranges
                if isinstance(file_range.content, StoredArray)
                and file_range.content.name in file.observers
            ]
        )
        self._next = next(self._waiting, None)
        self._open: list[tuple[FileRange, Sequence[Observer]]] = []

    def feed(self, data: memoryview, start: int) -> None:
        """Feed the next window.

        Args:
            start: byte address of the window.
        """
        # Open the arrays that begin in this window.
        stop = start + len(data)
        while self._next is not None and self._next[0].start < stop:
            self._open.append(self._next)
            self._next = next(self._waiting, None)

        # Pass on the part of each open array that is in the window.
        for file_range, observers in self._open:
            array = file_range.content
            assert isinstance(array, StoredArray)
            begin, end = max(file_range.start, start), min(file_range.stop, stop)
            first = (begin - file_range.start) // itemsize(array.dtype)
            for observer in observers:
                observer.feed(array, first, data[begin - start : end - start])
        self._open = [pair for pair in self._open if pair[0].stop > stop]
