"""The manifest: sizes, CRC-32s and content digests of a written checkpoint, for later checking.

``ckpt-manifest.json`` in the destination directory, or ``FILE.ckpt-manifest.json`` beside a single file::

    {"schema": "ckpt-manifest", "version": 1, "tool": "ckpt-toolkit 0.1.0", "digest": "xxh3-128/1MiB",
     "files": [
      {"path": "model.pt", "size": 1234, "crc32": "89abcdef"},
      …],
     "arrays": [
      {"key": "w", "name": "w", "file": "model.pt", "offset": 64, "dtype": "float32", "shape": [2, 3],
       "crc32": "…", "digest": "…"},
      …]}

One entry a line, in the order of the plan; no time stamps and no paths of the machine, so equal work gives equal
manifests. ``key`` is the first tensor that the array holds (a part of), ``name`` the array's. What was switched off is
null. Version 1 is the only one.
"""

from __future__ import annotations

import json
from array import array as columns
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from core.checksum import ALGORITHM, crc32, crc32_combine, crc32_of_zeros
from core.errors import CorruptError, UnsupportedError
from core.places import Places

if TYPE_CHECKING:
    from core.copy import CopyResult
    from core.image import FileImage
    from core.plan import Plan
    from core.store import ReadStore, WriteStore

MANIFEST = "ckpt-manifest.json"
SCHEMA = "ckpt-manifest"
VERSION = 1
MAX_BYTES = 4 << 30


def manifest_name(file: str | None = None) -> str:
    """Name of the manifest of a directory, or of a single file."""
    return MANIFEST if file is None else f"{file}.{MANIFEST}"


@dataclass(frozen=True, slots=True)
class FileSum:
    """A finished file.

    Args:
        path: relative to the destination.
        n_bytes: its size.
        crc: CRC-32 of the whole file; None if checksums are off.
    """

    path: str
    n_bytes: int
    crc: int | None


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
    store: WriteStore, name: str, plan: Plan, result: CopyResult, files: list[FileSum], *, tool: str, crc: bool = True
) -> None:
    """Writes the manifest of a finished stage.

    Args:
        store: the stage.
        name: of the manifest, see ``manifest_name``.
        plan, result: what was done.
        files: from ``finish_files``.
        tool: name and version of the writing software.
        crc: whether CRC-32s were computed.

    Raises:
        CapacityError, StorageError: the system refuses.
    """
    store.create(name, 0)
    offset = 0
    pending: list[str] = []
    for line in _lines(plan, result, files, tool=tool, crc=crc):
        pending.append(line)
        if len(pending) == 1000:
            offset += _put(store, name, offset, pending)
            pending = []
    _put(store, name, offset, pending)


def _put(store: WriteStore, name: str, offset: int, lines: list[str]) -> int:
    data = "".join(lines).encode()
    store.write(name, offset, data)
    return len(data)


def _lines(plan: Plan, result: CopyResult, files: list[FileSum], *, tool: str, crc: bool) -> Iterator[str]:
    head = {"schema": SCHEMA, "version": VERSION, "tool": tool, "digest": ALGORITHM if result.digests else None}
    yield json.dumps(head, ensure_ascii=False)[:-1] + ',\n"files": [\n'
    separator = ""
    for file in files:
        entry = {"path": file.path, "size": file.n_bytes, "crc32": None if file.crc is None else f"{file.crc:08x}"}
        yield separator + json.dumps(entry, ensure_ascii=False)
        separator = ",\n"
    yield '],\n"arrays": [\n'
    separator = ""
    places = plan.places
    is_listed = bytearray(len(places))
    for key in iter(plan.keys()):
        for fragment in plan.target.fragments(key):
            array = fragment.array
            number = None if array is None else places.number_of(array.name)
            if array is None or number is None or is_listed[number]:
                continue
            is_listed[number] = 1
            entry_of_array = {
                "key": key,
                "name": array.name,
                "file": places.file_of(number),
                "offset": places.offset_of(number),
                "dtype": array.dtype,
                "shape": list(array.shape),
                "crc32": f"{result.crcs[number]:08x}" if crc else None,
                "digest": result.digest_of(array.name),
            }
            yield separator + json.dumps(entry_of_array, ensure_ascii=False)
            separator = ",\n"
    yield "]}\n"


@dataclass(frozen=True, slots=True)
class ManifestArray:
    """An array as its manifest describes it; ``crc`` and ``digest`` (hexadecimal) are None where switched off."""

    key: str
    name: str
    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    crc: int | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a manifest states.

    Args:
        tool: who wrote it.
        digest: name of the digest, None if there are none.
        files: the files.
        arrays: the arrays.
    """

    tool: str
    digest: str | None
    files: tuple[FileSum, ...]
    arrays: tuple[ManifestArray, ...]


def read_manifest(store: ReadStore, name: str = MANIFEST) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        MissingShardError: there is none.
        CorruptError: it is not a manifest.
        UnsupportedError: it is of a newer version.
    """
    n_bytes = store.size(name)
    if n_bytes > MAX_BYTES:
        raise CorruptError(f"a manifest of {n_bytes} bytes is not believed", file=name)
    try:
        found: Any = json.loads(store.read(name, 0, n_bytes))
        if found["schema"] != SCHEMA:
            raise ValueError(found["schema"])
        if found["version"] > VERSION:
            raise UnsupportedError(f"manifest version {found['version']} is newer than {VERSION}", file=name)
        files = tuple(FileSum(str(f["path"]), int(f["size"]), _crc(f["crc32"])) for f in found["files"])
        arrays = tuple(_array(entry) for entry in found["arrays"])
        return Manifest(str(found["tool"]), found["digest"], files, arrays)
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise CorruptError("not a ckpt manifest", file=name, hint="remove it, or copy the checkpoint again") from err


def _crc(text: Any) -> int | None:
    return None if text is None else int(text, 16)


def _array(entry: Any) -> ManifestArray:
    return ManifestArray(
        str(entry["key"]),
        str(entry["name"]),
        str(entry["file"]),
        int(entry["offset"]),
        str(entry["dtype"]),
        tuple(int(n) for n in entry["shape"]),
        _crc(entry["crc32"]),
        entry["digest"],
    )
