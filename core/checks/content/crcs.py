"""CK700–CK709: bytes that are not what the checkpoint itself says of them, or that cannot be read or decoded.

What states a checksum: torch zips one CRC-32 a record (0 if torch was told to leave them out), and with them
``.distcp`` items, rank files and ``.bin`` shards; zarr 3 chunks with the codec crc32c; gzip, zlib and bz2 chunks;
indexes of shards and nodes of an OCDBT database (read with the metadata). What states none: safetensors, torch files
from before 1.6, plain zarr chunks, ``.metadata`` and JSON files. Of these, only a manifest (``ckpt manifest``) or
``integrity.json`` tells a flipped bit; one note says how many bytes of tensors that are.
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
    from core.catalog.stored import StoredArray
    from core.scan.sums import ReadProblem

_AGAIN = "copy the checkpoint again, or use an older one"

WRONG_CRC = Code("CK701", Severity.ERROR, "bytes do not have the CRC-32 that is stated", _AGAIN, Level.DEEP)
UNDECODED = Code("CK702", Severity.ERROR, "an array's bytes cannot be decoded", _AGAIN, Level.DEEP)
UNREAD = Code("CK703", Severity.ERROR, "bytes cannot be read", _AGAIN, Level.DEEP)
UNPROVEN = Code(
    "CK704",
    Severity.NOTE,
    "no checksum covers these bytes",
    "write a manifest while the checkpoint is known to be good: ckpt manifest PATH",
    Level.DEEP,
)

CODES = (WRONG_CRC, UNDECODED, UNREAD, UNPROVEN)


def stated_crcs(subject: Subject) -> Iterator[Finding]:
    """Every record whose bytes do not have the CRC that the container states."""
    scanned = subject.deep.scanned
    for wrong in scanned.mismatches:
        stated = wrong.stated
        if any(
            finding.severity == Severity.ERROR
            and finding.file == wrong.file
            and finding.span == (stated.start, stated.stop)
            for finding in subject.findings
        ):
            continue
        keys = subject.tensor_names.at(wrong.file, stated.start, stated.stop)
        place = f"{stated.name}, {stated.stop - stated.start} bytes"
        what = "the tensor is" if len(keys) == 1 else f"{len(keys)} tensors are"
        yield WRONG_CRC.finding(
            f"{what} damaged: {place}" if keys else f"{place}: damaged",
            file=wrong.file,
            keys=keys,
            span=(stated.start, stated.stop),
            expected=f"CRC-32 {stated.crc:08x}",
            found=f"{wrong.actual_crc:08x}",
        )


def readable(subject: Subject) -> Iterator[Finding]:
    """Everything that could not be read or decoded, unless it has been said of the file already."""
    scanned = subject.deep.scanned
    said = {finding.file for finding in subject.findings if finding.severity == Severity.ERROR}
    for problem in scanned.problems:
        file = problem.error.file or problem.file
        if file in said:
            continue
        if problem.array is None:
            said.add(file)
        yield _unread(subject, problem, file)


def _unread(subject: Subject, problem: ReadProblem, file: str) -> Finding:
    error, array = problem.error, problem.array
    code = UNDECODED if array is not None and _is_encoded(array) and not isinstance(error, TruncatedError) else UNREAD
    span = error.span
    if array is not None:
        span = array.extent.offset, array.extent.offset + max(n_stored_bytes(array), 1)
    keys = subject.tensor_names.at(file, *span) if span is not None else ()
    return code.finding(
        error.message,
        file=file,
        keys=keys or [key for key in (array.name if array is not None else error.key,) if key is not None],
        span=error.span,
        hint=error.hint,
    )


def _is_encoded(array: StoredArray) -> bool:
    return array.extent.encoding is not None


def unproven(subject: Subject) -> Iterator[Finding]:
    """How many bytes of tensors lie in files without any checksum; left unsaid where something is wrong anyway."""
    scanned, catalog = subject.deep.scanned, subject.catalog
    if catalog is None or any(finding.severity == Severity.ERROR for finding in subject.findings):
        return
    pieces = (piece.array for key in catalog.tensors for piece in catalog.fragments(key))
    stored = {array.extent.file for array in pieces if array is not None and fill_of(array) is None}
    files = stored - scanned.covered - _recorded(subject)
    left = {file: scanned.files[file].n_bytes for file in files if file in scanned.files}
    if any(left.values()):
        first = max(sorted(left), key=left.__getitem__)
        yield UNPROVEN.finding(
            f"{sum(left.values())} of {scanned.read_bytes} bytes have no checksum: "
            "a flipped bit in them cannot be told",
            found=f"{first}" + (f" and {len(left) - 1} more files" if len(left) > 1 else ""),
        )


def _recorded(subject: Subject) -> set[str]:
    """Files whose bytes a manifest or Megatron's ``integrity.json`` states."""
    known = subject.recorded
    listed = set() if known is None or known.manifest is None else {one.path for one in known.manifest.files if one.crc}
    return listed | sha256_names(subject)


CHECKS = (Check(stated_crcs, Level.DEEP), Check(readable, Level.DEEP), Check(unproven, Level.DEEP))
