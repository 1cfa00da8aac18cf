"""Decoding one chunk of a zarr array: from the stored bytes to its dense elements.

Stored bytes are the result of a chain: elements in some order and byte order, then codecs from
bytes to bytes. Where there is no such codec and the order is little-endian, the elements lie in the
file as they are, with strides. All else is decoded a whole chunk at a time.

Decoded: ``gzip``, ``zlib`` and ``bz2`` by the standard library, ``zstd`` by zstandard, ``blosc`` by
tensorstore, ``crc32c`` (checked, then cut off); none of them gives more bytes than the chunk has,
however few are stored.

Not supported, refused by name when the tensor's data is asked for: every other codec, and filters
of zarr 2.
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
    """The way in which a chunk is stored.

    Args:
        dtype: canonical dtype name.
        shape: shape of the chunk, in elements.
        order: the axes in their stored order, slowest first; ``(0, 1, 2)`` is C order.
        is_big_endian: whether the bytes of an element are stored most significant first.
        codecs: codecs from bytes to bytes, in the order in which they were applied.
    """

    dtype: str
    shape: Shape
    order: Shape
    is_big_endian: bool = False
    codecs: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the dense chunk."""
        return prod(self.shape) * itemsize(self.dtype)

    @property
    def is_plain(self) -> bool:
        """Return whether the elements lie in the file as they are, strided or not."""
        return not self.codecs and not self.is_big_endian

    @property
    def strides(self) -> Shape | None:
        """Return the strides of the stored chunk, in elements per axis; None for C order."""
        stored = c_strides(tuple(self.shape[axis] for axis in self.order))
        strides = [0] * len(self.order)
        for axis, step in zip(self.order, stored, strict=True):
            strides[axis] = step
        return None if is_c_contiguous(self.shape, tuple(strides)) else tuple(strides)

    def refuse_unknown(self, *, key: str, file: str) -> None:
        """Raise unless every codec can be decoded.

        Raises:
            UnsupportedError: a codec is unknown; names it.
        """
        for name in self.codecs:
            if name != "crc32c" and name not in _DECODERS:
                raise UnsupportedError(
                    f"the codec {name!r} is not supported",
                    key=key,
                    file=file,
                    hint=f"supported codecs: {', '.join(_DECODERS)}, crc32c; or leave it out with --exclude '{key}'",
                )


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The encoding (``core.catalog.stored``) of a chunk that is not plain.

    Args:
        coding: how it is stored.
        stored_bytes: number of stored bytes, from the extent's offset.
    """

    coding: ChunkCoding
    stored_bytes: int

    @property
    def name(self) -> str:
        """Return the name of the encoding."""
        return " + ".join(self.coding.codecs) or "big-endian"

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of a unit: the whole chunk."""
        return max(self.coding.n_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """Return the memory for decoding: the stored bytes twice (a library may copy them), and a
        dense copy.
        """
        return 2 * self.stored_bytes + 2 * self.coding.n_bytes

    @property
    def has_checksum(self) -> bool:
        """Return whether decoding compares a checksum."""
        return not _CHECKED.isdisjoint(self.coding.codecs)

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Return the dense bytes of the chunk.

        Raises:
            CorruptError: the bytes cannot be decoded, decode to another length, or differ from
                their checksum.
            UnsupportedError: a codec is not known.
        """
        extent = array.extent
        assert unit == 0
        coding = self.coding
        span = (extent.offset, extent.offset + self.stored_bytes)
        data: Any = store.read(extent.file, extent.offset, self.stored_bytes)
        try:
            # Undo the codecs, the last one first.
            for number in reversed(range(len(coding.codecs))):
                data = _undo_codec(coding.codecs[number], data, *_size_before(coding, number))
        except CorruptError as err:
            err.file, err.span = extent.file, span
            raise
        if len(data) != coding.n_bytes:
            kind = TruncatedError if len(data) < coding.n_bytes else CorruptError
            raise kind(
                f"the chunk decodes to {len(data)} bytes, not {coding.n_bytes}",
                file=extent.file,
                span=span,
            )
        return _in_c_order(coding, data)


def _size_before(coding: ChunkCoding, number: int) -> tuple[int, bool]:
    """Return how many bytes a codec was given when the chunk was written, and whether this is
    exact.

    If it is not exact, the number is a maximum.
    """
    earlier = coding.codecs[:number]
    is_exact = all(name == "crc32c" for name in earlier)
    n_bytes = coding.n_bytes + _CRC_BYTES * len(earlier)
    return (n_bytes, True) if is_exact else (2 * n_bytes + (1 << 16), False)


def _undo_codec(
    name: str, data: bytes, most_bytes: int, is_exact: bool
) -> bytes | bytearray | memoryview:
    """Return the bytes that a codec was given, at most one byte more than ``most_bytes``."""
    if name == "crc32c":
        if len(data) < _CRC_BYTES:
            raise TruncatedError(f"{len(data)} bytes are too few for a checksum")
        body, stated_crc = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
        if (crc := crc32c(body)) != stated_crc:
            raise CorruptError(
                f"checksum mismatch: the chunk has CRC-32C {crc:#010x}, but {stated_crc:#010x} was stored with it"
            )
        return body
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise UnsupportedError(f"the codec {name!r} is not supported")
    try:
        decoded = decoder(data, most_bytes)
    except (OSError, ValueError, EOFError, zlib.error) as err:
        raise CorruptError(f"the {name} data is damaged: {str(err)[:200]}") from err
    if len(decoded) > most_bytes or (is_exact and len(decoded) != most_bytes):
        length_text = f"more than {most_bytes}" if len(decoded) > most_bytes else f"{len(decoded)}"
        kind = TruncatedError if len(decoded) < most_bytes else CorruptError
        raise kind(f"the {name} data decodes to {length_text} bytes, not {most_bytes}")
    return decoded


def _decode_zlib(data: bytes, most_bytes: int) -> bytearray:
    """Return the content of members of gzip or zlib, one after the other."""
    return _decode_members(data, most_bytes, lambda: zlib.decompressobj(wbits=47))


def _decode_bz2(data: bytes, most_bytes: int) -> bytearray:
    return _decode_members(data, most_bytes, bz2.BZ2Decompressor)


def _decode_members(data: bytes, most_bytes: int, begin: Callable[[], Any]) -> bytearray:
    """Return the content of compressed members that follow each other."""
    decoded = bytearray()
    while data and len(decoded) <= most_bytes:
        member = begin()
        decoded += member.decompress(data, most_bytes + 1 - len(decoded))
        if not member.eof and len(decoded) <= most_bytes:
            raise EOFError(f"it ends too early, after {len(decoded)} decoded bytes")
        data = member.unused_data
    return decoded


def _decode_zstd(data: bytes, most_bytes: int) -> bytearray:
    import zstandard

    decoded = bytearray(most_bytes + 1)
    window = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
    n_decoded = 0
    try:
        with window.stream_reader(data, read_across_frames=True) as reader:
            while n_decoded < len(decoded):
                n_read = reader.readinto(memoryview(decoded)[n_decoded:])
                if n_read == 0:
                    break
                n_decoded += n_read
    except zstandard.ZstdError as err:
        raise ValueError(str(err)) from err
    del decoded[n_decoded:]
    return decoded


def _decode_blosc(data: bytes, most_bytes: int) -> memoryview:
    """Decode with tensorstore, as the only chunk of an array of bytes in memory."""
    if len(data) < _BLOSC_HEADER_BYTES:
        raise ValueError(f"{len(data)} bytes are too few for its header")
    n_bytes, n_stored = (int.from_bytes(data[offset : offset + 4], "little") for offset in (4, 12))
    if n_stored != len(data) or n_bytes > most_bytes:
        raise ValueError(
            f"its header states {n_stored} bytes for {n_bytes}, but there are {len(data)} for {most_bytes}"
        )
    if n_bytes == 0:
        return memoryview(b"")
    import tensorstore

    # One thread: the copy engine runs several of these already. The kvstore belongs to this context.
    context = tensorstore.Context(
        {"data_copy_concurrency": {"limit": 1}, "cache_pool": {"total_bytes_limit": 0}}
    )
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
    "gzip": _decode_zlib,
    "zlib": _decode_zlib,
    "bz2": _decode_bz2,
    "zstd": _decode_zstd,
    "blosc": _decode_blosc,
}


def _in_c_order(coding: ChunkCoding, data: Any) -> bytes | memoryview:
    """Return the elements in C order, little endian."""
    if not coding.is_big_endian and coding.strides is None:
        return memoryview(data)
    import numpy

    dtype = DTYPES[coding.dtype]
    # Swap bytes within numbers; a complex element has two of them.
    part = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    stored = tuple(coding.shape[axis] for axis in coding.order)
    parts = numpy.frombuffer(data, f"u{part}" if part > 1 else "u1")
    if coding.is_big_endian:
        parts = parts.byteswap()
    elements = parts.reshape(*stored, dtype.itemsize // part)
    back: Iterable[int] = (coding.order.index(axis) for axis in range(len(coding.order)))
    dense = numpy.ascontiguousarray(elements.transpose(*back, len(stored)))
    return memoryview(dense.reshape(-1).view("u1"))
