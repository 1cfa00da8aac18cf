"""The scan: one pass over every byte of a checkpoint, in several threads, in bounded memory.

Files are read in segments, each byte once, and handed on while they lie in the processor's cache: to the sums
(``core.scan.sums``) and, array by array, to *observers*. Arrays whose elements do not follow each other in their file,
or must be decoded, are read by themselves (``core.scan.separate_arrays``) and handed on as dense elements; sums are
made of these too.

What cannot be read is noted, and the scan goes on. Observers' own errors end it, unless they are of the project's tree.

The ranks of a team divide the files (``core.scan.share``); what they found is then the lead's, as if it had read all.

Memory: a window of 1 MiB a thread; for strided arrays two bands more; for encoded arrays one unit and what decoding it
takes, within ``memory_bytes``; about half a kilobyte for every array.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.arrays.dtypes import itemsize
from core.catalog.stored import StoredArray
from core.device.device import Device
from core.device.lane import host_buffer, showing
from core.errors import CheckpointingException, MissingShardError
from core.files.store import list_files_below
from core.scan.observer import FileObserver, Observer
from core.scan.separate_arrays import ApartReader, Budget, is_checked
from core.scan.share import Meter, ScanPart, share_of
from core.scan.sums import FilePart, FileSums, Problem, Scanned, SegmentSums, Sum, Wanted, sum_of_nothing
from core.scan.windows import WINDOW_BYTES, Apart, FilePlan, Line, plan_file
from core.team.agreement import agreed
from core.team.protocol import ALONE, Figures, StoppedError, Team, collected, is_lead, told
from core.team.threads import Crew

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.errors import Report
    from core.files.store import ReadStore
    from core.scan.windows import Stated

DEFAULT_MEMORY_BYTES = 512 << 20
CRCS = Wanted()
Progress = Callable[[int, int], None]
"""(bytes of files read, bytes of all files); called from the reading threads."""


class StatedIn(Protocol):
    """Finds the CRCs that files state of their parts."""

    def __call__(self, file: str, n_bytes: int, *, report: Report) -> Iterable[Stated]:
        """The CRCs in a file of that size; what is wrong with parts of it is reported."""


def scan(
    catalog: Catalog | None,
    store: ReadStore,
    observers: Sequence[Observer] = (),
    *,
    files: Mapping[str, int] | None = None,
    file_observers: Sequence[FileObserver] = (),
    wanted: Wanted = CRCS,
    stated_in: StatedIn | None = None,
    arrays: Iterable[StoredArray] | None = None,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
    team: Team = ALONE,
    device: Device | None = None,
) -> Scanned:
    """Reads every file once.

    Args:
        catalog: whose arrays are handed on; None if the metadata cannot be read: then only files are.
        store: the checkpoint's files.
        observers: get elements of arrays.
        files: name → size of what to read; None for all files of the store.
        file_observers: get bytes of files.
        wanted: which sums are made.
        stated_in: finds the CRCs that files state; without it none is compared.
        arrays: in place of all arrays of the catalog; an array of a name that came before is passed over.
        threads: None for as many as there are processors.
        memory_bytes: most bytes that decoding may take at once.
        progress: told about bytes that were read; of this rank.
        team: which divides the work; each rank calls this with the same arguments, and observers of its own.
        device: on which observers work, so that what it reads of is pinned, and sent to it once for all of them.

    Returns:
        What was found; on other ranks than the lead of their shares only. The lead's observers have seen everything.

    Raises:
        WorkerError: the ranks of a team do not see the same files.
    """
    if arrays is None:
        found = () if catalog is None else (fragment.array for fragment in catalog.all_fragments())
        arrays = (array for array in found if array is not None)

    def prepared() -> _Run:
        return _Run(
            store,
            list_files_below(store) if files is None else files,
            _by_file(arrays),
            bind=(lambda array: array) if catalog is None else lambda array: catalog.bind(store, array),
            observers=observers,
            file_observers=file_observers,
            wanted=wanted,
            stated_in=stated_in,
            memory_bytes=memory_bytes,
            progress=progress,
            team=team,
            device=device,
        )

    run = agreed(team, prepared, _Run.sight, what=store.label)
    n_threads = threads or len(os.sched_getaffinity(0))
    if team.size == 1:
        run.go(n_threads)
        return run.result
    parts = collected(team, lambda: run.part(n_threads))
    told(team, lambda: run.join(parts or []))
    return run.result


def _by_file(arrays: Iterable[StoredArray]) -> dict[str, list[StoredArray]]:
    """The arrays of each file, each once."""
    names: set[str] = set()
    found: dict[str, list[StoredArray]] = {}
    for array in arrays:
        if array.extent is not None and array.name not in names:
            names.add(array.name)
            found.setdefault(array.extent.file, []).append(array)
    return found


@dataclass(frozen=True, slots=True)
class _File:
    """A file that is being read.

    Args:
        plan: how.
        sums: its sums.
        observers: of its bytes.
        seen: observers by array name, of the arrays that any wants.
    """

    plan: FilePlan
    sums: FileSums
    observers: Sequence[FileObserver]
    seen: Mapping[str, Sequence[Observer]]


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece of work: a part of a file."""

    file: _File
    start: int
    stop: int
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class _Single:
    """A piece of work: an array that is read by itself."""

    file: _File
    array: Apart


class _Run:
    """What the threads of one scan share."""

    def __init__(
        self,
        store: ReadStore,
        files: Mapping[str, int],
        arrays: dict[str, list[StoredArray]],
        *,
        bind: Callable[[StoredArray], StoredArray],
        observers: Sequence[Observer],
        file_observers: Sequence[FileObserver],
        wanted: Wanted,
        stated_in: StatedIn | None,
        memory_bytes: int,
        progress: Progress | None,
        team: Team,
        device: Device | None,
    ) -> None:
        self._device = device
        self.result = Scanned()
        self._store = store
        self._files = files
        self._arrays = arrays
        self._bind = bind
        self._observers = observers
        self._file_observers = file_observers
        self._wanted = wanted
        self._stated_in = stated_in
        self._progress = progress
        self._budget = Budget(memory_bytes)
        self._team = team
        self._share = share_of(team, files, arrays)
        self._meter = Meter()
        self._split: dict[str, _File | None] = {}
        self._items = self._all_items()
        self._n_bytes = sum(files.values())
        self._done_bytes = 0
        self._taking = threading.Lock()
        self._lock = threading.Lock()
        self._crew = Crew("scan")

    def go(self, n_threads: int) -> None:
        """Runs the threads; the calling thread waits and stays open to signals."""
        self._crew.run(self._work, n_threads)

    def sight(self) -> object:
        """What all ranks must see alike, for their shares to fit together."""
        return self._share.places, [(name, [array.name for array in found]) for name, found in self._arrays.items()]

    def part(self, n_threads: int) -> ScanPart:
        """Reads this rank's share."""
        begun = time.monotonic()
        self._meter = Meter(self._team, self._share.n_bytes)
        self.go(n_threads)
        self._meter.finish()
        rank, n_bytes = self._team.rank, self.result.read_bytes + self.result.made_bytes
        files = {} if is_lead(self._team) else dict(self._file_parts())
        figures = Figures(rank, self._team.hosts[rank], n_bytes, 0, time.monotonic() - begun)
        if is_lead(self._team):
            return ScanPart(figures)
        states, file_states = ([one.state() for one in group] for group in (self._observers, self._file_observers))
        return ScanPart(figures, self.result, files, states, file_states)

    def _file_parts(self) -> Iterator[tuple[str, FilePart]]:
        """What this rank has of files that it shares with others."""
        for name, file in self._split.items():
            if file is None or file.sums.is_complete:
                continue
            try:
                found = file.sums.part(self._store)
            except CheckpointingException as err:
                self._note(name, None, err)
                continue
            if found.of_file.runs:
                yield name, found

    def join(self, parts: Sequence[ScanPart]) -> None:
        """Takes what all ranks have found; at the lead."""
        for name in self._share.places:
            if name not in self._split and any(name in part.files for part in parts):
                self._split[name] = self._planned(name, self._arrays.get(name, []), is_owner=False)
        for part in parts[1:]:
            assert part.scanned is not None
            self.result.add(part.scanned)
            for observer, state in zip(self._observers, part.states, strict=True):
                observer.merge(state)
            for reader, state in zip(self._file_observers, part.file_states, strict=True):
                reader.merge(state)
        for name, file in self._split.items():
            for part in parts:
                if file is not None and name in part.files:
                    self._join_file(file, part.files[name])
        order = {name: number for number, name in enumerate(self._share.places)}
        self.result.wrong.sort(key=lambda wrong: (order[wrong.file], wrong.stated.start))
        self.result.figures = tuple(part.figures for part in parts)

    def _join_file(self, file: _File, part: FilePart) -> None:
        try:
            for array in file.sums.join(part, self._store):
                for observer in file.seen.get(array.name, ()):
                    observer.finish(array)
        except CheckpointingException as err:
            self._note(file.plan.file, None, err)

    def _all_items(self) -> Iterator[_Segment | _Single]:
        share = self._share
        for name in share.places:
            if not share.meets(name):
                continue
            is_owner = share.is_mine(name)
            file = self._planned(name, self._arrays.get(name, []), is_owner=is_owner)
            if len(share.owners(name)) > 1:
                self._split[name] = file
            if file is None:
                continue
            for array in file.plan.empty if is_owner else ():
                self._finish(file, array, sum_of_nothing(array, self._wanted))
            if file.observers and file.plan.n_bytes:  # in order, so in one piece
                if is_owner:
                    yield _Segment(file, 0, file.plan.n_bytes, file.plan.lines)
            else:
                for start, stop, lines in file.plan.segments(share.piece_bytes):
                    if share.is_mine(name, start):
                        yield _Segment(file, start, stop, lines)
            at = file.plan.n_bytes
            for apart in file.plan.apart:
                if share.is_mine(name, at):
                    yield _Single(file, apart)
                at += apart.array.n_bytes

    def _planned(self, name: str, arrays: list[StoredArray], *, is_owner: bool) -> _File | None:
        """How a file is to be read; None if it cannot be.

        Args:
            is_owner: whether this rank says what is wrong with it, where several plan it.
        """

        def note(array: StoredArray | None, error: CheckpointingException) -> None:
            if is_owner:
                self._note(name, array, error)

        try:
            n_bytes = self._store.size(name)
        except CheckpointingException as err:
            note(None, err)
            return None
        bound = []
        for array in arrays:
            try:
                placed = self._bind(array)
                if placed.extent is None or placed.extent.is_late:
                    raise MissingShardError("the array lies nowhere", key=array.name, file=name)
                bound.append((array, placed))
            except CheckpointingException as err:
                note(array, err)
        stated: list[Stated] = []
        if self._stated_in is not None:
            try:
                stated += self._stated_in(name, n_bytes, report=lambda err: note(None, err))
            except CheckpointingException as err:
                note(None, err)
        plan, wrong = plan_file(name, n_bytes, bound, stated)
        for array, error in wrong:
            note(array, error)
        if stated or any(is_checked(one.bound) for one in plan.apart):
            self.result.covered.add(name)
        seen = {array.name: [one for one in self._observers if one.sees(array)] for array, _ in bound}
        sums = FileSums(plan, self._wanted, self.result, self._lock)
        readers = [one for one in self._file_observers if one.reads(name, n_bytes)]
        if n_bytes == 0 and is_owner:
            sums.finish(self._store)
            for one in readers:
                one.finish_file(name)
        return _File(plan, sums, readers, {key: found for key, found in seen.items() if found})

    def _note(self, file: str, array: StoredArray | None, error: CheckpointingException) -> None:
        with self._lock:
            self.result.problems.append(Problem(file, array, error))

    def _finish(self, file: _File, array: StoredArray, found: Sum) -> None:
        with self._lock:
            self.result.arrays[array.name] = found
        for observer in file.seen.get(array.name, ()):
            observer.finish(array)

    def _next(self) -> _Segment | _Single | None:
        with self._taking:
            return None if self._crew.is_stopped() else next(self._items, None)

    def _work(self) -> None:
        window = host_buffer(self._device if self._device is not None and self._device.work else None, WINDOW_BYTES)
        apart = ApartReader(self._store, self._budget, is_stopped=self._crew.is_stopped)
        while (item := self._next()) is not None:
            array = item.array.array if isinstance(item, _Single) else None
            try:
                if isinstance(item, _Single):
                    self._read_single(item, apart)
                else:
                    self._read_segment(item, window)
            except StoppedError:
                raise
            except CheckpointingException as err:
                self._note(item.file.plan.file, array, err)

    def _read_segment(self, item: _Segment, window: memoryview) -> None:
        file, name = item.file, item.file.plan.file
        sums = SegmentSums(file.plan, item.start, item.lines, self._wanted)
        hands = _Hands(file, item.lines)
        for start, stop in file.plan.windows(item.start, item.stop):
            if self._crew.is_stopped():
                return
            data = window[: stop - start]
            self._store.read_into(name, start, data)
            for one in file.observers:
                one.feed_file(name, start, data)
            sums.feed(data)
            with showing(self._device, data):
                hands.feed(data, start)
            self._tell(len(data))
        for array in file.sums.add(sums, self._store):
            for observer in file.seen.get(array.name, ()):
                observer.finish(array)
        if item.stop == file.plan.n_bytes:
            for one in file.observers:
                one.finish_file(name)

    def _read_single(self, item: _Single, apart: ApartReader) -> None:
        array = item.array.array
        seen = item.file.seen.get(array.name, ())

        def feed(start: int, data: memoryview) -> None:
            for observer in seen:
                observer.feed(array, start, data)
            self._meter.advance(len(data))

        found = apart.read(item.array, feed, self._wanted)
        if found is not None:
            self._finish(item.file, array, found)
            with self._lock:
                self.result.made_bytes += found.n_bytes

    def _tell(self, n_bytes: int) -> None:
        self._meter.advance(n_bytes)
        if self._progress is not None:
            with self._lock:
                self._done_bytes += n_bytes
                done = self._done_bytes
            self._progress(done, max(done, self._n_bytes))


class _Hands:
    """Hands the arrays of a segment to their observers, window by window."""

    def __init__(self, file: _File, lines: Iterable[Line]) -> None:
        self._waiting = iter([(line, file.seen[line.what.name]) for line in lines if _is_seen(line, file)])
        self._next = next(self._waiting, None)
        self._open: list[tuple[Line, Sequence[Observer]]] = []

    def feed(self, data: memoryview, start: int) -> None:
        """Takes the next window.

        Args:
            start: its byte address.
        """
        stop = start + len(data)
        while self._next is not None and self._next[0].start < stop:
            self._open.append(self._next)
            self._next = next(self._waiting, None)
        for line, observers in self._open:
            array = line.what
            assert isinstance(array, StoredArray)
            begin, end = max(line.start, start), min(line.stop, stop)
            first = (begin - line.start) // itemsize(array.dtype)
            for observer in observers:
                observer.feed(array, first, data[begin - start : end - start])
        self._open = [pair for pair in self._open if pair[0].stop > stop]


def _is_seen(line: Line, file: _File) -> bool:
    return isinstance(line.what, StoredArray) and line.what.name in file.seen
