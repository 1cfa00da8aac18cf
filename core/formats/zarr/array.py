"""The metadata of a zarr array in either version, and the checks that both versions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import itemsize
from core.errors import CorruptError, UnsafeError
from core.formats.zarr.grid import ChunkGrid
from core.values import dataclass

if TYPE_CHECKING:
    from core.formats.zarr.decode import ChunkCoding
    from core.formats.zarr.grid import ChunkNames

MAX_RANK = 64
_MAX_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Sharding:
    """The division of every chunk of the grid into inner chunks.

    The chunk is then a *shard*: a file with the inner chunks and their index.

    Args:
        inner: encoding of an inner chunk; its shape divides that of the shard.
        has_crc: the index ends with its CRC-32C.
        is_index_first: the index is stored before the inner chunks instead of after them.
    """

    inner: ChunkCoding
    has_crc: bool = True
    is_index_first: bool = False


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """The metadata of an array.

    Args:
        dtype: canonical dtype name.
        grid: shapes of the array and of its chunks.
        names: naming of the chunk files.
        coding: encoding of a chunk; for sharded arrays, that of an inner chunk.
        sharding: division of the chunks into inner chunks; None if the array is not sharded.
        fill: the fill value as the bytes of one element, little endian; None if the type cannot
            hold it.
        attributes: the array's attributes and, as that of ``core.catalog.attributes``, the names of
            its axes.
    """

    dtype: str
    grid: ChunkGrid
    names: ChunkNames
    coding: ChunkCoding
    sharding: Sharding | None = None
    fill: bytes | None = None
    attributes: Mapping[str, object] = field(default_factory=dict, compare=False)


OTHER_VERSION = (
    "zarr 2 describes an array in .zarray, zarr 3 in zarr.json: take the file that belongs here "
    "from the original"
)
"""Hint for a metadata file of another version of zarr."""
PICKLED = "zarr.pickle"
"""The rule (``CheckpointingException.rule``) that arrays of pickles violate."""
PICKLE_CODECS = frozenset(("pickle", "numcodecs.pickle"))


def pickled_array(file: str, key: str) -> UnsafeError:
    """Return the error about an array whose chunks are pickles."""
    return UnsafeError(
        "the chunks are pickles, which run code when they are read",
        file=file,
        key=key,
        hint="skip the array with --exclude, and find out who wrote it",
        rule=PICKLED,
    )


def required(metadata: Mapping[str, object], name: str, *, file: str) -> object:
    """Return a member of the metadata that must exist.

    Raises:
        CorruptError: the member is missing.
    """
    if name not in metadata:
        raise CorruptError(f"{name!r} is missing", file=file)
    return metadata[name]


def checked_shape(value: object, name: str, *, least: int, file: str) -> Shape:
    """Parse a shape, a list of integers.

    Args:
        value: the value in the JSON.
        name: name of the value, for messages.
        least: smallest number allowed.

    Raises:
        CorruptError: the value is not a list of integers, has too many axes, or a number is too
            small or absurdly large.
    """
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise CorruptError(f"{name} is not a list of at most {MAX_RANK} numbers", file=file)
    for number in value:
        # ``type``, because a bool is an instance of int.
        if type(number) is not int or not least <= number <= _MAX_BYTES:
            raise CorruptError(
                f"{name} contains {str(number)[:40]}, not an integer of at least {least}", file=file
            )
    return tuple(value)


def checked_grid(shape: Shape, chunk_shape: Shape, dtype: str, *, file: str) -> ChunkGrid:
    """Return the chunk grid of an array after checking its two shapes.

    Raises:
        CorruptError: the ranks differ, or the array or a chunk is too large to be addressed.
    """
    if len(shape) != len(chunk_shape):
        raise CorruptError(
            f"shape {list(shape)} and chunk shape {list(chunk_shape)} differ in rank", file=file
        )
    for subject, extents in (("the array", shape), ("a chunk", chunk_shape)):
        if prod(extents) * itemsize(dtype) > _MAX_BYTES:
            raise CorruptError(
                f"{subject} of shape {list(extents)} is too large to be addressed",
                file=file,
            )
    return ChunkGrid(shape, chunk_shape)


def checked_order(value: object, rank: int, *, file: str) -> Shape:
    """Parse the permutation of a transpose.

    Raises:
        CorruptError: the value is not a permutation of the axes.
    """
    # Compared as text: the JSON may mix types that cannot be sorted, and true must not pass as 1.
    if not isinstance(value, list) or sorted(map(repr, value)) != sorted(map(repr, range(rank))):
        raise CorruptError(
            f"the order of a transpose is {str(value)[:80]}, not a permutation of {rank} axes",
            file=file,
        )
    return tuple(value)
