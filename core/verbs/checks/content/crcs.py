"""CK701–CK704: find bytes that do not match their checksums, or cannot be read or decoded.

Checksums are stored in torch zips, one CRC-32 per record (0 if torch was told to omit them), and
therefore in ``.distcp`` items, rank files and ``.bin`` shards; in zarr 3 chunks with the codec
crc32c; in gzip, zlib and bz2 chunks; in indexes of shards and nodes of an OCDBT database (read with
the metadata). Safetensors, torch files from before 1.6, plain zarr chunks, ``.metadata`` and JSON
files have none. There, only a manifest (``ckpt manifest``) or ``integrity.json`` can reveal a
flipped bit; one note gives the number of bytes of tensors that are not covered.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.engine.catalog.stored import n_stored_bytes
from core.errors import TruncatedError
from core.formats.zarr.fill import fill_of
from core.values import n_text
from core.verbs.checks.content.integrity_json import sha256_names
from core.verbs.checks.content.store_checksums import compared_names
from core.verbs.checks.finding import Finding, Level, Severity, get_code
from core.verbs.checks.subject import Check, Subject

WRONG_CRC = get_code("CK701")
UNDECODED = get_code("CK702")
UNREAD = get_code("CK703")
UNPROVEN = get_code("CK704")


def check_crcs(subject: Subject) -> Iterator[Finding]:
    """Report every record whose bytes do not match the CRC stored in its container (CK701)."""
    for mismatch in subject.byte_scan.scanned.mismatches:
        stated = mismatch.stated
        span = (stated.start, stated.stop)
        # The checks of containers verify the CRCs of small records.
        is_reported = any(
            finding.severity == Severity.ERROR
            and finding.file == mismatch.file
            and finding.span == span
            for finding in subject.findings
        )
        if is_reported:
            continue
        # Name the tensors whose bytes are in the record.
        keys = subject.tensor_names.at(mismatch.file, *span)
        place = f"{stated.name}, {stated.stop - stated.start:,} bytes"
        tensors_are = "the tensor is" if len(keys) == 1 else f"{len(keys)} tensors are"
        yield WRONG_CRC.finding(
            f"{tensors_are} damaged: {place}" if keys else f"damaged: {place}",
            file=mismatch.file,
            keys=keys,
            span=span,
            expected=f"CRC-32 {stated.crc:08x}",
            found=f"{mismatch.actual_crc:08x}",
        )


def report_unreadable(subject: Subject) -> Iterator[Finding]:
    """Report arrays and files that could not be read or decoded, unless the file has an error.

    Codes: CK702, CK703.
    """
    scanned = subject.byte_scan.scanned
    reported = {finding.file for finding in subject.findings if finding.severity == Severity.ERROR}
    for problem in scanned.problems:
        error, array = problem.error, problem.array
        file = error.file or problem.file
        if file in reported:
            continue
        # An array is one of several problems of a file; the file itself is reported once.
        if array is None:
            reported.add(file)
            code, span, name = UNREAD, error.span, error.key
        else:
            is_decoding_error = array.extent.encoding is not None and not isinstance(
                error, TruncatedError
            )
            code = UNDECODED if is_decoding_error else UNREAD
            span = array.extent.offset, array.extent.offset + max(n_stored_bytes(array), 1)
            name = array.name
        # Name the tensors at these bytes; where none are known, the array or the error has a name.
        keys = subject.tensor_names.at(file, *span) if span is not None else ()
        yield code.finding(
            error.message,
            file=file,
            keys=keys or ([] if name is None else [name]),
            span=error.span,
            hint=error.hint,
        )


def report_uncovered(subject: Subject) -> Iterator[Finding]:
    """Report the number of bytes of tensors without a checksum (CK704), if there is no error."""
    scanned, catalog = subject.byte_scan.scanned, subject.catalog
    if catalog is None or any(finding.severity == Severity.ERROR for finding in subject.findings):
        return
    # Take the files with stored tensors, without those whose container or a record has checksums.
    arrays = (fragment.array for key in catalog.tensors for fragment in catalog.fragments(key))
    stored = {array.extent.file for array in arrays if array is not None and fill_of(array) is None}
    files = stored - scanned.covered - _recorded_files(subject)
    uncovered = {file: scanned.files[file].n_bytes for file in files if file in scanned.files}
    if any(uncovered.values()):
        largest = max(sorted(uncovered), key=uncovered.__getitem__)
        yield UNPROVEN.finding(
            f"{sum(uncovered.values()):,} of {scanned.read_bytes:,} bytes have no checksum; "
            "a flipped bit in them would go unnoticed",
            found=largest
            + (f" and {n_text(len(uncovered) - 1, 'more file')}" if len(uncovered) > 1 else ""),
        )


def _recorded_files(subject: Subject) -> frozenset[str]:
    """Return the files with checksums elsewhere: in a manifest, ``integrity.json`` or the store."""
    files = sha256_names(subject) | compared_names(subject)
    if subject.recorded is not None and subject.recorded.manifest is not None:
        files |= {file.path for file in subject.recorded.manifest.files if file.crc}
    return files


CHECKS = (
    Check(check_crcs, Level.DEEP),
    Check(report_unreadable, Level.DEEP),
    Check(report_uncovered, Level.DEEP),
)
