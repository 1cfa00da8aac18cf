"""Decoding one chunk of a zarr array: from the stored bytes to its dense elements.

The stored bytes are the result of a chain: the elements in some order of axes and some byte order,
then codecs from bytes to bytes. A chunk without such codecs and in little-endian order is *plain*:
its elements are read directly from the file, with strides. Any other chunk is decoded completely.

Supported: ``gzip``, ``zlib`` and ``bz2`` with the standard library, ``zstd`` with zstandard,
``blosc`` with tensorstore, ``crc32c`` (compared, then removed). None of them decodes more bytes
than the chunk has, however few are stored.

Not supported, refused by name when the tensor's data is requested: all other codecs, and zarr 2's
filters.
"""

from __future__ import annotations

import bz2
import zlib
from functools import partial
from math import prod
from shlex import quote
from typing import TYPE_CHECKING, Any

from core.arrays.box import Shape, c_strides, is_c_contiguous
from core.arrays.checksum import crc32c
from core.arrays.dtypes import DTYPES, itemsize
from core.errors import (
    UNLIKE_ANY_WRITER,
    CorruptError,
    TruncatedError,
    UnsupportedError,
    explain_missing_extra,
    suggesting,
)
from core.values import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

_CRC_BYTES = 4
_CHECKED = frozenset({"crc32c", "gzip", "zlib", "bz2"})
"""Codecs whose data ends with a checksum. That of zstd is optional, and zarr does not write it."""
_MAX_ZSTD_WINDOW_BYTES = 1 << 27
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
"""The value of ``wbits`` with which zlib recognizes either header."""
_BLOSC_HEADER_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChunkCoding:
    """The encoding of the chunks of an array.

    Args:
        dtype: canonical dtype name.
        shape: shape of a chunk, in elements.
        order: the axes in their stored order, slowest first; ``(0, 1, 2)`` is C order.
        is_big_endian: the bytes of an element are stored most significant first.
        codecs: names of the codecs from bytes to bytes, in the order in which they were applied.
    """

    dtype: str
    shape: Shape
    order: Shape
    is_big_endian: bool = False
    codecs: tuple[str, ...] = ()

    @property
    def n_bytes(self) -> int:
        """Size of the dense chunk, in bytes."""
        return prod(self.shape) * itemsize(self.dtype)

    @property
    def is_plain(self) -> bool:
        """True if the file contains the elements themselves, strided or not."""
        return not self.codecs and not self.is_big_endian

    @property
    def strides(self) -> Shape | None:
        """Strides of the stored chunk, in elements per axis; None for C order."""
        stored_strides = c_strides(tuple(self.shape[axis] for axis in self.order))
        strides = [0] * len(self.order)
        for axis, step in zip(self.order, stored_strides, strict=True):
            strides[axis] = step
        return None if is_c_contiguous(self.shape, tuple(strides)) else tuple(strides)

    def refuse_unknown(self, *, key: str, file: str) -> None:
        """Raise unless every codec can be decoded.

        Raises:
            UnsupportedError: a codec is not supported; names it.
        """
        for name in self.codecs:
            if name != "crc32c" and name not in _DECODERS:
                raise UnsupportedError(
                    f"the codec {name!r} is not supported",
                    key=key,
                    file=file,
                    hint=f"drop the tensor with --exclude {quote(key)}; supported codecs: "
                    f"{', '.join(_DECODERS)}, crc32c",
                )


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The encoding (``core.engine.catalog.stored``) of a chunk that is not plain.

    Args:
        coding: how the chunk is stored.
        stored_bytes: number of stored bytes, from the extent's offset.
    """

    coding: ChunkCoding
    stored_bytes: int

    @property
    def name(self) -> str:
        """Name of the encoding, for messages."""
        return " + ".join(self.coding.codecs) or "big-endian"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit, in bytes: the complete chunk."""
        return max(self.coding.n_bytes, 1)

    @property
    def working_bytes(self) -> int:
        """Memory needed for decoding, in bytes.

        The stored bytes count twice, as a library may copy them; so does the dense chunk, which may
        be copied into C order.
        """
        return 2 * self.stored_bytes + 2 * self.coding.n_bytes

    @property
    def has_checksum(self) -> bool:
        """True if decoding compares a checksum."""
        return not _CHECKED.isdisjoint(self.coding.codecs)

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Read a chunk and return its dense bytes.

        Raises:
            CorruptError: the bytes cannot be decoded, decode to another length, or differ from
                their checksum.
            UnsupportedError: a codec is not supported.
        """
        extent = array.extent
        assert unit == 0
        coding = self.coding
        span = (extent.offset, extent.offset + self.stored_bytes)
        data: Any = store.read(extent.file, extent.offset, self.stored_bytes)
        try:
            # Undo the codecs, the last one first. The input of a codec is known exactly if only
            # checksums were applied before it; a compressor before it may have made its input
            # larger than the chunk, but not by much.
            for number in reversed(range(len(coding.codecs))):
                earlier = coding.codecs[:number]
                most_bytes = coding.n_bytes + _CRC_BYTES * len(earlier)
                is_exact = all(name == "crc32c" for name in earlier)
                if not is_exact:
                    most_bytes = 2 * most_bytes + (1 << 16)
                data = _undo_codec(coding.codecs[number], data, most_bytes, is_exact=is_exact)
        except CorruptError as err:
            err.file, err.span = extent.file, span
            raise
        if len(data) != coding.n_bytes:
            kind = TruncatedError if len(data) < coding.n_bytes else CorruptError
            raise kind(
                f"the chunk decodes to {len(data)} bytes instead of {coding.n_bytes}",
                file=extent.file,
                span=span,
            )
        return _in_c_order(coding, data)


@suggesting(UNLIKE_ANY_WRITER)
def _undo_codec(
    name: str, data: bytes, most_bytes: int, *, is_exact: bool
) -> bytes | bytearray | memoryview:
    """Decode the output of one codec.

    Args:
        most_bytes: maximum number of decoded bytes; decoders stop after one more.
        is_exact: the decoded bytes must be exactly ``most_bytes``.

    Raises:
        CorruptError: the bytes cannot be decoded, decode to another length, or differ from their
            checksum.
        UnsupportedError: the codec is not supported.
    """
    # A checksum is not compressed data: it only has to be compared and removed.
    if name == "crc32c":
        if len(data) < _CRC_BYTES:
            raise TruncatedError(
                f"the chunk is {len(data)} bytes long, too short to contain a checksum"
            )
        body, stored_crc = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
        if (crc := crc32c(body)) != stored_crc:
            raise CorruptError(
                f"checksum mismatch: the chunk's CRC-32C is {crc:#010x}, but {stored_crc:#010x} is "
                "recorded"
            )
        return body
    # The limit keeps a small file from filling the memory; damaged data makes the libraries raise
    # errors of several types.
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise UnsupportedError(f"the codec {name!r} is not supported")
    try:
        decoded = decoder(data, most_bytes)
    except (OSError, ValueError, EOFError, zlib.error) as err:
        raise CorruptError(f"the {name} data is damaged: {str(err)[:200]}") from err
    if len(decoded) > most_bytes:
        raise CorruptError(f"the {name} data decodes to more than the expected {most_bytes} bytes")
    if is_exact and len(decoded) < most_bytes:
        raise TruncatedError(
            f"the {name} data decodes to {len(decoded)} bytes instead of {most_bytes}"
        )
    return decoded


def _decode_members(data: bytes, most_bytes: int, *, begin: Callable[[], Any]) -> bytearray:
    """Decode compressed members that follow each other, as gzip and bz2 files may have them.

    Args:
        begin: returns a new decompressor, for one member.
    """
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

    # Decode into a buffer of fixed size, so that a small file cannot fill the memory.
    decoded = bytearray(most_bytes + 1)
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
    n_decoded = 0
    try:
        with decompressor.stream_reader(data, read_across_frames=True) as reader:
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
    """Decode blosc data with tensorstore, as the only chunk of an array of bytes in memory."""
    # Bytes 4–7 of the header are the decoded size, bytes 12–15 the stored size; tensorstore would
    # allocate whatever the header claims.
    if len(data) < _BLOSC_HEADER_BYTES:
        raise ValueError(f"it is {len(data)} bytes long, too short for a header")
    n_bytes, n_stored = (int.from_bytes(data[offset : offset + 4], "little") for offset in (4, 12))
    if n_stored != len(data) or n_bytes > most_bytes:
        raise ValueError(
            f"its header specifies {n_stored} stored and {n_bytes} decoded bytes, but it has "
            f"{len(data)} stored bytes, which may decode to at most {most_bytes}"
        )
    if n_bytes == 0:
        return memoryview(b"")
    with explain_missing_extra("blosc-compressed data"):
        import tensorstore

    # One thread, as the copy engine runs several decoders already. The context is new, as its
    # memory:// store must not be shared with them.
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
    "gzip": partial(_decode_members, begin=partial(zlib.decompressobj, wbits=_GZIP_OR_ZLIB)),
    "zlib": partial(_decode_members, begin=partial(zlib.decompressobj, wbits=_GZIP_OR_ZLIB)),
    "bz2": partial(_decode_members, begin=bz2.BZ2Decompressor),
    "zstd": _decode_zstd,
    "blosc": _decode_blosc,
}


def _in_c_order(coding: ChunkCoding, data: Any) -> bytes | memoryview:
    """Return the bytes of the elements in C order, little endian."""
    if not coding.is_big_endian and coding.strides is None:
        return memoryview(data)
    import numpy

    dtype = DTYPES[coding.dtype]
    # Swap bytes within numbers; a complex element consists of two of them. Unsigned integers stand
    # for every type, as numpy lacks some of them.
    number_bytes = dtype.itemsize // 2 if dtype.kind == "complex" else dtype.itemsize
    numbers = numpy.frombuffer(data, f"u{number_bytes}")
    if coding.is_big_endian:
        numbers = numbers.byteswap()
    # Transpose from the stored order of the axes; the last axis holds the numbers of an element.
    stored_shape = tuple(coding.shape[axis] for axis in coding.order)
    elements = numbers.reshape(*stored_shape, dtype.itemsize // number_bytes)
    inverse: Iterable[int] = (coding.order.index(axis) for axis in range(len(coding.order)))
    dense = numpy.ascontiguousarray(elements.transpose(*inverse, len(stored_shape)))
    return memoryview(dense.reshape(-1).view("u1"))
