"""Chunks of zarr arrays that are not stored and are read as the array's fill value.

zarr-python (``write_empty_chunks=False``, the default) and tensorstore
(``store_data_equal_to_fill_value``, off by default; Orbax 0.6) do not store a chunk whose elements
all equal the fill value. In zarr 2 ``null`` as fill value leaves such elements undefined; both
libraries read zeros.

Fill values of ``.zarray`` and ``zarr.json``::

    true · -7 · 1.5 · "NaN" · "Infinity" · "-Infinity" · [re, im] for complex types
    "0x7fc00000"    zarr 3 only: the bits of a float, most significant digit first

Not supported (a missing chunk is then an error): values that the element type cannot hold, and
texts for structured types, which are base64.

Source: zarr 2 and 3 specifications; arrays written by zarr-python 3.1.6 and tensorstore 0.1.86.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING

from core.arrays.cast import cast_of
from core.arrays.dtypes import DTYPES, DType
from core.errors import MissingShardError, UnsupportedError
from core.files.json_object import parse_json_object, read_small_file
from core.files.store import LocalStore
from core.formats.zarr.facets import ZarrFacts

if TYPE_CHECKING:
    from core.catalog.catalog import Catalog
    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore

MOST_FILLED_BYTES = 1 << 40
"""Maximum size of a tensor's missing chunks; metadata that asks for more is considered damaged."""
_UNIT_BYTES = 1 << 20
_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_BITS = re.compile(r"0x[0-9a-fA-F]+$")
_CODES = {"float64": "<d", "float32": "<f", "float16": "<e"}
_NAN_BITS = {
    "bfloat16": 0x7FC0,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7E,
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2fnuz": 0x80,
}
_MANIFEST = "ckpt-manifest.json"
_MAX_MANIFEST_BYTES = 512 << 20
_MAX_MANIFEST_VALUES = 12_000_000


@dataclass(frozen=True, slots=True)
class FillValue:
    """The encoding (``core.catalog.stored``) of chunks that are not stored.

    The extent names the array's metadata file.

    Args:
        pattern: the bytes of one element, little endian.
        n_chunks: number of chunks that the array stands for.
        chunk_file: file of the first of them: the missing chunk, or the shard that lacks it.
        is_inner: whether that file is a shard.
    """

    pattern: bytes
    n_chunks: int
    chunk_file: str
    is_inner: bool = False

    @property
    def name(self) -> str:
        """Return the name of the encoding."""
        return "fill value"

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of a unit."""
        return _UNIT_BYTES

    @property
    def working_bytes(self) -> int:
        """Return 0: decoding needs no memory of its own."""
        return 0

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        """Return the bytes of a unit."""
        n_bytes = min(_UNIT_BYTES, array.n_bytes - unit * _UNIT_BYTES)
        return self.pattern * (n_bytes // len(self.pattern))


def fill_bytes(value: object, dtype: str, *, zarr_format: int) -> bytes | None:
    """Return one element of a fill value, little endian.

    None if the element type has no such value.

    Args:
        value: ``fill_value`` of the metadata's JSON.
        dtype: canonical name.
        zarr_format: 2 or 3; they differ in ``null`` and in bit patterns.
    """
    kind = DTYPES[dtype]
    # Values that JSON has directly: null, complex pairs, booleans, integers.
    if value is None and zarr_format == 2:
        return bytes(kind.itemsize)
    if kind.kind == "complex":
        if not isinstance(value, list) or len(value) != 2:
            return None
        parts = [
            fill_bytes(part, f"float{4 * kind.itemsize}", zarr_format=zarr_format) for part in value
        ]
        return None if None in parts else b"".join(part for part in parts if part is not None)
    if kind.kind == "bool":
        return bytes([value]) if isinstance(value, bool) else None
    if kind.kind in ("int", "uint"):
        return _integer_bytes(value, kind)
    # Floats are bit patterns, words or numbers.
    if isinstance(value, str) and zarr_format == 3 and _BITS.match(value):
        bits = int(value, 16)
        return bits.to_bytes(kind.itemsize, "little") if bits >> 8 * kind.itemsize == 0 else None
    return _float_bytes(value, dtype)


def _integer_bytes(value: object, kind: DType) -> bytes | None:
    """Return an integer as bytes; None if the type cannot hold the value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        return None
    try:
        return int(value).to_bytes(kind.itemsize, "little", signed=kind.kind == "int")
    except OverflowError:
        return None


def _float_bytes(value: object, dtype: str) -> bytes | None:
    """Return a floating-point number as bytes; None if the type cannot hold the value."""
    number = _WORDS.get(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    try:
        if dtype in _CODES:
            return struct.pack(_CODES[dtype], float(number))
        if isnan(number):
            return (
                _NAN_BITS[dtype].to_bytes(DTYPES[dtype].itemsize, "little")
                if dtype in _NAN_BITS
                else None
            )
        if str(number) in ("0", "0.0") and dtype in _NAN_BITS:
            return bytes(DTYPES[dtype].itemsize)  # the usual fill value needs no heavy module
        # Writers state numbers that the type holds; rounding and saturating differ between libraries.
        wide, narrow, back = (
            struct.pack("<d", number),
            bytearray(DTYPES[dtype].itemsize),
            bytearray(8),
        )
        cast_of("float64", dtype)(memoryview(wide), memoryview(narrow))
        cast_of(dtype, "float64")(memoryview(narrow), memoryview(back))
        return bytes(narrow) if bytes(back) == wide else None
    except (OverflowError, UnsupportedError):
        return None


def lost_files(store: ReadStore) -> tuple[str, ...]:
    """Return the files that once existed: listed in the manifest but missing, or names without
    data.

    Raises:
        CorruptError: the manifest is malformed.
    """
    return (*_listed_but_absent(store), *_unreadable(store))


def _unreadable(store: ReadStore) -> Iterator[str]:
    """Yield the names below a store that have no data, such as links to files that were moved
    away.
    """
    if not isinstance(store, LocalStore):
        return
    folders = [""]
    while folders:
        folder = folders.pop()
        prefix = f"{folder}/" if folder else ""
        yield from (prefix + name for name in store.unreadable(folder))
        folders += [prefix + name for name in store.folders(folder)]


def _listed_but_absent(store: ReadStore) -> tuple[str, ...]:
    """Return the files listed in the checkpoint's manifest that do not exist.

    None without a manifest.
    """
    if not store.exists(_MANIFEST):
        return ()
    data = read_small_file(store, _MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
    entries = parse_json_object(data, file=_MANIFEST, max_values=_MAX_MANIFEST_VALUES).get("files")
    paths = (
        (entry.get("path") for entry in entries if isinstance(entry, dict))
        if isinstance(entries, list)
        else ()
    )
    return tuple(path for path in paths if isinstance(path, str) and not store.exists(path))


@dataclass(frozen=True, slots=True)
class Unstored:
    """A tensor that lacks chunks.

    Args:
        key: the tensor.
        n_chunks, n_bytes: number and size of the missing chunks.
        chunk_file, is_inner: file of the first of them, see ``FillValue``.
    """

    key: str
    n_chunks: int
    n_bytes: int
    chunk_file: str
    is_inner: bool

    @property
    def n_text(self) -> str:
        """Return the number of chunks in words: ``1 chunk is``, ``2 chunks are``."""
        return "1 chunk is" if self.n_chunks == 1 else f"{self.n_chunks:,} chunks are"


def unstored(catalog: Catalog, *, reads_shards: bool = True) -> Iterator[Unstored]:
    """Yield the tensors that lack chunks.

    Args:
        reads_shards: read the index of every shard; otherwise look only at the files.

    Raises:
        CheckpointingException: the catalog's fragments cannot be read.
    """
    facts = catalog.facet(ZarrFacts)
    for key, is_sharded in facts.unstored.items() if facts is not None else ():
        if is_sharded and not reads_shards:
            continue
        arrays = (fragment.array for fragment in catalog.fragments(key))
        filled = [
            (array, fill)
            for array in arrays
            if array is not None and (fill := fill_of(array)) is not None
        ]
        if filled:
            first = filled[0][1]
            yield Unstored(
                key,
                sum(fill.n_chunks for _, fill in filled),
                sum(array.n_bytes for array, _ in filled),
                first.chunk_file,
                first.is_inner,
            )


def missing_chunk(tensor: Unstored) -> MissingShardError:
    """Return the error for chunks that are not stored, for a format that stores all."""
    if tensor.is_inner:
        message, rule = f"the shard lacks a chunk: {tensor.n_text} not stored", "zarr.inner"
    else:
        message, rule = f"a chunk is missing: {tensor.n_text} not stored", "zarr.missing"
    return MissingShardError(
        message,
        file=tensor.chunk_file,
        key=tensor.key,
        hint="copy the checkpoint again, with all its files",
        rule=rule,
    )


def fill_of(array: StoredArray) -> FillValue | None:
    """Return the fill value that an array consists of; None for an array that is stored."""
    encoding = array.extent.encoding
    return encoding if isinstance(encoding, FillValue) else None
