"""Write a destination so that it appears complete or not at all.

Everything is written into a *staging directory*, a hidden sibling of the destination with a fixed
name::

    out/                  does not exist yet
    .out.ckpt-stage/      locked (flock) as long as a process works on it
    ├── data/             becomes out/; for a single file: the file and its manifest
    ├── journal.jsonl     only with resume; with several workers one each, journal-1.jsonl …
    ├── plan              only with several workers (core.verbs.convert.stored_plan.file)
    └── workers.lock      only with several workers (core.publish.stage.workers_lock)

``Stage.commit`` syncs the files, then the directories, renames ``data`` and syncs the parent. If
the run ends in any other way, the staging directory is removed, except after a failure with
``resume`` (or only an interruption, with ``keeps_after``). The staging directory of a killed run is
not locked: the next run removes or continues it and adds a note. Before that it restores what a
replacement had moved aside (``core.publish.stage.replacement``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from core.errors import CapacityError, CheckpointingException, StorageError, UsageError
from core.files.folders import (
    empty_folder,
    make_folders,
    nearest_folder,
    remove_empty,
    sync_folder,
    sync_folders,
)
from core.files.store import translate_os_errors
from core.progress import OnProgress, Phase, begin_phase
from core.publish.stage.files import StageStore
from core.publish.stage.folder_lock import NO_LOCKS, FolderLock, lock_stage, stage_dir_of
from core.publish.stage.journal import (
    BATCH_BYTES,
    FileJournal,
    is_journal_of,
    journal_path,
    journals_in,
)
from core.publish.stage.replacement import (
    check_may_replace,
    is_vacant,
    replace_dir,
    replace_file,
    undo_replacement,
)
from core.publish.stage.stale import (
    clear_finished,
    finish_despite_interrupts,
    place_manifest,
    remove_stage,
)
from core.publish.stage.workers_lock import NAME as WORKERS_LOCK
from core.publish.stage.workers_lock import WorkersLock, claim_stage

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage
    from core.engine.plan.positions import Places
    from core.files.store import WriteStore
    from core.publish.stage.bucket.literals import EarlyLiterals

_MIB = 1 << 20
_APPEARED = "another process has created the destination in the meantime"


class Stage:
    """An unfinished destination; a context manager.

    Args:
        dst: the destination, which may be an empty directory; its parent directories are created
            if they are missing.
        is_file: the destination is a single file (then ``data`` contains it under its name).
        resume: keep the staging directory on failure, and continue one that belongs to the same
            plan.
        keeps_after: with ``resume``, keep it only after an interruption (Ctrl-C, SIGTERM), and only
            if the work has taken so many seconds or continues an earlier run's; None keeps it
            after any failure.
        force: replace an existing destination, at the end.
        fsync: wait for the disk.
        identity: identity of the plan (``core.verbs.convert.stored_plan.file.identity_of``); needed
            with ``resume``.
        needed_bytes: bytes of all files to come; 0 skips the check of the free space.
        keep: paths that an existing destination must not contain, and must not be inside of, such
            as the source.
        batch_bytes: with ``resume``, how many bytes a killed run may lose.
        is_shared: several workers fill the staging directory; needs ``resume``.

    Attributes:
        store: the files being written.
        journal: None without ``resume``.
        workers: the lock that the workers share; None if this process works alone, and no workers
            have used the staging directory before.
        notes: what happened to the staging directory of an earlier run and similar, one sentence
            each.

    Raises (on entering):
        UsageError: the destination exists, or replacing it would remove a path that must be kept.
        StorageError: another process is writing to the same destination, or the system refuses.
        CapacityError: too little free space.
    """

    def __init__(
        self,
        dst: Path,
        *,
        is_file: bool = False,
        resume: bool = False,
        keeps_after: float | None = None,
        force: bool = False,
        fsync: bool = True,
        identity: str = "",
        needed_bytes: int = 0,
        keep: Sequence[Path] = (),
        batch_bytes: int = BATCH_BYTES,
        is_shared: bool = False,
    ) -> None:
        self.dst = Path(os.path.abspath(dst))
        self.is_file = is_file
        self.stage_dir = stage_dir_of(self.dst)
        self.data_dir = self.stage_dir / "data"
        self.notes: list[str] = []
        self.journal: FileJournal | None = None
        self.published: Mapping[str, Any] | None = None
        self._resume = resume
        self._keeps_after = keeps_after
        self._begun = time.monotonic()
        self._force = force
        self._fsync = fsync
        self._identity = identity
        self._needed_bytes = needed_bytes
        self._keep = keep
        self._batch_bytes = batch_bytes
        self._is_shared = is_shared
        self.workers: WorkersLock | None = None
        self._lock: FolderLock | None = None
        self._new_stat: os.stat_result | None = None
        self._keeps_earlier_work = False
        self._has_synced_names = False
        self._created_dirs: list[Path] = []

    def __enter__(self) -> Self:
        if not self._force and os.path.lexists(self.dst):
            clear_finished(self.dst, is_file=self.is_file)
        self._check_destination()
        try:
            self._created_dirs = make_folders(self.dst.parent)
            self._acquire()
        except BaseException:
            remove_empty(self._created_dirs)
            raise
        try:
            self._begin()
        except BaseException:
            self._leave(keep=self._keeps_earlier_work)
            raise
        return self

    def _begin(self) -> None:
        """Continue or clear an earlier run's work, then open the files and the journal."""
        # Look for an earlier run's work, and undo a replacement that it did not finish.
        journals = journals_in(self.stage_dir)
        with translate_os_errors(str(self.stage_dir), doing="list the directory"):
            has_earlier_work = any(entry.name != WORKERS_LOCK for entry in self.stage_dir.iterdir())
            # As long as the earlier work may be useful, a failure must not remove it.
            self._keeps_earlier_work = has_earlier_work and self._resume
            if undo_replacement(self.stage_dir, self.dst):
                self.notes.append(
                    f"restored {self.dst.name}, which an interrupted run had moved aside"
                )
                self._check_destination()

        # Another process may have published the destination before this one got the lock.
        if not (self._force or is_vacant(self.dst, is_file=self.is_file)):
            raise UsageError(_APPEARED, file=str(self.dst))
        if has_earlier_work:
            journals = self._continue_or_clear(journals)

        # Open the files. The journal comes after the data directory, whose inode it records.
        with translate_os_errors(str(self.stage_dir), doing="create"):
            self.data_dir.mkdir(exist_ok=True)
        self.check_space()
        self.store = StageStore(self.data_dir, is_durable=self._fsync)
        if self._resume:
            self.journal = FileJournal(
                journal_path(self.stage_dir),
                self.journal_identity,
                sync=self._sync_data,
                batch_bytes=self._batch_bytes,
                others=journals,
            )

        # Only now may other workers enter.
        if self.workers is not None:
            self.workers.share()

    def _continue_or_clear(self, journals: list[Path]) -> list[Path]:
        """Empty the staging directory unless this plan can continue it; return its journals."""
        if self._resume and any(is_journal_of(path, self.journal_identity) for path in journals):
            self.notes.append("continuing an interrupted run")
            return journals
        self._keeps_earlier_work = False
        self.notes.append(
            f"removed {self.stage_dir.name}, left behind by an earlier run"
            + (" with different input or options" if self._resume else "")
        )
        empty_folder(self.stage_dir, keep=(WORKERS_LOCK,))
        return []

    @property
    def journal_identity(self) -> str:
        """Identity of the plan and of the data directory, as the journals record it.

        The inode is part of it: after a swap (``--force``), ``data`` is the old destination.
        """
        with translate_os_errors(str(self.data_dir), doing="inspect"):
            inode = os.lstat(self.data_dir).st_ino if os.path.lexists(self.data_dir) else "none"
            return f"{self._identity} in {inode}"

    def _sync_data(self, files: Iterable[str]) -> None:
        """Sync some files, and the first time also the names of the stage's directories."""
        for file in files if self._fsync else ():
            self.store.sync(file)
        if not self._has_synced_names:
            sync_folders(self.stage_dir)
            sync_folder(self.dst.parent)
            self._has_synced_names = True

    def _check_destination(self) -> None:
        """Raise if the destination exists and must not be replaced.

        Raises:
            UsageError: the destination exists, or replacing it would remove a path that must be
                kept.
        """
        if is_vacant(self.dst, is_file=self.is_file):
            return
        if not self._force:
            hint = "choose another one"
            # Nobody is sent to an option that is then refused.
            with suppress(UsageError):
                check_may_replace(self.dst, is_file=self.is_file, keep=self._keep)
                hint += ", or pass --force"
            if os.path.lexists(self.stage_dir):
                hint += f"; {self.stage_dir.name} next to it is left over from an earlier run"
            raise UsageError("the destination exists", file=str(self.dst), hint=hint)
        check_may_replace(self.dst, is_file=self.is_file, keep=self._keep)

    def _acquire(self) -> None:
        """Create or open the staging directory, and lock it."""
        self._lock = lock_stage(self.dst)
        if not self._lock.is_sure:
            self.notes.append(NO_LOCKS)
        if self._is_shared or os.path.lexists(self.stage_dir / WORKERS_LOCK):
            try:
                self.workers = claim_stage(self.stage_dir)
            except BaseException:
                self._unlock()
                raise

    def free_bytes(self) -> int:
        """Return the free space for the destination, in bytes.

        Blocks that an earlier run has written count as free: they are reused or removed. The
        staging directory need not exist, and an old destination does not count, as it is replaced
        only when the new one is complete.

        Raises:
            StorageError: the system does not tell.
        """
        with translate_os_errors(str(self.stage_dir), doing="check the free space"):
            status = os.statvfs(nearest_folder(self.stage_dir))
            present = sum(
                entry.stat().st_blocks * 512
                for entry in self.data_dir.rglob("*")
                if not entry.is_symlink()
            )
        return status.f_bavail * status.f_frsize + present

    def check_space(self) -> None:
        """Raise unless the file system has enough free space; a plan may ask before entering.

        Raises:
            CapacityError: too little free space.
            StorageError: the system does not tell.
        """
        if not self._needed_bytes:
            return
        free = self.free_bytes()
        if free < self._needed_bytes:
            raise CapacityError(
                f"the destination needs {self._needed_bytes / _MIB:,.1f} MiB, "
                f"but only {free / _MIB:,.1f} MiB are free",
                file=str(self.dst.parent),
                hint="free some space, or write to another disk",
            )

    def begin_literals(self, images: Sequence[FileImage], places: Places) -> EarlyLiterals | None:
        """Return None: the bytes around arrays are written when the arrays are complete."""
        return None

    def write_manifest(self, name: str, write: Callable[[WriteStore], None]) -> None:
        """Write the manifest.

        Args:
            name: its name.
            write: writes it to a store.
        """
        write(self.store)

    def make_readable(self, *, from_disk: bool = False, progress: OnProgress | None = None) -> None:
        """Make the written files readable.

        Args:
            from_disk: they will be read from the disk rather than from the page cache, if the
                destination has to be on the disk.
            progress: called with the files that have been synced.

        Raises:
            StorageError: the system could not write them.
        """
        if from_disk and self._fsync:
            self.store.sync_all(progress)

    @property
    def resumed_bytes(self) -> int:
        """0: the journal counts the bytes that an earlier run has written."""
        return 0

    @property
    def written_path(self) -> Path:
        """Path of the destination before it is published."""
        return self.data_dir / self.dst.name if self.is_file else self.data_dir

    @property
    def inode(self) -> int:
        """Inode that the destination will have."""
        return os.lstat(self.written_path).st_ino

    def commit(
        self, report: Mapping[str, Any] | None = None, *, progress: OnProgress | None = None
    ) -> None:
        """Publish the destination.

        Args:
            report: not used; see ``core.publish.stage.bucket.stage``.
            progress: called with the files that have been synced, and before the rename.

        Raises:
            StorageError: the system refuses. If only a step after the last rename failed, the
                message adds that the output is complete.
            UsageError: another process created the destination in the meantime.
        """
        # Sync before the rename, so that a crash never leaves an incomplete destination.
        if self._fsync:
            try:
                self.store.sync_all(progress)
            except CheckpointingException:
                if self.journal is not None:
                    self.journal.distrust()
                raise
        begin_phase(progress, Phase.PUBLISHING)
        self.store.close()

        # Note the inode first: it shows later whether the rename took place (_is_committed).
        with translate_os_errors(str(self.dst), doing="publish"):
            self._new_stat = os.lstat(
                self.data_dir / self.dst.name if self.is_file else self.data_dir
            )
            replace = replace_file if self.is_file else replace_dir
            try:
                replace(self.data_dir, self.dst, force=self._force)
            except FileExistsError as err:
                raise UsageError(_APPEARED, file=str(self.dst)) from err

        # From here on the output is complete, whatever fails.
        try:
            self._finish()
        except (StorageError, CapacityError) as err:
            raise StorageError(
                "the output is complete, but its manifest could not be moved next to it, "
                "or its directory could not be synced",
                file=str(self.dst),
            ) from err

    def _finish(self) -> None:
        """After the rename, move the manifest of a single file and sync the directories."""
        if self.is_file:
            place_manifest(self.data_dir, self.dst)
        if self._fsync:
            sync_folder(self.dst.parent)
            for folder in reversed(self._created_dirs):
                sync_folder(folder.parent)

    @property
    def _is_committed(self) -> bool:
        """True if the new destination has its final name.

        This is read from the disk, because a signal may arrive right after the rename.
        """
        try:
            return self._new_stat is not None and os.path.samestat(
                self._new_stat, os.lstat(self.dst)
            )
        except OSError:
            return False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave(keep=self._is_to_be_kept(kind) and not self._is_committed)

    def _is_to_be_kept(self, kind: type[BaseException] | None) -> bool:
        """Return whether the next run can continue what this one has done, and is meant to."""
        if not self._resume or kind is None:
            return False
        if self._keeps_after is None or self._keeps_earlier_work:
            return True
        seconds = time.monotonic() - self._begun
        return issubclass(kind, KeyboardInterrupt) and seconds >= self._keeps_after

    def _leave(self, *, keep: bool) -> None:
        """Close everything and remove the staging directory, even if Ctrl-C is pressed again."""
        finish_despite_interrupts(partial(self._clean_up, keep=keep))

    def _clean_up(self, *, keep: bool) -> None:
        """Close everything and remove the staging directory; can be repeated if interrupted."""
        # Record what has been written since the journal's last line.
        if keep and self.journal is not None:
            try:
                self.journal.flush()
            except CheckpointingException:
                self.notes.append("the journal could not be completed; some work will be repeated")
        self._close()
        if self._lock is None:
            return

        # Remove the staging directory, unless it contains the old destination or work to resume.
        if not self._settle_publication():
            self.notes.append(
                f"{self.stage_dir} contains the previous destination; the next run restores it"
            )
        elif not keep:
            if not remove_stage(self.stage_dir):
                self.notes.append(f"{self.stage_dir} could not be removed")
            if not self._is_committed:
                remove_empty(self._created_dirs)
        self._unlock()

    def _settle_publication(self) -> bool:
        """Undo or finish a publication that stopped half-way.

        Returns:
            True unless the staging directory contains data that must be kept.
        """
        if self._new_stat is None:
            return True
        try:
            if not self._is_committed:
                undo_replacement(self.stage_dir, self.dst)
            elif self.is_file and os.path.lexists(self.data_dir):
                self._finish()
        except (OSError, CheckpointingException):
            return self._is_committed
        return True

    def _close(self) -> None:
        """Close the journal and the files."""
        if self.journal is not None:
            journal, self.journal = self.journal, None
            # Errors do not matter: every line of the journal was synced, and the files were synced
            # or will be removed.
            with suppress(OSError):
                journal.close()
        store = getattr(self, "store", None)
        if store is not None:
            with suppress(StorageError):
                store.close()

    def _unlock(self) -> None:
        """Release both locks."""
        if self.workers is not None:
            self.workers.close()
        # Once it is released, the stage may be another run's: an interrupt must not come back here.
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()
