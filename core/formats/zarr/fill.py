"""Chunks of zarr arrays that are not stored and are read as the array's fill value.

zarr-python (``write_empty_chunks=False``, the default) and tensorstore
(``store_data_equal_to_fill_value``, off by default; Orbax 0.6) do not store a chunk whose elements
all equal the fill value. In zarr 2 ``null`` as fill value leaves such elements undefined; both
libraries read zeros.

Fill values in ``.zarray`` and ``zarr.json``::

    true · -7 · 1.5 · "NaN" · "Infinity" · "-Infinity" · [re, im] for complex types
    "0x7fc00000"    zarr 3 only: the bits of a float, most significant digit first

Not supported (a missing chunk is then an error): values that the element type cannot hold, and
base64 text, the fill value of structured types.

Source: zarr 2 and 3 specifications; arrays written by zarr-python 3.1.6 and tensorstore 0.1.86.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from math import isnan
from typing import TYPE_CHECKING

from core.arrays.dtypes import DTYPES, DType
from core.engine.catalog.facets import ZarrFacts
from core.errors import MissingShardError, UnsupportedError
from core.files.json_object import parse_json_object, read_small_file
from core.files.store import LocalStore
from core.pickle.fields import list_or_empty, mapping_or_empty
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

MOST_FILLED_BYTES = 1 << 40
"""Maximum size of a tensor's missing chunks; metadata that needs more is considered damaged."""
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
    "float8_e3m4": 0x78,
    "float8_e4m3b11fnuz": 0x80,
}
_MANIFEST = "ckpt-manifest.json"
_MAX_MANIFEST_BYTES = 512 << 20
_MAX_MANIFEST_VALUES = 12_000_000


@dataclass(frozen=True, slots=True)
class FillValue:
    """The encoding (``core.engine.catalog.stored``) of chunks that are not stored.

    The file of the extent is the array's metadata file.

    Args:
        pattern: the bytes of one element, little endian.
        n_chunks: number of chunks that the stored array represents.
        chunk_file: file of the first of them: the missing chunk, or the shard that lacks it.
        is_inner: that file is a shard, which lacks inner chunks.
    """

    pattern: bytes
    n_chunks: int
    chunk_file: str
    is_inner: bool = False

    @property
    def name(self) -> str:
        """Name of the encoding, for messages."""
        return "fill value"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit, in bytes."""
        return _UNIT_BYTES

    @property
    def working_bytes(self) -> int:
        """Memory needed for decoding: none in addition to the result."""
        return 0

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        """Return the dense bytes of a unit; nothing is read."""
        n_bytes = min(_UNIT_BYTES, array.n_bytes - unit * _UNIT_BYTES)
        return self.pattern * (n_bytes // len(self.pattern))


def fill_bytes(value: object, dtype: str, *, zarr_format: int) -> bytes | None:
    """Convert a fill value to the bytes of one element, little endian.

    Args:
        value: ``fill_value`` in the metadata's JSON.
        dtype: canonical dtype name.
        zarr_format: 2 or 3; they differ in ``null`` and in bit patterns.

    Returns:
        None if the element type cannot hold the value.
    """
    kind = DTYPES[dtype]
    # null leaves the elements undefined; zarr-python and tensorstore both read zeros.
    if value is None and zarr_format == 2:
        return bytes(kind.itemsize)
    if kind.kind == "complex":
        if not isinstance(value, list) or len(value) != 2:
            return None
        real, imaginary = (
            fill_bytes(part, f"float{4 * kind.itemsize}", zarr_format=zarr_format) for part in value
        )
        return None if real is None or imaginary is None else real + imaginary
    if kind.kind == "bool":
        return bytes([value]) if isinstance(value, bool) else None
    if kind.kind in ("int", "uint"):
        return _integer_bytes(value, kind)
    return _float_bytes(value, dtype, allows_bits=zarr_format == 3)


def _integer_bytes(value: object, kind: DType) -> bytes | None:
    """Convert an integer to bytes; None if the type cannot hold the value."""
    # Writers may spell an integer as 0.0; ``value // 1`` is NaN, thus different, for infinities.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1:
        return None
    try:
        if kind.value_bits is not None:
            half = 1 << (kind.value_bits - 1)
            number = int(value)
            return bytes((number % (2 * half),)) if -half <= number < half else None
        return int(value).to_bytes(kind.itemsize, "little", signed=kind.kind == "int")
    except OverflowError:
        return None


def _float_bytes(value: object, dtype: str, *, allows_bits: bool) -> bytes | None:
    """Convert a floating-point number to bytes; None if the type cannot hold the value.

    Args:
        allows_bits: the value may also be a bit pattern in hexadecimal digits.
    """
    from core.arrays.cast import find_cast

    itemsize = DTYPES[dtype].itemsize
    try:
        if allows_bits and isinstance(value, str) and _BITS.match(value):
            return int(value, 16).to_bytes(itemsize, "little")
        number = _WORDS.get(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        if dtype in _CODES:
            return struct.pack(_CODES[dtype], float(number))
        # NaN and 0 are the usual fill values: found without importing a heavy module for the cast.
        if isnan(number):
            bits = _NAN_BITS.get(dtype)
            return None if bits is None else bits.to_bytes(itemsize, "little")
        if str(number) in ("0", "0.0") and dtype in (*_NAN_BITS, "float4_e2m1fn"):
            return bytes(itemsize)
        # Only numbers that the type holds exactly: libraries round and saturate differently.
        wide, narrow, back = struct.pack("<d", number), bytearray(itemsize), bytearray(8)
        find_cast("float64", dtype)(memoryview(wide), memoryview(narrow))
        find_cast(dtype, "float64")(memoryview(narrow), memoryview(back))
        return bytes(narrow) if bytes(back) == wide else None
    except (OverflowError, UnsupportedError):
        return None


def lost_files(store: ReadStore) -> tuple[str, ...]:
    """Return the files that once existed.

    These are files that the checkpoint's manifest lists but that do not exist, and names without
    data, such as links to files that were moved away.

    Raises:
        CorruptError: the manifest is malformed.
    """
    lost: list[str] = []
    # The manifest may be written by hand: entries of another form are skipped.
    if store.exists(_MANIFEST):
        data = read_small_file(store, _MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
        manifest = parse_json_object(data, file=_MANIFEST, max_values=_MAX_MANIFEST_VALUES)
        entries = list_or_empty(manifest.get("files"))
        paths = (mapping_or_empty(entry).get("path") for entry in entries)
        lost += (path for path in paths if isinstance(path, str) and not store.exists(path))
    # Only a file system has names without data.
    if isinstance(store, LocalStore):
        lost += _names_without_data(store)
    return tuple(lost)


def _names_without_data(store: LocalStore) -> Iterator[str]:
    """Yield the paths of all directory entries that cannot be read, such as broken links."""
    folders = [""]
    while folders:
        folder = folders.pop()
        prefix = f"{folder}/" if folder else ""
        yield from (prefix + name for name in store.unreadable(folder))
        folders += [prefix + name for name in store.folders(folder)]


@dataclass(frozen=True, slots=True)
class Unstored:
    """A tensor that lacks chunks.

    Args:
        key: the tensor.
        n_chunks, n_bytes: number and dense size of the missing chunks.
        chunk_file, is_inner: the file of the first one and its kind, see ``FillValue``.
    """

    key: str
    n_chunks: int
    n_bytes: int
    chunk_file: str
    is_inner: bool

    @property
    def n_text(self) -> str:
        """Number of chunks in words: ``1 chunk is``, ``2 chunks are``."""
        return "1 chunk is" if self.n_chunks == 1 else f"{self.n_chunks:,} chunks are"


def unstored(catalog: Catalog, *, reads_shards: bool = True) -> Iterator[Unstored]:
    """Yield the tensors that lack chunks.

    Args:
        reads_shards: read the index of every shard; otherwise find only missing chunk files.

    Raises:
        CheckpointingException: the catalog's fragments cannot be read.
    """
    facts = catalog.facet(ZarrFacts)
    if facts is None:
        return
    for key, needs_indexes in facts.unstored.items():
        if needs_indexes and not reads_shards:
            continue
        # A tensor that may lack chunks need not lack any.
        filled = [
            (array.n_bytes, fill)
            for fragment in catalog.fragments(key)
            if (array := fragment.array) is not None and (fill := fill_of(array)) is not None
        ]
        if filled:
            first = filled[0][1]
            yield Unstored(
                key,
                sum(fill.n_chunks for _, fill in filled),
                sum(n_bytes for n_bytes, _ in filled),
                first.chunk_file,
                first.is_inner,
            )


def missing_chunk(tensor: Unstored) -> MissingShardError:
    """Return the error about chunks that are not stored, for writers that store all chunks."""
    if tensor.is_inner:
        message, rule = f"{tensor.n_text} missing from the shard", "zarr.inner"
    else:
        message, rule = f"{tensor.n_text} missing", "zarr.missing"
    return MissingShardError(
        message,
        file=tensor.chunk_file,
        key=tensor.key,
        hint="copy the checkpoint again, with all its files",
        rule=rule,
    )


def fill_of(array: StoredArray) -> FillValue | None:
    """Return the fill value that an array consists of; None if the array is stored."""
    encoding = array.extent.encoding
    return encoding if isinstance(encoding, FillValue) else None
