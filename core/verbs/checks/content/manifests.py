"""CK801–CK806: compare the checkpoint with its manifest (``core.publish.manifest.file``).

Names and sizes are checked without reading data, CRCs and digests of files and arrays at the
deepest level.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from core.arrays.dtypes import itemsize
from core.errors import CheckpointingException
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.engine.scan.sums import Sum
    from core.publish.manifest.file import Manifest, ManifestArray
    from core.verbs.checks.watch import Watch


BROKEN = get_code("CK801")
MISSING = get_code("CK802")
SIZE = get_code("CK803")
EXTRA = get_code("CK804")
CONTENT = get_code("CK805")
ARRAY = get_code("CK806")


def watch(subject: Subject) -> Watch:
    """Request digests if there is a manifest to compare with."""
    from core.verbs.checks.watch import Watch

    return Watch(digests=_manifest(subject) is not None)


def _manifest(subject: Subject) -> Manifest | None:
    return None if subject.recorded is None else subject.recorded.manifest


def check_files(subject: Subject) -> Iterator[Finding]:
    """Compare the names and sizes of the files with the manifest (CK801–CK804)."""
    from core.publish.manifest.lookup import is_manifest

    record = subject.recorded
    if record is None:
        return
    if record.failure is not None:
        yield BROKEN.finding(record.failure.message, file=record.name, hint=record.failure.hint)
        return
    assert record.manifest is not None
    for file in record.manifest.files:
        # Files in folders of a directory that is examined without them belong to another subject.
        is_elsewhere = not subject.has_folders and "/" in file.path
        if not is_elsewhere and not subject.is_covered_by_finding(file.path):
            size = subject.files.get(file.path)
            if size is None:
                is_other = file.path in subject.tree.irregular
                yield MISSING.finding(
                    f"{record.name} lists the file, but it is missing",
                    file=file.path,
                    expected=f"{file.n_bytes} bytes",
                    found="not a regular file" if is_other else "no such file",
                )
            elif size != file.n_bytes:
                yield SIZE.finding(
                    f"the file size does not match {record.name}",
                    file=file.path,
                    expected=f"{file.n_bytes} bytes",
                    found=f"{size} bytes",
                )
    listed = {file.path for file in record.manifest.files}
    for name in subject.files:
        if name not in listed and not is_manifest(name) and not subject.is_covered_by_finding(name):
            yield EXTRA.finding(f"{record.name} does not list the file", file=name)


def check_contents(subject: Subject) -> Iterator[Finding]:
    """Compare the CRC and digest of every file and every array with the manifest (CK805, CK806)."""
    from core.arrays.checksum import ALGORITHM

    manifest = _manifest(subject)
    if manifest is None:
        return
    # Digests of another algorithm cannot be compared, but CRCs can.
    digests = manifest.digest == ALGORITHM
    sums = _collect_array_sums(subject)
    arrays: dict[str, list[ManifestArray]] = {}
    for array in manifest.arrays:
        arrays.setdefault(array.file, []).append(array)
    for file in manifest.files:
        actual = subject.byte_scan.scanned.files.get(file.path)
        if actual is None or actual.n_bytes != file.n_bytes:
            continue  # reported by ``check_files``
        # A damaged array is reported instead of its file.
        wrong_arrays = [
            finding
            for array in arrays.get(file.path, ())
            for finding in _compare_array(subject, array, sums, digests=digests)
        ]
        yield from wrong_arrays
        difference = _first_difference(file.crc, file.digest if digests else None, actual)
        if difference is not None and not wrong_arrays:
            yield CONTENT.finding(
                "the file has been changed or damaged since the manifest was written",
                file=file.path,
                expected=difference[0],
                found=difference[1],
            )


def _first_difference(crc: int | None, digest: str | None, actual: Sum) -> tuple[str, str] | None:
    """Return (expected, found) of the first checksum that differs; None if none does."""
    from core.arrays.checksum import ALGORITHM

    if crc is not None and actual.crc is not None and crc != actual.crc:
        return f"CRC-32 {crc:08x}", f"{actual.crc:08x}"
    if digest is not None and actual.digest is not None and digest != actual.digest:
        return f"{ALGORITHM} {digest}", actual.digest
    return None


SumsByRange: TypeAlias = "dict[tuple[str, int, int], Sum]"
"""(file, byte offset, size in bytes) → checksums of the array there."""


def _collect_array_sums(subject: Subject) -> SumsByRange:
    """Return the checksums, computed by the scan, of arrays that are contiguous in their files."""
    from core.publish.manifest.fingerprint_feeds import is_dense_in_file

    sums: SumsByRange = {}
    catalog = subject.catalog
    if catalog is None:
        return sums
    for fragment in catalog.all_fragments():
        array = fragment.array
        actual = None if array is None else subject.byte_scan.scanned.arrays.get(array.name)
        if array is None or actual is None:
            continue
        # The position of an array inside an item or a zip is only known after binding it.
        try:
            extent = array.locate(subject.store).extent
        except CheckpointingException:
            continue
        if extent.encoding is None and is_dense_in_file(array):
            sums[extent.file, extent.offset, actual.n_bytes] = actual
    return sums


def _compare_array(
    subject: Subject, array: ManifestArray, sums: SumsByRange, *, digests: bool
) -> Iterator[Finding]:
    """Compare the checksums of one array with the manifest (CK806)."""
    try:
        n_bytes = itemsize(array.dtype) * prod(array.shape)
    except CheckpointingException as err:
        yield BROKEN.finding(err.message, file=array.file, key=array.key)
        return
    # The metadata may have changed since the manifest was written, so that the bytes of an array
    # are no longer one; they are read separately then.
    actual = sums.get((array.file, array.offset, n_bytes))
    actual = actual or _read_range_sums(subject, array, n_bytes)
    if actual is None:
        return
    difference = _first_difference(array.crc, array.digest if digests else None, actual)
    if difference is not None:
        yield ARRAY.finding(
            "the array has been changed or damaged since the manifest was written",
            file=array.file,
            key=array.key,
            span=(array.offset, array.offset + n_bytes),
            expected=difference[0],
            found=difference[1],
        )


def _read_range_sums(subject: Subject, array: ManifestArray, n_bytes: int) -> Sum | None:
    """Compute the checksums of bytes that are not an array of the checkpoint.

    Returns:
        None if the bytes cannot be read.
    """
    from core.engine.scan.sums import read_sum

    # A manifest from elsewhere may list any offset and shape.
    if array.offset < 0 or n_bytes < 0 or array.offset + n_bytes > subject.files.get(array.file, 0):
        return None
    try:
        return read_sum(subject.store, array.file, array.offset, n_bytes)
    except CheckpointingException:
        return None


CHECKS = (Check(check_files), Check(check_contents, Level.DEEP))
