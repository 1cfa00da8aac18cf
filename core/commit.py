"""Publication: a destination appears complete or not at all.

Everything is written into a *stage*, a hidden sibling of the destination with a fixed name::

    out/                        does not exist yet
    .out.ckpt-stage/            locked (flock) as long as someone works on it
    ├── data/                   becomes out/; for a single file: its file and manifest
    └── journal.jsonl           only with resume

``Stage.commit`` syncs the files, then the directories, renames ``data`` and syncs the parent. Any other way out removes
the stage, save for a failure with ``resume``. A stage whose owner was killed carries no lock: the next run says so and
removes it, or continues it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from core.errors import CapacityError, CheckpointingException, StorageError, UsageError
from core.folder_lock import NO_LOCKS, lock_folder
from core.folders import empty_folder, sync_folder
from core.journal import BATCH_BYTES, FileJournal, is_journal_of
from core.linux import exchange, rename_new
from core.manifest import manifest_name
from core.stage_store import StageStore
from core.store import translated

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
        identity: of the plan, see ``core.journal.identity_of``; needed with ``resume``.
        needed_bytes: bytes of all files to come; 0 leaves the free space unchecked.
        keep: paths that the destination must neither contain nor, if it exists, lie in, such as the source.
        batch_bytes: with ``resume``, how much a killed run may lose.

    Attributes:
        store: the files being written.
        journal: None without ``resume``.
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
        self._lock_fd = -1
        self._is_committed = False
        self._is_continued = False
        self._made_dirs: list[Path] = []

    def __enter__(self) -> Self:
        self._check_destination()
        self._make_parents()
        try:
            self._acquire()
        except BaseException:
            self._remove_parents()
            raise
        try:
            self._begin()
        except BaseException:
            self._leave(keep=self._is_continued)
            raise
        return self

    def _begin(self) -> None:
        journal_path = self.stage_dir / "journal.jsonl"
        if self._resume and is_journal_of(journal_path, self._identity):
            self._is_continued = True
            self.notes.append("continuing the unfinished stage")
        elif any(self.stage_dir.iterdir()):
            self.notes.append(
                f"{self.stage_dir.name}, left behind by an earlier run, "
                + ("belongs to other input or options; it was removed" if self._resume else "was removed")
            )
            empty_folder(self.stage_dir)
        with translated(str(self.stage_dir), doing="create"):
            self.data_dir.mkdir(exist_ok=True)
        self._check_space()
        self.store = StageStore(self.data_dir, is_durable=self._fsync)
        if self._resume:
            self.journal = FileJournal(
                journal_path, self._identity, sync=self._sync_data, batch_bytes=self._batch_bytes
            )

    def _sync_data(self, files: Iterable[str]) -> None:
        for file in files:
            self.store.sync(file)

    def _check_destination(self) -> None:
        if not os.path.lexists(self.dst):
            return
        if not self._force:
            raise UsageError("the destination exists", file=str(self.dst), hint="choose another one, or pass --force")
        if self.dst.is_dir() == self.is_file or self.dst.is_symlink():
            raise UsageError(
                "the destination is of another kind than what would replace it", file=str(self.dst), hint="remove it"
            )
        target = self.dst.resolve()
        for path in (*self._keep, Path.cwd(), Path.home()):
            if path.resolve().is_relative_to(target):
                raise UsageError(f"replacing the destination would remove {path}", file=str(self.dst))
        for path in self._keep:
            if target.is_relative_to(path.resolve()):
                raise UsageError(
                    f"the destination is a part of {path}, so it is not replaced",
                    file=str(self.dst),
                    hint="choose another one",
                )
        if os.path.ismount(self.dst):
            raise UsageError("the destination is a mount point", file=str(self.dst), hint="write to a directory in it")

    def _make_parents(self) -> None:
        missing = []
        parent = self.dst.parent
        while not parent.exists():
            missing.append(parent)
            parent = parent.parent
        for folder in reversed(missing):
            with translated(str(folder), doing="create"):
                folder.mkdir()
            self._made_dirs.append(folder)

    def _remove_parents(self) -> None:
        for folder in reversed(self._made_dirs):
            try:
                folder.rmdir()
            except OSError:
                return

    def _acquire(self) -> None:
        """Makes or opens the stage directory, and locks it."""
        lock = lock_folder(self.stage_dir, dst=self.dst)
        self._lock_fd = lock.fd
        if not lock.is_sure:
            self.notes.append(NO_LOCKS)

    def _check_space(self) -> None:
        if self._needed_bytes:
            with translated(str(self.stage_dir), doing="check the free space"):
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
            StorageError: the system refuses; if only the last sync failed, the message says so: the output is complete.
            UsageError: someone made the destination in the meantime.
        """
        if self._fsync:
            self.store.sync_all()
        self.store.close()
        with translated(str(self.dst), doing="publish"):
            try:
                self._publish_file() if self.is_file else self._publish_dir()
            except FileExistsError as err:
                raise UsageError("the destination has appeared meanwhile", file=str(self.dst)) from err
        self._is_committed = True
        if self._fsync:
            try:
                sync_folder(self.dst.parent)
            except StorageError as err:
                raise StorageError(
                    "the output is complete, but the system could not confirm that its name is on the disk",
                    file=str(self.dst),
                ) from err

    def _publish_dir(self) -> None:
        if not os.path.lexists(self.dst):
            rename_new(self.data_dir, self.dst)
        elif not self._force:
            raise FileExistsError
        elif not exchange(self.data_dir, self.dst):
            old_dir = self.stage_dir / "old"
            os.rename(self.dst, old_dir)
            try:
                os.rename(self.data_dir, self.dst)
            except OSError:
                os.rename(old_dir, self.dst)
                raise

    def _publish_file(self) -> None:
        manifest = manifest_name(self.dst.name)
        if self._force:
            (self.dst.parent / manifest).unlink(missing_ok=True)
            os.replace(self.data_dir / self.dst.name, self.dst)
        else:
            rename_new(self.data_dir / self.dst.name, self.dst)
        for name in os.listdir(self.data_dir):
            os.replace(self.data_dir / name, self.dst.parent / name)

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
        if keep:
            self._unlock()
        elif self._lock_fd >= 0:
            self._remove_stage()
            if not self._is_committed:
                self._remove_parents()

    def _close(self) -> None:
        if self.journal is not None:
            journal, self.journal = self.journal, None
            journal.close()
        store = getattr(self, "store", None)
        if store is not None:
            with suppress(StorageError):  # the files are thrown away, or were synced
                store.close()

    def _remove_stage(self) -> None:
        shutil.rmtree(self.stage_dir, ignore_errors=True)
        if self.stage_dir.exists():
            self.notes.append(f"{self.stage_dir} could not be removed")
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            fd, self._lock_fd = self._lock_fd, -1
            os.close(fd)
