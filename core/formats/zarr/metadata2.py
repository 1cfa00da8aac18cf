"""``.zarray``, the metadata of a zarr 2 array.

On disk::

    <array>/
    ├── .zarray   {"zarr_format": 2, "shape": [384, 64], "chunks": [192, 64],
    │              "dtype": "bfloat16", "order": "C", "compressor": null, "filters": null,
    │              "fill_value": null, "dimension_separator": "."}
    ├── 0.0       a chunk in C (or F) order; stored in full, also if it reaches beyond the array
    └── 1.0 …

Versions: 2.

Source: zarr 2 specification; arrays written by zarr 2.18.3 under megatron-core 0.12.1 (pinned in
tests/golden), zarr-python 3.1.6 and tensorstore 0.1.86.

Not supported: filters, and codecs and types that ``zarr.decode`` and ``zarr.array`` do not list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from core.errors import UNLIKE_ANY_WRITER, CorruptError, UnsupportedError, suggesting
from core.files.json_object import parse_json_object
from core.formats.zarr.array import (
    OTHER_VERSION,
    PICKLE_CODECS,
    ZarrArray,
    checked_grid,
    pickled_array,
    required,
    unsupported_dtype,
    v2_dtype,
    v2_spelling,
)
from core.formats.zarr.decode import ChunkCoding
from core.formats.zarr.fill import fill_bytes
from core.formats.zarr.grid import ChunkNames
from core.pickle.fields import FieldReader, list_or_empty, mapping_or_empty

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.formats.zarr.grid import ChunkGrid

ARRAY_FILE = ".zarray"
ATTRIBUTES_FILE = ".zattrs"
GROUP_FILE = ".zgroup"
_OBJECT_CODECS = frozenset(
    ("vlen-utf8", "vlen-bytes", "vlen-array", "json", "json2", "msgpack", "msgpack2", "categorize")
)
"""Codecs of numcodecs that store strings and other plain values of arrays of objects."""
_OBJECT = re.compile(r'"[|<>=]?O\d*"')
"""The element type of Python objects, alone or as a field of a structured type."""
_NEEDED = ("order", "fill_value", "compressor", "filters")
"""Members that may be null but not missing: tensorstore does not open an array without them."""


@suggesting(UNLIKE_ANY_WRITER)
def parse_zarray(
    data: bytes, *, file: str, key: str, attributes: Mapping[str, object] | None = None
) -> ZarrArray:
    """Parse the metadata of an array.

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
        raise UnsupportedError(
            f"zarr_format is {version!r:.40}, not 2", file=file, key=key, hint=OTHER_VERSION
        )
    # Before the element type: arrays of objects would be reported as merely unsupported.
    if _holds_pickles(metadata):
        raise pickled_array(file, key)
    spelling = required(metadata, "dtype", file=file)
    type_and_order = v2_dtype(spelling) if isinstance(spelling, str) else None
    if type_and_order is None:
        raise unsupported_dtype(spelling, file=file, key=key)
    dtype, is_big_endian = type_and_order
    # The grid.
    reader = FieldReader(file)
    shape = reader.read_shape(required(metadata, "shape", file=file), "shape")
    chunk_shape = reader.read_shape(required(metadata, "chunks", file=file), "chunks", least=1)
    # Order, names and codecs.
    for name in _NEEDED:
        required(metadata, name, file=file)
    order = metadata["order"]
    if order not in ("C", "F"):
        raise CorruptError(f"order is {str(order)[:40]!r}; expected 'C' or 'F'", file=file)
    separator = metadata.get("dimension_separator", ".")
    if separator not in (".", "/"):
        raise CorruptError(
            f"dimension_separator is {str(separator)[:40]!r}; expected '.' or '/'", file=file
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
    names = ChunkNames(len(shape), str(separator))
    return ZarrArray(dtype, grid, names, coding, fill=fill, attributes=attributes or {})


def _holds_pickles(metadata: Mapping[str, object]) -> bool:
    """Return whether a codec unpickles, or only pickles can hold the elements.

    Elements that are objects need a filter that stores them; without one, numcodecs pickles.
    """
    codecs = [*list_or_empty(metadata.get("filters")), metadata.get("compressor")]
    names = {str(mapping_or_empty(codec).get("id")) for codec in codecs}
    has_objects = _OBJECT.search(json.dumps(metadata.get("dtype"))) is not None
    return not PICKLE_CODECS.isdisjoint(names) or (has_objects and _OBJECT_CODECS.isdisjoint(names))


def _codecs(metadata: Mapping[str, object], *, file: str) -> tuple[str, ...]:
    """Parse the names of the codecs: filters, which are applied first, then the compressor.

    Raises:
        CorruptError: the filters are not a list, or a codec has no name.
    """
    filters, compressor = metadata["filters"], metadata["compressor"]
    filters = [] if filters is None else FieldReader(file).read_list(filters, "filters")
    codecs = [("filter", codec) for codec in filters]
    if compressor is not None:
        codecs.append(("compressor", compressor))
    names = []
    for role, codec in codecs:
        name = mapping_or_empty(codec).get("id")
        if not isinstance(name, str):
            raise CorruptError(f"a {role} has no 'id': {str(codec)[:80]}", file=file)
        # No filter is supported: the prefix keeps it from being taken for a compressor.
        names.append(name[:80] if role == "compressor" else f"filter {name[:80]}")
    return tuple(names)


def zarray(grid: ChunkGrid, dtype: str, *, key: str) -> bytes:
    """Return the ``.zarray`` of an array of plain chunks.

    The bytes are those that zarr 2.18 writes for Megatron.

    Raises:
        UnsupportedError: zarr has no such element type.
    """
    return _zarray_of_spelling(grid.shape, grid.chunk_shape, v2_spelling(dtype, key=key))


@lru_cache(maxsize=1024)
def _zarray_of_spelling(shape: Shape, chunk_shape: Shape, spelling: str) -> bytes:
    """Return a ``.zarray``. It is kept: encoding with an indent is slow, and layers are alike."""
    metadata = {
        "chunks": list(chunk_shape),
        "compressor": None,
        "dtype": spelling,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(metadata, indent=4, sort_keys=True).encode()
