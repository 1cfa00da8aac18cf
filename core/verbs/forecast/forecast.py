"""Forecast of a prepared job: the free space, and the time to expect from both disks' speed."""

from __future__ import annotations

import time
from dataclasses import replace

from core.arrays.checksum import BLOCK_BYTES, RunSum
from core.errors import CapacityError, CheckpointingException
from core.files.folders import SYNC_THREADS
from core.files.store import list_files_below
from core.values import dataclass
from core.verbs.convert.prepared import Prepared
from core.verbs.convert.stage import request_stage
from core.verbs.forecast.destination import ExistingDestination, existing_destination
from core.verbs.forecast.disk_rates import (
    SAMPLE_BYTES,
    ReadRate,
    WriteRate,
    measure_reading,
    measure_writing,
)

_SUM_SAMPLE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The space and the time that a job will need, and the space that it will find.

    Args:
        needed_bytes: bytes that the run has still to write.
        existing: what has the name of the destination already; None if nothing does.
        free_bytes: free space for the destination; what an interrupted run has written is free.
            None for an object store.
        shortage: the error with which the run would end, if that is too little.
        resumed_bytes: bytes of the destination that an interrupted run of the same job has written.
        reading, writing: measured speed of the disks; None if there was nothing to measure, or it
            was not possible.
        seconds: expected wall time of the run in one process; None if it is not known.
        unknown: why the time is not known; None if it is.
    """

    free_bytes: int | None = None
    needed_bytes: int = 0
    existing: ExistingDestination | None = None
    shortage: CapacityError | None = None
    resumed_bytes: int = 0
    reading: ReadRate | None = None
    writing: WriteRate | None = None
    seconds: float | None = None
    unknown: str | None = None

    def as_dict(self) -> dict[str, object]:
        """Build the fields that the JSON object of a plan gets."""
        return {
            "free_bytes": self.free_bytes,
            "dst_exists": self.existing is not None,
            "resumed_bytes": self.resumed_bytes,
            "expected_seconds": None if self.seconds is None else round(self.seconds, 3),
            "read_rate": None if self.reading is None else round(self.reading.bytes_per_second),
            "write_rate": None if self.writing is None else round(self.writing.bytes_per_second),
        }


def forecast(prepared: Prepared, *, prepare_seconds: float) -> Forecast:
    """Look at the destination, measure both disks, and estimate the time of the run.

    Up to 64 MiB of the source are read and as much is written into a file without a name, each for
    about 0.3 s.

    Args:
        prepared: the prepared job, which has not run.
        prepare_seconds: time that it took to prepare, which the run will take again.

    Raises:
        StorageError: the system does not tell the free space.
    """
    expected = _forecast_run(prepared, prepare_seconds=prepare_seconds)
    needed_bytes = prepared.plan.file_bytes - expected.resumed_bytes
    return replace(expected, needed_bytes=needed_bytes, existing=existing_destination(prepared))


def _forecast_run(prepared: Prepared, *, prepare_seconds: float) -> Forecast:
    """Compare with the free space and estimate the time; without the state of the destination."""
    # What an interrupted run has written; the identity must not cover the files measured below.
    job, store = prepared.job, prepared.source.store
    space = prepared.destination.find_space(request_stage(prepared))
    if space is None:
        return Forecast(unknown="the speed of an object store is not measured")

    # The run's own check of the free space. Nothing is measured on a disk that is too full.
    free_bytes, n_resumed = space.free_bytes, space.resumed_bytes
    if space.shortage is not None:
        return Forecast(
            free_bytes=free_bytes,
            shortage=space.shortage,
            resumed_bytes=n_resumed,
            unknown="too little free space",
        )
    if free_bytes < 2 * SAMPLE_BYTES:
        return Forecast(
            free_bytes=free_bytes,
            resumed_bytes=n_resumed,
            unknown="too little free space to measure the disk",
        )

    # Measure what is left to do.
    share = 1 - n_resumed / max(prepared.plan.file_bytes, 1)
    n_read, n_written = (
        round(n_bytes * share) for n_bytes in (prepared.plan.read_bytes, prepared.plan.file_bytes)
    )
    reading, writing = None, None
    try:
        sizes = list_files_below(store)
        reading = measure_reading(store, sizes, n_bytes=n_read, threads=job.threads)
        writing = measure_writing(space.folder, n_bytes=n_written, syncs=job.fsync)
    except CheckpointingException as err:
        return Forecast(
            free_bytes=free_bytes,
            resumed_bytes=n_resumed,
            reading=reading,
            unknown=f"{err.message}: {err.file}" if err.file else err.message,
        )
    seconds = prepare_seconds + _copy_seconds(
        prepared, reading, writing, n_read=n_read, n_written=n_written, n_resumed=n_resumed
    )
    return Forecast(
        free_bytes=free_bytes,
        resumed_bytes=n_resumed,
        reading=reading,
        writing=writing,
        seconds=seconds,
    )


def _copy_seconds(
    prepared: Prepared,
    reading: ReadRate | None,
    writing: WriteRate,
    *,
    n_read: int,
    n_written: int,
    n_resumed: int,
) -> float:
    """Estimate the time of a copy from the measured rates.

    A thread reads, sums and writes one after the other; the system carries what is written to the
    disk at the same time.

    Args:
        prepared: the prepared job.
        reading: None if there is nothing to read.
        n_read, n_written: bytes that are left to read and to write.
        n_resumed: bytes of an interrupted run, which are read to be checked.
    """
    job = prepared.job
    read_rate = float("inf") if reading is None else reading.bytes_per_second
    # The rate of reading is that of all threads together, the others are those of one.
    per_byte = 1 / writing.buffered_bytes_per_second
    if job.crc or job.digest:
        per_byte += 1 / _measure_sums(crc=job.crc, digest=job.digest)
    in_threads = (n_read + n_resumed) / read_rate + n_written * per_byte / job.threads
    seconds = max(in_threads, n_written / writing.bytes_per_second)
    # Every file is created and synced.
    seconds += len(prepared.images) * writing.seconds_per_file / SYNC_THREADS
    # The comparison reads both sides, the new one from memory.
    if job.verify:
        seconds += n_read / read_rate + n_written * per_byte / job.threads
    return seconds


def _measure_sums(*, crc: bool, digest: bool) -> float:
    """Measure how many bytes per second one thread sums."""
    block = memoryview(bytearray(BLOCK_BYTES))
    run_sum = RunSum(0, _SUM_SAMPLE_BYTES, crc=crc, digest=digest)
    begun = time.perf_counter()
    for _ in range(_SUM_SAMPLE_BYTES // BLOCK_BYTES):
        run_sum.feed(block)
    return _SUM_SAMPLE_BYTES / (time.perf_counter() - begun)
