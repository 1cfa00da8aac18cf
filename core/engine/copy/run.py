"""Run a plan in several threads, through small reused buffers.

Checksums are computed in the same pass, from the bytes as they are written. Files are created with
their space allocated before the first byte moves, so a full disk is detected early. The first error
stops all threads and is raised.
"""

from __future__ import annotations

import threading
from array import array as columns
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from core.arrays.checksum import BLOCK_BYTES, RunSum
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import StoredArray
from core.engine.copy.ledger import Ledger
from core.engine.copy.options import CopyOptions
from core.engine.copy.worker import CopyWorker, band_bytes_of
from core.engine.device.device import DEQUANTIZE, QUANTIZE, Device
from core.engine.plan.items import Interleave, Item, ItemNumber, Portion, items_of_portion
from core.engine.plan.positions import Places
from core.engine.team.threads import ThreadGroup
from core.files.store import ReadStore, TargetStore
from core.values import dataclass


class Work(Protocol):
    """The work of a copy: a complete plan, or one worker's share of it.

    ``core.engine.plan.plan`` and ``core.verbs.convert.stored_plan.file`` implement it.

    Attributes:
        images: the files to create.
        places: file positions of the target's arrays.
        threads, buffer_bytes, cache_bytes: the resources of the copy
        (``core.engine.plan.plan.Plan``).
    """

    @property
    def images(self) -> Sequence[FileImage]: ...

    @property
    def places(self) -> Places: ...

    @property
    def threads(self) -> int: ...

    @property
    def buffer_bytes(self) -> int: ...

    @property
    def cache_bytes(self) -> int: ...

    def portions(self) -> Iterator[Portion]:
        """Yield the work, tensor by tensor."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """Checksums and byte counts of a finished copy.

    Args:
        places: the arrays.
        read_bytes, written_bytes: bytes read and written by this run.
        resumed_bytes: bytes of the target that an earlier run had written.
        ledger: the checksums.
    """

    places: Places
    read_bytes: int
    written_bytes: int
    resumed_bytes: int
    ledger: Ledger

    @property
    def crcs(self) -> columns[int]:
        """CRC-32s by array number; zeros if they were not computed."""
        return self.ledger.crcs

    @property
    def digests(self) -> bytearray | None:
        """16 bytes per array number; None if they were not computed."""
        return self.ledger.digests or None

    def crc_of(self, name: str) -> int:
        """Return the CRC-32 of an array, by name; 0 if none was computed.

        Raises:
            KeyError: no array has this name.
        """
        return self.crcs[self._number_of(name)]

    def digest_of(self, name: str) -> str | None:
        """Return the digest of an array in hexadecimal digits, by name; None if none was computed.

        Raises:
            KeyError: no array has this name.
        """
        number = self._number_of(name)
        return None if self.digests is None else self.digests[16 * number : 16 * number + 16].hex()

    def _number_of(self, name: str) -> int:
        number = self.places.number_of(name)
        if number is None:
            raise KeyError(name)
        return number


def execute(
    plan: Work,
    source_store: ReadStore,
    stage_store: TargetStore,
    options: CopyOptions | None = None,
) -> CopyResult:
    """Create the files of a plan and fill their arrays.

    Args:
        plan: the proven work, or a share of it.
        source_store: the source files.
        stage_store: receives the new files.
        options: None for the defaults.

    Raises:
        CorruptError: a source array's bytes do not have the CRC that the source records.
        ReplicaMismatchError: copies that must be equal differ.
        TruncatedError, MissingShardError: a source file is too short, or missing.
        StorageError: the operating system refuses to read or write.
        CapacityError: the disk is full.
    """
    options = options or CopyOptions()
    if options.journal is not None:  # it records the CRC-32 of each item
        options = replace(options, crc=True)
    # All files get their space before the first byte moves: a full disk is found out at once.
    for image in plan.images:
        stage_store.create(image.path, image.size)
    run = CopyRun(plan, source_store, stage_store, options)
    run.run_threads()
    return run.result()


class CopyRun:
    """The state that the threads of one copy share.

    Args:
        plan: the proven work, or a share of it.
        source_store: the source files.
        stage_store: receives the new files.
        options: options of the copy.
    """

    def __init__(
        self, plan: Work, source_store: ReadStore, stage_store: TargetStore, options: CopyOptions
    ) -> None:
        self._plan = plan
        self._options = options
        # Quantized tensors are decoded into the cache; without one the device has no such work.
        quantizing: Device | None = None
        if plan.cache_bytes and options.device is not None:
            from core.engine.calibration.choice import choose_device

            quantizing = choose_device(options.device, (QUANTIZE, DEQUANTIZE), threads=plan.threads)
        self._source_store = DecodedStore(
            source_store, cache_bytes=plan.cache_bytes, device=quantizing
        )
        self._stage_store = stage_store
        self._band_bytes = band_bytes_of(options.buffer_bytes or plan.buffer_bytes)
        self._ledger = Ledger(
            plan.places,
            stage_store,
            crc=options.crc,
            digest=options.digest,
            on_array=options.on_array,
        )
        self._lock = threading.Lock()
        self._threads = ThreadGroup("copy")
        self._items = self._threads.share(self._all_items())
        self._read_bytes = 0
        self._written_bytes = 0
        self._resumed_bytes = 0

    def _all_items(self) -> Iterator[tuple[ItemNumber, Item]]:
        items = (
            item for portion in self._plan.portions() for item in self._items_of_portion(portion)
        )
        if not self._source_store.is_remote:
            return items
        journal = self._options.journal
        from core.engine.copy.announce import announce

        return announce(
            items,
            self._source_store,
            is_done=lambda n: journal is not None and journal.done(n) is not None,
        )

    def _items_of_portion(self, portion: Portion) -> Iterable[tuple[ItemNumber, Item]]:
        places, stage = self._plan.places, self._stage_store
        items = items_of_portion(
            portion,
            places=places,
            bind=self._bind,
            band_bytes=self._band_bytes,
            item_bytes=self._options.item_bytes,
        )
        if stage.is_readable:
            return items
        # Arrays that are put together from pieces may have to be read back for their checksums.
        numbered = list(items)
        pieced = {
            link.destination.array
            for _, item in numbered
            if isinstance(item, Interleave)
            for link in item.links
        }
        for array in pieced:
            stage.hold(places.file_of(array), places.offset_of(array), places.bytes_of(array))
        return numbered

    def _bind(self, array: StoredArray) -> StoredArray:
        return self._source_store.placed(array.locate(self._source_store))

    def run_threads(self) -> None:
        """Copy all items in threads; the calling thread waits and stays open to signals."""
        self._threads.run(self._work, self._plan.threads)

    def _work(self) -> None:
        worker = CopyWorker(
            self._source_store,
            self._stage_store,
            self._plan.places,
            self._ledger,
            self._options,
            band_bytes=self._band_bytes,
            threads=self._plan.threads,
            is_stopped=self._threads.is_stopped,
        )
        journal = self._options.journal
        for number, item in self._items:
            if self._options.before_item is not None:
                self._options.before_item()
            if not self._is_resumed(number):
                record, files = worker.do(item)
                if journal is not None and record is not None:
                    journal.add(number, record, files)
        with self._lock:
            self._read_bytes += worker.read_bytes
            self._written_bytes += worker.written_bytes
            self._ledger.add_overflows(worker.overflows)

    def _is_resumed(self, number: ItemNumber) -> bool:
        """Return True if an earlier run copied an item and its bytes have the recorded CRCs."""
        journal = self._options.journal
        record = None if journal is None else journal.done(number)
        if record is None:
            return False
        # Read the item's bytes back: only those that have the recorded CRC count as written.
        buffer = memoryview(bytearray(BLOCK_BYTES))
        places = self._plan.places
        sums = []
        for run in record.written:
            run_sum = RunSum(
                run.offset, places.bytes_of(run.array), crc=True, digest=self._options.digest
            )
            file, base = places.file_of(run.array), places.offset_of(run.array) + run.offset
            for start in range(0, run.n_bytes, BLOCK_BYTES):
                piece = buffer[: min(BLOCK_BYTES, run.n_bytes - start)]
                self._stage_store.read_into(file, base + start, piece)
                run_sum.feed(piece)
            if run_sum.crc != run.crc:
                return False
            sums.append((run.array, run_sum))
        # They are as recorded, and go into the ledger as if this run had written them.
        self._ledger.check(record.checked)
        for array, run_sum in sums:
            self._ledger.add(array, run_sum)
        n_bytes = sum(run.n_bytes for run in record.written)
        with self._lock:
            self._resumed_bytes += n_bytes
        if self._options.progress is not None:
            self._options.progress(n_bytes)
        return True

    def result(self) -> CopyResult:
        """Return the result, after all threads have finished."""
        return CopyResult(
            places=self._plan.places,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            resumed_bytes=self._resumed_bytes,
            ledger=self._ledger,
        )
