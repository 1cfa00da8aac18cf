"""Finish a copy after its arrays are written: write literals, checksum files, write a manifest."""

from __future__ import annotations

from array import array as columns
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from core.arrays.checksum import ALGORITHM, crc32, crc32_combine, crc32_of_zeros
from core.errors import CorruptError
from core.publish.manifest.file import MANIFEST as MANIFEST
from core.publish.manifest.file import FileSum as FileSum
from core.publish.manifest.file import ManifestArray, manifest_lines, write_lines
from core.publish.manifest.file import manifest_name as manifest_name
from core.publish.manifest.file import read_manifest as read_manifest

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage
    from core.engine.copy.run import CopyResult
    from core.engine.fingerprint.definition import Fingerprint
    from core.engine.plan.plan import Plan
    from core.files.store import WriteStore


def finish_files(
    plan: Plan,
    result: CopyResult,
    store: WriteStore,
    *,
    crc: bool = True,
    written: Sequence[FileRanges] | None = None,
) -> list[FileSum]:
    """Write the literals of all file images, metadata files last.

    Literals are the bytes of a file that are not arrays, such as headers.

    Args:
        plan: the plan that was executed.
        result: checksums of the arrays, which the literals may contain.
        store: the staging directory, where the files exist.
        crc: return CRC-32s of entire files; they are combined from those in ``result``.
        written: the literals of each file, if they have been written already.

    Returns:
        The files, in the order of the images.

    Raises:
        CorruptError: a literal or array overlaps another one, or exceeds its file.
        CapacityError, StorageError: the system cannot write.
    """
    # Arrays are numbered in the order of the images: find the numbers of each image's.
    first: list[int] = [0]
    for image in plan.images:
        first.append(first[-1] + len(image.arrays))
    sums: dict[int, FileSum] = {}
    # Metadata files come last, since they make the checkpoint recognisable.
    order = sorted(range(len(plan.images)), key=lambda n: plan.images[n].is_metadata)
    for number in order:
        image = plan.images[number]
        ranges = FileRanges() if written is None else written[number]
        for n in range(first[number], first[number + 1]):
            ranges.add_sum(plan.places.offset_of(n), plan.places.bytes_of(n), result.crcs[n])
        for offset, data in image.literals(result.crc_of) if written is None else ():
            if data:
                store.write(image.path, offset, data)
                ranges.add(offset, data)
        file_crc = ranges.crc_of(image)  # called without ``crc`` too, as it checks for overlaps
        sums[number] = FileSum(image.path, image.size, file_crc if crc else None)
    return [sums[number] for number in range(len(plan.images))]


class FileRanges:
    """The byte ranges of one file that contain arrays and literals, as columns."""

    def __init__(self) -> None:
        self._offsets = columns("q")
        self._sizes = columns("q")
        self._crcs = columns("I")

    def add(self, offset: int, data: bytes) -> None:
        """Add a literal."""
        self.add_sum(offset, len(data), crc32(data))

    def add_sum(self, offset: int, n_bytes: int, crc: int) -> None:
        """Add an array whose CRC-32 is known."""
        self._offsets.append(offset)
        self._sizes.append(n_bytes)
        self._crcs.append(crc)

    def crc_of(self, image: FileImage) -> int:
        """Return the CRC-32 of the entire file; bytes outside all ranges are zero.

        Raises:
            CorruptError: a range exceeds the file or overlaps another range.
        """
        # Combine the CRCs of ranges and gaps in the order of the file, without reading it.
        crc = end = 0
        for n in sorted(range(len(self._offsets)), key=self._offsets.__getitem__):
            offset, n_bytes = self._offsets[n], self._sizes[n]
            if n_bytes == 0:
                continue
            if offset < end or offset + n_bytes > image.size:
                raise CorruptError(
                    f"bytes {offset}–{offset + n_bytes} overlap other bytes or extend past the end "
                    f"of the file ({image.size} bytes)",
                    file=image.path,
                )
            crc = crc32_combine(crc, crc32_of_zeros(offset - end), offset - end)
            crc = crc32_combine(crc, self._crcs[n], n_bytes)
            end = offset + n_bytes
        return crc32_combine(crc, crc32_of_zeros(image.size - end), image.size - end)


def write_manifest(
    store: WriteStore,
    name: str,
    plan: Plan,
    result: CopyResult,
    files: list[FileSum],
    *,
    tool: str,
    crc: bool = True,
    fingerprints: Mapping[str, Fingerprint] | None = None,
) -> None:
    """Write the manifest of a finished copy.

    Args:
        store: the staging directory.
        name: name of the manifest (``manifest_name``).
        plan, result: the plan that was executed, and its result.
        files: from ``finish_files``.
        tool: name and version of the writing software.
        crc: CRC-32s were computed.
        fingerprints: fingerprints by canonical key; None if they were not requested.

    Raises:
        CapacityError, StorageError: the system cannot write.
    """
    digest = ALGORITHM if result.digests else None
    write_lines(
        store,
        name,
        manifest_lines(tool, digest, files, manifest_arrays(plan, result, crc=crc), fingerprints),
    )


def manifest_arrays(plan: Plan, result: CopyResult, *, crc: bool) -> Iterator[ManifestArray]:
    """Yield the entries of the arrays that the plan filled, each once."""
    places = plan.places
    is_listed = bytearray(len(places))
    for key in iter(plan.keys()):
        for fragment in plan.target.fragments(key):
            # Skip arrays that the plan does not fill, and those listed under another tensor.
            array = fragment.array
            number = None if array is None else places.number_of(array.name)
            if array is None or number is None or is_listed[number]:
                continue
            is_listed[number] = 1
            yield ManifestArray(
                key,
                array.name,
                places.file_of(number),
                places.offset_of(number),
                array.dtype,
                array.shape,
                result.crcs[number] if crc else None,
                result.digest_of(array.name),
            )
