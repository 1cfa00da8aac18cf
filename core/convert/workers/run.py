"""A conversion that several workers make together.

::

    lead      prepare, make the files, write the plan ─┬─ check ─┬─ share ─┬─ literals, manifest ─┬─ commit
    others                                             └─ check ─┴─ share ─┘                      └─ done

The lead decides and proves everything, as a single process does (``core.convert.prepare.prepare``), and writes the
proven plan into the stage. All agree on its hash before a byte is written; then each copies its share
(``core.convert.workers.share``). The lead joins their books, so literals, manifest and every other byte are those of a
single process. Only it publishes, and only once every worker has said that its part is on the disk. The stage is always
kept when something fails: the same command, with any number of workers, goes on from the journals.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from core.convert.job import Job, Report
from core.convert.prepare import Prepared, prepare
from core.convert.run import within_memory
from core.convert.stage import Made, finish_data, finish_manifest, identity_text, report_of, stage_of, written_path
from core.convert.stored_plan.division import Division, divided, divided_by_hosts
from core.convert.stored_plan.file import Written, file_digest, finish_plan, write_plan
from core.convert.verify import Comparison, planned_again
from core.convert.workers.share import Done, Order, Share
from core.copy.ledger import Ledger
from core.copy.run import CopyResult
from core.device.device import Device
from core.errors import WorkerError
from core.files.folders import sync_folders
from core.files.network_mounts import file_system_of, is_coherent
from core.files.store import LocalStore, translate_os_errors
from core.megatron.reshard.reshard import load_rules
from core.plan.items import ITEM_BYTES
from core.stage.existing import check_replaceable
from core.stage.journal import BATCH_BYTES
from core.team.protocol import Figures, Team, broadcast_result, gather_results, is_lead

if TYPE_CHECKING:
    from core.fingerprint.definition import Fingerprint
    from core.manifest.of_copy import FileSum
    from core.plan.plan import Plan
    from core.stage.stage import Stage

T = TypeVar("T")
_SPOOLED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How finely work is cut: about the bytes of an item, those of a thread's buffers (None for the plan's), and of
    what a killed worker may lose."""

    item_bytes: int = ITEM_BYTES
    buffer_bytes: int | None = None
    batch_bytes: int = BATCH_BYTES


_USUAL = Sizes()


def run_shared(
    job: Job,
    team: Team,
    *,
    sizes: Sizes = _USUAL,
    publishing: Callable[[Report, int], None] | None = None,
) -> Report:
    """Do the job as one of several workers: what ``core.convert.run.run`` does in one process.

    Args:
        job: the same on all workers.
        team: more than one worker; all of them call this.
        sizes: the same on all workers.
        publishing: as for ``core.convert.run.run``; called at the lead only.

    Raises:
        CheckpointingException: any kind, on all workers; the destination is untouched, and the stage is kept.
    """
    job = replace(within_memory(job), resume=True, beside_bytes=team.runtime_bytes)
    with ExitStack() as stack:
        lead = _Lead(job, team, stack, sizes) if is_lead(team) else None
        order = broadcast_result(team, _by(lead, lambda lead: lead.begin()))
        done = _shared(order, team, job.device, lambda share: share.copy())
        broadcast_result(team, _by(lead, lambda lead: lead.join(done or ())))
        fingerprints = _fingerprints(job, order, team) if job.fingerprint else None
        broadcast_result(team, _by(lead, lambda lead: lead.finish(fingerprints)))
        if job.verify:
            order = broadcast_result(team, _by(lead, lambda lead: lead.begin_verifying()))
            done = _shared(
                order, team, job.device, lambda share: share.compare(Comparison(stack.enter_context(_written(order))))
            )
            broadcast_result(team, _by(lead, lambda lead: lead.finish_verifying(done or ())))
        try:
            return broadcast_result(team, _by(lead, lambda lead: lead.commit(publishing)))
        except (WorkerError, KeyboardInterrupt):
            if lead is None or lead.committed is None:
                raise
            return lead.committed  # somebody is gone who had nothing left to do; an agent ends the others for that


def _fingerprints(job: Job, order: Order, team: Team) -> dict[str, Fingerprint]:
    """The fingerprints of what was written, at the lead; all workers read it."""
    from core.manifest.fingerprint_share import fingerprints_of_directory

    rules = load_rules(job.rules, unknown=job.unknown)
    return fingerprints_of_directory(
        order.written,
        rules=rules,
        threads=job.threads,
        memory_bytes=job.memory_bytes - job.beside_bytes,
        team=team,
        device=job.device,
    ).fingerprints


@contextmanager
def _written(order: Order) -> Iterator[LocalStore]:
    """The files that are compared."""
    assert order.target is not None
    store = LocalStore(order.target)
    try:
        yield store
    finally:
        store.close()


def _by(lead: _Lead | None, work: Callable[[_Lead], T]) -> Callable[[], T]:
    """The work as ``broadcast_result`` wants it; it is called at the lead only."""

    def call() -> T:
        assert lead is not None
        return work(lead)

    return call


def _shared(order: Order, team: Team, device: Device | None, work: Callable[[Share], Done]) -> list[Done] | None:
    """What each worker did, at the lead; no worker begins before all have seen the same plan, stage and source."""
    with ExitStack() as stack:
        shares: list[Share] = []

        def see() -> None:
            shares.append(stack.enter_context(Share(order, team, device=device)))

        gather_results(team, see)
        return gather_results(team, lambda: work(shares[0]))


class _Lead:
    """What only the lead does and knows.

    Args:
        job: what to do.
        team: the workers.
        stack: closes source and stage at the end, whatever happens.
        sizes: how finely work is cut.
    """

    def __init__(self, job: Job, team: Team, stack: ExitStack, sizes: Sizes) -> None:
        self._job = job
        self._team = team
        self._stack = stack
        self._sizes = sizes
        self._begun = time.monotonic()
        self._prepared: Prepared
        self._stage: Stage
        self._result: CopyResult
        self._figures: tuple[Figures, ...] = ()
        self._n_verified = 0
        self._again: Plan | None = None
        self.committed: Report | None = None
        self._files: list[FileSum] = []
        self._made = Made()

    def begin(self) -> Order:
        """Decides, makes the stage with all its files, and writes the plan."""
        job = self._job
        prepared = self._prepared = self._stack.enter_context(prepare(job))
        if job.force:
            check_replaceable(prepared.dst, [image.path for image in prepared.images])
        with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as spooled:
            written = write_plan(
                prepared.plan,
                prepared.source.store,
                spooled,
                options=identity_text(job),
                item_bytes=self._sizes.item_bytes,
            )
            stage = stage_of(prepared, identity=written.identity, is_shared=True)
            self._stage = self._stack.enter_context(stage)
            for image in prepared.images:
                stage.store.create(image.path, image.size)
            sync_folders(stage.stage_dir)
            path = stage.stage_dir / "plan"
            digest = self._stored(path, spooled, written, self._divided(written, stage))
        order = self._order(path, digest, threads=prepared.plan.threads)
        return replace(
            order, journal_identity=stage.journal_identity, crc=job.crc, crc_digest=job.digest, fsync=job.fsync
        )

    def _order(self, plan: Path, digest: str, *, threads: int) -> Order:
        """What all orders of this job have in common."""
        prepared, stage = self._prepared, self._stage
        assert stage.workers is not None
        return Order(
            stage_dir=stage.stage_dir,
            plan=plan,
            digest=digest,
            token=stage.workers.token,
            journal_identity=None,
            written=written_path(prepared, stage),
            source=Path(prepared.source.store.root).absolute(),
            threads=threads,
            **asdict(self._sizes),
        )

    def _divided(self, written: Written, stage: Stage) -> Division:
        """Who writes what: on file systems whose hosts have caches of their own, each file is one host's."""
        hosts, item_bytes = self._team.hosts, self._sizes.item_bytes
        kind = file_system_of(stage.stage_dir)
        if len(set(hosts)) == 1 or is_coherent(kind):
            return divided(written.works, self._team.size, item_bytes=item_bytes)
        division = divided_by_hosts(written.works, written.target_files, hosts, item_bytes=item_bytes)
        stage.notes.append(
            f"on {kind} each file is written by one host, as hosts may overwrite each other's bytes there; the largest "
            f"share is {division.balance:.2f} × the mean"
        )
        return division

    def _stored(self, path: Path, spooled: IO[bytes], written: Written, division: Division) -> str:
        """Writes the plan's file; its SHA-256."""
        finish_plan(spooled, written, division)
        spooled.seek(0)
        with translate_os_errors(str(path), doing="write"), path.open("wb") as file:
            shutil.copyfileobj(spooled, file)
        return file_digest(path)

    def join(self, done: Sequence[Done]) -> None:
        """Joins the books, and writes what is not tensors."""
        prepared, stage, job = self._prepared, self._stage, self._job
        plan = prepared.plan
        ledger = Ledger(plan.places, stage.store, crc=True, digest=job.digest)
        for one in done:
            ledger.join(one.state)
        self._check_complete(ledger)
        self._figures = tuple(one.figures for one in done)
        self._result = CopyResult(
            places=plan.places,
            read_bytes=sum(one.figures.read_bytes for one in done),
            written_bytes=sum(one.figures.written_bytes for one in done),
            resumed_bytes=sum(one.resumed_bytes for one in done),
            ledger=ledger,
        )
        self._files = finish_data(prepared, stage, self._result)

    def finish(self, fingerprints: dict[str, Fingerprint] | None) -> None:
        """Writes the manifest.

        Args:
            fingerprints: of what was written; None if they were not asked for.
        """
        self._made = Made(fingerprints, len(fingerprints or ()))
        finish_manifest(self._prepared, self._stage, self._result, self._files, self._made)

    def _check_complete(self, ledger: Ledger) -> None:
        """Returns if every byte of every array has been written by somebody.

        Raises:
            WorkerError: something was nobody's; a fault of the program.
        """
        if not ledger.is_complete:
            raise WorkerError("the workers' shares do not make the whole: nothing was made visible")

    def begin_verifying(self) -> Order:
        """Plans the comparison of what was written with the source."""
        prepared, stage, job = self._prepared, self._stage, self._job
        stage.store.sync_all()
        again, store = self._stack.enter_context(
            planned_again(
                prepared.plan,
                written_path(prepared, stage),
                rules=load_rules(job.rules, unknown=job.unknown),
                memory_bytes=job.memory_bytes - job.beside_bytes,
            )
        )
        self._again = again
        with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as spooled:
            written = write_plan(again, prepared.source.store, spooled)
            path = stage.stage_dir / "plan-to-verify"
            division = divided(written.works, self._team.size, item_bytes=self._sizes.item_bytes)
            digest = self._stored(path, spooled, written, division)
        return replace(self._order(path, digest, threads=again.threads), target=store.root.absolute())

    def finish_verifying(self, done: Sequence[Done]) -> None:
        """Adds up what was compared.

        Raises:
            WorkerError: something was not compared; a fault of the program.
        """
        assert self._again is not None
        self._n_verified = sum(one.figures.written_bytes for one in done)
        if self._n_verified != self._again.write_bytes:
            raise WorkerError("the workers have not compared everything: nothing was made visible")

    def _report(self) -> Report:
        return report_of(
            self._prepared,
            self._stage,
            self._result,
            self._made,
            n_verified=self._n_verified,
            seconds=time.monotonic() - self._begun,
            workers=self._figures,
        )

    def commit(self, publishing: Callable[[Report, int], None] | None) -> Report:
        """Publishes."""
        self._prepared.source.store.verify_unchanged()
        if publishing is not None:
            publishing(self._report(), os.lstat(written_path(self._prepared, self._stage)).st_ino)
        self._stage.commit()
        self.committed = self._report()
        return self.committed
