"""Open the stage of a prepared job, write what comes beside its tensors, and report on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.convert.job import Job, Report
from core.manifest.of_copy import FileSum, finish_files, manifest_name, write_manifest
from core.stage.stage import Stage
from core.team.protocol import Figures
from core.version import __version__

if TYPE_CHECKING:
    from core.convert.prepare import Prepared
    from core.copy.run import CopyResult
    from core.fingerprint.definition import Fingerprint


def stage_of(prepared: Prepared, *, identity: str, is_shared: bool = False) -> Stage:
    """Return the stage of a job.

    Args:
        identity: the identity of the plan; needed with ``resume``.
        is_shared: several workers fill the stage.
    """
    job = prepared.job
    return Stage(
        prepared.dst,
        is_file=prepared.is_file,
        resume=job.resume,
        force=job.force,
        fsync=job.fsync,
        identity=identity,
        needed_bytes=prepared.plan.file_bytes,
        keep=(prepared.source.path,),
        is_shared=is_shared,
    )


def written_path(prepared: Prepared, stage: Stage) -> Path:
    """Return where the destination is until it is published."""
    return stage.data_dir / prepared.dst.name if prepared.is_file else stage.data_dir


@dataclass(frozen=True, slots=True)
class WrittenFingerprints:
    """Fingerprints of what has been written.

    Args:
        fingerprints: fingerprints by key; None if they were not asked for.
        n_read_back: fingerprints for which the result was read back.
    """

    fingerprints: dict[str, Fingerprint] | None = None
    n_read_back: int = 0


def finish_data(prepared: Prepared, stage: Stage, result: CopyResult) -> list[FileSum]:
    """Write everything beside the tensors except the manifest, and make the hard links.

    Args:
        result: the result of the copy; all tensors are written.

    Returns:
        The checksums of all files.

    Raises:
        CapacityError, StorageError: the file system refuses a write.
        UnsupportedError: the file system has no hard links to the source's files.
    """
    files = finish_files(prepared.plan, result, stage.store, crc=prepared.job.crc)
    for path, name, size in prepared.links:
        stage.store.link(path, prepared.source.store.path(name))
        files.append(FileSum(path, size, None))
    return files


def finish_manifest(
    prepared: Prepared,
    stage: Stage,
    result: CopyResult,
    files: list[FileSum],
    fingerprints: WrittenFingerprints,
) -> None:
    """Write the manifest, the last of all files.

    Args:
        files: from ``finish_data``.
        fingerprints: the fingerprints to record.

    Raises:
        CapacityError, StorageError: the file system refuses a write.
    """
    write_manifest(
        stage.store,
        _manifest_of(prepared),
        prepared.plan,
        result,
        files,
        tool=f"ckpt-toolkit {__version__}",
        crc=prepared.job.crc,
        fingerprints=fingerprints.fingerprints,
    )


def _manifest_of(prepared: Prepared) -> str:
    return manifest_name(prepared.dst.name if prepared.is_file else None)


def report_of(
    prepared: Prepared,
    stage: Stage,
    result: CopyResult,
    fingerprints: WrittenFingerprints,
    *,
    n_verified: int,
    seconds: float,
    workers: Sequence[Figures] = (),
) -> Report:
    """Return the report on a finished job.

    Args:
        n_verified: bytes that were compared with the source.
        seconds: wall time.
        workers: what each of several workers did.
    """
    dst, manifest = prepared.dst, _manifest_of(prepared)
    return Report(
        src=str(prepared.source.path),
        dst=str(dst),
        source_format=prepared.source.format.name,
        format=prepared.target_format.name,
        n_tensors=prepared.n_tensors,
        bytes_read=result.read_bytes,
        bytes_written=prepared.plan.file_bytes,
        bytes_resumed=result.resumed_bytes,
        bytes_verified=n_verified,
        n_copies=prepared.plan.n_copies,
        n_fingerprints=len(fingerprints.fingerprints or ()),
        n_read_back=fingerprints.n_read_back,
        seconds=seconds,
        files=tuple(path for path, _ in prepared.files),
        manifest=str(dst.parent / manifest if prepared.is_file else dst / manifest),
        notes=(*prepared.notes, *stage.notes),
        dropped=prepared.dropped,
        workers=tuple(workers),
    )


def identity_text(job: Job) -> str:
    """Return the tool's version and the options that decide the written bytes, as JSON."""
    options = asdict(job)
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
