"""Runs a plan: reads, weaves, casts, checks and writes, in several threads, through small reused buffers.

Checksums are made in the same pass, of the bytes as they are written. Files are created with their space allocated
before the first byte moves, so a full disk is found out early. The first error stops all threads and is raised.
"""

from __future__ import annotations

import threading
from array import array as columns
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from core.arrays.checksum import BLOCK_BYTES, RunSum
from core.catalog.decoded import DecodedStore
from core.catalog.file_image import FileImage
from core.catalog.stored import StoredArray
from core.copy.ledger import ItemRecord, Ledger
from core.copy.output import Stage, Watch
from core.copy.worker import Copier, band_bytes_of
from core.device.device import DEQUANTIZE, QUANTIZE, Device
from core.files.store import ReadStore
from core.plan.items import ITEM_BYTES, Item, ItemNumber, Portion, items_of_portion
from core.plan.positions import Places
from core.team.threads import Crew

Progress = Callable[[int], None]
"""Called from the copying threads with the number of bytes just written."""


class Journal(Protocol):
    """Remembers finished items, see ``core.stage.journal``."""

    def done(self, item: ItemNumber) -> ItemRecord | None:
        """What an earlier run recorded for an item."""

    def add(self, item: ItemNumber, record: ItemRecord, files: Iterable[str]) -> None:
        """Records an item whose bytes have been written to ``files``."""


class Work(Protocol):
    """What is to be copied: a whole plan (``core.plan.plan``), or one worker's share of it
    (``core.convert.stored_plan.file``).

    Attributes:
        images: the files to make.
        places: where the target's arrays lie.
        threads, buffer_bytes, cache_bytes: see ``core.plan.plan.Plan``.
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
        """What is to be done, tensor by tensor."""

    def bind(self, store: ReadStore, array: StoredArray) -> StoredArray:
        """See ``Catalog.bind``."""


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What a copy found out.

    Args:
        places: the arrays.
        read_bytes, written_bytes: bytes that went through.
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
        """CRC-32s by array number; zeros if switched off."""
        return self.ledger.crcs

    @property
    def digests(self) -> bytearray | None:
        """16 bytes per array number; None if switched off."""
        return self.ledger.digests or None

    def crc_of(self, name: str) -> int:
        """CRC-32 of an array, by name; 0 if none was computed.

        Raises:
            KeyError: there is no such array.
        """
        return self.crcs[self._number_of(name)]

    def digest_of(self, name: str) -> str | None:
        """Digest of an array in hexadecimal digits, by name; None if none was computed.

        Raises:
            KeyError: there is no such array.
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
    stage_store: Stage,
    *,
    threads: int | None = None,
    buffer_bytes: int | None = None,
    item_bytes: int = ITEM_BYTES,
    crc: bool = True,
    digest: bool = True,
    progress: Progress | None = None,
    journal: Journal | None = None,
    watch: Watch | None = None,
    device: Device | None = None,
    heed: Callable[[], None] | None = None,
) -> CopyResult:
    """Creates the files of a plan and fills their arrays.

    Args:
        plan: the proven work, or a share of it.
        source_store: holds the source's files.
        stage_store: gets the files.
        threads: copying threads; None takes the plan's.
        buffer_bytes: most bytes of buffers per thread; None takes the plan's.
        item_bytes: about how many bytes a thread copies before it takes the next piece of work.
        crc: compute CRC-32s, and check those that the source states. A journal needs it.
        digest: compute content digests.
        progress: told about written bytes.
        journal: finished items are recorded in it, and those it lists are checked and passed over.
        watch: sees what is written; not what an earlier run had written.
        device: on which per-byte work may be done; None for the CPU path.
        heed: called before each item, also before those that write nothing; what it raises ends the copy.

    Raises:
        CorruptError: a source array's bytes do not have the CRC that the source states.
        ReplicaMismatchError: copies that must be equal differ.
        TruncatedError, MissingShardError, StorageError, CapacityError: from the stores.
    """
    for image in plan.images:
        stage_store.create(image.path, image.size)
    run = _Run(
        plan,
        source_store,
        stage_store,
        buffer_bytes=buffer_bytes or plan.buffer_bytes,
        item_bytes=item_bytes,
        crc=crc or journal is not None,
        digest=digest,
        progress=progress,
        journal=journal,
        watch=watch,
        device=device,
        threads=threads or plan.threads,
        heed=heed,
    )
    run.go(threads or plan.threads)
    return run.result()


def _computing(device: Device | None, threads: int) -> Device | None:
    """The device, for the encodings that compute which it does."""
    if device is None:
        return None
    from core.calibration.choice import settled

    return settled(device, (QUANTIZE, DEQUANTIZE), threads=threads)


class _Run:
    """What the threads of one copy share."""

    def __init__(
        self,
        plan: Work,
        source_store: ReadStore,
        stage_store: Stage,
        *,
        buffer_bytes: int,
        item_bytes: int,
        crc: bool,
        digest: bool,
        progress: Progress | None,
        journal: Journal | None,
        watch: Watch | None,
        device: Device | None,
        threads: int,
        heed: Callable[[], None] | None,
    ) -> None:
        self._plan = plan
        self._device = device
        self._threads = threads
        computing = _computing(device, threads) if plan.cache_bytes else None
        self._source_store = DecodedStore(source_store, cache_bytes=plan.cache_bytes, device=computing)
        self._stage_store = stage_store
        self._buffer_bytes = buffer_bytes
        self._item_bytes = item_bytes
        self._crc = crc
        self._digest = digest
        self._progress = progress
        self._journal = journal
        self._watch = watch
        self._heed = heed
        self._ledger = Ledger(plan.places, stage_store, crc=crc, digest=digest)
        self._items = self._all_items()
        self._lock = threading.Lock()
        self._crew = Crew("copy")
        self._read_bytes = 0
        self._written_bytes = 0
        self._resumed_bytes = 0

    def _all_items(self) -> Iterator[tuple[ItemNumber, Item]]:
        for portion in self._plan.portions():
            yield from items_of_portion(
                portion,
                places=self._plan.places,
                bind=self._bind,
                band_bytes=band_bytes_of(self._buffer_bytes),
                item_bytes=self._item_bytes,
            )

    def _bind(self, array: StoredArray) -> StoredArray:
        return self._source_store.placed(self._plan.bind(self._source_store, array))

    def go(self, n_threads: int) -> None:
        """Runs the threads; the calling thread waits and stays open to signals."""
        self._crew.run(self._work, n_threads)

    def _next(self) -> tuple[ItemNumber, Item] | None:
        if self._heed is not None:
            self._heed()
        with self._lock:
            return None if self._crew.is_stopped() else next(self._items, None)

    def _work(self) -> None:
        copier = Copier(
            self._source_store,
            self._stage_store,
            self._plan.places,
            self._ledger,
            buffer_bytes=self._buffer_bytes,
            crc=self._crc,
            digest=self._digest,
            progress=self._progress,
            is_stopped=self._crew.is_stopped,
            watch=self._watch,
            device=self._device,
            threads=self._threads,
        )
        while (found := self._next()) is not None:
            number, item = found
            if not self._is_resumed(number):
                record, files = copier.do(item)
                if self._journal is not None and record is not None:
                    self._journal.add(number, record, files)
        with self._lock:
            self._read_bytes += copier.read_bytes
            self._written_bytes += copier.written_bytes

    def _is_resumed(self, number: ItemNumber) -> bool:
        """Whether an earlier run did an item, and its bytes are in the stage with the CRCs it recorded."""
        record = None if self._journal is None else self._journal.done(number)
        if record is None:
            return False
        buffer = memoryview(bytearray(BLOCK_BYTES))
        places = self._plan.places
        sums = []
        for run in record.written:
            made = RunSum(run.offset, places.bytes_of(run.array), crc=True, digest=self._digest)
            file, base = places.file_of(run.array), places.offset_of(run.array) + run.offset
            for start in range(0, run.n_bytes, BLOCK_BYTES):
                piece = buffer[: min(BLOCK_BYTES, run.n_bytes - start)]
                self._stage_store.read_into(file, base + start, piece)
                made.feed(piece)
            if made.crc != run.crc:
                return False
            sums.append((run.array, made))
        self._ledger.check(record.checked)
        for array, made in sums:
            self._ledger.add(array, made)
        n_bytes = sum(run.n_bytes for run in record.written)
        with self._lock:
            self._resumed_bytes += n_bytes
        if self._progress is not None:
            self._progress(n_bytes)
        return True

    def result(self) -> CopyResult:
        """What was found out, once all threads are done."""
        return CopyResult(
            places=self._plan.places,
            read_bytes=self._read_bytes,
            written_bytes=self._written_bytes,
            resumed_bytes=self._resumed_bytes,
            ledger=self._ledger,
        )
