"""CK701–CK704: bytes that do not match their checksums, or cannot be read or decoded.

Checksums are stored in torch zips, one CRC-32 per record (0 if torch was told to omit them), and
therefore in ``.distcp`` items, rank files and ``.bin`` shards; in zarr 3 chunks with the codec
crc32c; in gzip, zlib and bz2 chunks; in indexes of shards and nodes of an OCDBT database (read with
the metadata). Safetensors, torch files from before 1.6, plain zarr chunks, ``.metadata`` and JSON
files have none. There, only a manifest (``ckpt manifest``) or ``integrity.json`` can reveal a
flipped bit; one note states how many bytes of tensors are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.catalog.stored import n_stored_bytes
from core.checks.check import Check, Code
from core.checks.content.integrity_json import sha256_names
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.errors import TruncatedError
from core.formats.zarr.fill import fill_of

if TYPE_CHECKING:
    from core.scan.sums import ReadProblem

_AGAIN = "copy the checkpoint again, or use an older one"

WRONG_CRC = Code("CK701", Severity.ERROR, "checksum mismatch", _AGAIN, Level.DEEP)
UNDECODED = Code("CK702", Severity.ERROR, "an array cannot be decoded", _AGAIN, Level.DEEP)
UNREAD = Code("CK703", Severity.ERROR, "bytes cannot be read", _AGAIN, Level.DEEP)
UNPROVEN = Code(
    "CK704",
    Severity.NOTE,
    "no checksum covers these bytes",
    "write a manifest while the checkpoint is known to be good: ckpt manifest PATH",
    Level.DEEP,
)

CODES = (WRONG_CRC, UNDECODED, UNREAD, UNPROVEN)


def check_crcs(subject: Subject) -> Iterator[Finding]:
    """Report every record whose bytes do not match the CRC stored in its container (CK701)."""
    for wrong in subject.byte_scan.scanned.mismatches:
        stated = wrong.stated
        span = (stated.start, stated.stop)
        is_reported = any(
            finding.severity == Severity.ERROR
            and finding.file == wrong.file
            and finding.span == span
            for finding in subject.findings
        )
        if is_reported:
            continue
        keys = subject.tensor_names.at(wrong.file, *span)
        place = f"{stated.name}, {stated.stop - stated.start:,} bytes"
        victims = "the tensor is" if len(keys) == 1 else f"{len(keys)} tensors are"
        yield WRONG_CRC.finding(
            f"{victims} damaged: {place}" if keys else f"damaged: {place}",
            file=wrong.file,
            keys=keys,
            span=span,
            expected=f"CRC-32 {stated.crc:08x}",
            found=f"{wrong.actual_crc:08x}",
        )


def report_unreadable(subject: Subject) -> Iterator[Finding]:
    """Report everything that could not be read or decoded, unless its file has an error already."""
    scanned = subject.byte_scan.scanned
    reported = {finding.file for finding in subject.findings if finding.severity == Severity.ERROR}
    for problem in scanned.problems:
        file = problem.error.file or problem.file
        if file in reported:
            continue
        if problem.array is None:
            reported.add(file)
        yield _unread(subject, problem, file)


def _unread(subject: Subject, problem: ReadProblem, file: str) -> Finding:
    """Return the finding for an array or a file that could not be read or decoded.

    Codes: CK702, CK703.
    """
    error, array = problem.error, problem.array
    is_encoded = array is not None and array.extent.encoding is not None
    code = UNDECODED if is_encoded and not isinstance(error, TruncatedError) else UNREAD
    # Errors of arrays name the tensors at the array's bytes, others those at the error's.
    span = error.span
    if array is not None:
        span = array.extent.offset, array.extent.offset + max(n_stored_bytes(array), 1)
    keys = subject.tensor_names.at(file, *span) if span is not None else ()
    name = error.key if array is None else array.name
    return code.finding(
        error.message,
        file=file,
        keys=keys or ([] if name is None else [name]),
        span=error.span,
        hint=error.hint,
    )


def report_uncovered(subject: Subject) -> Iterator[Finding]:
    """Report how many bytes of tensors no checksum covers (CK704).

    Only if nothing else is wrong.
    """
    scanned, catalog = subject.byte_scan.scanned, subject.catalog
    if catalog is None or any(finding.severity == Severity.ERROR for finding in subject.findings):
        return
    pieces = (piece.array for key in catalog.tensors for piece in catalog.fragments(key))
    stored = {array.extent.file for array in pieces if array is not None and fill_of(array) is None}
    files = stored - scanned.covered - _recorded_files(subject)
    uncovered = {file: scanned.files[file].n_bytes for file in files if file in scanned.files}
    if any(uncovered.values()):
        largest = max(sorted(uncovered), key=uncovered.__getitem__)
        yield UNPROVEN.finding(
            f"{sum(uncovered.values()):,} of {scanned.read_bytes:,} bytes have no checksum; "
            "a flipped bit in them cannot be detected",
            found=largest + (f" and {len(uncovered) - 1} more files" if len(uncovered) > 1 else ""),
        )


def _recorded_files(subject: Subject) -> set[str]:
    """Return the files whose checksums a manifest or Megatron's ``integrity.json`` holds."""
    record = subject.recorded
    listed = (
        set()
        if record is None or record.manifest is None
        else {file.path for file in record.manifest.files if file.crc}
    )
    return listed | sha256_names(subject)


CHECKS = (
    Check(check_crcs, Level.DEEP),
    Check(report_unreadable, Level.DEEP),
    Check(report_uncovered, Level.DEEP),
)
