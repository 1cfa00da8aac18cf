"""Write a destination so that it appears complete or not at all.

Everything is written into a *staging directory*, a hidden sibling of the destination with a fixed
name::

    out/                  does not exist yet, or is empty
    .out.ckpt-stage/      locked (flock) as long as a process works on it
    ├── data/             becomes out/; for a single file: the file and its manifest
    ├── journal.jsonl     of a run that can be continued; with several workers one each
    ├── plan              only with several workers (core.verbs.convert.stored_plan.file)
    └── workers.lock      only with several workers (core.publish.stage.workers_lock)

``Stage.commit`` syncs the files, then the directories, renames ``data`` and syncs the parent. If
the run ends in any other way, the staging directory is removed, except after a failure of a run
that is to be continued: with ``--resume``, or interrupted after a while (``keeps_after``). The
staging directory of a killed run is not locked: the next run removes or continues it and adds a
note. Before that it restores what a replacement had moved aside
(``core.publish.stage.replacement``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shlex import quote
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
from core.files.store import override, translate_os_errors
from core.files.url import refuse_url
from core.progress import OnProgress, Phase, begin_phase
from core.publish.stage.files import StageStore
from core.publish.stage.folder_lock import (
    NO_LOCKS,
    WORKERS_LOCK,
    FolderLock,
    lock_stage,
    stage_dir_of,
)
from core.publish.stage.journal import (
    FileJournal,
    is_journal_of,
    journal_path,
    journals_in,
    recorded_bytes,
)
from core.publish.stage.protocol import (
    DestinationStage,
    OutputDestination,
    ShareResult,
    Space,
    StageRequest,
)
from core.publish.stage.replacement import (
    check_may_replace,
    holds_previous,
    is_vacant,
    replace_dir,
    replace_file,
    undo_replacement,
)
from core.publish.stage.stale import (
    clear_finished,
    finish_despite_interrupts,
    finish_publication,
    place_manifest,
    remove_stage,
)
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage
    from core.engine.plan.positions import Places
    from core.files.store import WriteStore
    from core.publish.stage.shared import SharedDirectory
    from core.publish.stage.workers_lock import WorkersLock

_MIB = 1 << 20
_PLAIN_REQUEST = StageRequest()
_APPEARED = "another process has created the destination in the meantime"


@dataclass(frozen=True, slots=True)
class LocalDestination(OutputDestination):
    """A file or directory of the file system.

    Args:
        dst: its path.
    """

    dst: Path
    is_on_disk = True

    @override
    def check_writable(self, *, needs_links: bool) -> None:
        refuse_url(self.dst)

    @override
    def check_may_replace(self, *, is_file: bool, keep: Sequence[Path]) -> None:
        check_may_replace(self.dst, is_file=is_file, keep=keep)

    @override
    def estimate_sending(self, images: Sequence[FileImage], memory_bytes: int) -> int:
        return 0

    @override
    def open_stage(self, request: StageRequest) -> Stage:
        return Stage(self.dst, request)

    @override
    def find_space(self, request: StageRequest) -> Space:
        stage = self.open_stage(request)
        n_resumed = 0
        if request.resume and stage.stage_dir.is_dir():
            n_resumed = min(
                recorded_bytes(stage.stage_dir, stage.journal_identity), request.n_bytes
            )
        shortage = None
        try:
            stage.check_space()
        except CapacityError as err:
            shortage = err
        return Space(stage.free_bytes(), n_resumed, shortage, nearest_folder(self.dst.parent))

    @override
    def describe_remains(
        self, *, has_begun: bool, inode: int | None, keeps_partial: bool, command: str | None
    ) -> str:
        dst = self.dst
        # The disk decides: a signal may arrive right before or after the rename.
        with suppress(OSError):
            if os.lstat(dst).st_ino == inode:
                return f"{dst} was already complete"
        stage_dir = stage_dir_of(Path(os.path.abspath(dst)))
        has_stage = os.path.lexists(stage_dir)
        # Without --force there was no destination, or the command would have refused it.
        unchanged = f", {dst} is unchanged" if os.path.lexists(dst) else ""
        if has_stage and not has_begun:
            return (
                f"nothing was written{unchanged}; {stage_dir} is the partial output of another "
                "run (to continue it, rerun the command that began it)"
            )
        n_bytes = 0
        with suppress(CheckpointingException):
            n_bytes = recorded_bytes(stage_dir) if has_stage else 0
        if has_stage and (n_bytes or keeps_partial):
            done = f"{n_bytes / _MIB:,.1f} MiB of" if n_bytes else "the beginning of"
            again = " with the same command" if command is None else f": {command}"
            return (
                f"{done} the output is kept in {stage_dir}{unchanged}; continue{again} "
                f"(or remove it: rm -r {quote(str(stage_dir))})"
            )
        if keeps_partial:
            return f"nothing was written{unchanged} (rerun the same command)"
        if has_stage:
            return f"{stage_dir} could not be removed{unchanged} (the next run will remove it)"
        return (
            f"nothing was written{unchanged} (rerun with --resume to keep partial work next time)"
        )

    @override
    def finish_publication(self) -> None:
        finish_publication(self.dst.absolute())


class Stage(DestinationStage):
    """An unfinished destination in the file system; a context manager.

    Args:
        dst: the destination, which may be an empty directory; its parent directories are created
            if they are missing.
        request: what is written.

    Attributes:
        workers: the lock that the workers share; None if this process works alone, and no workers
            have used the staging directory before.
    """

    store: StageStore

    def __init__(self, dst: Path, request: StageRequest = _PLAIN_REQUEST) -> None:
        self.dst = Path(os.path.abspath(dst))
        self.is_file = request.is_file
        self.stage_dir = stage_dir_of(self.dst)
        self.data_dir = self.stage_dir / "data"
        self.notes: list[str] = []
        self.journal: FileJournal | None = None
        self.published = None
        self._request = request
        self._resume = request.resume
        self._begun = time.monotonic()
        self._force = request.force
        self._fsync = request.fsync
        self._identity = request.identify() if request.resume else ""
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
                batch_bytes=self._request.batch_bytes,
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
            hint = "choose another destination"
            # Nobody is sent to an option that is then refused.
            with suppress(UsageError):
                check_may_replace(self.dst, is_file=self.is_file, keep=self._request.keep)
                hint += ", or pass --force"
            if os.path.lexists(self.stage_dir):
                hint += f"; {self.stage_dir.name} next to it is left over from an earlier run"
            raise UsageError("the destination already exists", file=str(self.dst), hint=hint)
        check_may_replace(self.dst, is_file=self.is_file, keep=self._request.keep)

    def _acquire(self) -> None:
        """Create or open the staging directory, and lock it."""
        self._lock = lock_stage(self.dst)
        if not self._lock.is_sure:
            self.notes.append(NO_LOCKS)
        if self._request.is_shared or os.path.lexists(self.stage_dir / WORKERS_LOCK):
            from core.publish.stage.workers_lock import claim_stage

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
        with translate_os_errors(str(self.stage_dir), doing="check the free space of"):
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
        needed_bytes = self._request.n_bytes
        if not needed_bytes:
            return
        free = self.free_bytes()
        if free < needed_bytes:
            raise CapacityError(
                f"the output needs {needed_bytes / _MIB:,.1f} MiB, "
                f"but only {free / _MIB:,.1f} MiB is free",
                file=str(self.dst.parent),
                hint="free some space, or write to another disk",
            )

    @override
    def begin_literals(self, images: Sequence[FileImage], places: Places) -> None:
        """Return None: the bytes around arrays are written when the arrays are complete."""

    @override
    def link_file(self, name: str, path: Path) -> None:
        self.store.link(name, path)

    @override
    def share(self) -> SharedDirectory:
        from core.publish.stage.shared import SharedDirectory

        assert self.workers is not None, "the stage was opened for several workers"
        sync_folders(self.stage_dir)
        return SharedDirectory(
            self.stage_dir,
            self.workers.token,
            self.journal_identity,
            fsync=self._fsync,
            batch_bytes=self._request.batch_bytes,
        )

    @override
    def take_shares(self, shares: Sequence[ShareResult], places: Places) -> None:
        """Do nothing: all workers have written to the same files."""

    @override
    def write_manifest(self, name: str, write: Callable[[WriteStore], None]) -> None:
        write(self.store)

    @override
    def make_readable(self, *, from_disk: bool = False, progress: OnProgress | None = None) -> None:
        if from_disk and self._fsync:
            self.store.sync_all(progress)

    @property
    @override
    def resumed_bytes(self) -> int:
        return 0  # the journal counts them

    @property
    @override
    def written_path(self) -> Path:
        return self.data_dir / self.dst.name if self.is_file else self.data_dir

    @property
    @override
    def inode(self) -> int:
        return os.lstat(self.written_path).st_ino

    @override
    def commit(
        self, report: Mapping[str, Any] | None = None, *, progress: OnProgress | None = None
    ) -> None:
        # Sync before the rename, so that a crash never leaves an incomplete destination.
        if self._fsync:
            try:
                self.store.sync_all(progress)
            except CheckpointingException:
                if self.journal is not None:
                    self.journal.distrust()
                raise
        begin_phase(progress, Phase.PUBLISHING)
        if self._force:
            self._request.check_replaced()
        self.store.close()

        # Note the inode first: it shows later whether the rename took place (_is_committed).
        with translate_os_errors(str(self.dst), doing="publish"):
            self._new_stat = os.lstat(self.written_path)
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
        keeps_after = self._request.keeps_after
        if keeps_after is None or self._keeps_earlier_work:
            return True
        return issubclass(kind, KeyboardInterrupt) and time.monotonic() - self._begun >= keeps_after

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
                self.notes.append(
                    "the journal could not be completed, so some work will be repeated"
                )
        self._close()
        if self._lock is None:
            return

        # Remove the staging directory, unless it contains the old destination or work to resume.
        if not self._settle_publication():
            self.notes.append(
                f"{self.stage_dir} contains the previous destination; the next run will restore it"
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
            return not holds_previous(self.stage_dir, self.dst)
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
