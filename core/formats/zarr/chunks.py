"""The chunks of a zarr array: which of them are stored, and the tensor's fragments in them.

A chunk that is not stored is the fill value if the writer omits such chunks
(``core.formats.zarr.fill``). If the writer stores all chunks, or if a manifest lists the chunk, its
absence is an error that names the chunk.
"""

from __future__ import annotations

from array import array as columns
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, pairwise, product, starmap
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape, boxes_of_flat_range, full_box
from core.engine.catalog.stored import Extent, StoredArray, array_name
from core.engine.catalog.tensor import Fragment, whole_fragment
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
from core.formats.zarr.tree import path_in
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore
    from core.formats.zarr.array import ZarrArray
    from core.formats.zarr.decode import ChunkCoding

_COPY_AGAIN = "copy the checkpoint again, with all its files"
_MIXED = (
    "the array's metadata and its chunks belong to different checkpoints; replace the "
    "array's directory with a complete copy from one of them"
)
_MAX_NAMED = 100
"""Maximum number of missing chunks of an array that are reported."""
_MAX_SINGLE = 1 << 16
"""Maximum number of chunks of an array for which every absent chunk is a fragment of its own."""


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """The location of a chunk (or shard): file, offset in it and length, both in bytes."""

    file: str
    offset: int
    n_bytes: int


LocationOf = Callable[[Shape, int], ChunkLocation]
"""(index of a chunk, its number in C order) → its location."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The stored chunks (or shards) of an array, and their locations.

    Args:
        place_of: returns the location of a chunk, even if the chunk is absent.
        absent: runs [start, stop) of the numbers of chunks that are not stored, in order.
        fill: one element of the absent chunks, also of inner chunks absent from shards; None if all
            must be stored.
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
    """List the chunks of an array that is a directory of files, and check their presence and size.

    Args:
        folder: the array's directory, "" for the root.
        key: the tensor, for messages.
        fill: the array's fill value if its writer omits chunks that equal it, else None.
        lost: returns files that are known to have existed; called only if chunks are absent.
        listing: the files directly in ``folder`` and their sizes, if they are known.
        report: receives an error for every chunk that is missing (at most 100), too short, too
            long, or beyond the grid.

    Raises:
        MissingShardError: a chunk that must exist is missing; names its file.
        TruncatedError, CorruptError: a chunk has the wrong length, or is beyond the grid.
    """
    grid, names = array.grid, array.names
    size_of = _stored_sizes(store, folder, array, key=key, listing=listing, report=report)
    absent: tuple[tuple[int, int], ...] = ()
    if len(size_of) != grid.n_chunks:
        numbers = pairwise((-1, *sorted(size_of), grid.n_chunks))
        absent = tuple((before + 1, after) for before, after in numbers if before + 1 < after)
    # If chunks exist only under names of another kind (another separator), the metadata is wrong:
    # no chunk was omitted for being the fill value.
    if (
        absent
        and not size_of
        and any("/" in name for name, _ in _list_files(store, folder, names.rank + 1, {}))
    ):
        fill = None
    # Decide which of the absent chunks are missing, and report these.
    missing, fill = _missing_numbers(array, absent, folder, fill=fill, lost=lost)
    text = f"a chunk is missing; only {len(size_of)} of {grid.n_chunks} chunks exist"
    for number in islice(missing, _MAX_NAMED):
        report(_missing_error(text, path_in(folder, names.name(grid.index_at(number))), key))
    # Keep sizes only of chunks whose size does not follow from the metadata; a column of numbers is
    # much smaller than a dict, but has no gaps.
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
        return ChunkLocation(path_in(folder, names.name(index)), 0, n_bytes)

    return Chunks(place_of, absent, fill)


def _stored_sizes(
    store: ReadStore,
    folder: str,
    array: ZarrArray,
    *,
    key: str,
    listing: Mapping[str, int] | None,
    report: Report,
) -> dict[int, int]:
    """Return the file sizes of the stored chunks by chunk number; report those that are wrong."""
    grid = array.grid
    size_of: dict[int, int] = {}
    for name, size in _list_files(store, folder, array.names.n_folders, listing):
        # Files with other names, such as attributes, are no concern of the grid.
        file = path_in(folder, name)
        index = array.names.index(name)
        number = None if index is None else grid.number_of(index)
        if number is not None:
            problem = _size_problem(array, size, file=file, key=key)
            if problem is not None:
                report(problem)
            size_of[number] = size
        elif is_like_a_chunk(name):
            report(
                CorruptError(
                    f"the chunk is outside the array's grid of {grid.counts} chunks of shape "
                    f"{grid.chunk_shape}",
                    file=file,
                    key=key,
                    hint=_MIXED,
                    rule="zarr.beyond",
                )
            )
    return size_of


def _missing_numbers(
    array: ZarrArray,
    absent: Sequence[tuple[int, int]],
    folder: str,
    *,
    fill: bytes | None,
    lost: Callable[[], Sequence[str]],
) -> tuple[Iterable[int], bytes | None]:
    """Separate the absent chunks into missing ones and ones that are the fill value.

    Args:
        absent: runs of the numbers of chunks that are not stored.
        fill: the fill value; None if every chunk must be stored.

    Returns:
        The numbers of the missing chunks, and the fill value of the others.
    """
    if not absent:
        return (), fill
    # Damaged metadata may ask for an absurd number of fill values.
    grid = array.grid
    n_absent = sum(stop - start for start, stop in absent)
    if fill is None or n_absent * prod(grid.chunk_shape) * len(fill) > MOST_FILLED_BYTES:
        return chain.from_iterable(starmap(range, absent)), None
    # Chunks that once existed were lost, not omitted by the writer.
    prefix = path_in(folder, "")
    names = [path.removeprefix(prefix) for path in lost() if path.startswith(prefix)]
    indices = [index for index in map(array.names.index, names) if index is not None]
    return [number for number in map(grid.number_of, indices) if number is not None], fill


def check_chunks(store: ReadStore, folder: str, array: ZarrArray, box: Box, *, key: str) -> None:
    """Raise unless every chunk (or shard) that overlaps a box exists and has the right length.

    Needed before tensorstore or zarr reads the box: they would use the fill value for a missing
    chunk.

    Args:
        folder: the array's directory, "" for the root.
        box: a region of the array, in elements; parts beyond the array are ignored.
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
        file = path_in(folder, array.names.name(index))
        if not store.exists(file):
            raise _missing_error("a chunk is missing", file, key)
        problem = _size_problem(array, store.size(file), file=file, key=key)
        if problem is not None:
            raise problem


def _missing_error(
    message: str, file: str, key: str, *, rule: str = "zarr.missing"
) -> MissingShardError:
    """Return the error about a missing chunk or inner chunk."""
    return MissingShardError(
        message,
        file=file,
        key=key,
        hint=f"{_COPY_AGAIN}; if the writer skipped chunks of zeros, save again with "
        "write_empty_chunks",
        rule=rule,
    )


def _size_problem(
    array: ZarrArray, size: int, *, file: str, key: str
) -> CheckpointingException | None:
    """Return the error about a chunk file of the wrong length; None if the length is right."""
    from core.formats.zarr.shards import index_bytes

    # The length of encoded chunks cannot be predicted.
    if array.sharding is not None:
        n_inner = ChunkGrid(array.grid.chunk_shape, array.sharding.inner.shape).n_chunks
        least = index_bytes(n_inner, has_crc=array.sharding.has_crc)
        if size < least:
            message = f"the shard is {size} bytes long, but its index alone needs {least} bytes"
            return TruncatedError(message, file=file, key=key, hint=_COPY_AGAIN, rule="zarr.size")
    elif array.coding.is_plain and size != array.coding.n_bytes:
        is_short = size < array.coding.n_bytes
        kind = TruncatedError if is_short else CorruptError
        return kind(
            f"the chunk is {size} bytes long, but a {array.dtype} chunk of shape "
            f"{array.grid.chunk_shape} needs {array.coding.n_bytes} bytes",
            file=file,
            key=key,
            hint=_COPY_AGAIN if is_short else _MIXED,
            rule="zarr.size",
        )
    return None


def _list_files(
    store: ReadStore, folder: str, n_folders: int, listing: Mapping[str, int] | None = None
) -> Iterator[tuple[str, int]]:
    """Yield the names, relative to ``folder``, and the sizes of the files that may be chunks.

    Args:
        n_folders: number of directory levels below ``folder`` to descend into.
        listing: the files directly in ``folder``, if they are known.
    """
    yield from (store.sizes(folder) if listing is None else listing).items()
    if n_folders > 0:
        for subfolder in store.folders(folder):
            if is_like_a_chunk(subfolder) or subfolder == "c":
                for name, size in _list_files(store, path_in(folder, subfolder), n_folders - 1):
                    yield f"{subfolder}/{name}", size


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
        file: the array's metadata file, which contains the fill value.
        report: receives the errors of shards.

    Raises:
        MissingShardError: a shard lacks one of its inner chunks.
        TruncatedError, CorruptError: the index of a shard is damaged, or contradicts the metadata.
        UnsupportedError: a codec is not supported.
    """
    grid = array.grid
    array.coding.refuse_unknown(key=key, file=file)
    # Enumerate the stored chunks; if some are absent, the runs between them.
    stored: Iterable[tuple[int, Shape]]
    if chunks.absent:
        runs = pairwise(((0, 0), *chunks.absent, (grid.n_chunks, 0)))
        stored = (
            (number, grid.index_at(number))
            for (_, start), (stop, _) in runs
            for number in range(start, stop)
        )
    else:
        stored = enumerate(grid.indices())
    # The strides are the same for all chunks; computing them for each would dominate.
    fragments: list[Fragment] = []
    coding, strides, is_only = array.coding, array.coding.strides, grid.n_chunks == 1
    for number, index in stored:
        location, box = chunks.place_of(index, number), grid.box(index)
        if array.sharding is None:
            extent = _chunk_extent(coding, location, strides)
            # Padding at the end of a plain chunk is not part of the array: it need not be read.
            is_prefix = extent.encoding is None and strides is None
            shape = box.shape if is_prefix and _is_dense_prefix(box.shape, coding.shape) else None
            fragments.append(
                _fragment(key, box, coding.dtype, shape or coding.shape, extent, is_only=is_only)
            )
        else:
            try:
                fragments += _shard_fragments(
                    store, key, array, box, location, fill=chunks.fill, file=file
                )
            except CheckpointingException as err:
                report(err)
    fragments += _filled_fragments(key, array, chunks, file)
    # A tensor without elements has no chunk, but is one (empty) array.
    if 0 in grid.shape:
        fragments.append(whole_fragment(StoredArray(key, array.dtype, grid.shape, Extent(file, 0))))
    return fragments


def _is_dense_prefix(shape: Shape, chunk_shape: Shape) -> bool:
    """Return whether a chunk, clipped to a shape, is one run at its beginning in C order."""
    axis = next((axis for axis, extent in enumerate(chunk_shape) if extent > 1), len(shape))
    return shape[axis + 1 :] == chunk_shape[axis + 1 :]


def _filled_fragments(key: str, array: ZarrArray, chunks: Chunks, file: str) -> Iterator[Fragment]:
    """Yield fragments for the chunks that are not stored: one for each, or one for every run.

    Runs are used if there are very many chunks.
    """
    grid = array.grid
    for start, stop in chunks.absent:
        n_joined = 1 if grid.n_chunks <= _MAX_SINGLE else stop - start
        for first in range(start, stop, n_joined):
            # A run of chunk numbers is a few boxes of chunks, each a box of the tensor.
            for run in boxes_of_flat_range(grid.counts, first, first + n_joined):
                offset = tuple(
                    position * extent
                    for position, extent in zip(run.offset, grid.chunk_shape, strict=True)
                )
                # Chunks at the upper edges may reach beyond the tensor: clip the box.
                shape = tuple(
                    min(begin + n_chunks * extent, end) - begin
                    for begin, n_chunks, extent, end in zip(
                        offset, run.shape, grid.chunk_shape, grid.shape, strict=True
                    )
                )
                # The first absent chunk stands for the others in messages.
                number = grid.number_of(run.offset)
                assert number is not None and chunks.fill is not None
                chunk_file = chunks.place_of(run.offset, number).file
                fill = FillValue(chunks.fill, run.n_elements, chunk_file)
                yield _fragment(
                    key,
                    Box(offset, shape),
                    array.dtype,
                    shape,
                    Extent(file, 0, encoding=fill),
                    is_only=grid.n_chunks == 1,
                )


def _fragment(
    key: str, box: Box, dtype: str, shape: Shape, extent: Extent, *, is_only: bool = False
) -> Fragment:
    """Return the fragment of an array whose first element is the first of a box.

    Args:
        key: the tensor.
        box: region of the tensor.
        dtype, shape, extent: the stored array; its shape may reach beyond the box.
        is_only: the array is the only one of the tensor, and is named like it.
    """
    name = key if is_only else array_name(key, box)
    return Fragment(box, StoredArray(name, dtype, shape, extent), (0,) * box.rank)


def _chunk_extent(coding: ChunkCoding, location: ChunkLocation, strides: Shape | None) -> Extent:
    """Return the extent of a stored chunk, which is encoded unless it is plain."""
    if coding.is_plain:
        return Extent(location.file, location.offset, strides)
    encoding = EncodedChunk(coding, location.n_bytes)
    return Extent(location.file, location.offset, encoding=encoding)


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
    """Yield the fragments of one shard: one for a dense shard, else one for every inner chunk.

    Args:
        box: region of the tensor that the shard covers, clipped to the tensor.
        location: where the shard is stored.
        fill: one element of absent inner chunks; None if all must be stored.
        file: the array's metadata file.

    Raises:
        MissingShardError: an inner chunk is absent, although all must be stored.
        TruncatedError, CorruptError: the index is damaged, or an inner chunk has the wrong size.
    """
    from core.formats.zarr.shards import are_bands, read_shard_index

    # The index covers the complete shard, also where the shard reaches beyond the tensor.
    sharding = array.sharding
    assert sharding is not None
    shard_shape, inner = array.grid.chunk_shape, sharding.inner
    shard_grid = ChunkGrid(shard_shape, inner.shape)
    index = read_shard_index(
        store,
        location.file,
        start=location.offset,
        n_bytes=location.n_bytes,
        n_inner=shard_grid.n_chunks,
        sharding=sharding,
        key=key,
    )
    # If the inner chunks, one after the other, are the shard in C order, the shard is one array.
    # This project and others write shards like that; one large read is faster than many.
    strides = inner.strides
    is_in_c_order = inner.is_plain and strides is None and are_bands(shard_shape, inner.shape)
    lengths = islice(index.numbers, 1, None, 2)
    if is_in_c_order and set(lengths) == {inner.n_bytes} and index.is_one_run:
        extent = Extent(location.file, index.numbers[0])
        yield _fragment(key, box, inner.dtype, shard_shape, extent)
        return
    # Otherwise every inner chunk is an array. Those completely beyond the tensor need not exist.
    stored_grid = ChunkGrid(box.shape, inner.shape)
    for inner_index in stored_grid.indices():
        number = shard_grid.number_of(inner_index)
        assert number is not None
        span = index.place(number)
        inner_box = stored_grid.box(inner_index).shift(box.offset)
        if span is None:
            if fill is None:
                raise _missing_error(
                    f"the shard's inner chunk {inner_index} is missing",
                    location.file,
                    key,
                    rule="zarr.inner",
                )
            encoding = FillValue(fill, 1, location.file, is_inner=True)
            extent = Extent(file, 0, encoding=encoding)
            yield _fragment(key, inner_box, inner.dtype, inner_box.shape, extent)
            continue
        # Encoded inner chunks may have any length; it is checked when they are decoded.
        offset, n_bytes = span
        if inner.is_plain and n_bytes != inner.n_bytes:
            raise CorruptError(
                f"inner chunk {inner_index} is {n_bytes} bytes long, but a {inner.dtype} chunk of "
                f"shape {inner.shape} needs {inner.n_bytes} bytes",
                file=location.file,
                key=key,
                span=(offset, offset + n_bytes),
                rule="zarr.shard",
            )
        extent = _chunk_extent(inner, ChunkLocation(location.file, offset, n_bytes), strides)
        yield _fragment(key, inner_box, inner.dtype, inner.shape, extent)
