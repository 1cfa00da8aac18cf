"""CK801–CK806: the checkpoint is what its manifest says (``core.manifest.file``).

Names and sizes without reading data; CRCs and digests of files and arrays at the deepest level.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.arrays.checksum import ALGORITHM, BLOCK_BYTES, RunSum, digest_of_blocks
from core.arrays.dtypes import itemsize
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.checks.watch import Watch
from core.errors import CheckpointingException
from core.manifest.file import Manifest, ManifestArray
from core.manifest.fingerprint_feeds import is_dense_in_file
from core.manifest.lookup import is_manifest
from core.scan.sums import Sum

_AGAIN = "copy the checkpoint again, or write a new manifest if it was changed on purpose: ckpt manifest --force"

BROKEN = Code("CK801", Severity.ERROR, "the manifest cannot be read", "write a new one: ckpt manifest --force")
MISSING = Code("CK802", Severity.ERROR, "a file that the manifest lists is missing", _AGAIN)
SIZE = Code("CK803", Severity.ERROR, "a file has another size than its manifest says", _AGAIN)
EXTRA = Code(
    "CK804", Severity.NOTE, "a file that the manifest does not list", "remove it, or write a new manifest if it belongs"
)
CONTENT = Code("CK805", Severity.ERROR, "a file's bytes are not those of the manifest", _AGAIN, Level.DEEP)
ARRAY = Code("CK806", Severity.ERROR, "an array's bytes are not those of the manifest", _AGAIN, Level.DEEP)

CODES = (BROKEN, MISSING, SIZE, EXTRA, CONTENT, ARRAY)


def watch(subject: Subject) -> Watch:
    """Digests, if there are some to compare with."""
    return Watch(digests=_manifest(subject) is not None)


def _manifest(subject: Subject) -> Manifest | None:
    return None if subject.recorded is None else subject.recorded.manifest


def files(subject: Subject) -> Iterator[Finding]:
    """Every file is there, and has its size."""
    known = subject.recorded
    if known is None:
        return
    if known.failure is not None:
        yield BROKEN.finding(known.failure.message, file=known.name, hint=known.failure.hint)
        return
    assert known.manifest is not None
    listed = {one.path for one in known.manifest.files}
    for one in known.manifest.files:
        size = subject.files.get(one.path)
        if subject.is_explained(one.path):
            continue
        if size is None:
            found = "something that is no file" if one.path in subject.tree.irregular else "nothing"
            yield MISSING.finding(f"{known.name} lists it", file=one.path, expected=f"{one.n_bytes} bytes", found=found)
        elif size != one.n_bytes:
            yield SIZE.finding(
                f"{known.name} says otherwise", file=one.path, expected=f"{one.n_bytes} bytes", found=f"{size} bytes"
            )
    for name in subject.files:
        if name not in listed and not is_manifest(name) and not subject.is_explained(name):
            yield EXTRA.finding(f"{known.name} does not list it", file=name)


def contents(subject: Subject) -> Iterator[Finding]:
    """Every file and every array has its CRC and its digest."""
    manifest = _manifest(subject)
    if manifest is None:
        return
    digests = manifest.digest == ALGORITHM
    places = _scanned_arrays(subject)
    arrays: dict[str, list[ManifestArray]] = {}
    for array in manifest.arrays:
        arrays.setdefault(array.file, []).append(array)
    for file in manifest.files:
        known = subject.deep.scanned.files.get(file.path)
        if known is None or known.n_bytes != file.n_bytes:
            continue  # said before
        wrong = list(_wrong_arrays(subject, arrays.get(file.path, ()), places, digests=digests))
        yield from wrong
        said = _difference(file.crc, file.digest if digests else None, known)
        if said is not None and not wrong:
            yield CONTENT.finding("it was changed or damaged", file=file.path, expected=said[0], found=said[1])


def _difference(crc: int | None, digest: str | None, found: Sum) -> tuple[str, str] | None:
    """(expected, found) of the first sum that disagrees."""
    if crc is not None and found.crc is not None and crc != found.crc:
        return f"CRC-32 {crc:08x}", f"{found.crc:08x}"
    if digest is not None and found.digest is not None and digest != found.digest:
        return f"{ALGORITHM} {digest}", found.digest
    return None


Places = dict[tuple[str, int, int], Sum]
"""(file, byte address, bytes) → the sums of the array there."""


def _scanned_arrays(subject: Subject) -> Places:
    """The sums of the arrays that lie dense in their files."""
    found: Places = {}
    catalog = subject.catalog
    if catalog is None:
        return found
    for fragment in catalog.all_fragments():
        array = fragment.array
        known = None if array is None else subject.deep.scanned.arrays.get(array.name)
        if array is None or known is None:
            continue
        try:
            extent = catalog.bind(subject.store, array).extent
        except CheckpointingException:
            continue
        if extent.encoding is None and is_dense_in_file(array):
            found[extent.file, extent.offset, known.n_bytes] = known
    return found


def _wrong_arrays(
    subject: Subject, arrays: list[ManifestArray] | tuple[ManifestArray, ...], places: Places, *, digests: bool
) -> Iterator[Finding]:
    for array in arrays:
        try:
            n_bytes = itemsize(array.dtype)
        except CheckpointingException as err:
            yield BROKEN.finding(err.message, file=array.file, key=array.key)
            continue
        for extent in array.shape:
            n_bytes *= extent
        known = places.get((array.file, array.offset, n_bytes)) or _sum_of_range(subject, array, n_bytes)
        said = None if known is None else _difference(array.crc, array.digest if digests else None, known)
        if said is not None:
            yield ARRAY.finding(
                "it was changed or damaged",
                file=array.file,
                key=array.key,
                span=(array.offset, array.offset + n_bytes),
                expected=said[0],
                found=said[1],
            )


def _sum_of_range(subject: Subject, array: ManifestArray, n_bytes: int) -> Sum | None:
    """The sums of bytes that are no array of the checkpoint as it is read; None if they cannot be read."""
    if array.offset < 0 or n_bytes < 0 or array.offset + n_bytes > subject.files.get(array.file, 0):
        return None
    run = RunSum(0, n_bytes, crc=True, digest=True)
    buffer = memoryview(bytearray(min(BLOCK_BYTES, n_bytes)))
    try:
        for start in range(0, n_bytes, BLOCK_BYTES):
            piece = buffer[: min(BLOCK_BYTES, n_bytes - start)]
            subject.store.read_into(array.file, array.offset + start, piece)
            run.feed(piece)
    except CheckpointingException:
        return None
    return Sum(n_bytes, run.crc, digest_of_blocks(run.blocks).hex())


CHECKS = (Check(files), Check(contents, Level.DEEP))
