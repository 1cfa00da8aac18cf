"""The journal of a stage: which work items are done, so that an interrupted run can be continued.

A file of JSON lines beside the stage's data. The first line names the plan (``identity``); each other line lists items
whose bytes were on the disk when it was written, with the CRC-32 of every range. A run that is killed loses at most the
items since the last line (``BATCH_BYTES``); a torn last line counts as not written. Whoever continues reads the listed
ranges again and believes only what has the listed CRC.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from core.bands import ITEM_BYTES
from core.encoding import files_read
from core.ends import RecordCrc
from core.errors import CapacityError, MissingShardError, StorageError
from core.ledger import CheckedRun, ItemRecord, WrittenRun
from core.plan import Plan
from core.store import ReadStore, translated

VERSION = 1
BATCH_BYTES = 256 << 20
"""Written bytes between two lines. A killed run may lose two such batches: one being synced, one being filled."""


class FileJournal:
    """The journal file of one stage; safe for threads.

    Args:
        path: of the journal file.
        identity: of the plan, see ``identity_of``.
        sync: brings the bytes of some files to the disk.
        batch_bytes: written bytes after which a line is due.

    Attributes:
        n_found: items that an earlier run had recorded for the same plan.
    """

    def __init__(
        self, path: Path, identity: str, *, sync: Callable[[Iterable[str]], None], batch_bytes: int = BATCH_BYTES
    ) -> None:
        self._path = path
        self._sync = sync
        self._batch_bytes = batch_bytes
        self._lock = threading.Lock()
        self._line_lock = threading.Lock()
        self._pending: list[tuple[int, ItemRecord]] = []
        self._pending_files: set[str] = set()
        self._pending_bytes = 0
        self._is_trusted = True
        self._done, n_valid = _read(path, identity)
        self.n_found = len(self._done)
        with translated(path.name, doing="write"):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            os.ftruncate(self._fd, n_valid)
            os.lseek(self._fd, n_valid, os.SEEK_SET)
            if n_valid == 0:
                self._append({"journal": VERSION, "plan": identity})

    def done(self, item: int) -> ItemRecord | None:
        """What an earlier run recorded for an item."""
        entry = self._done.get(item)
        return None if entry is None else _record(entry)

    def add(self, item: int, record: ItemRecord, files: Iterable[str]) -> None:
        """Records an item whose bytes have been written to ``files``; now and then waits for the disk.

        Raises:
            StorageError, CapacityError: the system refuses.
        """
        with self._lock:
            self._pending.append((item, record))
            self._pending_files.update(files)
            self._pending_bytes += sum(run.n_bytes for run in record.written)
            is_due = self._pending_bytes >= self._batch_bytes
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Brings what is pending to the disk, data first.

        Raises:
            StorageError, CapacityError: the system refuses.
        """
        with self._line_lock:
            with self._lock:
                pending, files = self._pending, self._pending_files
                self._pending, self._pending_files, self._pending_bytes = [], set(), 0
            if pending and self._is_trusted:
                try:
                    self._sync(files)
                except (StorageError, CapacityError):
                    self.distrust()
                    raise
                with translated(self._path.name, doing="write"):
                    self._append({"items": [_entry(item, record) for item, record in pending]})

    def distrust(self) -> None:
        """Records nothing more: the disk has refused to sync, and the system reports lost bytes only once."""
        self._is_trusted = False

    def close(self) -> None:
        """Closes the file; pending items are forgotten."""
        os.close(self._fd)

    def _append(self, line: dict[str, object]) -> None:
        data = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        begin = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
        except OSError:
            self.distrust()
            with suppress(OSError):  # half a line would hide those after it
                os.ftruncate(self._fd, begin)
            raise


def is_journal_of(path: Path, identity: str) -> bool:
    """Whether a journal file exists and belongs to a plan."""
    return _read(path, identity)[1] > 0


def _read(path: Path, identity: str) -> tuple[dict[int, list[object]], int]:
    """The entries of a plan's journal, and the bytes of its whole lines; nothing if it is another plan's."""
    done: dict[int, list[object]] = {}
    n_valid = 0
    try:
        with translated(path.name, doing="read"), path.open("rb") as lines:
            for line in lines:
                found = json.loads(line) if line.endswith(b"\n") else None
                if n_valid == 0:
                    if found != {"journal": VERSION, "plan": identity}:
                        return {}, 0
                elif found is None:
                    break
                else:
                    done.update((entry[0], entry) for entry in found["items"])
                n_valid += len(line)
    except MissingShardError:
        return {}, 0
    except (ValueError, KeyError, TypeError, IndexError):  # torn by a crash: what came before still counts
        return done, n_valid
    return done, n_valid


def _entry(item: int, record: ItemRecord) -> list[object]:
    written = [[run.array, run.offset, run.n_bytes, run.crc] for run in record.written]
    checked = [
        [r.record.file, r.record.array, r.record.n_bytes, r.record.crc, r.record.start, r.offset, r.n_bytes, r.crc]
        for r in record.checked
    ]
    return [item, written, checked]


def _record(entry: list[object]) -> ItemRecord | None:
    try:
        _, written, checked = entry
        assert isinstance(written, list) and isinstance(checked, list)
        return ItemRecord(
            tuple(WrittenRun(*run) for run in written),
            tuple(CheckedRun(RecordCrc(*run[:5]), *run[5:]) for run in checked),
        )
    except (TypeError, ValueError, AssertionError):
        return None


def identity_of(plan: Plan, source_store: ReadStore, *, options: str = "", item_bytes: int = ITEM_BYTES) -> str:
    """A hash of everything that decides which bytes a plan writes where.

    Args:
        plan: the plan.
        source_store: the sizes of its files, and where the store knows them their modification times, are part of the
            hash: of those with tensors, and of all that were opened to make the plan.
        options: whatever else matters: the tool's version, the command's options.
        item_bytes: as for ``core.copy.execute``.
    """
    state = hashlib.sha256()

    def add(*values: object) -> None:
        state.update(json.dumps(values, separators=(",", ":")).encode() + b"\n")

    add(VERSION, options, item_bytes, plan.buffer_bytes)
    for image in plan.images:
        add(image.path, image.size)
        for placed in image.arrays:
            add(placed.offset, placed.array.name, placed.array.dtype, placed.array.shape)
    files: set[str] = set()
    for key in iter(plan.keys()):
        add(key)
        for fragment in plan.target.fragments(key):
            add(None if fragment.array is None else fragment.array.name, fragment.box.offset, fragment.at)
        for fragment in plan.source.fragments(key):
            array = fragment.array
            extent = None if array is None else array.extent
            if array is None or extent is None:
                add(fragment.box.offset, fragment.box.shape)
            else:
                files.add(extent.file)
                files.update(files_read(extent.encoding))
                add(fragment.box.offset, fragment.box.shape, array.dtype, fragment.at, extent.file, extent.offset)
        add([(box.offset, box.shape) for box in plan.zeros.get(key, ())])
    stamp = getattr(source_store, "stamp", None)
    files.update(getattr(source_store, "opened", ()))
    for file in sorted(files):
        add(file, source_store.size(file) if stamp is None else stamp(file))
    return state.hexdigest()
