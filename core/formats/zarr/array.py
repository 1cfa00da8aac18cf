"""The metadata of a zarr array in either version, and the checks that both versions share.

Names of element types: zarr 2 has numpy's type strings (``<f4``, ``|b1``); for the types that numpy
lacks, tensorstore, and Megatron before it, write the bare name (``bfloat16``). zarr 3 has names
throughout. What zarr-python 3.1 cannot open (bfloat16, all 8-bit floats) tensorstore opens.

Types of less than a byte have one value per byte. Not supported: ``uint4``, which tensorstore does
not store, strings, times, structures, opaque bytes (``|V2``), zarr 3 extension types; on writing,
``complex32`` and ``float4_e2m1fn_x2``.

Source: zarr 2 and 3 specifications; tensorstore 0.1.86 and zarr-python 3.1.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING

from core.arrays.box import Shape
from core.arrays.dtypes import DTYPES, itemsize
from core.errors import CorruptError, UnsafeError, UnsupportedError
from core.formats.format import check_dtypes
from core.formats.zarr.grid import ChunkGrid
from core.pickle.fields import FieldReader
from core.values import dataclass

if TYPE_CHECKING:
    from core.formats.zarr.decode import ChunkCoding
    from core.formats.zarr.grid import ChunkNames

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
        attributes: the array's attributes and, as that of ``core.engine.catalog.attributes``, the
            names of its axes.
    """

    dtype: str
    grid: ChunkGrid
    names: ChunkNames
    coding: ChunkCoding
    sharding: Sharding | None = None
    fill: bytes | None = None
    attributes: Mapping[str, object] = field(default_factory=dict, compare=False)


OTHER_VERSION = (
    "Zarr 2 describes an array in .zarray and Zarr 3 in zarr.json; copy the right file from the "
    "original checkpoint"
)
"""Hint for a metadata file of another version of zarr."""
PICKLED = "zarr.pickle"
"""The rule (``CheckpointingException.rule``) that arrays of pickles violate."""
PICKLE_CODECS = frozenset(("pickle", "numcodecs.pickle"))


def pickled_array(file: str, key: str) -> UnsafeError:
    """Return the error about an array whose chunks are pickles."""
    return UnsafeError(
        "the array's chunks are pickles, which can run code when they are loaded",
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


def checked_grid(shape: Shape, chunk_shape: Shape, dtype: str, *, file: str) -> ChunkGrid:
    """Return the chunk grid of an array after checking its two shapes.

    Raises:
        CorruptError: the ranks differ, or the array or a chunk is too large to be addressed.
    """
    if len(shape) != len(chunk_shape):
        raise CorruptError(
            f"shape {list(shape)} and chunk shape {list(chunk_shape)} have different numbers of "
            "axes",
            file=file,
        )
    for subject, extents in (("the array", shape), ("a chunk", chunk_shape)):
        if prod(extents) * itemsize(dtype) > _MAX_BYTES:
            raise CorruptError(
                f"{subject} of shape {list(extents)} is too large to address",
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
        expected = f"a permutation of {rank} axes"
        raise FieldReader(file).build_error(value, "the order of a transpose", expected)
    return tuple(value)


_V2_CODES = {
    "float64": "f8",
    "float32": "f4",
    "float16": "f2",
    "int64": "i8",
    "int32": "i4",
    "int16": "i2",
    "int8": "i1",
    "uint64": "u8",
    "uint32": "u4",
    "uint16": "u2",
    "uint8": "u1",
    "bool": "b1",
    "complex128": "c16",
    "complex64": "c8",
}
TENSORSTORE_ONLY = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float8_e3m4",
    "float8_e4m3b11fnuz",
    "float4_e2m1fn",
    "int4",
    "int2",
)
"""Types without a numpy code, which zarr-python cannot open. zarr 3 spells them as the registry of
extensions does.
"""
_V2_DTYPES = {code: name for name, code in _V2_CODES.items()}
_V3_DTYPES = {name: name for name in (*_V2_CODES, *TENSORSTORE_ONLY)}


def v2_dtype(spelling: str) -> tuple[str, bool] | None:
    """Parse a zarr 2 dtype into its canonical name and whether it is big-endian.

    Returns None if the type is not supported.
    """
    if spelling in TENSORSTORE_ONLY:
        return spelling, False
    name = _V2_DTYPES.get(spelling[1:])
    if name is None or spelling[0] not in "<>|":
        return None
    n_bytes = DTYPES[name].itemsize
    # "|" means "no byte order", which only types of one byte may have.
    if spelling[0] == "|" and n_bytes > 1:
        return None
    return name, spelling[0] == ">" and n_bytes > 1


def v3_dtype(data_type: object, *, file: str, key: str) -> str:
    """Parse a zarr 3 data type into its canonical name.

    Args:
        data_type: the value in the JSON.
        file, key: the metadata file and the tensor, for messages.

    Raises:
        UnsupportedError: the type is not supported, or is an extension with a configuration.
    """
    dtype = _V3_DTYPES.get(data_type) if isinstance(data_type, str) else None
    if dtype is None:
        name = data_type.get("name", data_type) if isinstance(data_type, dict) else data_type
        raise unsupported_dtype(name, file=file, key=key)
    return dtype


def unsupported_dtype(name: object, *, file: str, key: str) -> UnsupportedError:
    """Return the error about an element type that cannot be read."""
    return UnsupportedError(
        f"the dtype {str(name)[:80]!r} is not supported",
        file=file,
        key=key,
        hint="cast the array to a supported dtype with the tool that wrote it",
    )


def v2_spelling(dtype: str, *, key: str) -> str:
    """Return zarr 2's name for a canonical dtype.

    Raises:
        UnsupportedError: zarr has no such type.
    """
    code = _V2_CODES.get(dtype)
    if code is not None:
        return ("|" if DTYPES[dtype].itemsize == 1 else "<") + code
    return v3_spelling(dtype, key=key)


def v3_spelling(dtype: str, *, key: str) -> str:
    """Return zarr 3's name for a canonical dtype.

    Raises:
        UnsupportedError: zarr has no such type.
    """
    check_stored_dtypes({key: dtype})
    return dtype


def check_stored_dtypes(dtypes: Mapping[str, str]) -> None:
    """Raise if zarr lacks the element type of one of all tensors.

    Args:
        dtypes: key → canonical dtype.

    Raises:
        UnsupportedError: names the first tensor.
    """
    check_dtypes(dtypes, lambda dtype: dtype.name in _V3_DTYPES, owner="zarr")


def v3_fill_value(dtype: str) -> object:
    """Return the zero of a dtype in the spelling of a ``zarr.json``."""
    kind = DTYPES[dtype].kind
    return {"bool": False, "int": 0, "uint": 0, "complex": [0.0, 0.0]}.get(kind, 0.0)
