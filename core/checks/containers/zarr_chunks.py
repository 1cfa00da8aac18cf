"""CK140–CK148: zarr arrays in directories: their metadata, their chunks, their shards.

Where the checkpoint's metadata could be read, every array has its chunks, each of the right length; where not, every
array is looked at by itself. With headers, the index of every shard is read. Chunks that are not stored because they
equal the fill value are counted in a note (``core.formats.zarr.fill``).

Source: ``core.formats.zarr.metadata2``, ``zarr_v3``, ``zarr_chunks``, ``zarr_shards``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from math import prod

from core.checks.check import Check
from core.checks.file_codes import OBJECT_SHARD, ZARR_METADATA, ZARR_SEPARATOR, ZARR_TWO, ZARR_UNSTORED
from core.checks.finding import Finding
from core.checks.level import Level
from core.checks.problems import finding_of, problems_of
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.files.json_object import read_small_file
from core.files.store import ReadStore
from core.formats.mcore.objects import shard_grids
from core.formats.zarr import format as zarr
from core.formats.zarr import format3 as zarr3
from core.formats.zarr.array import PICKLED, ZarrArray
from core.formats.zarr.chunks import Chunks, folder_chunks, fragments_of_chunks
from core.formats.zarr.fill import lost_files, missing_chunk, unstored
from core.formats.zarr.grid import ChunkNames, is_like_a_chunk
from core.formats.zarr.metadata2 import ARRAY_FILE, parse_zarray
from core.formats.zarr.metadata3 import METADATA_FILE, node_of, parse_array
from core.formats.zarr.tree import ROOT_KEY, folders_of
from core.opening.open import ERROR

CODES = ()

_MAX_METADATA_BYTES = 256 << 20
_MOST_NAMED = 100
Parsed = Callable[[ReadStore, str, str], ZarrArray | None]
"""(store, metadata file, key) → the array; None if it is a group."""


def _v2(store: ReadStore, file: str, key: str) -> ZarrArray | None:
    return parse_zarray(read_small_file(store, file, max_bytes=_MAX_METADATA_BYTES, key=key), file=file, key=key)


def _v3(store: ReadStore, file: str, key: str) -> ZarrArray | None:
    kind, metadata = node_of(read_small_file(store, file, max_bytes=_MAX_METADATA_BYTES, key=key), file=file)
    return parse_array(metadata, file=file, key=key) if kind == "array" else None


_VERSIONS: dict[str, tuple[str, Parsed, Callable[[ReadStore], bool]]] = {
    "zarr": (ARRAY_FILE, _v2, zarr.stores_every_chunk),
    "zarr3": (METADATA_FILE, _v3, zarr3.stores_every_chunk),
}


@dataclass(frozen=True, slots=True)
class _Folder:
    """An array's directory, its metadata file, its files and its metadata."""

    path: str
    file: str
    key: str
    listing: Mapping[str, int]
    array: ZarrArray


def arrays(subject: Subject) -> Iterator[Finding]:
    """CK140–CK146."""
    assert subject.format is not None
    if subject.catalog is not None and subject.level < Level.HEADERS:
        return
    marker, parsed, stores_every_chunk = _VERSIONS[subject.format.name]
    lost = cache(partial(lost_files, subject.store))
    try:
        fills = not stores_every_chunk(subject.store)
        for found in _folders(subject, marker, parsed):
            if isinstance(found, Finding):
                yield found
            else:
                yield from _chunks(subject, found, fills=fills, lost=lost)
    except CheckpointingException as err:  # of the walk itself
        yield finding_of(err, default=ZARR_METADATA)


def _folders(subject: Subject, marker: str, parsed: Parsed) -> Iterator[_Folder | Finding]:
    """The arrays, and what is wrong with directories that are none."""
    store = subject.store
    groups: set[str] = set()
    bare: list[str] = []
    pending: list[_Folder | Finding] = []

    def is_array(folder: str, listing: Mapping[str, int]) -> bool:
        if marker not in listing:
            return False
        file, key = _joined(folder, marker), folder or ROOT_KEY
        try:
            array = parsed(store, file, key)
        except CheckpointingException as err:
            if err.rule == PICKLED and subject.catalog is not None:  # CK601 says it
                return True
            pending.append(finding_of(err, default=ZARR_METADATA, file=file, key=key))
            return True
        if array is None:
            groups.add(folder)
            return False
        pending.append(_Folder(folder, file, key, listing, array))
        return True

    for folder, listing, found in folders_of(store, is_array=is_array):
        yield from pending
        pending.clear()
        if found or folder in groups or folder.startswith(tuple(bare)):
            continue
        for finding in _no_array(subject, folder, listing, marker):
            bare.append(_joined(folder, ""))
            yield finding


def _no_array(subject: Subject, folder: str, listing: Mapping[str, int], marker: str) -> Iterator[Finding]:
    """What a directory without metadata is, if it was an array's."""
    chunk = next(filter(is_like_a_chunk, listing), None)
    prefix = f"{folder}/" if folder else ""
    if chunk is None and f"{prefix}c" in subject.tree.folders:
        chunk = "c/…"
    if chunk is not None:
        yield ZARR_METADATA.finding(
            f"{marker} is missing beside the chunk {chunk}",
            file=_joined(folder, marker),
            key=folder or None,
            expected=marker,
            found="chunks without it",
        )
    elif folder and not any(path.startswith(prefix) for path in (*subject.files, *subject.tree.folders)):
        yield ZARR_METADATA.finding(
            "the directory of a tensor is empty", file=folder, key=folder, expected=marker, found="no file"
        )


def _chunks(subject: Subject, folder: _Folder, *, fills: bool, lost: Callable[[], Sequence[str]]) -> Iterator[Finding]:
    """CK141–CK146, of one array.

    Args:
        fills: chunks may be absent where the array has a fill value.
        lost: files that are known to have been there.
    """
    array, store = folder.array, subject.store
    chunks: list[Chunks] = []
    problems = problems_of(
        lambda report: chunks.append(
            folder_chunks(
                store,
                folder.path,
                array,
                key=folder.key,
                fill=array.fill if fills else None,
                lost=lost,
                listing=folder.listing,
                report=report,
            )
        )
    )
    is_misplaced = any(err.rule in ("zarr.missing", "zarr.beyond") for err in problems)
    other = _other_names(subject, folder) if is_misplaced else None
    if other is not None:
        yield ZARR_SEPARATOR.finding(
            "the chunks are there, but under names of another kind than the metadata say",
            file=folder.file,
            key=folder.key,
            expected=f"names like {array.names.name(_last(array))}",
            found=f"names like {other.name(_last(array))}",
        )
        return
    for err in problems:
        yield finding_of(err, default=ZARR_METADATA, expected=_expected(array), found=_found(subject, err))
    if array.sharding is not None and not problems:
        for err in problems_of(
            lambda report: fragments_of_chunks(store, folder.key, array, chunks[0], file=folder.file, report=report)
        ):
            yield finding_of(err, default=ZARR_METADATA)


def _expected(array: ZarrArray) -> str:
    if array.sharding is None and array.coding.is_plain:
        return f"{array.grid.n_chunks} chunks of {array.coding.n_bytes} bytes"
    return f"{array.grid.n_chunks} chunks"


def _found(subject: Subject, err: CheckpointingException) -> str | None:
    size = None if err.file is None else subject.files.get(err.file)
    return "no such file" if size is None else f"{size} bytes"


def _last(array: ZarrArray) -> tuple[int, ...]:
    return tuple(max(count - 1, 0) for count in array.grid.counts)


def _other_names(subject: Subject, folder: _Folder) -> ChunkNames | None:
    """The kind of names under which every chunk is there, if the metadata say another one and none is there by that."""
    array, grid = folder.array, folder.array.grid
    names = subject.tree.below(folder.path)
    if any(array.names.index(name) is not None for name in names):
        return None
    for separator in ("/", "."):
        for has_prefix in (True, False):
            other = ChunkNames(array.names.rank, separator, has_prefix)
            found = (other.index(name) for name in names)
            numbers = {grid.number_of(index) for index in found if index is not None}
            if other != array.names and len(numbers - {None}) == grid.n_chunks:
                return other
    return None


def absent_chunks(subject: Subject) -> Iterator[Finding]:
    """CK148: chunks that are not stored; errors where the user refuses them. Inside shards only with headers."""
    if subject.catalog is None:
        return
    for tensor in unstored(subject.catalog, reads_shards=subject.level >= Level.HEADERS):
        if subject.missing_chunks == ERROR:
            yield finding_of(missing_chunk(tensor), default=ZARR_METADATA)
            continue
        yield ZARR_UNSTORED.finding(
            f"{tensor.n_chunks} {'chunk reads' if tensor.n_chunks == 1 else 'chunks read'} as the fill value "
            f"({tensor.n_bytes} bytes)",
            file=tensor.chunk_file,
            key=tensor.key,
        )


def objects(subject: Subject) -> Iterator[Finding]:
    """CK162: where some shards of a ShardedObject are there, all of its grid are."""
    for grid in shard_grids(path.removesuffix(".pt") for path in subject.files if path.endswith(".pt")):
        for key in islice(grid.absent_keys(), _MOST_NAMED):
            yield OBJECT_SHARD.finding(
                "other shards of the object are there, this one is not",
                file=f"{key}.pt",
                key=key,
                expected=f"{prod(grid.shape)} shards",
                found=f"{len(grid.offsets)}",
            )


def two_versions(subject: Subject) -> Iterator[Finding]:
    """CK147: an array has the metadata of one version."""
    for name in subject.files:
        folder, _, last = name.rpartition("/")
        if last == ARRAY_FILE and _joined(folder, METADATA_FILE) in subject.files:
            yield ZARR_TWO.finding(
                f"{ARRAY_FILE} and {METADATA_FILE} describe one directory; readers take either",
                file=name,
                key=folder or None,
                expected="one of them",
                found="both",
            )


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


CHECKS = (
    Check(arrays, formats=("zarr", "zarr3")),
    Check(absent_chunks, formats=("zarr", "zarr3", "orbax")),
    Check(objects, formats=("zarr",)),
    Check(two_versions, formats=("zarr", "zarr3")),
)
