"""The chunks of a zarr array: those that are stored, and the fragments that they are.

A chunk that is not stored is the fill value if the group's writer leaves such chunks out
(``core.formats.zarr.fill``). If it does not, or if a manifest lists the chunk, it is an error that
names the chunk.
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
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    Report,
    TruncatedError,
    raising,
)
from core.formats.zarr.decode import EncodedChunk
from core.formats.zarr.fill import MOST_FILLED_BYTES, FillValue
from core.formats.zarr.grid import ChunkGrid, is_like_a_chunk
from core.formats.zarr.shards import ShardIndex, are_bands, index_bytes, read_index

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.zarr.array import ZarrArray
    from core.formats.zarr.decode import ChunkCoding

_COPY_AGAIN = "copy the checkpoint again, with all its files"
_MAX_NAMED = 100
"""Maximum number of missing chunks of an array that are reported."""
_MAX_SINGLE = 1 << 16
"""Maximum number of chunks of an array for separate fragments; beyond it, missing neighbours are
one fragment.
"""


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """The bytes of a chunk (or shard): file, byte offset in it, length in bytes."""

    file: str
    offset: int
    n_bytes: int


LocationOf = Callable[[Shape, int], ChunkLocation]
"""(index of a chunk, its number in C order) → its location."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The stored chunks (or shards) of an array, and their locations.

    Args:
        place_of: returns the location of a chunk, even if it is missing.
        absent: runs [start, stop) of the numbers of chunks that are not stored, in order.
        fill: one element of the missing chunks, also of those missing in shards; None if all must
            be stored.
    """

    place_of: LocationOf
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
        fill: the array's fill value if its writer leaves out chunks that equal it, else None.
        lost: returns files that are known to have existed; called only if chunks are missing.
        listing: the files directly in ``folder``, if they are known.
        report: receives chunks that are missing (at most 100), too short or too long, or beyond the
            grid.

    Raises:
        MissingShardError: a chunk that must exist is missing; names its file.
        TruncatedError, CorruptError: a chunk has the wrong length, or lies beyond the grid.
    """
    grid, names = array.grid, array.names
    size_of: dict[int, int] = {}
    # Look at all files with names of chunks.
    for name, size in _list_files(store, folder, names.n_folders, listing):
        index = names.index(name)
        number = None if index is None else grid.number_of(index)
        if number is not None:
            problem = _size_problem(array, size, file=_path(folder, name), key=key)
            if problem is not None:
                report(problem)
            size_of[number] = size
        elif is_like_a_chunk(name):
            report(
                CorruptError(
                    f"a chunk with this name lies beyond the grid of {grid.counts} chunks of shape {grid.chunk_shape}",
                    file=_path(folder, name),
                    key=key,
                    hint="the array's metadata and its chunks belong to different checkpoints",
                    rule="zarr.beyond",
                )
            )
    # Find out which missing chunks are the fill value, and report the others.
    absent = tuple(_absent_runs(size_of, grid.n_chunks))
    if (
        absent
        and not size_of
        and any("/" in name for name, _ in _list_files(store, folder, names.rank + 1, {}))
    ):
        fill = None  # chunks exist under names of another kind
    missing, fill = _missing_numbers(array, absent, folder, fill=fill, lost=lost)
    text = f"a chunk is missing: {len(size_of)} of {grid.n_chunks} exist"
    for number in islice(missing, _MAX_NAMED):
        report(_missing_error(text, _path(folder, names.name(grid.index_at(number))), key))
    # Lengths are stored only for chunks whose length is not known from the metadata.
    chunk_bytes = array.coding.n_bytes
    sizes: dict[int, int] | columns[int] = {}
    if not (array.sharding is None and array.coding.is_plain):
        sizes = (
            size_of
            if absent
            else columns("q", (size_of[number] for number in range(grid.n_chunks)))
        )

    def place_of(index: Shape, number: int) -> ChunkLocation:
        n_bytes = sizes.get(number, chunk_bytes) if isinstance(sizes, dict) else sizes[number]
        return ChunkLocation(_path(folder, names.name(index)), 0, n_bytes)

    return Chunks(place_of, absent, fill)


def _absent_runs(stored: Mapping[int, int], n_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of numbers below ``n_chunks`` that are not in ``stored``."""
    start = 0
    for number in sorted(stored) if len(stored) != n_chunks else ():
        if number > start:
            yield start, number
        start = number + 1
    if len(stored) != n_chunks and start < n_chunks:
        yield start, n_chunks


def _missing_numbers(
    array: ZarrArray,
    absent: Sequence[tuple[int, int]],
    folder: str,
    *,
    fill: bytes | None,
    lost: Callable[[], Sequence[str]],
) -> tuple[Iterator[int], bytes | None]:
    """Return the numbers of missing chunks that must exist, and the fill value of the others.

    Metadata that asks for an absurd amount of fill values is considered damaged.
    """
    grid = array.grid
    n_absent = sum(stop - start for start, stop in absent)
    if fill is None or n_absent * prod(grid.chunk_shape) * len(fill) > MOST_FILLED_BYTES:
        return chain.from_iterable(range(*run) for run in absent), None
    # Chunks that once existed are lost, not left out.
    prefix = _path(folder, "")
    lost_names = (
        [name.removeprefix(prefix) for name in lost() if name.startswith(prefix)] if absent else []
    )
    indices = (index for index in map(array.names.index, lost_names) if index is not None)
    return (number for number in map(grid.number_of, indices) if number is not None), fill


def check_chunks(store: ReadStore, folder: str, array: ZarrArray, box: Box, *, key: str) -> None:
    """Raise unless every chunk (or shard) that holds a part of a box exists and has the right
    length.

    For readers that would use the fill value for a missing chunk.

    Args:
        folder: the array's directory, "" for the root.
        box: a region of the array, in elements; parts beyond the array do not count.
        key: the tensor, for messages.

    Raises:
        MissingShardError: a chunk is missing; names its file.
        TruncatedError, CorruptError: a chunk has the wrong length.
    """
    grid = array.grid
    region = box.intersect(full_box(grid.shape))
    if region is None:
        return
    spans = (
        range(start // step, (start + extent - 1) // step + 1)
        for start, extent, step in zip(region.offset, region.shape, grid.chunk_shape, strict=True)
    )
    for index in product(*spans):
        file = _path(folder, array.names.name(index))
        if not store.exists(file):
            raise _missing_error("a chunk is missing", file, key)
        problem = _size_problem(array, store.size(file), file=file, key=key)
        if problem is not None:
            raise problem


def _missing_error(message: str, file: str, key: str) -> MissingShardError:
    """Return the error about a missing chunk."""
    return MissingShardError(
        message,
        file=file,
        key=key,
        hint=f"{_COPY_AGAIN}; if the writer left out chunks of zeros, write them too (write_empty_chunks)",
        rule="zarr.missing",
    )


def _size_problem(
    array: ZarrArray, size: int, *, file: str, key: str
) -> CheckpointingException | None:
    """Return the error about the length of a chunk's file; None if it is right."""
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


def _path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _list_files(
    store: ReadStore, folder: str, n_folders: int, listing: Mapping[str, int] | None = None
) -> Iterator[tuple[str, int]]:
    """Yield names relative to ``folder`` and sizes of the files in it and, ``n_folders`` levels
    deep, below it.
    """
    yield from (store.sizes(folder) if listing is None else listing).items()
    if n_folders > 0:
        for name in store.folders(folder):
            if is_like_a_chunk(name) or name == "c":
                for rest, size in _list_files(store, _path(folder, name), n_folders - 1):
                    yield f"{name}/{rest}", size


def fragments_of_chunks(
    store: ReadStore,
    key: str,
    array: ZarrArray,
    chunks: Chunks,
    *,
    file: str,
    report: Report = raising,
) -> list[Fragment]:
    """Return the fragments of a tensor whose chunks' locations are known.

    Args:
        store: the checkpoint, to read the indexes of shards.
        file: the array's metadata file, which holds the fill value.
        report: receives the problems of shards.

    Raises:
        MissingShardError: a shard lacks one of its chunks.
        CorruptError: a shard contradicts itself.
        UnsupportedError: a codec is not known.
    """
    grid = array.grid
    array.coding.refuse_unknown(key=key, file=file)
    fragments: list[Fragment] = []
    strides, is_only = array.coding.strides, grid.n_chunks == 1
    for number, index in (
        enumerate(grid.indices()) if not chunks.absent else _stored_indices(grid, chunks.absent)
    ):
        location, box = chunks.place_of(index, number), grid.box(index)
        if array.sharding is None:
            fragments.append(_fragment(key, array.coding, box, location, strides, is_only=is_only))
        else:
            try:
                fragments += _shard_fragments(
                    store, key, array, box, location, fill=chunks.fill, file=file
                )
            except CheckpointingException as err:
                report(err)
    fragments += _filled_fragments(key, array, chunks, file)
    if 0 in grid.shape:
        fragments.append(
            whole_fragment(key, StoredArray(key, array.dtype, grid.shape, Extent(file, 0)))
        )
    return fragments


def _stored_indices(
    grid: ChunkGrid, absent: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Shape]]:
    """Yield number and index of every chunk between the missing ones."""
    for (_, start), (stop, _) in pairwise(((0, 0), *absent, (grid.n_chunks, 0))):
        for number in range(start, stop):
            yield number, grid.index_at(number)


def _filled_fragments(key: str, array: ZarrArray, chunks: Chunks, file: str) -> Iterator[Fragment]:
    """Yield fragments for the chunks that are not stored.

    Neighbours are one if there are very many chunks.
    """
    grid = array.grid
    for start, stop in chunks.absent:
        step = 1 if grid.n_chunks <= _MAX_SINGLE else stop - start
        for first in range(start, stop, step):
            for run in boxes_of_flat_range(grid.counts, first, first + step):
                steps = tuple(zip(run.offset, run.shape, grid.chunk_shape, grid.shape, strict=True))
                offset = tuple(position * chunk for position, _, chunk, _ in steps)
                end = (
                    min((position + n_chunks) * chunk, extent)
                    for position, n_chunks, chunk, extent in steps
                )
                box = Box(
                    offset, tuple(stop - start for start, stop in zip(offset, end, strict=True))
                )
                number = grid.number_of(run.offset)
                assert number is not None and chunks.fill is not None
                chunk_file = chunks.place_of(run.offset, number).file
                name = key if grid.n_chunks == 1 else array_name(key, box)
                yield _filled_fragment(
                    name,
                    key,
                    array.dtype,
                    box,
                    file,
                    FillValue(chunks.fill, run.n_elements, chunk_file),
                )


def _filled_fragment(
    name: str, key: str, dtype: str, box: Box, file: str, fill: FillValue
) -> Fragment:
    return Fragment(
        key,
        box,
        StoredArray(name, dtype, box.shape, Extent(file, 0, encoding=fill)),
        (0,) * box.rank,
    )


def _fragment(
    key: str,
    coding: ChunkCoding,
    box: Box,
    location: ChunkLocation,
    strides: Shape | None,
    *,
    is_only: bool = False,
) -> Fragment:
    """Return the fragment of one stored chunk."""
    name = key if is_only else array_name(key, box)
    if coding.is_plain:
        extent = Extent(location.file, location.offset, strides)
    else:
        extent = Extent(
            location.file, location.offset, encoding=EncodedChunk(coding, location.n_bytes)
        )
    return Fragment(
        key, box, StoredArray(name, coding.dtype, coding.shape, extent), (0,) * box.rank
    )


def _shard_fragments(
    store: ReadStore,
    key: str,
    array: ZarrArray,
    box: Box,
    location: ChunkLocation,
    *,
    fill: bytes | None,
    file: str,
) -> Iterator[Fragment]:
    """Yield the fragments of one shard: its inner chunks, or one array if they are one run of plain
    bands.
    """
    sharding = array.sharding
    assert sharding is not None
    shard_shape, inner = array.grid.chunk_shape, sharding.inner
    shard_grid = ChunkGrid(shard_shape, inner.shape)
    index = read_index(
        store,
        location.file,
        start=location.offset,
        n_bytes=location.n_bytes,
        n_inner=shard_grid.n_chunks,
        sharding=sharding,
        key=key,
    )
    # A dense shard is one array.
    if _is_dense(inner, shard_shape, index):
        start, _ = index.place(0) or (0, 0)
        name = array_name(key, box)
        yield Fragment(
            key,
            box,
            StoredArray(name, inner.dtype, shard_shape, Extent(location.file, start)),
            (0,) * box.rank,
        )
        return
    # Otherwise each inner chunk is an array.
    stored_grid = ChunkGrid(box.shape, inner.shape)  # inner chunks beyond the tensor need not exist
    for inner_index in stored_grid.indices():
        number = shard_grid.number_of(inner_index)
        assert number is not None
        span = index.place(number)
        part = stored_grid.box(inner_index).shift(box.offset)
        if span is None and fill is not None:
            yield _filled_fragment(
                array_name(key, part),
                key,
                inner.dtype,
                part,
                file,
                FillValue(fill, 1, location.file, is_inner=True),
            )
            continue
        if span is None:
            raise MissingShardError(
                f"the shard lacks its inner chunk {inner_index}",
                file=location.file,
                key=key,
                hint=f"{_COPY_AGAIN}; if the writer left out chunks of zeros, write them too (write_empty_chunks)",
                rule="zarr.inner",
            )
        if inner.is_plain and span[1] != inner.n_bytes:
            raise CorruptError(
                f"inner chunk {inner_index} has {span[1]} bytes, not {inner.n_bytes} ({inner.shape} {inner.dtype})",
                file=location.file,
                key=key,
                span=(span[0], span[0] + span[1]),
                rule="zarr.shard",
            )
        yield _fragment(key, inner, part, ChunkLocation(location.file, *span), inner.strides)


def _is_dense(inner: ChunkCoding, shard_shape: Shape, index: ShardIndex) -> bool:
    """Return whether the shard's inner chunks, one after the other, are the shard in C order."""
    return (
        inner.is_plain
        and inner.strides is None
        and are_bands(shard_shape, inner.shape)
        and all(n_bytes == inner.n_bytes for n_bytes in islice(index.numbers, 1, None, 2))
        and index.is_one_run
    )
