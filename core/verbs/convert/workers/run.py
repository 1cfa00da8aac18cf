"""Run a conversion with several workers.

::

    lead      prepare, create files, write plan ─┬─ check ─┬─ share ─┬─ literals, manifest ── commit
    others                                       └─ check ─┴─ share ─┘

The lead decides and proves everything, as a single process does
(``core.verbs.convert.prepare.prepare``), and writes the proven plan into the staging directory. All
workers agree on its hash before a byte is written; then each copies its share
(``core.verbs.convert.workers.share``). The lead joins their ledgers, so literals, manifest and
every other byte are those of a single process. Only the lead publishes, after every worker has
reported that its part is on the disk. The staging directory is always kept when something fails:
the same command, with any number of workers, continues from the journals.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from core.engine.copy.ledger import Ledger
from core.engine.copy.run import CopyResult
from core.engine.device.device import Device
from core.engine.plan.items import ITEM_BYTES
from core.engine.team.protocol import Figures, Team, broadcast_result, gather_results, is_lead
from core.errors import WorkerError
from core.files.source_store import SourceStore, open_store, other_roots
from core.megatron.rules.tables import load_rules
from core.progress import OnProgress, Phase, begin_phase
from core.publish.stage.journal import BATCH_BYTES
from core.publish.stage.protocol import DestinationStage, SharedStage, ShareResult
from core.values import dataclass
from core.verbs.convert.job import Job, Report
from core.verbs.convert.prepare import prepare
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.run import within_memory
from core.verbs.convert.stage import (
    WrittenFingerprints,
    check_replaced,
    finish_data,
    finish_manifest,
    identity_text,
    publish,
    report_of,
    request_stage,
)
from core.verbs.convert.stored_plan.division import Division, divide_by_hosts, divide_work
from core.verbs.convert.stored_plan.file import WrittenPlan, finish_plan, write_plan
from core.verbs.convert.verify import ComparingStage, plan_comparison
from core.verbs.convert.workers.share import WorkerShare, WorkOrder

if TYPE_CHECKING:
    from core.engine.fingerprint.definition import Fingerprint
    from core.engine.plan.plan import Plan
    from core.publish.manifest.of_copy import FileSum
    from core.publish.stage.bucket.literals import EarlyLiterals

T = TypeVar("T")
_SPOOLED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """Granularity of the work, in bytes.

    Args:
        item_bytes: approximate number of bytes that an item writes.
        buffer_bytes: buffers of a thread; None for the plan's.
        batch_bytes: work that a killed worker may lose.
    """

    item_bytes: int = ITEM_BYTES
    buffer_bytes: int | None = None
    batch_bytes: int = BATCH_BYTES


_DEFAULT_SIZES = WorkSizes()


def run_shared(
    job: Job,
    team: Team,
    *,
    sizes: WorkSizes = _DEFAULT_SIZES,
    progress: OnProgress | None = None,
    publishing: Callable[[Report, int], None] | None = None,
) -> Report:
    """Run the job as one of several workers, as ``core.verbs.convert.run.run`` does in one process.

    Args:
        job: the same on all workers.
        team: more than one worker; all of them call this function.
        sizes: the same on all workers.
        progress: called on the lead with the phase; the bytes of a phase are those of the team.
        publishing: as for ``core.verbs.convert.run.run``; called on the lead only.

    Raises:
        CheckpointingException: the job failed, on all workers; the destination is untouched, and
            the staging directory is kept.
    """
    begin_phase(progress, Phase.PLANNING)
    job = replace(within_memory(job), resume=True, beside_bytes=team.runtime_bytes)
    with ExitStack() as stack:
        # Copy: the lead writes the plan, all copy their shares, the lead joins the checksums.
        lead = _Lead(job, team, stack, sizes, progress) if is_lead(team) else None
        order = broadcast_result(team, _by(lead, lambda lead: lead.begin()))
        if isinstance(order, Report):
            return order
        begin_phase(progress, Phase.COPYING)
        results = _run_shares(order, team, job.device, lambda share: share.copy())
        broadcast_result(team, _by(lead, lambda lead: lead.join(results or ())))

        # Fingerprint: all workers read the written files back; the lead has the result.
        fingerprints: dict[str, Fingerprint] | None = None
        if job.fingerprint:
            from core.publish.manifest.fingerprint_share import fingerprints_of_directory

            broadcast_result(team, _by(lead, lambda lead: lead.make_readable()))
            fingerprints = fingerprints_of_directory(
                order.written,
                rules=load_rules(job.rules, unknown=job.unknown),
                threads=job.threads,
                memory_bytes=job.memory_bytes,
                progress=progress,
                team=team,
                device=job.device,
            ).fingerprints
        broadcast_result(team, _by(lead, lambda lead: lead.finish(fingerprints)))

        # Verify: a second plan, whose shares compare instead of writing.
        if job.verify:
            order = broadcast_result(team, _by(lead, lambda lead: lead.begin_verifying()))
            begin_phase(progress, Phase.VERIFYING)
            results = _run_shares(
                order,
                team,
                job.device,
                lambda share: share.compare(ComparingStage(stack.enter_context(_written(order)))),
            )
            broadcast_result(team, _by(lead, lambda lead: lead.finish_verifying(results or ())))

        # Publish. A worker that is lost after that had nothing left to do: the job has succeeded.
        try:
            return broadcast_result(team, _by(lead, lambda lead: lead.commit(publishing)))
        except (WorkerError, KeyboardInterrupt):
            if lead is None or lead.committed is None:
                raise
            return lead.committed


@contextmanager
def _written(order: WorkOrder) -> Iterator[SourceStore]:
    """Open the files to compare, and close them after the block."""
    assert order.target is not None
    store = open_store(order.target)
    try:
        yield store
    finally:
        store.close()


def _by(lead: _Lead | None, work: Callable[[_Lead], T]) -> Callable[[], T]:
    """Bind work to the lead: only the lead may call the returned function."""

    def call() -> T:
        assert lead is not None
        return work(lead)

    return call


def _run_shares(
    order: WorkOrder, team: Team, device: Device | None, work: Callable[[WorkerShare], ShareResult]
) -> list[ShareResult] | None:
    """Run each worker's share after all workers have opened plan, staging directory and source.

    Returns:
        The results of all workers on the lead, None on the others.
    """
    with ExitStack() as stack:
        shares: list[WorkerShare] = []

        def open_share() -> None:
            shares.append(stack.enter_context(WorkerShare(order, team, device=device)))

        gather_results(team, open_share)
        return gather_results(team, lambda: work(shares[0]))


class _Lead:
    """The lead's part of a job: its steps in order, and their state.

    Args:
        job: the conversion.
        team: the workers.
        stack: closes source and staging directory at the end, whatever happens.
        sizes: granularity of the work.
        progress: called with the phase and its amounts.
    """

    def __init__(
        self,
        job: Job,
        team: Team,
        stack: ExitStack,
        sizes: WorkSizes,
        progress: OnProgress | None,
    ) -> None:
        self._job = job
        self._team = team
        self._stack = stack
        self._sizes = sizes
        self._progress = progress
        self._begun = time.monotonic()
        self._prepared: Prepared
        self._stage: DestinationStage
        self._shared: SharedStage
        self._literals: EarlyLiterals | None = None
        self._result: CopyResult
        self._figures: tuple[Figures, ...] = ()
        self._n_verified = 0
        self._comparison: Plan | None = None
        self.committed: Report | None = None
        self._files: list[FileSum] = []
        self._fingerprints = WrittenFingerprints()

    def begin(self) -> WorkOrder | Report:
        """Prepare the job, create all files in the staging area, and write the plan.

        Returns:
            The order; or the report of an earlier launch, if its publication was only finished now.
        """
        job = self._job
        prepared = self._prepared = self._stack.enter_context(prepare(job, progress=self._progress))
        if job.force:
            check_replaced(prepared)
        with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as spooled:
            written = write_plan(
                prepared.plan,
                prepared.source.store,
                spooled,
                options=identity_text(job),
                item_bytes=self._sizes.item_bytes,
            )
            # The plan's hash identifies the staging directory, so the plan waits in a spool.
            request = request_stage(
                prepared,
                identity=written.identity,
                is_shared=True,
                batch_bytes=self._sizes.batch_bytes,
            )
            stage = self._stage = prepared.destination.open_stage(request)
            # From here on the stage is this run's, as callers tell by the phase.
            begin_phase(self._progress, Phase.COPYING)
            self._stack.enter_context(stage)
            if stage.published is not None:  # an interrupted launch had only to publish
                return Report.from_dict(stage.published)
            for image in prepared.images:
                stage.store.create(image.path, image.size)
            self._literals = stage.begin_literals(prepared.images, prepared.plan.places)
            self._shared = stage.share()
            order = self._order(
                "plan", spooled, written, self._divide(written), threads=prepared.plan.threads
            )
        return replace(order, crc=job.crc, crc_digest=job.digest)

    def _order(
        self,
        name: str,
        spooled: tempfile.SpooledTemporaryFile[bytes],
        written: WrittenPlan,
        division: Division,
        *,
        threads: int,
    ) -> WorkOrder:
        """Store a plan with its division under a name, and build the order for it."""
        prepared = self._prepared
        finish_plan(spooled, written, division)
        spooled.seek(0)
        digest = hashlib.file_digest(spooled, "sha256")
        path = self._shared.write_plan(name, spooled)
        return WorkOrder(
            stage=self._shared,
            plan=path,
            digest=digest.hexdigest(),
            written=self._stage.written_path,
            source=prepared.source.store.root.absolute(),
            other_sources=other_roots(prepared.source.store),
            threads=threads,
            memory_bytes=prepared.job.own_memory_bytes,
            item_bytes=self._sizes.item_bytes,
            buffer_bytes=self._sizes.buffer_bytes,
        )

    def _divide(self, written: WrittenPlan) -> Division:
        """Divide the work; only one host writes each file if the hosts' caches are not coherent."""
        hosts, item_bytes = self._team.hosts, self._sizes.item_bytes
        kind = None if len(set(hosts)) == 1 else self._shared.find_incoherent_file_system()
        if kind is None:
            return divide_work(written.works, self._team.size, item_bytes=item_bytes)
        division = divide_by_hosts(
            written.works, written.target_files, hosts, item_bytes=item_bytes
        )
        self._stage.notes.append(
            "each file is written by a single host, because hosts may overwrite each other's bytes "
            f"on {kind}; the largest share is {division.balance:.2f} × the mean"
        )
        return division

    def join(self, done: Sequence[ShareResult]) -> None:
        """Join the workers' ledgers, and write everything that is not a tensor.

        Args:
            done: the results of all workers.

        Raises:
            WorkerError: some bytes were not written by any worker, which is a bug.
        """
        prepared, stage, job = self._prepared, self._stage, self._job
        plan = prepared.plan
        places, literals = plan.places, self._literals
        ledger = Ledger(
            places,
            stage.store,
            crc=True,
            digest=job.digest,
            on_array=None if literals is None else literals.array_done,
        )
        stage.take_shares(done, places)
        for share in done:
            ledger.join(share.state)
        if not ledger.is_complete:
            raise WorkerError(
                "the workers' shares do not cover all the data, so nothing was published"
            )
        self._figures = tuple(share.figures for share in done)
        self._result = CopyResult(
            places=plan.places,
            read_bytes=sum(share.figures.read_bytes for share in done),
            written_bytes=sum(share.figures.written_bytes for share in done),
            resumed_bytes=sum(share.resumed_bytes for share in done),
            ledger=ledger,
        )
        self._files = finish_data(prepared, stage, self._result, literals)

    def make_readable(self) -> None:
        """Make the written files readable for all workers."""
        self._stage.make_readable(progress=self._progress)

    def finish(self, fingerprints: dict[str, Fingerprint] | None) -> None:
        """Write the manifest.

        Args:
            fingerprints: fingerprints of the written tensors; None if they were not requested.
        """
        self._fingerprints = WrittenFingerprints(fingerprints, len(fingerprints or ()))
        finish_manifest(self._prepared, self._stage, self._result, self._files, self._fingerprints)

    def begin_verifying(self) -> WorkOrder:
        """Plan the comparison of the written files with the source, and return the order for it."""
        prepared, stage, job = self._prepared, self._stage, self._job
        stage.make_readable(from_disk=True, progress=self._progress)
        comparison, store = self._stack.enter_context(
            plan_comparison(
                prepared.plan,
                stage.written_path,
                rules=load_rules(job.rules, unknown=job.unknown),
                memory_bytes=job.own_memory_bytes,
            )
        )
        self._comparison = comparison
        with tempfile.SpooledTemporaryFile(_SPOOLED_BYTES) as spooled:
            written = write_plan(comparison, prepared.source.store, spooled)
            division = divide_work(
                written.works, self._team.size, item_bytes=self._sizes.item_bytes
            )
            order = self._order(
                "plan-to-verify", spooled, written, division, threads=comparison.threads
            )
        return replace(order, target=store.root.absolute())

    def finish_verifying(self, done: Sequence[ShareResult]) -> None:
        """Add up the bytes that were compared.

        Raises:
            WorkerError: not everything was compared, which is a bug.
        """
        assert self._comparison is not None
        self._n_verified = sum(share.figures.written_bytes for share in done)
        if self._n_verified != self._comparison.write_bytes:
            raise WorkerError("the workers did not compare all the data, so nothing was published")

    def _report(self) -> Report:
        return report_of(
            self._prepared,
            self._stage,
            self._result,
            self._fingerprints,
            n_verified=self._n_verified,
            seconds=time.monotonic() - self._begun,
            workers=self._figures,
        )

    def commit(self, publishing: Callable[[Report, int], None] | None) -> Report:
        """Publish the destination, and return the report."""
        self._prepared.source.store.verify_unchanged()
        publish(self._stage, self._report, publishing=publishing, progress=self._progress)
        self.committed = self._report()
        return self.committed
