"""Copy one worker's share of a plan into a stage that several workers fill.

A worker opens the plan, the source and the stage that the lead's order names, and checks that they
are the lead's: the stage by its lock's token (``core.publish.stage.shared``), the plan by its hash,
the source's files by size and modification time. It copies its share, waits until it is stored, and
returns its checksums. No worker reads bytes of another before that one has finished.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.engine.device.device import Device
from core.engine.plan.items import ITEM_BYTES
from core.engine.team.protocol import Figures, Team, is_lead
from core.errors import CheckpointingException, UsageError
from core.files.source_store import open_joined
from core.files.store import TargetStore
from core.publish.stage.journal import FileJournal
from core.publish.stage.protocol import SharedStage, ShareResult
from core.values import dataclass
from core.verbs.convert.stored_plan.file import StoredPlan

PATIENCE_SECONDS = 5.0
"""Time that a worker waits for the lead's files, which appear late on network file systems."""
_PAUSE_SECONDS = 0.2
_N_CHECKED_FILES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOrder:
    """The lead's order to all workers.

    Args:
        stage: the stage.
        plan: path of the plan's file.
        digest: SHA-256 of the plan's file.
        written: path of the destination before it is published.
        source: directory of the source.
        other_sources: directories of the other sources of a merge.
        target: directory whose files are compared; None if files are written.
        threads: number of copying threads.
        memory_bytes: memory that the engine may use in each worker.
        crc, crc_digest: compute CRC-32s, and content digests.
        item_bytes, buffer_bytes: as for ``core.engine.copy.options.CopyOptions``.
    """

    stage: SharedStage
    plan: Path
    digest: str
    written: Path
    source: Path
    other_sources: tuple[Path, ...] = ()
    target: Path | None = None
    threads: int
    memory_bytes: int
    crc: bool = True
    crc_digest: bool = True
    item_bytes: int = ITEM_BYTES
    buffer_bytes: int | None = None


class WorkerShare:
    """Context manager of a worker's share: the open plan, source and staging directory.

    Args:
        order: the lead's order.
        team: the team, as this worker sees it.
        device: this worker's device for per-byte work, or None.
        patience_s: how long to wait for the lead's files, in seconds.

    Raises (on entering):
        UsageError: this host does not see the lead's files.
        CorruptError: the plan is not the lead's.
        StorageError: another run has taken over, or a file cannot be read.
    """

    def __init__(
        self,
        order: WorkOrder,
        team: Team,
        *,
        device: Device | None = None,
        patience_s: float = PATIENCE_SECONDS,
    ) -> None:
        self._device = device
        self._order = order
        self._team = team
        self._patience_s = patience_s
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for folder in (self._order.source, *self._order.other_sources):
                self._wait_for(folder, "the source")
            opened = self._order.stage.open_plan(
                self._order.plan, is_lead=is_lead(self._team), wait_for=self._wait_for
            )
            plan = StoredPlan(
                stack.enter_context(opened),
                self._order.digest,
                rank=self._team.rank,
                threads=self._order.threads,
            )
            self._plan = stack.enter_context(plan)
            self._source = open_joined(
                self._order.source, self._order.other_sources, stamps=self._plan.stamps
            )
            stack.callback(self._source.close)
            self._source.limit_reading(self._order.memory_bytes, threads=self._order.threads)
            self._check_source()
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.close()

    def copy(self) -> ShareResult:
        """Copy the share into the stage.

        Raises:
            CheckpointingException: as for ``core.engine.copy.run.execute``, and StoppedError.
        """
        order, plan = self._order, self._plan

        def copy(store: TargetStore, journal: FileJournal | None) -> ShareResult:
            return self._execute(store, crc=order.crc, digest=order.crc_digest, journal=journal)

        return order.stage.copy_share(
            copy, rank=self._team.rank, places=plan.places, tensors=plan.numbers
        )

    def compare(self, target: TargetStore) -> ShareResult:
        """Compare the share with the written files.

        Args:
            target: a store that compares instead of writing.

        Raises:
            CheckpointingException: as for ``core.verbs.convert.verify.verify``, and StoppedError.
        """
        return self._execute(target, crc=False, digest=False, journal=None)

    def _execute(
        self, store: TargetStore, *, crc: bool, digest: bool, journal: FileJournal | None
    ) -> ShareResult:
        team = self._team
        begun = time.monotonic()
        team.expect(self._plan.write_bytes)
        options = CopyOptions(
            buffer_bytes=self._order.buffer_bytes,
            item_bytes=self._order.item_bytes,
            crc=crc,
            digest=digest,
            progress=team.advance,
            journal=journal,
            device=self._device,
            before_item=lambda: team.advance(0),
        )
        result = execute(self._plan, self._source, store, options)
        self._source.verify_unchanged()
        figures = Figures(
            team.rank,
            team.hosts[team.rank],
            result.read_bytes,
            result.written_bytes,
            time.monotonic() - begun,
        )
        return ShareResult(result.ledger.state(), figures, result.resumed_bytes)

    def _wait_for(self, path: Path, label: str) -> None:
        """Wait until a path exists.

        Raises:
            UsageError: the path does not appear in time.
        """
        until = time.monotonic() + self._patience_s
        while not path.exists():
            if time.monotonic() >= until:
                raise self._not_visible(path, label)
            # A network file system may have cached that the path does not exist; listing the
            # directory makes it look again.
            with suppress(OSError):
                os.listdir(path.parent)
            time.sleep(_PAUSE_SECONDS)

    def _check_source(self) -> None:
        """Raise unless the first files of the source are the lead's.

        Raises:
            UsageError: the files differ on another host than the lead's.
            CheckpointingException: the files differ on the lead's own host.
        """
        for name in list(self._plan.stamps)[:_N_CHECKED_FILES]:
            try:
                self._source.size(name)
            except CheckpointingException as err:
                if self._team.hosts[self._team.rank] == self._team.hosts[0]:
                    raise  # the lead's own host: the source has changed since the plan was made
                raise self._not_visible(
                    self._order.source / name, f"the source's file ({err.message})"
                ) from err

    def _not_visible(self, path: Path, label: str) -> UsageError:
        """Build the error about a path that only other hosts have."""
        hosts, rank = self._team.hosts, self._team.rank
        return UsageError(
            f"worker {rank} on host {hosts[rank]} cannot see {label}, "
            f"unlike worker 0 on host {hosts[0]}",
            file=str(path),
            hint="use paths on a shared file system, so that all hosts see the same files under "
            "the same paths",
        )
