"""Let several workers write to the files of one staging directory.

::

    .out.ckpt-stage/
    ├── data/            the files, created by the lead, filled by all: every byte has one owner
    ├── plan             the division of work; its hash is checked
    ├── journal.jsonl    finished items of the lead; journal-1.jsonl for worker 1 …
    └── workers.lock     held by all that may still write (core.publish.stage.workers_lock)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from core.errors import CheckpointingException, StorageError
from core.files.network_mounts import file_system_of, is_coherent
from core.files.store import TargetStore, override, translate_os_errors
from core.publish.stage.files import StageStore
from core.publish.stage.journal import FileJournal, journal_path, journals_in
from core.publish.stage.protocol import SharedStage, ShareResult
from core.publish.stage.workers_lock import join_stage
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.plan.positions import Places

_DATA = "data"


@dataclass(frozen=True, slots=True)
class SharedDirectory(SharedStage):
    """A staging directory, as the lead tells it to all workers.

    Args:
        stage_dir: the staging directory.
        token: token of the run (``core.publish.stage.workers_lock``).
        journal_identity: identity that journals must have.
        fsync: wait until the bytes are on the disk.
        batch_bytes: work that a killed worker may lose.
    """

    stage_dir: Path
    token: str
    journal_identity: str
    fsync: bool
    batch_bytes: int

    @override
    def find_incoherent_file_system(self) -> str | None:
        kind = file_system_of(self.stage_dir)
        return None if is_coherent(kind) else kind

    @override
    def write_plan(self, name: str, file: IO[bytes]) -> Path:
        path = self.stage_dir / name
        file.seek(0)
        with translate_os_errors(str(path), doing="write"), path.open("wb") as target:
            shutil.copyfileobj(file, target)
        return path

    @override
    @contextmanager
    def open_plan(
        self, path: Path, *, is_lead: bool, wait_for: Callable[[Path, str], None]
    ) -> Iterator[Path]:
        wait_for(self.stage_dir / _DATA, "the unfinished destination")
        # Hold the lock, so that no other run takes over while this worker may still write.
        with nullcontext() if is_lead else closing(join_stage(self.stage_dir, self.token)):
            yield path

    @override
    def copy_share(
        self,
        copy: Callable[[TargetStore, FileJournal | None], ShareResult],
        *,
        rank: int,
        places: Places,
        tensors: Container[int],
    ) -> ShareResult:
        store = StageStore(self.stage_dir / _DATA, is_durable=self.fsync)

        def sync(files: Iterable[str]) -> None:
            for file in files if self.fsync else ():
                store.sync(file)

        try:
            # The journal lists an item only after its bytes are on the disk.
            journal = FileJournal(
                journal_path(self.stage_dir, rank),
                self.journal_identity,
                sync=sync,
                batch_bytes=self.batch_bytes,
                others=journals_in(self.stage_dir),
                keys=tensors,
            )
            try:
                result = copy(store, journal)
                journal.flush()
            except BaseException:
                with suppress(CheckpointingException):
                    journal.flush()
                raise
            finally:
                journal.close()
            if self.fsync:
                store.sync_files()
        except BaseException:
            with suppress(StorageError):  # report the first error, not one of closing after it
                store.close()
            raise
        store.close()  # a network file system may report a failed write only here
        return result
