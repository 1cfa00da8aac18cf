"""The metadata of a zarr array in either version, and the checks that both versions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import itemsize
from core.errors import CorruptError, UnsafeError
from core.formats.zarr.grid import ChunkGrid

if TYPE_CHECKING:
    from core.formats.zarr.decode import ChunkCoding
    from core.formats.zarr.grid import ChunkNames

MAX_RANK = 64
_MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Sharding:
    """The second cut of the grid's chunks: each is a *shard*, a file of inner chunks and their
    index.

    Args:
        inner: how an inner chunk is stored; its shape divides the shard's.
        has_crc: whether the index ends with its CRC-32C.
        is_index_first: whether the index comes before the inner chunks, not after them.
    """

    inner: ChunkCoding
    has_crc: bool = True
    is_index_first: bool = False


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """An array's metadata.

    Args:
        dtype: canonical dtype name.
        grid: shapes of the array and of its chunks.
        names: names of the chunks' files.
        coding: how a chunk is stored; of a shard, only the shape is used.
        sharding: how chunks are cut again, or None.
        fill: one element of the fill value, little endian; None if the type has no such value.
    """

    dtype: str
    grid: ChunkGrid
    names: ChunkNames
    coding: ChunkCoding
    sharding: Sharding | None = None
    fill: bytes | None = None


PICKLED = "zarr.pickle"
"""The rule that arrays of pickles break."""
PICKLE_CODECS = frozenset(("pickle", "numcodecs.pickle"))


def pickled_array(file: str, key: str) -> UnsafeError:
    """Return the error about an array whose chunks are pickles."""
    return UnsafeError(
        "the chunks are pickles, which run code when they are read",
        file=file,
        key=key,
        hint="leave the array out with --exclude, and find out who wrote it",
        rule=PICKLED,
    )


def required(metadata: Mapping[str, object], name: str, *, file: str) -> object:
    """Return a member that must exist.

    Raises:
        CorruptError: the member is missing.
    """
    if name not in metadata:
        raise CorruptError(f"{name!r} is missing", file=file)
    return metadata[name]


def checked_shape(value: object, name: str, *, least: int, file: str) -> Shape:
    """Return a list of whole numbers as a shape.

    Args:
        value: the value in the JSON.
        name: name of the value, for messages.
        least: smallest number allowed.

    Raises:
        CorruptError: the value is not such a list, has too many axes, or a number is too small or
            absurdly large.
    """
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise CorruptError(f"{name} is not a list of at most {MAX_RANK} numbers", file=file)
    for number in value:
        if type(number) is not int or not least <= number <= _MAX_BYTES:
            raise CorruptError(
                f"{name} holds {str(number)[:40]}, not a whole number from {least}", file=file
            )
    return tuple(value)


def checked_grid(shape: Shape, chunk_shape: Shape, dtype: str, *, file: str) -> ChunkGrid:
    """Return the grid of two shapes that fit together.

    Raises:
        CorruptError: their ranks differ, or so many bytes cannot be addressed.
    """
    if len(shape) != len(chunk_shape):
        raise CorruptError(
            f"shape {list(shape)} and chunk shape {list(chunk_shape)} differ in rank", file=file
        )
    for subject, extents in (("the array", shape), ("a chunk", chunk_shape)):
        if prod(extents) * itemsize(dtype) > _MAX_BYTES:
            raise CorruptError(
                f"{subject} of shape {list(extents)} has more bytes than can be addressed",
                file=file,
            )
    return ChunkGrid(shape, chunk_shape)


def checked_order(value: object, rank: int, *, file: str) -> Shape:
    """Return a permutation of the axes.

    Raises:
        CorruptError: the value is not a permutation of the axes.
    """
    if not isinstance(value, list) or sorted(map(repr, value)) != sorted(map(repr, range(rank))):
        raise CorruptError(
            f"the order of a transpose is {str(value)[:80]}, not a permutation of {rank} axes",
            file=file,
        )
    return tuple(value)
