"""``.zarray``, the metadata of a zarr 2 array.

On disk::

    <array>/
    ├── .zarray     {"zarr_format": 2, "shape": [384, 64], "chunks": [192, 64], "dtype": "bfloat16", "order": "C",
    │                "compressor": null, "filters": null, "fill_value": null, "dimension_separator": "."}
    ├── 0.0         a chunk: C (or F) order, the full chunk shape even where it reaches beyond the array
    └── 1.0 …

Versions: 2.

Source: zarr 2 specification; arrays written by zarr 2.18.3 under megatron-core 0.12.1 (pinned in
tests/golden), zarr-python 3.1.6 and tensorstore 0.1.86.

Not supported: filters, and the codecs and types that ``zarr.decode`` and ``zarr.dtypes`` do not
list.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from core.errors import CorruptError, UnsupportedError
from core.files.json_object import parse_json_object
from core.formats.zarr.array import (
    PICKLE_CODECS,
    ZarrArray,
    checked_grid,
    checked_shape,
    pickled_array,
    required,
)
from core.formats.zarr.decode import ChunkCoding
from core.formats.zarr.dtypes import v2_dtype, v2_spelling
from core.formats.zarr.fill import fill_bytes
from core.formats.zarr.grid import ChunkNames

if TYPE_CHECKING:
    from core.formats.zarr.grid import ChunkGrid

ARRAY_FILE = ".zarray"
GROUP_FILE = ".zgroup"
_OBJECT_CODECS = frozenset(
    ("vlen-utf8", "vlen-bytes", "vlen-array", "json", "json2", "msgpack", "msgpack2", "categorize")
)
"""Codecs of numcodecs that hold texts and other plain values in arrays of objects."""
_OBJECT = re.compile(r'"[|<>=]?O\d*"')
"""An element type of objects, by itself or as a field of another."""
_NEEDED = ("order", "fill_value", "compressor", "filters")
"""Members that may be null, but not missing: tensorstore opens no array without them."""


def parse_zarray(data: bytes, *, file: str, key: str) -> ZarrArray:
    """Parse an array's metadata.

    Args:
        data: content of its ``.zarray``.
        file, key: name of that file and of the tensor, for messages.

    Raises:
        CorruptError: the metadata is malformed.
        UnsupportedError: the version or the element type is not supported.
        UnsafeError: the chunks are pickles.
    """
    metadata = parse_json_object(data, file=file)
    version = required(metadata, "zarr_format", file=file)
    if version != 2:
        raise UnsupportedError(f"zarr format {str(version)[:40]} is not 2", file=file, key=key)
    _refuse_pickles(metadata, file=file, key=key)
    dtype, is_big_endian = _dtype(required(metadata, "dtype", file=file), file=file, key=key)
    shape = checked_shape(required(metadata, "shape", file=file), "shape", least=0, file=file)
    chunk_shape = checked_shape(
        required(metadata, "chunks", file=file), "chunks", least=1, file=file
    )
    for name in _NEEDED:
        required(metadata, name, file=file)
    order = metadata["order"]
    if order not in ("C", "F"):
        raise CorruptError(f"order is {str(order)[:40]!r}, neither C nor F", file=file)
    separator = metadata.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise CorruptError(
            f"dimension_separator is {str(separator)[:40]!r}, neither '.' nor '/'", file=file
        )
    grid = checked_grid(shape, chunk_shape, dtype, file=file)
    axes = tuple(range(len(shape)))
    coding = ChunkCoding(
        dtype,
        chunk_shape,
        axes if order == "C" else axes[::-1],
        is_big_endian,
        _codecs(metadata, file=file),
    )
    fill = fill_bytes(metadata["fill_value"], dtype, zarr_format=2)
    return ZarrArray(dtype, grid, ChunkNames(len(shape), str(separator)), coding, fill=fill)


def _refuse_pickles(metadata: dict[str, object], *, file: str, key: str) -> None:
    """Raise if a codec unpickles, or elements are objects that only pickle can hold.

    Raises:
        UnsafeError: the chunks are pickles.
    """
    filters = metadata.get("filters")
    codecs = [*(filters if isinstance(filters, list) else ()), metadata.get("compressor")]
    names = [codec.get("id") for codec in codecs if isinstance(codec, dict)]
    is_of_objects = _OBJECT.search(json.dumps(metadata.get("dtype"))) is not None
    if not PICKLE_CODECS.isdisjoint(map(str, names)) or (
        is_of_objects and _OBJECT_CODECS.isdisjoint(map(str, names))
    ):
        raise pickled_array(file, key)


def _dtype(spelling: object, *, file: str, key: str) -> tuple[str, bool]:
    dtype = v2_dtype(spelling) if isinstance(spelling, str) else None
    if dtype is None:
        raise UnsupportedError(
            f"the element type {str(spelling)[:80]!r} is not supported",
            file=file,
            key=key,
            hint="cast the array with the tool that wrote it",
        )
    return dtype


def _codecs(metadata: dict[str, object], *, file: str) -> tuple[str, ...]:
    """Return the names of the codecs, filters first."""
    filters = metadata.get("filters")
    if filters is not None and not isinstance(filters, list):
        raise CorruptError(f"filters is a {type(filters).__name__}, not a list", file=file)
    names = []
    for codec, role in (
        *((item, "filter") for item in filters or ()),
        (metadata.get("compressor"), "compressor"),
    ):
        if codec is None and role == "compressor":
            continue
        name = codec.get("id") if isinstance(codec, dict) else None
        if not isinstance(name, str):
            raise CorruptError(f"a {role} has no 'id': {str(codec)[:80]}", file=file)
        names.append(name[:80] if role == "compressor" else f"filter {name[:80]}")
    return tuple(names)


def zarray(grid: ChunkGrid, dtype: str, *, key: str) -> bytes:
    """Return the ``.zarray`` of an array of plain chunks, byte for byte as zarr 2.18 writes it for
    Megatron.

    Raises:
        UnsupportedError: zarr has no such element type.
    """
    metadata = {
        "chunks": list(grid.chunk_shape),
        "compressor": None,
        "dtype": v2_spelling(dtype, key=key),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(grid.shape),
        "zarr_format": 2,
    }
    return json.dumps(metadata, indent=4, sort_keys=True).encode()
