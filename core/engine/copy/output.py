"""Cast, sum and write the elements of one work item, in the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from core.arrays.checksum import RunSum, crc32
from core.arrays.dtypes import itemsize
from core.engine.copy.ledger import CheckedRun, ItemRecord, WrittenRun
from core.engine.device.device import Device
from core.engine.plan.addresses import RecordCrc
from core.files.store import TargetStore

if TYPE_CHECKING:
    from core.arrays.cast import Cast
    from core.engine.copy.ledger import Ledger
    from core.engine.copy.options import CopyOptions
    from core.engine.plan.positions import Places

_SETTLED_BYTES = 8 << 20
"""Finished bytes of an array after which the stage may start to write them to the disk."""


class Output:
    """The writes of one item: casts, checksums and finished runs of arrays.

    Args:
        dtypes: dtypes of the source and of the target.
        options: options of the copy, for checksums, progress and observer.
        stage: receives the bytes.
        places: file positions of the target arrays.
        ledger: receives the checksums.
        spare: buffer for casts.
        device: does the cast; None for the CPU.

    Attributes:
        written_bytes: bytes written so far.
        n_overflows: finite elements that became infinite so far.
    """

    def __init__(
        self,
        dtypes: tuple[str, str],
        options: CopyOptions,
        *,
        stage: TargetStore,
        places: Places,
        ledger: Ledger,
        spare: memoryview,
        device: Device | None,
    ) -> None:
        self._options = options
        self._dtypes = dtypes
        self._source_size, self._size = (itemsize(name) for name in dtypes)
        self._cast: Cast | None = None
        if dtypes[0] != dtypes[1]:
            from core.engine.device.cast import cast_on

            self._cast = cast_on(device, *dtypes)
        self._stage = stage
        self._places = places
        self._ledger = ledger
        self._spare = spare
        self._open: dict[int, RunSum] = {}
        self._settled: dict[int, int] = {}
        self._closed: list[tuple[int, RunSum]] = []
        self._checked: dict[RecordCrc, list[CheckedRun]] = {}
        self._is_recordable = True
        self.written_bytes = 0
        self.n_overflows = 0

    def put(self, array: int, index: int, data: memoryview) -> None:
        """Write elements of the source's type at a flat element index of an array."""
        self.put_all(((array, index),), 0, data)

    def put_all(
        self, destinations: Sequence[tuple[int, int]], delta: int, data: memoryview
    ) -> None:
        """Write elements of the source's type to several arrays.

        Args:
            destinations: array numbers and flat element indices.
            delta: number of elements between each index and the begin of the data.
            data: the elements.
        """
        for skip, piece in self._cast_chunks(data):
            places = [(array, (index + delta + skip) * self._size) for array, index in destinations]
            # Sum and observe before the write, while the bytes are in the processor's cache.
            self._feed(places, piece)
            if self._options.watch is not None:
                for array, offset in places:
                    self._options.watch.feed(array, offset, piece)
            for array, offset in places:
                file = self._places.file_of(array)
                self._stage.write(file, self._places.offset_of(array) + offset, piece)
                self._settle(array, file, offset + len(piece))
            self._report(len(piece) * len(places))

    def put_zeros(
        self, destinations: Sequence[tuple[int, int]], delta: int, zeros: memoryview
    ) -> None:
        """Account for zero elements of the target; the new files are zero already."""
        places = [(array, (index + delta) * self._size) for array, index in destinations]
        self._feed(places, zeros)
        for array, offset in places:
            file = self._places.file_of(array)
            self._stage.zero(file, self._places.offset_of(array) + offset, len(zeros))
        if self._options.watch is not None:
            for array, offset in places:
                self._options.watch.pass_over(array, offset, len(zeros))
        self._report(len(zeros) * len(destinations))

    def put_piece(self, array: int, index: int, data: memoryview) -> None:
        """Write elements like ``put``, without an order; such an item cannot be resumed."""
        self._is_recordable = False
        for skip, piece in self._cast_chunks(data):
            offset = self._places.offset_of(array) + (index + skip) * self._size
            self._stage.write(self._places.file_of(array), offset, piece)
            self._ledger.add_unsummed(array, len(piece))
            if self._options.watch is not None:
                self._options.watch.feed(array, (index + skip) * self._size, piece)
            self._report(len(piece))

    def check(
        self, record: RecordCrc, address: int, data: Iterable[memoryview], n_bytes: int
    ) -> None:
        """Add source bytes, read from a byte address, to the CRC of their array."""
        if not self._options.crc:
            return
        # Extend the last run if the bytes follow it, else begin a new one.
        offset = address - record.start
        runs = self._checked.setdefault(record, [])
        last = runs.pop() if runs and runs[-1].offset + runs[-1].n_bytes == offset else None
        crc = 0 if last is None else last.crc
        for piece in data:
            crc = crc32(piece, crc)
        before = (offset, 0) if last is None else (last.offset, last.n_bytes)
        runs.append(CheckedRun(record, before[0], before[1] + n_bytes, crc))

    def close(self) -> tuple[ItemRecord | None, set[str]]:
        """Pass the checksums on to the ledger.

        Returns:
            The item's record, None if it cannot be resumed, and the files that it wrote to.

        Raises:
            CorruptError: a source array does not have its recorded CRC.
        """
        # Close the open runs.
        for array, run in self._open.items():
            self._closed.append((array, run))
            self._settle(array, self._places.file_of(array), run.offset + run.n_bytes, is_last=True)
        # Check the source before the target's checksums count as valid.
        checked = tuple(run for runs in self._checked.values() for run in runs)
        self._ledger.check(checked)
        for array, run in self._closed:
            self._ledger.add(array, run)
        files = {self._places.file_of(array) for array, _ in self._closed}
        if not self._is_recordable:
            return None, files
        written = tuple(
            WrittenRun(array, run.offset, run.n_bytes, run.crc) for array, run in self._closed
        )
        return ItemRecord(written, checked), files

    def _cast_chunks(self, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Cast elements to the target's type, one buffer at a time.

        Yields:
            The number of elements before the chunk, and the bytes of the chunk.
        """
        if self._cast is None:
            yield 0, data
            return
        from core.arrays.cast import count_overflows

        n_elements = len(data) // self._source_size
        at_once = len(self._spare) // self._size
        for first in range(0, n_elements, at_once):
            n = min(at_once, n_elements - first)
            piece = self._spare[: n * self._size]
            values = data[first * self._source_size : (first + n) * self._source_size]
            self._cast(values, piece)
            self.n_overflows += count_overflows(values, self._dtypes[0], piece, self._dtypes[1])
            yield first, piece

    def _feed(self, places: list[tuple[int, int]], piece: memoryview) -> None:
        """Sum a chunk once for all arrays that get it at the same offset."""
        new: dict[tuple[int, int], RunSum] = {}
        runs: dict[int, RunSum] = {}
        for array, offset in places:
            # A run goes on as long as pieces follow each other. Arrays that get the same
            # bytes at the same offset share one sum.
            run = self._open.get(array)
            if run is None or run.offset + run.n_bytes != offset:
                if run is not None:
                    self._closed.append((array, run))
                size = self._places.bytes_of(array)
                run = new.get((offset, size))
                if run is None:
                    run = new[offset, size] = RunSum(
                        offset,
                        size,
                        crc=self._options.crc,
                        digest=self._options.digest,
                        keeps_edges=not self._stage.is_readable,
                    )
                self._open[array] = run
                self._settled[array] = offset
            runs[id(run)] = run
        for run in runs.values():
            run.feed(piece)

    def _settle(self, array: int, file: str, end: int, *, is_last: bool = False) -> None:
        """Report the bytes of an array up to ``end`` as finished, if there are enough of them."""
        start = self._settled[array]
        if end - start >= (_SETTLED_BYTES >> 3 if is_last else _SETTLED_BYTES):
            self._stage.settle(file, self._places.offset_of(array) + start, end - start)
            self._settled[array] = end

    def _report(self, n_bytes: int) -> None:
        self.written_bytes += n_bytes
        if self._options.progress is not None:
            self._options.progress(n_bytes)
