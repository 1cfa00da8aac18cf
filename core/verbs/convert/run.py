"""Convert or reshard a checkpoint in one process, from opening the source to publishing the result.

::

    open → global form → [shard | stack | nest] → lay out → plan → stage, copy, literals, commit

``prepare`` does everything that moves no data, and ``run`` the rest.
``core.verbs.convert.workers.run`` does the same with several workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from core.engine.copy.options import CopyOptions
from core.engine.copy.run import execute
from core.progress import OnProgress, Phase, begin_phase, count_steps
from core.verbs.convert.job import Job as Job
from core.verbs.convert.job import Report as Report
from core.verbs.convert.job import TopologyChange as TopologyChange
from core.verbs.convert.prepare import prepare
from core.verbs.convert.stage import (
    WrittenFingerprints,
    check_replaced,
    finish_data,
    finish_manifest,
    publish,
    report_of,
    request_stage,
)

if TYPE_CHECKING:
    from core.publish.manifest.fingerprint_copy import CopyFingerprints


def run(
    job: Job,
    *,
    progress: OnProgress | None = None,
    publishing: Callable[[Report, int], None] | None = None,
) -> Report:
    """Run the job in this process, all or nothing.

    With ``resume`` a failed run keeps its unfinished staging directory, and the next one continues
    it. A team of several workers calls ``core.verbs.convert.workers.run.run_shared`` instead.

    Args:
        job: the conversion to run.
        progress: called with the phase and its amounts, from this thread and the copying ones.
        publishing: called right before the destination gets its name, with the report and the
            inode that will have that name; of an object store when everything is published, with 0.

    Raises:
        CheckpointingException: the job failed; the destination is untouched.
    """
    begin_phase(progress, Phase.PLANNING)
    job = within_memory(job)
    begun = time.monotonic()
    with prepare(job, progress=progress) as prepared:
        plan, source = prepared.plan, prepared.source
        if job.force:
            check_replaced(prepared)

        # Choose the stage: a new one, or that of an interrupted run of the same job.
        stage = prepared.destination.open_stage(request_stage(prepared))

        # Compute fingerprints of the copied bytes on the way, which saves reading them back.
        watching: AbstractContextManager[CopyFingerprints | None] = nullcontext()
        if job.fingerprint:
            from core.megatron.rules.tables import load_rules
            from core.publish.manifest.fingerprint_copy import observe_copy

            watching = observe_copy(
                plan,
                entry=prepared.dst.name if prepared.is_file else None,
                rules=load_rules(job.rules, unknown=job.unknown),
                device=job.device,
            )

        # From here on the stage is this run's, as callers tell by the phase.
        begin_phase(progress, Phase.COPYING)
        with stage, watching as watch:
            if stage.published is not None:  # an interrupted run had only to publish
                return Report.from_dict(stage.published)

            # Copy the tensors, then write everything else; the manifest comes last.
            literals = stage.begin_literals(prepared.images, plan.places)
            options = CopyOptions(
                crc=job.crc,
                digest=job.digest,
                progress=count_steps(progress, Phase.COPYING, plan.write_bytes),
                journal=stage.journal,
                watch=watch,
                device=job.device,
                on_array=None if literals is None else literals.array_done,
            )
            result = execute(plan, source.store, stage.store, options)
            files = finish_data(prepared, stage, result, literals)
            fingerprints = WrittenFingerprints()
            if watch is not None:
                stage.make_readable(progress=progress)
                fingerprints = WrittenFingerprints(
                    *watch.finish(
                        stage.written_path,
                        threads=job.threads,
                        memory_bytes=job.memory_bytes,
                        progress=progress,
                    )
                )
            finish_manifest(prepared, stage, result, files, fingerprints)

            # Check the result before it becomes visible.
            n_verified = 0
            if job.verify:
                from core.megatron.rules.tables import load_rules
                from core.verbs.convert.verify import verify

                stage.make_readable(from_disk=True, progress=progress)
                begin_phase(progress, Phase.VERIFYING)
                n_verified = verify(
                    plan,
                    source.store,
                    stage.written_path,
                    rules=load_rules(job.rules, unknown=job.unknown),
                    memory_bytes=job.memory_bytes,
                    progress=progress,
                    device=job.device,
                )
            source.store.verify_unchanged()

            def report() -> Report:
                seconds = time.monotonic() - begun
                return report_of(
                    prepared, stage, result, fingerprints, n_verified=n_verified, seconds=seconds
                )

            publish(stage, report, publishing=publishing, progress=progress)
        return report()


def within_memory(job: Job) -> Job:
    """Reserve memory for the job's device, or drop a device that does not fit.

    Raises:
        CapacityError: the device was requested by name, and does not fit into the memory limit.
    """
    if job.device is None:
        return job
    from core.engine.calibration.choice import reserve_device_memory

    device, memory_bytes = reserve_device_memory(
        job.device, memory_bytes=job.memory_bytes, threads=job.threads
    )
    return replace(job, device=device, memory_bytes=memory_bytes)
