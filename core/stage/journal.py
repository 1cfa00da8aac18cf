"""The journals of a stage: which work items are done, so that an interrupted run can be continued.

A file of JSON lines beside the stage's data for each worker. Items are numbered by the plan alone, so whoever continues
reads all of them, however many workers there were, and however many there are. The first line names the plan
(``identity``); each other line lists items whose bytes were on the disk when it was written, with the CRC-32 of every
range. A run that is killed loses at most the items since the last line (``BATCH_BYTES``); a torn last line counts as
not written. Whoever continues reads the listed ranges again and believes only what has the listed CRC. A run that does
not wait for the disk (``--no-fsync``) lists items as soon as they are written: they outlive the process, and CRCs tell
if they did not outlive the machine.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from pathlib import Path

from core.copy.ledger import CheckedRun, ItemRecord, WrittenRun
from core.errors import CapacityError, MissingShardError, StorageError
from core.files.store import translate_os_errors
from core.plan.addresses import RecordCrc
from core.plan.items import ItemNumber

VERSION = 2
BATCH_BYTES = 256 << 20
"""Written bytes between two lines. A killed run may lose two such batches: one being synced, one being filled."""


_FIRST = "journal.jsonl"


def journal_path(stage_dir: Path, rank: int = 0) -> Path:
    """The journal that a worker writes."""
    return stage_dir / (f"journal-{rank}.jsonl" if rank else _FIRST)


def journals_in(stage_dir: Path) -> list[Path]:
    """The journals of all workers of earlier runs."""
    with translate_os_errors(str(stage_dir), doing="look into"):
        return sorted([*stage_dir.glob(_FIRST), *stage_dir.glob("journal-*.jsonl")])


class FileJournal:
    """The journal file of one worker; safe for threads.

    Args:
        path: of the journal file.
        identity: of the plan, see ``core.convert.stored_plan.file.identity_of``.
        sync: brings the bytes of some files to the disk.
        batch_bytes: written bytes after which a line is due.
        others: journals of other workers, which are only read.
        keys: numbers of the tensors whose items are asked for; None for all.

    Attributes:
    """

    def __init__(
        self,
        path: Path,
        identity: str,
        *,
        sync: Callable[[Iterable[str]], None],
        batch_bytes: int = BATCH_BYTES,
        others: Iterable[Path] = (),
        keys: Container[int] | None = None,
    ) -> None:
        self._path = path
        self._sync = sync
        self._batch_bytes = batch_bytes
        self._lock = threading.Lock()
        self._line_lock = threading.Lock()
        self._pending: list[tuple[ItemNumber, ItemRecord]] = []
        self._pending_files: set[str] = set()
        self._pending_bytes = 0
        self._is_trusted = True
        self._done, n_valid = _read(path, identity, keys)
        for other in others:
            if other != path:
                self._done.update(_read(other, identity, keys)[0])
        with translate_os_errors(path.name, doing="write"):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            os.ftruncate(self._fd, n_valid)
            os.lseek(self._fd, n_valid, os.SEEK_SET)
            if n_valid == 0:
                self._append({"journal": VERSION, "plan": identity})

    def done(self, item: ItemNumber) -> ItemRecord | None:
        """What an earlier run recorded for an item."""
        entry = self._done.get(item)
        return None if entry is None else _record(entry)

    def add(self, item: ItemNumber, record: ItemRecord, files: Iterable[str]) -> None:
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
                with translate_os_errors(self._path.name, doing="write"):
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
    return _read(path, identity, ())[1] > 0


def _read(path: Path, identity: str, keys: Container[int] | None) -> tuple[dict[ItemNumber, list[object]], int]:
    """The entries of a plan's journal, and the bytes of its whole lines; nothing if it is another plan's."""
    done: dict[ItemNumber, list[object]] = {}
    n_valid = 0
    try:
        with translate_os_errors(path.name, doing="read"), path.open("rb") as lines:
            for line in lines:
                found = json.loads(line) if line.endswith(b"\n") else None
                if n_valid == 0:
                    if found != {"journal": VERSION, "plan": identity}:
                        return {}, 0
                elif found is None:
                    break
                else:
                    for entry in found["items"]:
                        if keys is None or entry[0] in keys:
                            done[entry[0], entry[1]] = entry
                n_valid += len(line)
    except MissingShardError:
        return {}, 0
    except (ValueError, KeyError, TypeError, IndexError):  # torn by a crash: what came before still counts
        return done, n_valid
    return done, n_valid


def _entry(item: ItemNumber, record: ItemRecord) -> list[object]:
    written = [[run.array, run.offset, run.n_bytes, run.crc] for run in record.written]
    checked = [
        [r.record.file, r.record.array, r.record.n_bytes, r.record.crc, r.record.start, r.offset, r.n_bytes, r.crc]
        for r in record.checked
    ]
    return [*item, written, checked]


def _record(entry: list[object]) -> ItemRecord | None:
    try:
        _, _, written, checked = entry
        assert isinstance(written, list) and isinstance(checked, list)
        return ItemRecord(
            tuple(WrittenRun(*run) for run in written),
            tuple(CheckedRun(RecordCrc(*run[:5]), *run[5:]) for run in checked),
        )
    except (TypeError, ValueError, AssertionError):
        return None
