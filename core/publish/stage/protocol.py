"""What a command asks of a place to which it writes a checkpoint.

::

    choose_destination ─▶ OutputDestination ─ open_stage ─▶ DestinationStage ─ share ─▶ SharedStage
    by its location       before anything is written        one run                     for workers

Nothing else asks what kind of place a destination is: a new kind implements these protocols, and
``core.publish.stage.destination`` chooses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

from core.publish.stage.journal import BATCH_BYTES, FileJournal
from core.values import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType
    from typing import IO

    from core.engine.catalog.file_image import FileImage
    from core.engine.copy.ledger import LedgerState
    from core.engine.plan.positions import Places
    from core.engine.team.protocol import Figures
    from core.errors import CapacityError
    from core.files.store import TargetStore, WriteStore
    from core.progress import OnProgress
    from core.publish.stage.bucket.literals import EarlyLiterals
    from core.publish.stage.bucket.parts import SentShare


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """The output for which a stage is opened.

    Args:
        images: the files to write.
        n_bytes: their total size; 0 skips the check of the free space.
        is_file: the output is a single file, whose manifest is next to it.
        resume: keep what was written if the run fails, and continue what a run of the same plan has
            kept.
        keeps_after: with ``resume``, keep it only after an interruption (Ctrl-C, SIGTERM) of work
            that has taken so many seconds, or if it continues an earlier run's; None keeps it after
            any failure.
        force: replace what is at the destination, at the end.
        fsync: wait for the disk.
        reads_back: the output is read back before it is published.
        identify: returns the identity of the plan; called if other runs have to recognise it.
        keep: paths that an existing destination must not contain, and must not be inside of, such
            as the source.
        check_replaced: raises if what is at the destination may not be replaced. With ``force``, a
            directory calls it right before the replacement, as files may have been added while the
            run wrote; a bucket when it lists the objects to delete, as others stay.
        memory_bytes: memory limit of the process; 0 for as few buffers as possible.
        batch_bytes: with ``resume``, how many bytes a killed run may lose.
        is_shared: several workers write the output; needs ``resume``.
    """

    images: Sequence[FileImage] = ()
    n_bytes: int = 0
    is_file: bool = False
    resume: bool = False
    keeps_after: float | None = None
    force: bool = False
    fsync: bool = True
    reads_back: bool = False
    identify: Callable[[], str] = str
    keep: Sequence[Path] = ()
    check_replaced: Callable[[], None] = lambda: None
    memory_bytes: int = 0
    batch_bytes: int = BATCH_BYTES
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """The space that a run will find.

    Args:
        free_bytes: free space; what an interrupted run has written is free.
        resumed_bytes: bytes that an interrupted run of the same plan has written.
        shortage: the error with which the run would end, if that is too little.
        folder: an existing directory of the same disk, whose speed can be measured.
    """

    free_bytes: int
    resumed_bytes: int
    shortage: CapacityError | None
    folder: Path


@dataclass(frozen=True, slots=True)
class ShareResult:
    """The result of a worker's share.

    Args:
        state: state of the worker's ledger.
        figures: figures for the report.
        resumed_bytes: bytes of the target that an earlier run had written.
        sent: what the worker has sent to an object store; None for a directory.
    """

    state: LedgerState
    figures: Figures
    resumed_bytes: int
    sent: SentShare | None = None


class OutputDestination(Protocol):
    """A place to which a checkpoint is written; each method may raise a StorageError.

    Attributes:
        is_on_disk: the libraries that load checkpoints can open the result by its path.
    """

    is_on_disk: bool

    def check_writable(self, *, needs_links: bool) -> None:
        """Raise a UsageError if nothing, or no hard link to the source, can be written there."""

    def check_may_replace(self, *, is_file: bool, keep: Sequence[Path]) -> None:
        """Raise a UsageError if it is known that what exists there may not be replaced."""

    def estimate_sending(self, images: Sequence[FileImage], memory_bytes: int) -> int:
        """Return the memory that writing takes besides that of the copy, in bytes."""

    def find_space(self, request: StageRequest) -> Space | None:
        """Return the space that a run will find; None where neither space nor speed is measured."""

    def open_stage(self, request: StageRequest) -> DestinationStage:
        """Return the stage of a run; nothing is touched until it is entered."""

    def describe_remains(
        self, *, has_begun: bool, inode: int | None, keeps_partial: bool, command: str | None
    ) -> str:
        """Return what an interrupted command has left, and how to continue.

        Args:
            has_begun: the command may have opened the stage; else what exists is another run's.
            inode: that of the stage, if the run was about to publish it, or has; else None.
            keeps_partial: an interrupted run keeps what it has written, however little.
            command: the command line, which continues if it is run again; None if it must not be
                shown.
        """

    def finish_publication(self) -> None:
        """Finish the work of a run that was killed when the destination had its name already."""


class DestinationStage(Protocol):
    """An unfinished destination; a context manager, which removes what was not committed.

    Attributes:
        store: the files being written.
        journal: records which work is done; None if there is nothing to record.
        notes: what happened to the work of an earlier run and similar, one sentence each.
        published: the report of an earlier run of the same job, if entering has finished its
            publication; then there is nothing else to do.

    Raises (on entering):
        UsageError: the destination exists, or replacing it would remove a path that must be kept.
        StorageError: another run is writing to it, or the system or the store refuses.
        CapacityError: too little free space.
    """

    store: TargetStore
    journal: FileJournal | None
    notes: list[str]
    published: Mapping[str, Any] | None

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def resumed_bytes(self) -> int:
        """Number of bytes that an earlier run had sent, which no journal counts."""

    @property
    def written_path(self) -> Path:
        """Path at which the output can be read after ``make_readable``."""

    @property
    def inode(self) -> int:
        """Inode that the destination will have; 0 if it will have none."""

    def begin_literals(self, images: Sequence[FileImage], places: Places) -> EarlyLiterals | None:
        """Return what writes the bytes around arrays early; None if they wait for the arrays."""

    def link_file(self, name: str, path: Path) -> None:
        """Make a file of the output a hard link to a file of the source.

        Raises:
            UnsupportedError: the file system has no hard links to it.
        """

    def share(self) -> SharedStage:
        """Let other workers write to the files, which have been created.

        Raises:
            UsageError: several processes cannot write to this destination.
        """

    def take_shares(self, shares: Sequence[ShareResult], places: Places) -> None:
        """Take over what all workers have written, before their ledgers are joined.

        Raises:
            CorruptError: it is not what they have written.
        """

    def write_manifest(self, name: str, write: Callable[[WriteStore], None]) -> None:
        """Write the manifest; ``write`` writes it to a store under the name."""

    def make_readable(self, *, from_disk: bool = False, progress: OnProgress | None = None) -> None:
        """Make the written files readable.

        Args:
            from_disk: they will be read from the disk rather than from the page cache, if the
                destination has to be on the disk.
            progress: called with the phase, or the files that have been synced.
        """

    def commit(self, report: Mapping[str, Any], *, progress: OnProgress | None = None) -> None:
        """Publish the destination.

        Args:
            report: the report of this run.
            progress: called with the files that have been synced, and with the phase.

        Raises:
            CorruptError: bytes of an object were never written.
            UsageError: another process has written to the destination in the meantime.
            StorageError: the system or the store refuses. If only a step after the destination got
                its name failed, the message adds that the output is complete.
        """


class SharedStage(Protocol):
    """A stage that several workers fill, as the lead tells them; can be pickled."""

    def find_incoherent_file_system(self) -> str | None:
        """Return the file system on which hosts may overwrite each other's bytes; else None."""

    def write_plan(self, name: str, file: IO[bytes]) -> Path:
        """Write a plan beside the output, and return its path."""

    def open_plan(
        self, path: Path, *, is_lead: bool, wait_for: Callable[[Path, str], None]
    ) -> AbstractContextManager[Path]:
        """Return a local path of a plan, and keep other runs out in the block.

        Args:
            path: from ``write_plan``.
            is_lead: the worker is the one that opened the stage.
            wait_for: waits until a path, which the label describes, exists.

        Raises (on entering):
            StorageError: another run has taken over the stage.
        """

    def copy_share(
        self,
        copy: Callable[[TargetStore, FileJournal | None], ShareResult],
        *,
        rank: int,
        places: Places,
        tensors: Container[int],
    ) -> ShareResult:
        """Copy a worker's share, and return its result when it is stored.

        Args:
            copy: copies the share into a store, and notes in a journal what is done.
            rank: the worker.
            places: positions of the arrays.
            tensors: numbers of the tensors whose work is divided.
        """
