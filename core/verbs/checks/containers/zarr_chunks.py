"""CK140–CK148, CK162: check the metadata, chunks and shards of zarr arrays in directories.

If the checkpoint's metadata could be read, the chunks of its arrays are known to exist and are
checked again only from the headers level on, which also reads the index of every shard. Otherwise
every array is examined separately. Chunks that are not stored because they equal the fill value are
counted in a note (``core.formats.zarr.fill``).

Source: ``core.formats.zarr.metadata2``, ``metadata3``, ``chunks``, ``shards``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod

from core.errors import CheckpointingException
from core.files.json_object import read_small_file
from core.files.store import ReadStore
from core.formats.zarr import format as zarr
from core.formats.zarr import format3 as zarr3
from core.formats.zarr.array import PICKLED, ZarrArray
from core.formats.zarr.chunks import Chunks, folder_chunks, fragments_of_chunks
from core.formats.zarr.fill import lost_files, missing_chunk, unstored
from core.formats.zarr.grid import ChunkNames, is_like_a_chunk
from core.formats.zarr.metadata2 import ARRAY_FILE, parse_zarray
from core.formats.zarr.metadata3 import METADATA_FILE, node_of, parse_array
from core.formats.zarr.tree import ROOT_KEY, walk_folders
from core.megatron.extras.sharded_objects import shard_grids
from core.opening.open import ERROR
from core.values import dataclass, n_text
from core.verbs.checks.finding import Finding, Level, get_code
from core.verbs.checks.problems import collect_problems, finding_of
from core.verbs.checks.subject import Check, Subject

OBJECT_SHARD = get_code("CK162")
ZARR_UNSTORED = get_code("CK148")
ZARR_TWO = get_code("CK147")
ZARR_SEPARATOR = get_code("CK144")
ZARR_METADATA = get_code("CK140")

_MAX_METADATA_BYTES = 256 << 20
_MOST_NAMED = 100
ParseArray = Callable[[ReadStore, str, str], ZarrArray | None]
"""(store, metadata file, tensor name) → the array; None for a group."""


def _parse_v2(store: ReadStore, file: str, key: str) -> ZarrArray | None:
    """Parse the metadata of a zarr 2 array."""
    return parse_zarray(
        read_small_file(store, file, max_bytes=_MAX_METADATA_BYTES, key=key), file=file, key=key
    )


def _parse_v3(store: ReadStore, file: str, key: str) -> ZarrArray | None:
    """Parse the metadata of a zarr 3 array; None for a group."""
    kind, metadata = node_of(
        read_small_file(store, file, max_bytes=_MAX_METADATA_BYTES, key=key), file=file
    )
    return parse_array(metadata, file=file, key=key) if kind == "array" else None


_VERSIONS: dict[str, tuple[str, ParseArray, Callable[[ReadStore], bool]]] = {
    "zarr": (ARRAY_FILE, _parse_v2, zarr.stores_every_chunk),
    "zarr3": (METADATA_FILE, _parse_v3, zarr3.stores_every_chunk),
}


@dataclass(frozen=True, slots=True)
class _Folder:
    """The directory of one array.

    Args:
        path: path of the directory in the checkpoint; "" for the checkpoint itself.
        file: path of the array's metadata file.
        key: tensor name.
        listing: name of each file in the directory → its size in bytes.
        array: the parsed metadata.
    """

    path: str
    file: str
    key: str
    listing: Mapping[str, int]
    array: ZarrArray


def check_arrays(subject: Subject) -> Iterator[Finding]:
    """Check the metadata and the chunks of every array (CK140–CK146)."""
    assert subject.format is not None
    if subject.catalog is not None and subject.level < Level.HEADERS:
        return
    marker, parse, stores_every_chunk = _VERSIONS[subject.format.name]
    # Listing the files that must have existed is slow and only needed if chunks are absent.
    lost = cache(partial(lost_files, subject.store))
    try:
        fills = not stores_every_chunk(subject.store)
        for folder in _find_arrays(subject, marker, parse):
            if isinstance(folder, Finding):
                yield folder
            else:
                yield from _check_chunks(subject, folder, fills=fills, lost=lost)
    except CheckpointingException as err:  # raised while walking the directories
        yield finding_of(err, default=ZARR_METADATA)


def _find_arrays(subject: Subject, marker: str, parse: ParseArray) -> Iterator[_Folder | Finding]:
    """Yield the directories of arrays, and findings about those that should be arrays.

    Args:
        marker: name of the metadata file of an array.
        parse: parses that file.
    """
    store = subject.store
    groups: set[str] = set()
    bare_prefixes: list[str] = []
    pending: list[_Folder | Finding] = []

    def is_array(folder: str, listing: Mapping[str, int]) -> bool:
        if marker not in listing:
            return False
        file, key = _joined(folder, marker), folder or ROOT_KEY
        try:
            array = parse(store, file, key)
        except CheckpointingException as err:
            if err.rule == PICKLED and subject.catalog is not None:  # CK601 reports it
                return True
            pending.append(finding_of(err, default=ZARR_METADATA, file=file, key=key))
            return True
        if array is None:
            groups.add(folder)
            return False
        pending.append(_Folder(folder, file, key, listing, array))
        return True

    # ``walk_folders`` calls ``is_array`` for each folder before it yields the folder; meanwhile the
    # array or the finding is queued in ``pending``.
    for folder, listing, is_array_folder in walk_folders(store, is_array=is_array):
        yield from pending
        pending.clear()
        if is_array_folder or folder in groups or folder.startswith(tuple(bare_prefixes)):
            continue
        # The subfolders of a reported directory hold its chunks, and are not reported again.
        finding = _missing_metadata(subject, folder, listing, marker)
        if finding is not None:
            bare_prefixes.append(_joined(folder, ""))
            yield finding


def _missing_metadata(
    subject: Subject, folder: str, listing: Mapping[str, int], marker: str
) -> Finding | None:
    """Return the finding for a directory that looks like an array's but has no metadata."""
    chunk = next(filter(is_like_a_chunk, listing), None)
    prefix = f"{folder}/" if folder else ""
    # The chunks of zarr 3 are usually in a folder "c", which may also be an array of that name.
    if (
        chunk is None
        and f"{prefix}c" in subject.tree.folders
        and f"{prefix}c/{marker}" not in subject.files
    ):
        chunk = "c/…"
    if chunk is not None:
        return ZARR_METADATA.finding(
            f"{marker} is missing, but chunk {chunk} exists",
            file=_joined(folder, marker),
            key=folder or None,
            expected=marker,
            found="chunks without metadata",
        )
    # A directory with anything below it may be a group without metadata.
    if not folder or any(
        path.startswith(prefix) for path in (*subject.files, *subject.tree.folders)
    ):
        return None
    return ZARR_METADATA.finding(
        "the tensor's directory is empty",
        file=folder,
        key=folder,
        expected=marker,
        found="no file",
    )


def _check_chunks(
    subject: Subject, folder: _Folder, *, fills: bool, lost: Callable[[], Sequence[str]]
) -> Iterator[Finding]:
    """Check the chunks of one array (CK141–CK146).

    Args:
        fills: chunks may be absent if the array has a fill value.
        lost: returns the names of files that are known to have existed.
    """
    array, store = folder.array, subject.store
    # Compare the files with the chunk grid.
    chunks: list[Chunks] = []
    problems = collect_problems(
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
    # If chunks are missing or surplus, they may all exist under another naming scheme: that is one
    # finding about the metadata, not one for each chunk.
    is_misplaced = any(err.rule in ("zarr.missing", "zarr.beyond") for err in problems)
    other = _matching_names(subject, folder) if is_misplaced else None
    if other is not None:
        last = tuple(max(count - 1, 0) for count in array.grid.counts)
        yield ZARR_SEPARATOR.finding(
            "the chunks exist, but their names do not match the metadata",
            file=folder.file,
            key=folder.key,
            expected=f"names like {array.names.name(last)}",
            found=f"names like {other.name(last)}",
        )
        return
    # Otherwise report each problem. Only the chunks of a plain array have a known size.
    expected = f"{array.grid.n_chunks} chunks"
    if array.sharding is None and array.coding.is_plain:
        expected += f" of {array.coding.n_bytes} bytes"
    for err in problems:
        size = None if err.file is None else subject.files.get(err.file)
        size_text = "no such file" if size is None else f"{size} bytes"
        yield finding_of(err, default=ZARR_METADATA, expected=expected, found=size_text)
    # The chunks of a sharded array are shards, with an index of the chunks inside.
    if array.sharding is not None and not problems:
        for err in collect_problems(
            lambda report: fragments_of_chunks(
                store, folder.key, array, chunks[0], file=folder.file, report=report
            )
        ):
            yield finding_of(err, default=ZARR_METADATA)


def _matching_names(subject: Subject, folder: _Folder) -> ChunkNames | None:
    """Return another naming scheme under which every chunk exists.

    Returns:
        None if there is none, or if some files follow the scheme of the metadata.
    """
    array, grid = folder.array, folder.array.grid
    names = subject.tree.below(folder.path)
    if any(array.names.index(name) is not None for name in names):
        return None
    for separator in ("/", "."):
        for has_prefix in (True, False):
            other = ChunkNames(array.names.rank, separator, has_prefix)
            indexes = (other.index(name) for name in names)
            numbers = {grid.number_of(index) for index in indexes if index is not None}
            if other != array.names and len(numbers - {None}) == grid.n_chunks:
                return other
    return None


def report_absent_chunks(subject: Subject) -> Iterator[Finding]:
    """Report chunks that are not stored (CK148), as errors if the user rejects them.

    Chunks inside shards are only looked up from the headers level on.
    """
    if subject.catalog is None:
        return
    for tensor in unstored(subject.catalog, reads_shards=subject.level >= Level.HEADERS):
        if subject.missing_chunks == ERROR:
            yield finding_of(missing_chunk(tensor), default=ZARR_METADATA)
            continue
        yield ZARR_UNSTORED.finding(
            f"{n_text(tensor.n_chunks, 'chunk is', 'chunks are')} not stored, so the fill value is "
            f"read instead ({tensor.n_bytes:,} bytes)",
            file=tensor.chunk_file,
            key=tensor.key,
        )


def check_object_shards(subject: Subject) -> Iterator[Finding]:
    """Check that each ShardedObject has all shards of its grid (CK162)."""
    for grid in shard_grids(
        path.removesuffix(".pt") for path in subject.files if path.endswith(".pt")
    ):
        for key in grid.absent_keys(_MOST_NAMED):
            yield OBJECT_SHARD.finding(
                "this shard of the object is missing, but other shards exist",
                file=f"{key}.pt",
                key=key,
                expected=f"{prod(grid.shape)} shards",
                found=f"{len(grid.offsets)}",
            )


def find_two_versions(subject: Subject) -> Iterator[Finding]:
    """Report directories with the metadata of both zarr versions (CK147)."""
    for name in subject.files:
        folder, _, last = name.rpartition("/")
        if last == ARRAY_FILE and _joined(folder, METADATA_FILE) in subject.files:
            yield ZARR_TWO.finding(
                f"{ARRAY_FILE} and {METADATA_FILE} describe the same directory, so different "
                "readers may use different files",
                file=name,
                key=folder or None,
                expected="one of them",
                found="both",
            )


def _joined(folder: str, name: str) -> str:
    """Join a folder and a name; "" is the folder of the checkpoint."""
    return f"{folder}/{name}" if folder else name


CHECKS = (
    Check(check_arrays, formats=("zarr", "zarr3")),
    Check(report_absent_chunks, formats=("zarr", "zarr3", "orbax")),
    Check(check_object_shards, formats=("zarr",)),
    Check(find_two_versions, formats=("zarr", "zarr3")),
)
