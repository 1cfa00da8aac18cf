"""Converting and resharding: the only place where format, layout, plan, copy and commit meet.

::

    open → global form → [shard | stack | nest] → lay out → plan → stage, copy, literals, commit

``prepare`` does all of it that moves no data; ``run`` does the rest, ``core.convert.workers.run`` with several workers.
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
from core.convert.stage import Made, finish_data, finish_manifest, identity_text, report_of, stage_of, written_path
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
        progress: called with (bytes done, bytes in all) from the copying threads.
        publishing: called right before the destination gets its name, with what will be said of
            it and the inode that then has that name.

    Raises:
        CheckpointingException: any kind; the destination is untouched.
    """
    job = within_memory(job)
    begun = time.monotonic()
    with prepare(job) as prepared:
        plan, source = prepared.plan, prepared.source
        if job.force:
            check_replaceable(prepared.dst, [image.path for image in prepared.images])
        identity = identity_of(plan, source.store, options=identity_text(job)) if job.resume else ""
        stage = stage_of(prepared, identity=identity)
        with stage, _watch(prepared) as watch:
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
            made = Made() if watch is None else _seen(watch, prepared, stage)
            finish_manifest(prepared, stage, result, files, made)
            n_verified = _verified(prepared, stage, progress) if job.verify else 0
            source.store.verify_unchanged()

            def report() -> Report:
                seconds = time.monotonic() - begun
                return report_of(prepared, stage, result, made, n_verified=n_verified, seconds=seconds)

            if publishing is not None:
                publishing(report(), os.lstat(written_path(prepared, stage)).st_ino)
            stage.commit()
        return report()


def within_memory(job: Job) -> Job:
    """The job with the memory that is left beside its device, and without a device that is left out for it.

    Raises:
        CapacityError: the device was asked for by name, and takes too much.
    """
    if job.device is None:
        return job
    from core.calibration.choice import reserve_device_memory

    device, memory_bytes = reserve_device_memory(job.device, memory_bytes=job.memory_bytes, threads=job.threads)
    return replace(job, device=device, memory_bytes=memory_bytes)


def _watch(prepared: Prepared) -> AbstractContextManager[CopyFingerprints | None]:
    """Makes fingerprints of what is written, if they are wanted."""
    job = prepared.job
    if not job.fingerprint:
        return nullcontext()
    from core.manifest.fingerprint_copy import observe_copy

    entry = prepared.dst.name if prepared.is_file else None
    rules = load_rules(job.rules, unknown=job.unknown)
    return observe_copy(prepared.plan, entry=entry, rules=rules, device=job.device)


def _seen(watch: CopyFingerprints, prepared: Prepared, stage: Stage) -> Made:
    """The fingerprints of what was written."""
    job = prepared.job
    return Made(*watch.finish(written_path(prepared, stage), threads=job.threads, memory_bytes=job.memory_bytes))


def _verified(prepared: Prepared, stage: Stage, progress: Progress | None) -> int:
    """Bytes of the stage that were read again and compared with the source."""
    job, plan = prepared.job, prepared.plan
    if job.fsync:
        stage.store.sync_all()  # so that reading again means the disk, and not the system's cache
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
    """Turns steps into totals; safe for threads."""
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
