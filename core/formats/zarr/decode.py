"""One chunk of a zarr array: how its dense elements are made from the bytes that are stored.

Stored bytes are the result of a chain: elements in some order and byte order, then codecs from bytes to bytes. Where
there is no such codec and the order is little-endian, the elements lie in the file as they are, with strides. All else
is decoded a whole chunk at a time.

Decoded: ``gzip``, ``zlib`` and ``bz2`` by the standard library, ``zstd`` by zstandard, ``blosc`` by tensorstore,
``crc32c`` (checked, then cut off); none of them gives more bytes than the chunk has, however few are stored.

Not supported, refused by name when the tensor's data is asked for: every other codec, and filters of zarr 2.
"""

from __future__ import annotations

import bz2
import zlib
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Shape, c_strides, is_c_contiguous
from core.arrays.checksum import crc32c
from core.arrays.dtypes import DTYPES, itemsize
from core.errors import CorruptError, TruncatedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore

_CRC_BYTES = 4
_CHECKED = frozenset({"crc32c", "gzip", "zlib", "bz2"})
"""Codecs whose data end with a checksum; that of zstd is optional, and zarr leaves it out."""
_MAX_ZSTD_WINDOW_BYTES = 1 << 27
_BLOSC_HEADER_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChunkCoding:
    """How a chunk is stored.

    Args:
        dtype: canonical dtype name.
        shape: of the chunk, in elements.
        order: the axes as they are stored, slowest first; ``(0, 1, 2)`` is C order.
        is_big_endian: the elements' bytes are stored most significant first.
        codecs: from bytes to bytes, in the order in which they were applied.
    """

    dtype: str
    shape: Shape
    order: Shape
    is_big_endian: bool = False
    codecs: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Bytes of the dense chunk."""
        return prod(self.shape) * itemsize(self.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether the elements lie in the file as they are, strided or not."""
        return not self.codecs and not self.is_big_endian

    @property
    def strides(self) -> Shape | None:
        """In elements per axis of the chunk, as stored; None for C order."""
        stored = c_strides(tuple(self.shape[axis] for axis in self.order))
        found = [0] * len(self.order)
        for axis, step in zip(self.order, stored, strict=True):
            found[axis] = step
        return None if is_c_contiguous(self.shape, tuple(found)) else tuple(found)

    def refuse_unknown(self, *, key: str, file: str) -> None:
        """Returns if every codec is one that can be decoded.

        Raises:
            UnsupportedError: names the codec.
        """
        for name in self.codecs:
            if name != "crc32c" and name not in _DECODERS:
                raise UnsupportedError(
                    f"the codec {name!r} is not one that can be decoded",
                    key=key,
                    file=file,
                    hint=f"known codecs: {', '.join(_DECODERS)}, crc32c; or leave it out with --exclude '{key}'",
                )


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The encoding (``core.catalog.stored``) of a chunk that is not plain.

    Args:
        coding: how it is stored.
        stored_bytes: length of the stored bytes, from the extent's offset.
    """

    coding: ChunkCoding
    stored_bytes: int

    @property
    def name(self) -> str:
        """See Encoding."""
        return " + ".join(self.coding.codecs) or "big-endian"

    @property
    def unit_bytes(self) -> int:
        """See Encoding: the whole chunk."""
        return max(self.coding.n_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """See Encoding: the stored bytes, twice where a library copies them, and one dense copy."""
        return 2 * self.stored_bytes + 2 * self.coding.n_bytes

    @property
    def has_checksum(self) -> bool:
        """See Encoding."""
        return not _CHECKED.isdisjoint(self.coding.codecs)

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """See Encoding.

        Raises:
            CorruptError: the bytes cannot be decoded, decode to another length, or differ from their checksum.
            UnsupportedError: a codec is not known.
        """
        extent = array.extent
        assert unit == 0
        coding = self.coding
        span = (extent.offset, extent.offset + self.stored_bytes)
        data: Any = store.read(extent.file, extent.offset, self.stored_bytes)
        try:
            for number in reversed(range(len(coding.codecs))):
                data = _undone(coding.codecs[number], data, *_size_before(coding, number))
        except CorruptError as err:
            err.file, err.span = extent.file, span
            raise
        if len(data) != coding.n_bytes:
            kind = TruncatedError if len(data) < coding.n_bytes else CorruptError
            raise kind(f"the chunk decodes to {len(data)} bytes, not {coding.n_bytes}", file=extent.file, span=span)
        return _in_c_order(coding, data)


def _size_before(coding: ChunkCoding, number: int) -> tuple[int, bool]:
    """(most bytes that a codec was given when the chunk was written, whether it was exactly that many)."""
    earlier = coding.codecs[:number]
    is_exact = all(name == "crc32c" for name in earlier)
    n_bytes = coding.n_bytes + _CRC_BYTES * len(earlier)
    return (n_bytes, True) if is_exact else (2 * n_bytes + (1 << 16), False)


def _undone(name: str, data: bytes, most_bytes: int, is_exact: bool) -> bytes | bytearray | memoryview:
    """What a codec was given, at most one byte more than ``most_bytes`` of it."""
    if name == "crc32c":
        if len(data) < _CRC_BYTES:
            raise TruncatedError(f"{len(data)} bytes hold no checksum")
        body, stated = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
        if (found := crc32c(body)) != stated:
            raise CorruptError(f"the chunk's CRC-32C is {found:#010x}, but {stated:#010x} was stored with it")
        return body
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise UnsupportedError(f"the codec {name!r} is not one that can be decoded")
    try:
        found_data = decoder(data, most_bytes)
    except (OSError, ValueError, EOFError, zlib.error) as err:
        raise CorruptError(f"not {name} data: {str(err)[:200]}") from err
    if len(found_data) > most_bytes or (is_exact and len(found_data) != most_bytes):
        what = f"more than {most_bytes}" if len(found_data) > most_bytes else f"{len(found_data)}"
        kind = TruncatedError if len(found_data) < most_bytes else CorruptError
        raise kind(f"the {name} data decode to {what} bytes, not {most_bytes}")
    return found_data


def _zlib(data: bytes, most_bytes: int) -> bytearray:
    """Members of gzip or zlib, one after the other."""
    return _members(data, most_bytes, lambda: zlib.decompressobj(wbits=47))


def _bz2(data: bytes, most_bytes: int) -> bytearray:
    return _members(data, most_bytes, bz2.BZ2Decompressor)


def _members(data: bytes, most_bytes: int, begin: Callable[[], Any]) -> bytearray:
    found = bytearray()
    while data and len(found) <= most_bytes:
        member = begin()
        found += member.decompress(data, most_bytes + 1 - len(found))
        if not member.eof and len(found) <= most_bytes:
            raise EOFError(f"they end too early, after {len(found)} decoded bytes")
        data = member.unused_data
    return found


def _zstd(data: bytes, most_bytes: int) -> bytearray:
    import zstandard

    found = bytearray(most_bytes + 1)
    window = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
    done = 0
    try:
        with window.stream_reader(data, read_across_frames=True) as reader:
            while done < len(found):
                n = reader.readinto(memoryview(found)[done:])
                if n == 0:
                    break
                done += n
    except zstandard.ZstdError as err:
        raise ValueError(str(err)) from err
    del found[done:]
    return found


def _blosc(data: bytes, most_bytes: int) -> memoryview:
    """By tensorstore, as the only chunk of an array of bytes in memory."""
    if len(data) < _BLOSC_HEADER_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for its header")
    n_bytes, n_stored = (int.from_bytes(data[at : at + 4], "little") for at in (4, 12))
    if n_stored != len(data) or n_bytes > most_bytes:
        raise ValueError(f"its header tells of {n_stored} bytes for {n_bytes}, there are {len(data)} for {most_bytes}")
    if n_bytes == 0:
        return memoryview(b"")
    import tensorstore

    # One thread: whoever copies runs several of these already. The kvstore is this context's own.
    context = tensorstore.Context({"data_copy_concurrency": {"limit": 1}, "cache_pool": {"total_bytes_limit": 0}})
    metadata = {
        "zarr_format": 2,
        "shape": [n_bytes],
        "chunks": [n_bytes],
        "dtype": "|u1",
        "compressor": {"id": "blosc"},
        "filters": None,
        "fill_value": None,
        "order": "C",
    }
    files = tensorstore.KvStore.open("memory://", context=context).result()
    files.write("0", data).result()
    spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata}
    array = tensorstore.open(spec, context=context, create=True).result()
    dense: Any = array.read().result()
    return memoryview(dense)


_DECODERS: dict[str, Callable[[bytes, int], bytes | bytearray | memoryview]] = {
    "gzip": _zlib,
    "zlib": _zlib,
    "bz2": _bz2,
    "zstd": _zstd,
    "blosc": _blosc,
}


def _in_c_order(coding: ChunkCoding, data: Any) -> bytes | memoryview:
    """The elements in C order, little endian."""
    if not coding.is_big_endian and coding.strides is None:
        return memoryview(data)
    import numpy

    found = DTYPES[coding.dtype]
    part = found.itemsize // 2 if found.kind == "complex" else found.itemsize
    stored = tuple(coding.shape[axis] for axis in coding.order)
    parts = numpy.frombuffer(data, f"u{part}" if part > 1 else "u1")
    if coding.is_big_endian:
        parts = parts.byteswap()
    elements = parts.reshape(*stored, found.itemsize // part)
    back: Iterable[int] = (coding.order.index(axis) for axis in range(len(coding.order)))
    dense = numpy.ascontiguousarray(elements.transpose(*back, len(stored)))
    return memoryview(dense.reshape(-1).view("u1"))
