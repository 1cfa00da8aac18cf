"""The chunks of a zarr array: which of them are stored, and the fragments they are.

A chunk that is not stored is the fill value where the group's own writer means that (``core.formats.zarr.fill``); where
it does not, and where a manifest lists the chunk, it is an error that names it.
"""

from __future__ import annotations

from array import array as columns
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise, product
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape, boxes_of_flat_range, full_box
from core.catalog.catalog import Fragment, whole_fragment
from core.catalog.stored import Extent, StoredArray, array_name
from core.errors import CheckpointingException, CorruptError, MissingShardError, Report, TruncatedError, raising
from core.formats.zarr.decode import EncodedChunk
from core.formats.zarr.fill import MOST_FILLED_BYTES, FillValue
from core.formats.zarr.grid import ChunkGrid, is_like_a_chunk
from core.formats.zarr.shards import ShardIndex, are_bands, index_bytes, read_index

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.zarr.array import ZarrArray
    from core.formats.zarr.decode import ChunkCoding

_COPY_AGAIN = "copy the checkpoint again, with all its files"
_MOST_NAMED = 100
"""Absent chunks of an array of which a check is told."""
_MOST_SINGLE = 1 << 16
"""Chunks of an array of which each absent one is a fragment of its own; of more, neighbours are one fragment."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a chunk (or shard) lie: file, byte offset in it, length in bytes."""

    file: str
    offset: int
    n_bytes: int


PlaceOf = Callable[[Shape, int], Place]
"""(index of a chunk, its number in C order) → its place."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which chunks (or shards) of an array are stored, and where.

    Args:
        place_of: where a chunk lies, or would lie.
        absent: runs [start, stop) of the numbers of chunks that are not stored, in order.
        fill: one element of what absent chunks, and those absent in a shard, hold; None where all must be stored.
    """

    place_of: PlaceOf
    absent: tuple[tuple[int, int], ...] = ()
    fill: bytes | None = None


def folder_chunks(
    store: ReadStore,
    folder: str,
    array: ZarrArray,
    *,
    key: str,
    fill: bytes | None = None,
    lost: Callable[[], Sequence[str]] = tuple,
    listing: Mapping[str, int] | None = None,
    report: Report = raising,
) -> Chunks:
    """Return the chunks of an array that is a directory of files.

    Args:
        folder: the array's directory, "" for the root.
        key: the tensor, for messages.
        fill: the array's fill value if its writer leaves chunks out that equal it, else None.
        lost: files that are known to have been there; asked for only where chunks are absent.
        listing: the files directly in ``folder``, if they are known.
        report: told of single chunks that are absent, too short or too long, or beyond the grid; of a few where many
            are absent.

    Raises:
        MissingShardError: a chunk is absent that must be there; names its file.
        TruncatedError, CorruptError: a chunk has the wrong length, or a file is that of a chunk beyond the grid.
    """
    grid, names = array.grid, array.names
    found: dict[int, int] = {}
    for name, size in _tree(store, folder, names.n_folders, listing):
        index = names.index(name)
        number = None if index is None else grid.number_of(index)
        if number is not None:
            problem = _size_problem(array, size, file=_joined(folder, name), key=key)
            if problem is not None:
                report(problem)
            found[number] = size
        elif is_like_a_chunk(name):
            report(
                CorruptError(
                    f"a chunk of this name lies beyond the grid of {grid.counts} chunks of shape {grid.chunk_shape}",
                    file=_joined(folder, name),
                    key=key,
                    hint="the array's metadata and its chunks are not of the same checkpoint",
                    rule="zarr.beyond",
                )
            )
    absent = tuple(_absent_runs(found, grid.n_chunks))
    if absent and not found and any("/" in name for name, _ in _tree(store, folder, names.rank + 1, {})):
        fill = None  # the chunks are there, under names of another kind
    missing, fill = _missing_numbers(array, absent, folder, fill=fill, lost=lost)
    text = f"a chunk is missing: {len(found)} of {grid.n_chunks} are there"
    for number in islice(missing, _MOST_NAMED):
        report(_missing(text, _joined(folder, names.name(grid.index_at(number))), key))
    chunk_bytes = array.coding.n_bytes
    sizes: dict[int, int] | columns[int] = {}
    if not _is_plain(array):
        sizes = found if absent else columns("q", (found[number] for number in range(grid.n_chunks)))

    def place_of(index: Shape, number: int) -> Place:
        n_bytes = sizes.get(number, chunk_bytes) if isinstance(sizes, dict) else sizes[number]
        return Place(_joined(folder, names.name(index)), 0, n_bytes)

    return Chunks(place_of, absent, fill)


def _absent_runs(found: Mapping[int, int], n_chunks: int) -> Iterator[tuple[int, int]]:
    """Runs of numbers below ``n_chunks`` that are not among those found."""
    start = 0
    for number in sorted(found) if len(found) != n_chunks else ():
        if number > start:
            yield start, number
        start = number + 1
    if len(found) != n_chunks and start < n_chunks:
        yield start, n_chunks


def _missing_numbers(
    array: ZarrArray,
    absent: Sequence[tuple[int, int]],
    folder: str,
    *,
    fill: bytes | None,
    lost: Callable[[], Sequence[str]],
) -> tuple[Iterator[int], bytes | None]:
    """(numbers of absent chunks that must be there, the fill value of the others).

    Metadata that ask for an absurd amount of fill values are taken for damaged.
    """
    grid = array.grid
    n_absent = sum(stop - start for start, stop in absent)
    if fill is None or n_absent * prod(grid.chunk_shape) * len(fill) > MOST_FILLED_BYTES:
        return chain.from_iterable(range(*run) for run in absent), None
    prefix = _joined(folder, "")
    inside = [name.removeprefix(prefix) for name in lost() if name.startswith(prefix)] if absent else []
    indices = (index for index in map(array.names.index, inside) if index is not None)
    return (number for number in map(grid.number_of, indices) if number is not None), fill


def check_chunks(store: ReadStore, folder: str, array: ZarrArray, box: Box, *, key: str) -> None:
    """Returns if every chunk (or shard) that holds a part of a box is there, and of the right length.

    For readers that would take the fill value for a chunk that is absent.

    Args:
        folder: the array's directory, "" for the root.
        box: a region of the array, in elements; what lies beyond the array does not count.
        key: the tensor, for messages.

    Raises:
        MissingShardError: a chunk is absent; names its file.
        TruncatedError, CorruptError: a chunk has the wrong length.
    """
    grid = array.grid
    inside = box.intersect(full_box(grid.shape))
    if inside is None:
        return
    spans = (
        range(start // step, (start + extent - 1) // step + 1)
        for start, extent, step in zip(inside.offset, inside.shape, grid.chunk_shape, strict=True)
    )
    for index in product(*spans):
        file = _joined(folder, array.names.name(index))
        if not store.exists(file):
            raise _missing("a chunk is missing", file, key)
        problem = _size_problem(array, store.size(file), file=file, key=key)
        if problem is not None:
            raise problem


def _missing(message: str, file: str, key: str) -> MissingShardError:
    return MissingShardError(
        message,
        file=file,
        key=key,
        hint=f"{_COPY_AGAIN}; where the writer left out chunks of zeros, write them too (write_empty_chunks)",
        rule="zarr.missing",
    )


def _is_plain(array: ZarrArray) -> bool:
    return array.sharding is None and array.coding.is_plain


def _size_problem(array: ZarrArray, size: int, *, file: str, key: str) -> CheckpointingException | None:
    """What is wrong with the length of a chunk's file; None if nothing is."""
    if array.sharding is not None:
        n_inner = ChunkGrid(array.grid.chunk_shape, array.sharding.inner.shape).n_chunks
        least = index_bytes(n_inner, has_crc=array.sharding.has_crc)
        if size < least:
            message = f"the shard has {size} bytes, but its index alone takes {least}"
            return TruncatedError(message, file=file, key=key, hint=_COPY_AGAIN, rule="zarr.size")
    elif array.coding.is_plain and size != array.coding.n_bytes:
        kind = TruncatedError if size < array.coding.n_bytes else CorruptError
        return kind(
            f"the chunk has {size} bytes, not the {array.coding.n_bytes} of {array.grid.chunk_shape} {array.dtype}",
            file=file,
            key=key,
            hint=_COPY_AGAIN,
            rule="zarr.size",
        )
    return None


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _tree(
    store: ReadStore, folder: str, n_folders: int, listing: Mapping[str, int] | None = None
) -> Iterator[tuple[str, int]]:
    """Names relative to ``folder`` and sizes of the files in it and, so many levels deep, in its directories."""
    yield from (store.sizes(folder) if listing is None else listing).items()
    if n_folders > 0:
        for name in store.folders(folder):
            if is_like_a_chunk(name) or name == "c":
                for rest, size in _tree(store, _joined(folder, name), n_folders - 1):
                    yield f"{name}/{rest}", size


def fragments_of_chunks(
    store: ReadStore, key: str, array: ZarrArray, chunks: Chunks, *, file: str, report: Report = raising
) -> list[Fragment]:
    """The fragments of a tensor whose chunks' places are known.

    Args:
        store: from which the indexes of shards are read.
        file: the array's metadata file, in which fill values lie, and for messages.
        report: told of each shard with which something is wrong.

    Raises:
        MissingShardError: a shard does not hold one of its chunks.
        CorruptError: a shard contradicts itself.
        UnsupportedError: a codec is not known.
    """
    grid = array.grid
    array.coding.refuse_unknown(key=key, file=file)
    found: list[Fragment] = []
    strides, is_only = array.coding.strides, grid.n_chunks == 1
    for number, index in enumerate(grid.indices()) if not chunks.absent else _stored(grid, chunks.absent):
        place, box = chunks.place_of(index, number), grid.box(index)
        if array.sharding is None:
            found.append(_fragment(key, array.coding, box, place, strides, is_only=is_only))
        else:
            try:
                found += _shard_fragments(store, key, array, box, place, fill=chunks.fill, file=file)
            except CheckpointingException as err:
                report(err)
    found += _filled(key, array, chunks, file)
    if 0 in grid.shape:
        found.append(whole_fragment(key, StoredArray(key, array.dtype, grid.shape, Extent(file, 0))))
    return found


def _stored(grid: ChunkGrid, absent: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Shape]]:
    """(number, index) of every chunk that lies between the absent ones."""
    for (_, start), (stop, _) in pairwise(((0, 0), *absent, (grid.n_chunks, 0))):
        for number in range(start, stop):
            yield number, grid.index_at(number)


def _filled(key: str, array: ZarrArray, chunks: Chunks, file: str) -> Iterator[Fragment]:
    """Fragments of the chunks that are not stored; neighbours are one where there are very many chunks."""
    grid = array.grid
    for start, stop in chunks.absent:
        step = 1 if grid.n_chunks <= _MOST_SINGLE else stop - start
        for first in range(start, stop, step):
            for run in boxes_of_flat_range(grid.counts, first, first + step):
                steps = tuple(zip(run.offset, run.shape, grid.chunk_shape, grid.shape, strict=True))
                offset = tuple(at * chunk for at, _, chunk, _ in steps)
                end = (min((at + n) * chunk, extent) for at, n, chunk, extent in steps)
                box = Box(offset, tuple(stop - start for start, stop in zip(offset, end, strict=True)))
                number = grid.number_of(run.offset)
                assert number is not None and chunks.fill is not None
                chunk_file = chunks.place_of(run.offset, number).file
                name = key if grid.n_chunks == 1 else array_name(key, box)
                yield _filled_fragment(
                    name, key, array.dtype, box, file, FillValue(chunks.fill, run.n_elements, chunk_file)
                )


def _filled_fragment(name: str, key: str, dtype: str, box: Box, file: str, fill: FillValue) -> Fragment:
    return Fragment(key, box, StoredArray(name, dtype, box.shape, Extent(file, 0, encoding=fill)), (0,) * box.rank)


def _fragment(
    key: str, coding: ChunkCoding, box: Box, place: Place, strides: Shape | None, *, is_only: bool = False
) -> Fragment:
    """What one stored chunk holds of a tensor."""
    name = key if is_only else array_name(key, box)
    if coding.is_plain:
        extent = Extent(place.file, place.offset, strides)
    else:
        extent = Extent(place.file, place.offset, encoding=EncodedChunk(coding, place.n_bytes))
    return Fragment(key, box, StoredArray(name, coding.dtype, coding.shape, extent), (0,) * box.rank)


def _shard_fragments(
    store: ReadStore, key: str, array: ZarrArray, box: Box, place: Place, *, fill: bytes | None, file: str
) -> Iterator[Fragment]:
    """What one shard holds: its inner chunks, or all of it as one array where they are one run of plain bands."""
    sharding = array.sharding
    assert sharding is not None
    shard_shape, inner = array.grid.chunk_shape, sharding.inner
    cut = ChunkGrid(shard_shape, inner.shape)
    index = read_index(
        store,
        place.file,
        start=place.offset,
        n_bytes=place.n_bytes,
        n_inner=cut.n_chunks,
        sharding=sharding,
        key=key,
    )
    if _is_dense(inner, shard_shape, index):
        start, _ = index.place(0) or (0, 0)
        name = array_name(key, box)
        yield Fragment(
            key, box, StoredArray(name, inner.dtype, shard_shape, Extent(place.file, start)), (0,) * box.rank
        )
        return
    inside = ChunkGrid(box.shape, inner.shape)  # inner chunks that lie beyond the tensor need not be there
    for at in inside.indices():
        number = cut.number_of(at)
        assert number is not None
        found = index.place(number)
        part = inside.box(at).shift(box.offset)
        if found is None and fill is not None:
            yield _filled_fragment(
                array_name(key, part), key, inner.dtype, part, file, FillValue(fill, 1, place.file, is_inner=True)
            )
            continue
        if found is None:
            raise MissingShardError(
                f"the shard does not hold its inner chunk {at}",
                file=place.file,
                key=key,
                hint=f"{_COPY_AGAIN}; where the writer left out chunks of zeros, write them too (write_empty_chunks)",
                rule="zarr.inner",
            )
        if inner.is_plain and found[1] != inner.n_bytes:
            raise CorruptError(
                f"inner chunk {at} has {found[1]} bytes, not the {inner.n_bytes} of {inner.shape} {inner.dtype}",
                file=place.file,
                key=key,
                span=(found[0], found[0] + found[1]),
                rule="zarr.shard",
            )
        yield _fragment(key, inner, part, Place(place.file, *found), inner.strides)


def _is_dense(inner: ChunkCoding, shard_shape: Shape, index: ShardIndex) -> bool:
    """Whether the shard's inner chunks, one after the other, are the shard in C order."""
    return (
        inner.is_plain
        and inner.strides is None
        and are_bands(shard_shape, inner.shape)
        and all(n_bytes == inner.n_bytes for n_bytes in islice(index.numbers, 1, None, 2))
        and index.is_one_run
    )
