"""The scan: one pass over every byte of a checkpoint, in several threads, in bounded memory.

Files are read in segments, each byte once, and handed on while they lie in the processor's cache: to the sums
(``core.scan_sums``) and, array by array, to *observers*. Arrays whose elements do not follow each other in their file,
or must be decoded, are read by themselves (``core.scan_apart``) and handed on as dense elements; sums are made of these
too.

What cannot be read is noted, and the scan goes on. Observers' own errors end it, unless they are of the project's tree.

Memory: a window of 1 MiB a thread; for strided arrays two bands more; for encoded arrays one unit and what decoding it
takes, within ``memory_bytes``; about half a kilobyte for every array.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from core.catalog import StoredArray
from core.crew import Crew
from core.dtypes import itemsize
from core.errors import CheckpointingException, MissingShardError
from core.scan_apart import ApartReader, Budget, is_checked
from core.scan_plan import WINDOW_BYTES, Apart, FilePlan, Line, plan_file
from core.scan_sums import FileSums, Problem, Scanned, SegmentSums, Sum, Wanted, sum_of_nothing
from core.store import files_below

if TYPE_CHECKING:
    from core.catalog import Catalog
    from core.errors import Report
    from core.stated import Stated
    from core.store import ReadStore

DEFAULT_MEMORY_BYTES = 512 << 20
CRCS = Wanted()
Progress = Callable[[int, int], None]
"""(bytes of files read, bytes of all files); called from the reading threads."""


class StatedIn(Protocol):
    """Finds the CRCs that files state of their parts."""

    def __call__(self, file: str, n_bytes: int, *, report: Report) -> Iterable[Stated]:
        """The CRCs in a file of that size; what is wrong with parts of it is reported."""


class Observer(Protocol):
    """Gets the elements of arrays; called from several threads."""

    def sees(self, array: StoredArray) -> bool:
        """Whether it wants the elements of an array; asked once for each."""

    def feed(self, array: StoredArray, start: int, data: memoryview) -> None:
        """Takes a run of elements.

        Args:
            array: as the catalog has it.
            start: index of the run's first element in the array's C order. Runs come in any order, and together they
                are all of the array, each element once. An array of more than 1 MiB is mostly cut at multiples of
                1 MiB from its start.
            data: the elements, little endian; at most 1 MiB, valid during the call only.
        """

    def finish(self, array: StoredArray) -> None:
        """All elements of an array have been fed; called once, not at all if some could not be read."""


class FileObserver(Protocol):
    """Gets the bytes of files; called from several threads."""

    def reads(self, file: str, n_bytes: int) -> bool:
        """Whether it wants the bytes of a file, in order and from one thread; asked once for each."""

    def feed_file(self, file: str, offset: int, data: memoryview) -> None:
        """Takes the next bytes of a file; valid during the call only."""

    def finish_file(self, file: str) -> None:
        """All of a file has been fed; not called if some of it could not be read."""


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
        progress: told about bytes that were read.
    """
    if arrays is None:
        found = () if catalog is None else (fragment.array for fragment in catalog.all_fragments())
        arrays = (array for array in found if array is not None)
    run = _Run(
        store,
        files_below(store) if files is None else files,
        _by_file(arrays),
        bind=(lambda array: array) if catalog is None else lambda array: catalog.bind(store, array),
        observers=observers,
        file_observers=file_observers,
        wanted=wanted,
        stated_in=stated_in,
        memory_bytes=memory_bytes,
        progress=progress,
    )
    run.go(threads or len(os.sched_getaffinity(0)))
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
    ) -> None:
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
        self._items = self._all_items()
        self._n_bytes = sum(files.values())
        self._done_bytes = 0
        self._taking = threading.Lock()
        self._lock = threading.Lock()
        self._crew = Crew("scan")

    def go(self, n_threads: int) -> None:
        """Runs the threads; the calling thread waits and stays open to signals."""
        self._crew.run(self._work, n_threads)

    def _all_items(self) -> Iterator[_Segment | _Single]:
        for name in [*self._files, *(name for name in self._arrays if name not in self._files)]:
            file = self._planned(name, self._arrays.pop(name, []))
            if file is None:
                continue
            for array in file.plan.empty:
                self._finish(file, array, sum_of_nothing(array, self._wanted))
            if file.observers and file.plan.n_bytes:  # in order, so in one piece
                yield _Segment(file, 0, file.plan.n_bytes, file.plan.lines)
            else:
                yield from (_Segment(file, *segment) for segment in file.plan.segments())
            for apart in file.plan.apart:
                yield _Single(file, apart)

    def _planned(self, name: str, arrays: list[StoredArray]) -> _File | None:
        """How a file is to be read; None if it cannot be."""
        try:
            n_bytes = self._store.size(name)
        except CheckpointingException as err:
            self._note(name, None, err)
            return None
        bound = []
        for array in arrays:
            try:
                placed = self._bind(array)
                if placed.extent is None or placed.extent.is_late:
                    raise MissingShardError("the array lies nowhere", key=array.name, file=name)
                bound.append((array, placed))
            except CheckpointingException as err:
                self._note(name, array, err)
        stated: list[Stated] = []
        if self._stated_in is not None:
            try:
                stated += self._stated_in(name, n_bytes, report=lambda err: self._note(name, None, err))
            except CheckpointingException as err:
                self._note(name, None, err)
        plan, wrong = plan_file(name, n_bytes, bound, stated)
        for array, error in wrong:
            self._note(name, array, error)
        if stated or any(is_checked(one.bound) for one in plan.apart):
            self.result.covered.add(name)
        seen = {array.name: [one for one in self._observers if one.sees(array)] for array, _ in bound}
        sums = FileSums(plan, self._wanted, self.result, self._lock)
        readers = [one for one in self._file_observers if one.reads(name, n_bytes)]
        if n_bytes == 0:
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
        window = memoryview(mmap.mmap(-1, WINDOW_BYTES))
        apart = ApartReader(self._store, self._budget, is_stopped=self._crew.is_stopped)
        while (item := self._next()) is not None:
            array = item.array.array if isinstance(item, _Single) else None
            try:
                if isinstance(item, _Single):
                    self._read_single(item, apart)
                else:
                    self._read_segment(item, window)
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

        found = apart.read(item.array, feed, self._wanted)
        if found is not None:
            self._finish(item.file, array, found)
            with self._lock:
                self.result.made_bytes += found.n_bytes

    def _tell(self, n_bytes: int) -> None:
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
