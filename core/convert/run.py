"""Convert or reshard in one process: where format, layout, plan, copy and commit meet.

::

    open → global form → [shard | stack | nest] → lay out → plan → stage, copy, literals, commit

``prepare`` does everything that moves no data, and ``run`` the rest. With several workers
``core.convert.workers.run`` does it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from core.convert.job import Job as Job
from core.convert.job import Progress as Progress
from core.convert.job import Report as Report
from core.convert.job import TopologyChange as TopologyChange
from core.convert.prepare import Prepared, prepare
from core.convert.stage import (
    WrittenFingerprints,
    finish_data,
    finish_manifest,
    identity_text,
    report_of,
    stage_of,
    written_path,
)
from core.convert.stored_plan.file import identity_of
from core.convert.verify import verify
from core.copy.options import CopyOptions
from core.copy.run import execute
from core.megatron.reshard.reshard import load_rules
from core.stage.existing import check_replaceable
from core.stage.stage import Stage

if TYPE_CHECKING:
    from core.manifest.fingerprint_copy import CopyFingerprints


def run(
    job: Job,
    *,
    progress: Progress | None = None,
    publishing: Callable[[Report, int], None] | None = None,
) -> Report:
    """Run the job in this process: all or nothing, unless ``resume`` keeps an unfinished stage.

    A team of several workers calls ``core.convert.workers.run.run_shared`` instead.

    Args:
        job: what to do.
        progress: called with (bytes done, bytes in total) from the copying threads.
        publishing: called right before the destination gets its name, with the report and the
            inode that will have that name.

    Raises:
        CheckpointingException: the job failed; the destination is untouched.
    """
    job = within_memory(job)
    begun = time.monotonic()
    with prepare(job) as prepared:
        # Open the stage, or continue the one that an interrupted run of the same job left.
        plan, source = prepared.plan, prepared.source
        if job.force:
            check_replaceable(prepared.dst, [image.path for image in prepared.images])
        identity = identity_of(plan, source.store, options=identity_text(job)) if job.resume else ""
        stage = stage_of(prepared, identity=identity)
        with stage, _watch(prepared) as watch:
            # Copy the tensors, then write everything else; the manifest comes last.
            options = CopyOptions(
                crc=job.crc,
                digest=job.digest,
                progress=_counted(progress, plan.write_bytes),
                journal=stage.journal,
                watch=watch,
                device=job.device,
            )
            result = execute(plan, source.store, stage.store, options)
            files = finish_data(prepared, stage, result)
            fingerprints = WrittenFingerprints()
            if watch is not None:
                path = written_path(prepared, stage)
                fingerprints = WrittenFingerprints(
                    *watch.finish(path, threads=job.threads, memory_bytes=job.memory_bytes)
                )
            finish_manifest(prepared, stage, result, files, fingerprints)

            # Check the result before it becomes visible.
            n_verified = _verify_stage(prepared, stage, progress) if job.verify else 0
            source.store.verify_unchanged()

            def report() -> Report:
                seconds = time.monotonic() - begun
                return report_of(
                    prepared, stage, result, fingerprints, n_verified=n_verified, seconds=seconds
                )

            if publishing is not None:
                publishing(report(), os.lstat(written_path(prepared, stage)).st_ino)
            stage.commit()
        return report()


def within_memory(job: Job) -> Job:
    """Return the job with the memory that its device leaves, without a device that does not fit.

    Raises:
        CapacityError: the device was asked for by name, and does not fit into the memory limit.
    """
    if job.device is None:
        return job
    from core.calibration.choice import reserve_device_memory

    device, memory_bytes = reserve_device_memory(
        job.device, memory_bytes=job.memory_bytes, threads=job.threads
    )
    return replace(job, device=device, memory_bytes=memory_bytes)


def _watch(prepared: Prepared) -> AbstractContextManager[CopyFingerprints | None]:
    """Return a context that makes fingerprints of what is written, if the job asks for them."""
    job = prepared.job
    if not job.fingerprint:
        return nullcontext()
    from core.manifest.fingerprint_copy import observe_copy

    entry = prepared.dst.name if prepared.is_file else None
    rules = load_rules(job.rules, unknown=job.unknown)
    return observe_copy(prepared.plan, entry=entry, rules=rules, device=job.device)


def _verify_stage(prepared: Prepared, stage: Stage, progress: Progress | None) -> int:
    """Read the stage back, compare it with the source, and return the number of bytes compared."""
    job, plan = prepared.job, prepared.plan
    if job.fsync:
        stage.store.sync_all()  # so that the bytes are read from the disk, not from the system's cache
    return verify(
        plan,
        prepared.source.store,
        written_path(prepared, stage),
        rules=load_rules(job.rules, unknown=job.unknown),
        memory_bytes=job.memory_bytes,
        progress=_counted(progress, plan.write_bytes),
        device=job.device,
    )


def _counted(progress: Progress | None, n_bytes: int) -> Callable[[int], None] | None:
    """Return a thread-safe callback that turns steps in bytes into totals for ``progress``."""
    if progress is None:
        return None
    lock = threading.Lock()
    done = 0

    def step(n: int) -> None:
        nonlocal done
        with lock:
            done += n
            progress(done, n_bytes)

    return step
