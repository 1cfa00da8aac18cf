"""Record which work items are done, so that an interrupted run can be continued.

Each worker writes a journal, a file of JSON lines, next to the data in the staging directory. Items
are numbered by the plan alone, so that a resumed run reads all journals, however many workers there
were or are. The first line names the plan (``identity``); each other line lists items whose bytes
were on the disk when it was written, with the CRC-32 of every range. A run that is killed loses at
most the items since the last line (``BATCH_BYTES``); a torn last line counts as not written. A
resumed run reads the listed ranges again and trusts only those that have the listed CRC. A run
that does not wait for the disk (``--no-fsync``) lists items as soon as they are written: they
survive the end of the process, and the CRCs show whether they survived a crash of the machine.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from pathlib import Path

from core.engine.copy.ledger import CheckedRun, ItemRecord, WrittenRun
from core.engine.plan.addresses import RecordCrc
from core.engine.plan.items import ItemNumber
from core.errors import CapacityError, MissingShardError, StorageError
from core.files.store import translate_os_errors
from core.files.syscalls import flush_content

VERSION = 2
BATCH_BYTES = 256 << 20
"""Written bytes between two lines.

A killed run may lose two such batches: one that is being synced and one that is being filled.
"""
_FIRST = "journal.jsonl"


def journal_path(stage_dir: Path, rank: int = 0) -> Path:
    """Return the path of the journal that a worker writes."""
    return stage_dir / (f"journal-{rank}.jsonl" if rank else _FIRST)


def journals_in(stage_dir: Path) -> list[Path]:
    """Return the paths of the journals of all workers of earlier runs."""
    with translate_os_errors(str(stage_dir), doing="list the directory"):
        return sorted([*stage_dir.glob(_FIRST), *stage_dir.glob("journal-*.jsonl")])


class FileJournal:
    """Journal file of one worker; safe for threads.

    Args:
        path: path of the journal file.
        identity: identity of the plan (``core.verbs.convert.stored_plan.file.identity_of``).
        sync: writes the bytes of the given files to the disk and waits for it.
        batch_bytes: number of written bytes after which a line is due.
        others: journals of other workers, which are only read.
        keys: indices of the tensors whose items ``done`` will look up; None for all.
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

        # Read what earlier runs have recorded, in this journal and in those of other workers.
        self._done, n_valid = _read(path, identity, keys)
        for other in others:
            if other != path:
                self._done.update(_read(other, identity, keys)[0])

        # Continue after the last complete line; a journal of another plan is overwritten.
        with translate_os_errors(path.name, doing="write"):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            os.ftruncate(self._fd, n_valid)
            os.lseek(self._fd, n_valid, os.SEEK_SET)
            if n_valid == 0:
                self._append({"journal": VERSION, "plan": identity})

    def done(self, item: ItemNumber) -> ItemRecord | None:
        """Return what an earlier run recorded for an item, or None."""
        entry = self._done.get(item)
        return None if entry is None else _decode(entry)

    def add(self, item: ItemNumber, record: ItemRecord, files: Iterable[str]) -> None:
        """Record an item whose bytes are written to ``files``; sync them when a batch is full.

        Raises:
            StorageError, CapacityError: the files or the journal cannot be written.
        """
        with self._lock:
            self._pending.append((item, record))
            self._pending_files.update(files)
            self._pending_bytes += sum(run.n_bytes for run in record.written)
            is_due = self._pending_bytes >= self._batch_bytes
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Write pending items to the journal, after their data are on the disk.

        Raises:
            StorageError, CapacityError: the files or the journal cannot be written.
        """
        with self._line_lock:
            # Take the batch; other threads go on adding items while it is synced.
            with self._lock:
                pending, files = self._pending, self._pending_files
                self._pending, self._pending_files, self._pending_bytes = [], set(), 0

            # Data before the line: a line must never list bytes that a crash can lose.
            if pending and self._is_trusted:
                try:
                    self._sync(files)
                except (StorageError, CapacityError):
                    self.distrust()
                    raise
                with translate_os_errors(self._path.name, doing="write"):
                    self._append({"items": [_encode(item, record) for item, record in pending]})

    def distrust(self) -> None:
        """Stop recording, after a failed sync: the system reports lost bytes only one time."""
        self._is_trusted = False

    def close(self) -> None:
        """Close the file; pending items are dropped."""
        os.close(self._fd)

    def _append(self, line: dict[str, object]) -> None:
        """Write a line and wait for the disk."""
        data = memoryview(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        begin = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            flush_content(self._fd)
        except OSError:
            self.distrust()
            # An incomplete line would hide the lines after it.
            with suppress(OSError):
                os.ftruncate(self._fd, begin)
            raise


def is_journal_of(path: Path, identity: str) -> bool:
    """Return whether a journal file exists and belongs to a plan."""
    return _read(path, identity, ())[1] > 0


def recorded_bytes(stage_dir: Path, identity: str | None = None) -> int:
    """Return the bytes of the destination that the journals of a plan list as written.

    Args:
        identity: identity of the plan and of the data directory (``Stage.journal_identity``); None
            for that of the first journal.
    """
    done: dict[ItemNumber, list[object]] = {}
    if identity is None:
        with (
            suppress(OSError, ValueError, KeyError, TypeError),
            (stage_dir / _FIRST).open("rb") as lines,
        ):
            identity = json.loads(lines.readline())["plan"]
    if not isinstance(identity, str):
        return 0
    for path in journals_in(stage_dir):
        done.update(_read(path, identity, None)[0])
    records = filter(None, map(_decode, done.values()))
    return sum(run.n_bytes for record in records for run in record.written)


def _read(
    path: Path, identity: str, keys: Container[int] | None
) -> tuple[dict[ItemNumber, list[object]], int]:
    """Read the journal of a plan.

    Args:
        keys: indices of the tensors whose items are read; None for all.

    Returns:
        The entries by item, and the bytes of the complete lines; ({}, 0) if there is no journal or
        it belongs to another plan.
    """
    done: dict[ItemNumber, list[object]] = {}
    n_valid = 0
    try:
        with translate_os_errors(path.name, doing="read"), path.open("rb") as lines:
            header = lines.readline()
            if not header.endswith(b"\n") or json.loads(header) != {
                "journal": VERSION,
                "plan": identity,
            }:
                return {}, 0
            n_valid = len(header)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                for entry in json.loads(line)["items"]:
                    if keys is None or entry[0] in keys:
                        done[entry[0], entry[1]] = entry
                n_valid += len(line)
    except MissingShardError:
        return {}, 0
    except (ValueError, KeyError, TypeError, IndexError):
        # A line that was torn by a crash: the lines before it still count.
        return done, n_valid
    return done, n_valid


def _encode(item: ItemNumber, record: ItemRecord) -> list[object]:
    """Return an item's entry in the journal.

    ``[tensor, item, written, checked]``, with written ranges ``[array, offset, n_bytes, crc]`` and
    checked ranges ``[file, array, array bytes, recorded crc, array start, offset, n_bytes, crc]``.
    """
    written = [[run.array, run.offset, run.n_bytes, run.crc] for run in record.written]
    checked = [
        [
            run.record.file,
            run.record.array,
            run.record.n_bytes,
            run.record.crc,
            run.record.start,
            run.offset,
            run.n_bytes,
            run.crc,
        ]
        for run in record.checked
    ]
    return [*item, written, checked]


def _decode(entry: list[object]) -> ItemRecord | None:
    """Return the record in a journal's entry, or None if the entry is malformed."""
    try:
        _, _, written, checked = entry
        assert isinstance(written, list) and isinstance(checked, list)
        return ItemRecord(
            tuple(WrittenRun(*run) for run in written),
            tuple(CheckedRun(RecordCrc(*run[:5]), *run[5:]) for run in checked),
        )
    except (TypeError, ValueError, AssertionError):
        return None
