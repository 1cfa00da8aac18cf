"""Publication: a destination appears complete or not at all.

Everything is written into a *stage*, a hidden sibling of the destination with a fixed name::

    out/                        does not exist yet
    .out.ckpt-stage/            locked (flock) as long as someone works on it
    ├── data/                   becomes out/; for a single file: its file and manifest
    ├── journal.jsonl           only with resume; with several workers one for each, journal-1.jsonl …
    ├── plan                    only with several workers (core.convert.stored_plan.file)
    └── workers.lock            only with several workers (core.stage.workers_lock)

``Stage.commit`` syncs the files, then the directories, renames ``data`` and syncs the parent. Any other way out removes
the stage, save for a failure with ``resume``. A stage whose owner was killed carries no lock: the next run says so and
removes it, or continues it; before that it puts back what a replacement had set aside (``core.stage.replacement``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from core.errors import CapacityError, CheckpointingException, StorageError, UsageError
from core.files.folders import empty_folder, make_folders, remove_empty, sync_folder, sync_folders
from core.files.store import translate_os_errors
from core.stage.files import StageStore
from core.stage.folder_lock import NO_LOCKS, lock_folder
from core.stage.journal import BATCH_BYTES, FileJournal, is_journal_of, journal_path, journals_in
from core.stage.replacement import check_may_go, put_back, replace_dir, replace_file
from core.stage.stale import clear_finished, remove_stage
from core.stage.workers_lock import NAME as WORKERS_LOCK
from core.stage.workers_lock import WorkersLock, claim

_PATIENCE = 3


def stage_dir_of(dst: Path) -> Path:
    """The stage of a destination."""
    return dst.parent / f".{dst.name}.ckpt-stage"


class Stage:
    """An unfinished destination; a context manager.

    Args:
        dst: the destination; its directory is made if it is missing.
        is_file: whether the destination is one file (then the stage's ``data`` holds it under its name).
        resume: keep the stage on failure, and continue one that belongs to the same plan.
        force: replace an existing destination, at the end.
        fsync: wait for the disk.
        identity: of the plan, see ``core.convert.stored_plan.file.identity_of``; needed with ``resume``.
        needed_bytes: bytes of all files to come; 0 leaves the free space unchecked.
        keep: paths that the destination must neither contain nor, if it exists, lie in, such as the source.
        batch_bytes: with ``resume``, how much a killed run may lose.
        is_shared: several workers fill it; needs ``resume``.

    Attributes:
        store: the files being written.
        journal: None without ``resume``.
        workers: the lock that the workers share; None if this process works alone, and none has been there before.
        notes: what was found and done about it, one sentence each.

    Raises (on entering):
        UsageError: the destination exists, or replacing it would remove what must be kept.
        StorageError: another process is at work on the same destination, or the system refuses.
        CapacityError: too little space.
    """

    def __init__(
        self,
        dst: Path,
        *,
        is_file: bool = False,
        resume: bool = False,
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
        self._resume = resume
        self._force = force
        self._fsync = fsync
        self._identity = identity
        self._needed_bytes = needed_bytes
        self._keep = keep
        self._batch_bytes = batch_bytes
        self._is_shared = is_shared
        self.workers: WorkersLock | None = None
        self._lock_fd = -1
        self._new: os.stat_result | None = None
        self._keeps_found = False
        self._has_synced_names = False
        self._made_dirs: list[Path] = []

    def __enter__(self) -> Self:
        self._check_destination()
        try:
            self._made_dirs = make_folders(self.dst.parent)
            self._acquire()
        except BaseException:
            remove_empty(self._made_dirs)
            raise
        try:
            self._begin()
        except BaseException:
            self._leave(keep=self._keeps_found)
            raise
        return self

    def _begin(self) -> None:
        journals = journals_in(self.stage_dir)
        with translate_os_errors(str(self.stage_dir), doing="look into"):
            is_found = any(entry.name != WORKERS_LOCK for entry in self.stage_dir.iterdir())
            self._keeps_found = is_found and self._resume  # until it is known to be of no use
            if put_back(self.stage_dir, self.dst):
                self.notes.append(f"{self.dst.name}, which an interrupted run had set aside, was put back")
                self._check_destination()
        if not self._force and os.path.lexists(self.dst):  # another process was quicker, until the lock was had
            raise UsageError("the destination has appeared meanwhile", file=str(self.dst))
        if self._resume and any(is_journal_of(path, self.journal_of) for path in journals):
            self.notes.append("continuing the unfinished stage")
        elif is_found:
            self._keeps_found = False
            self.notes.append(
                f"{self.stage_dir.name}, left behind by an earlier run, "
                + ("belongs to other input or options; it was removed" if self._resume else "was removed")
            )
            empty_folder(self.stage_dir, keep=(WORKERS_LOCK,))
            journals = []
        with translate_os_errors(str(self.stage_dir), doing="create"):
            self.data_dir.mkdir(exist_ok=True)
        self._check_space()
        self.store = StageStore(self.data_dir, is_durable=self._fsync)
        if self._resume:
            self.journal = FileJournal(
                journal_path(self.stage_dir),
                self.journal_of,
                sync=self._sync_data,
                batch_bytes=self._batch_bytes,
                others=journals,
            )
        if self.workers is not None:
            self.workers.share()

    @property
    def journal_of(self) -> str:
        """What journals must be of: the plan, and this directory, which another one may replace (``--force``)."""
        with translate_os_errors(str(self.data_dir), doing="look at"):
            is_there = os.path.lexists(self.data_dir)
            return f"{self._identity} in {os.lstat(self.data_dir).st_ino if is_there else 'none'}"

    def _sync_data(self, files: Iterable[str]) -> None:
        for file in files if self._fsync else ():
            self.store.sync(file)
        if not self._has_synced_names:
            sync_folders(self.stage_dir)
            sync_folder(self.dst.parent)
            self._has_synced_names = True

    def _check_destination(self) -> None:
        if not os.path.lexists(self.dst):
            return
        if not self._force:
            hint = "choose another one, or pass --force"
            if not clear_finished(self.stage_dir, self.dst, is_file=self.is_file):
                hint += f"; {self.stage_dir.name} beside it is of an earlier run"
            raise UsageError("the destination exists", file=str(self.dst), hint=hint)
        check_may_go(self.dst, is_file=self.is_file, keep=self._keep)

    def _acquire(self) -> None:
        """Makes or opens the stage directory, and locks it."""
        lock = lock_folder(self.stage_dir, dst=self.dst)
        self._lock_fd = lock.fd
        if not lock.is_sure:
            self.notes.append(NO_LOCKS)
        if self._is_shared or os.path.lexists(self.stage_dir / WORKERS_LOCK):
            try:
                self.workers = claim(self.stage_dir)
            except BaseException:
                self._unlock()
                raise

    def _check_space(self) -> None:
        if self._needed_bytes:
            with translate_os_errors(str(self.stage_dir), doing="check the free space"):
                status = os.statvfs(self.stage_dir)
                present = sum(
                    entry.stat().st_blocks * 512 for entry in self.data_dir.rglob("*") if not entry.is_symlink()
                )
            free = status.f_bavail * status.f_frsize + present
            if free < self._needed_bytes:
                raise CapacityError(
                    f"the destination needs {self._needed_bytes} bytes, {free} are free",
                    file=str(self.dst.parent),
                    hint="free some space, or write to another disk",
                )

    def commit(self) -> None:
        """Publishes the destination.

        Raises:
            StorageError: the system refuses; if only something after the last rename failed, the message says so: the
                output is complete.
            UsageError: someone made the destination in the meantime.
        """
        if self._fsync:
            self._sync_all()
        self.store.close()
        with translate_os_errors(str(self.dst), doing="publish"):
            self._new = os.lstat(self.data_dir / self.dst.name if self.is_file else self.data_dir)
            replace = replace_file if self.is_file else replace_dir
            try:
                replace(self.data_dir, self.dst, force=self._force)
            except FileExistsError as err:
                raise UsageError("the destination has appeared meanwhile", file=str(self.dst)) from err
        try:
            self._finish()
        except (StorageError, CapacityError) as err:
            raise StorageError(
                "the output is complete, but the system could not confirm that its name is on the disk, or put its "
                "manifest beside it",
                file=str(self.dst),
            ) from err

    def _sync_all(self) -> None:
        try:
            self.store.sync_all()
        except CheckpointingException:
            if self.journal is not None:
                self.journal.distrust()
            raise

    def _finish(self) -> None:
        """What comes after the renames by which the destination got its name."""
        if self.is_file:
            with translate_os_errors(str(self.dst), doing="publish the manifest of"):
                for name in os.listdir(self.data_dir):
                    os.replace(self.data_dir / name, self.dst.parent / name)
        if self._fsync:
            sync_folder(self.dst.parent)
            for folder in reversed(self._made_dirs):
                sync_folder(folder.parent)

    @property
    def _is_committed(self) -> bool:
        """Whether the new destination has its name; asked of the disk, because a signal may come right after it."""
        try:
            return self._new is not None and os.path.samestat(self._new, os.lstat(self.dst))
        except OSError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(keep=self._resume and kind is not None and not self._is_committed)

    def _leave(self, *, keep: bool) -> None:
        """Closes everything and removes the stage; a second Ctrl-C shall not leave half of it behind."""
        for _ in range(_PATIENCE):
            with suppress(KeyboardInterrupt):
                self._clean_up(keep=keep)
                return

    def _clean_up(self, *, keep: bool) -> None:
        """What ``_leave`` does; it can be done again from the beginning."""
        if keep and self.journal is not None:
            try:
                self.journal.flush()
            except CheckpointingException:
                self.notes.append("the journal could not be completed; some work will be done again")
        self._close()
        if self._lock_fd < 0:
            return
        if not self._is_settled():
            self.notes.append(f"{self.stage_dir} holds what was there before; the next run puts it back")
        elif not keep:
            if not remove_stage(self.stage_dir):
                self.notes.append(f"{self.stage_dir} could not be removed")
            if not self._is_committed:
                remove_empty(self._made_dirs)
        self._unlock()

    def _is_settled(self) -> bool:
        """Undoes a publication that stopped half-way, or finishes it; whether nothing of worth is left in the stage."""
        if self._new is None:
            return True
        try:
            if not self._is_committed:
                put_back(self.stage_dir, self.dst)
            elif self.is_file and os.path.lexists(self.data_dir):
                self._finish()
        except (OSError, CheckpointingException):
            return self._is_committed
        return True

    def _close(self) -> None:
        if self.journal is not None:
            journal, self.journal = self.journal, None
            with suppress(OSError):  # every line of it was synced
                journal.close()
        store = getattr(self, "store", None)
        if store is not None:
            with suppress(StorageError):  # the files are thrown away, or were synced
                store.close()

    def _unlock(self) -> None:
        if self.workers is not None:
            self.workers.close()
        fd, self._lock_fd = self._lock_fd, -1
        with suppress(OSError):
            os.close(fd)
