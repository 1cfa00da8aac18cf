"""What a copy does once its arrays are written: the literals of the files, their sums, and the manifest."""

from __future__ import annotations

from array import array as columns
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from core.arrays.checksum import ALGORITHM, crc32, crc32_combine, crc32_of_zeros
from core.errors import CorruptError
from core.manifest.file import MANIFEST as MANIFEST
from core.manifest.file import FileSum as FileSum
from core.manifest.file import ManifestArray, manifest_lines, write_lines
from core.manifest.file import manifest_name as manifest_name
from core.manifest.file import read_manifest as read_manifest
from core.plan.positions import Places

if TYPE_CHECKING:
    from core.catalog.file_image import FileImage
    from core.copy.run import CopyResult
    from core.files.store import WriteStore
    from core.fingerprint.definition import Fingerprint
    from core.plan.plan import Plan


def finish_files(plan: Plan, result: CopyResult, store: WriteStore, *, crc: bool = True) -> list[FileSum]:
    """Writes the literals of all file images, metadata files last.

    Args:
        plan: the plan that was executed.
        result: its checksums, which the literals may state.
        store: the stage; the files exist.
        crc: sum whole files; needs the arrays' CRCs in ``result``.

    Returns:
        The files, in the order of the images.

    Raises:
        CorruptError: a literal lies outside its file or on an array.
        CapacityError, StorageError: the system refuses.
    """
    first: list[int] = [0]
    for image in plan.images:
        first.append(first[-1] + len(image.arrays))
    sums: dict[int, FileSum] = {}
    order = sorted(range(len(plan.images)), key=lambda n: plan.images[n].is_metadata)
    for number in order:
        image = plan.images[number]
        pieces = _Pieces(plan.places, result, range(first[number], first[number + 1]))
        for offset, data in image.literals(result.crc_of):
            if data:
                store.write(image.path, offset, data)
                pieces.add(offset, data)
        whole = pieces.crc_of(image)
        sums[number] = FileSum(image.path, image.size, whole if crc else None)
    return [sums[number] for number in range(len(plan.images))]


class _Pieces:
    """Arrays and literals of one file, as columns."""

    def __init__(self, places: Places, result: CopyResult, numbers: range) -> None:
        self._offsets = columns("q", (places.offset_of(n) for n in numbers))
        self._sizes = columns("q", (places.bytes_of(n) for n in numbers))
        self._crcs = columns("I", (result.crcs[n] for n in numbers))

    def add(self, offset: int, data: bytes) -> None:
        self._offsets.append(offset)
        self._sizes.append(len(data))
        self._crcs.append(crc32(data))

    def crc_of(self, image: FileImage) -> int:
        """CRC-32 of the whole file; what no piece covers is zero."""
        crc = end = 0
        for n in sorted(range(len(self._offsets)), key=self._offsets.__getitem__):
            offset, n_bytes = self._offsets[n], self._sizes[n]
            if n_bytes == 0:
                continue
            if offset < end or offset + n_bytes > image.size:
                raise CorruptError(
                    f"bytes {offset}–{offset + n_bytes} of a file of {image.size} bytes are laid out twice or outside",
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
    """Writes the manifest of a finished stage.

    Args:
        store: the stage.
        name: of the manifest, see ``manifest_name``.
        plan, result: what was done.
        files: from ``finish_files``.
        tool: name and version of the writing software.
        crc: whether CRC-32s were computed.
        fingerprints: of the canonical tensors; None if they were not asked for.

    Raises:
        CapacityError, StorageError: the system refuses.
    """
    digest = ALGORITHM if result.digests else None
    write_lines(store, name, manifest_lines(tool, digest, files, _arrays(plan, result, crc=crc), fingerprints))


def _arrays(plan: Plan, result: CopyResult, *, crc: bool) -> Iterator[ManifestArray]:
    places = plan.places
    is_listed = bytearray(len(places))
    for key in iter(plan.keys()):
        for fragment in plan.target.fragments(key):
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
