"""Stage of a prepared job: request it, write all files besides the tensors, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from core.engine.team.protocol import Figures
from core.progress import OnProgress
from core.publish.manifest.of_copy import FileSum, finish_files, manifest_name, write_manifest
from core.publish.stage.journal import BATCH_BYTES
from core.publish.stage.protocol import DestinationStage, StageRequest
from core.values import dataclass
from core.verbs.convert.job import Job, Report
from core.version import TOOL, __version__

if TYPE_CHECKING:
    from core.engine.copy.run import CopyResult
    from core.engine.fingerprint.definition import Fingerprint
    from core.files.store import WriteStore
    from core.publish.stage.bucket.literals import EarlyLiterals
    from core.verbs.convert.prepared import Prepared


RESUMED_BYTES = 1 << 30
"""Bytes of a destination from which a run can be continued without ``resume``.

A journal loses up to 512 MiB (``core.publish.stage.journal``), and costs nothing beside so many.
"""
KEPT_SECONDS = 60
"""Seconds of work that an interruption keeps without ``resume``."""


def request_stage(
    prepared: Prepared,
    *,
    identity: str | None = None,
    is_shared: bool = False,
    batch_bytes: int = BATCH_BYTES,
) -> StageRequest:
    """Build what a destination has to know of a job to open its stage.

    Args:
        prepared: the prepared job.
        identity: identity of the plan, so that only a run of the same job continues; None to
            compute it if it is needed.
        is_shared: several workers write the output.
        batch_bytes: with ``resume``, how many bytes a killed run may lose.
    """
    job = prepared.job
    # In an object store, parts that nobody asked to keep would cost money.
    is_large = prepared.plan.file_bytes >= RESUMED_BYTES and prepared.destination.is_on_disk

    def identify() -> str:
        if identity is not None:
            return identity
        from core.verbs.convert.stored_plan.file import identity_of

        return identity_of(prepared.plan, prepared.source.store, options=identity_text(job))

    return StageRequest(
        images=prepared.images,
        n_bytes=prepared.plan.file_bytes,
        is_file=prepared.is_file,
        resume=job.resume or is_large,
        keeps_after=None if job.resume else KEPT_SECONDS,
        force=job.force,
        fsync=job.fsync,
        reads_back=job.verify or job.fingerprint,
        keep=prepared.source_paths,
        check_replaced=lambda: check_replaced(prepared),
        memory_bytes=job.own_memory_bytes,
        identify=identify,
        is_shared=is_shared,
        batch_bytes=batch_bytes,
    )


def check_replaced(prepared: Prepared) -> None:
    """Raise unless the destination is free, or a checkpoint that may be replaced.

    Raises:
        UsageError: it is not a checkpoint, or other iterations or added files would be lost.
    """
    from core.publish.stage.existing import check_replaceable

    check_replaceable(prepared.dst, [image.path for image in prepared.images])


@dataclass(frozen=True, slots=True)
class WrittenFingerprints:
    """Fingerprints of the written tensors.

    Args:
        fingerprints: fingerprints by key; None if the job does not request them.
        n_read_back: number of fingerprints for which the result was read back.
    """

    fingerprints: dict[str, Fingerprint] | None = None
    n_read_back: int = 0


def finish_data(
    prepared: Prepared,
    stage: DestinationStage,
    result: CopyResult,
    literals: EarlyLiterals | None = None,
) -> list[FileSum]:
    """Write everything except tensors and manifest, and create the hard links.

    Args:
        prepared: the prepared job.
        stage: its stage.
        result: the result of the copy; all tensors are written.
        literals: what has written the bytes around tensors already, if anything has.

    Returns:
        The checksums of all files.

    Raises:
        CapacityError: the disk is full.
        StorageError: another write fails.
        UnsupportedError: the file system has no hard links to the source's files.
    """
    written = None if literals is None else literals.written
    files = finish_files(prepared.plan, result, stage.store, crc=prepared.job.crc, written=written)
    for path, name, size in prepared.links:
        stage.link_file(path, prepared.source.store.path(name))
        files.append(FileSum(path, size, None))  # no checksum: the data was not read
    return files


def finish_manifest(
    prepared: Prepared,
    stage: DestinationStage,
    result: CopyResult,
    files: list[FileSum],
    fingerprints: WrittenFingerprints,
) -> None:
    """Write the manifest, the last of all files.

    Args:
        prepared: the prepared job.
        stage: its stage.
        result: the result of the copy.
        files: the checksums from ``finish_data``.
        fingerprints: the fingerprints to record.

    Raises:
        CapacityError: the disk is full.
        StorageError: another write fails.
    """
    name = manifest_name(prepared.dst.name if prepared.is_file else None)

    def write(store: WriteStore) -> None:
        write_manifest(
            store,
            name,
            prepared.plan,
            result,
            files,
            tool=TOOL,
            crc=prepared.job.crc,
            fingerprints=fingerprints.fingerprints,
        )

    stage.write_manifest(name, write)


def publish(
    stage: DestinationStage,
    report: Callable[[], Report],
    *,
    publishing: Callable[[Report, int], None] | None,
    progress: OnProgress | None,
) -> None:
    """Publish the destination.

    Args:
        stage: the stage, with everything written.
        report: returns the report, which may change until the destination is published.
        publishing: called with report and inode right before the destination gets its name: a
            launch that is restarted from there on recognises by the inode that its destination is
            already published. An object has no inode (0), so of a store the call comes afterwards.
        progress: called with the phase.
    """
    inode = stage.inode
    if publishing is not None and inode:
        publishing(report(), inode)
    stage.commit(report().as_dict(), progress=progress)
    if publishing is not None and not inode:
        publishing(report(), inode)


def report_of(
    prepared: Prepared,
    stage: DestinationStage,
    result: CopyResult,
    fingerprints: WrittenFingerprints,
    *,
    n_verified: int,
    seconds: float,
    workers: Sequence[Figures] = (),
) -> Report:
    """Build the report on a finished job.

    Args:
        prepared: the prepared job.
        stage: its stage.
        result: the result of the copy.
        fingerprints: the recorded fingerprints.
        n_verified: bytes that were compared with the source.
        seconds: wall time.
        workers: figures of each of several workers.
    """
    dst = prepared.dst
    # The manifest of a single file is next to it, that of a directory inside.
    manifest = dst.parent / manifest_name(dst.name) if prepared.is_file else dst / manifest_name()
    return Report(
        src=str(prepared.source.path),
        dst=str(dst),
        source_format=prepared.source.format.name,
        format=prepared.target_format.name,
        n_tensors=prepared.n_tensors,
        bytes_read=result.read_bytes,
        bytes_written=prepared.plan.file_bytes,
        bytes_resumed=result.resumed_bytes + stage.resumed_bytes,
        bytes_verified=n_verified,
        n_copies=prepared.plan.n_copies,
        n_fingerprints=len(fingerprints.fingerprints or ()),
        n_read_back=fingerprints.n_read_back,
        seconds=seconds,
        files=tuple(path for path, _ in prepared.files),
        manifest=str(manifest),
        notes=(*prepared.notes, *stage.notes, *_overflow_notes(result.ledger.overflows)),
        dropped=prepared.dropped,
        dropped_reasons=prepared.dropped_reasons,
        next=prepared.load_line,
        workers=tuple(workers),
    )


def _overflow_notes(overflows: Mapping[str, int]) -> list[str]:
    """Return a note if finite values became infinite, the tensor with most of them first."""
    if not overflows:
        return []
    worst = max(overflows, key=lambda key: overflows[key])
    others = len(overflows) - 1
    more = f" and {others} other tensor{'s' * (others > 1)}" if others else ""
    note = (
        f"{sum(overflows.values()):,} finite values of {worst}{more} became infinite, because "
        "they are beyond the range of the new dtype (--dtype); bfloat16 has the same range as "
        "float32"
    )
    return [note]


def identity_text(job: Job) -> str:
    """Encode the tool's version and the options that determine the written bytes as JSON."""
    options = asdict(job)
    # Drop the options that may differ between an interrupted run and the one that continues it.
    for name in (
        "src",
        "dst",
        "resume",
        "force",
        "fsync",
        "verify",
        "fingerprint",
        "threads",
        "memory_bytes",
        "beside_bytes",
        "device",
    ):
        del options[name]
    return json.dumps([__version__, options], default=str, sort_keys=True)
