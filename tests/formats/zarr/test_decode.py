"""Chunks that are not plain bytes, and hostile ones."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Callable

import numcodecs
import numpy as np
import pytest
import zstandard

from core.arrays.checksum import crc32c
from core.engine.catalog.stored import Extent, StoredArray
from core.errors import CorruptError, TruncatedError, UnsupportedError
from core.files.store import MemoryStore
from core.formats.zarr.decode import ChunkCoding, EncodedChunk

SHAPE = (6, 5)
VALUES = np.arange(30, dtype="<u4").reshape(SHAPE) * 0x01020304
CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "zstd": lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
    "blosc": lambda data: bytes(
        numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE).encode(np.frombuffer(data, "<u4"))
    ),
    "crc32c": lambda data: data + crc32c(data).to_bytes(4, "little"),
}


def decoded(
    stored: bytes,
    *codecs: str,
    offset: int = 0,
    dtype: str = "uint32",
    shape: tuple[int, ...] = SHAPE,
) -> bytes:
    coding = ChunkCoding(dtype, shape, tuple(range(len(shape))), False, codecs)
    store = MemoryStore({"f": bytes(offset) + stored + b"behind"})
    return bytes(
        EncodedChunk(coding, len(stored)).decode(
            store, StoredArray("w", dtype, shape, Extent("f", offset)), 0
        )
    )


@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("name", CODERS)
def test_every_codec_gives_back_what_was_encoded(name: str, offset: int) -> None:
    assert decoded(CODERS[name](VALUES.tobytes()), name, offset=offset) == VALUES.tobytes()


@pytest.mark.parametrize(
    "last", [name for name in CODERS if name != "blosc"]
)  # it wants whole elements
@pytest.mark.parametrize("first", [name for name in CODERS if name != "blosc"])
def test_codecs_follow_each_other(first: str, last: str) -> None:
    assert decoded(CODERS[last](CODERS[first](VALUES.tobytes())), first, last) == VALUES.tobytes()


@pytest.mark.parametrize("name", CODERS)
def test_a_cut_chunk_is_corrupt_and_named(name: str) -> None:
    stored = CODERS[name](VALUES.tobytes())
    for length in (0, 1, 3, len(stored) // 2, len(stored) - 1):
        with pytest.raises(CorruptError) as caught:
            decoded(stored[:length], name, offset=8)
        assert caught.value.file == "f"
        assert caught.value.span == (8, 8 + length)


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("change", [-4, 4])
def test_a_chunk_of_another_length_is_corrupt(name: str, change: int) -> None:
    data = (VALUES.tobytes() + bytes(4))[: VALUES.nbytes + change]
    with pytest.raises(
        TruncatedError if change < 0 and name != "blosc" else CorruptError, match="bytes"
    ):
        decoded(CODERS[name](data), name)


@pytest.mark.parametrize("name", ["gzip", "zlib", "bz2", "zstd", "blosc"])
def test_a_small_chunk_that_unfolds_to_much_is_stopped(name: str) -> None:
    stored = CODERS[name](bytes(1 << 26))
    with pytest.raises(CorruptError, match="120"):
        decoded(stored, name)
    with pytest.raises(CorruptError):
        decoded(CODERS["gzip"](stored), name, "gzip")


@pytest.mark.parametrize("name", ["gzip", "zlib", "bz2", "zstd", "blosc"])
def test_noise_is_corrupt(name: str) -> None:
    noise = np.random.default_rng(7).bytes(500)
    with pytest.raises(CorruptError, match=name):
        decoded(noise, name)


def test_a_header_of_blosc_that_lies_is_corrupt() -> None:
    stored = bytearray(CODERS["blosc"](VALUES.tobytes()))
    stored[4:8] = (1 << 30).to_bytes(4, "little")
    with pytest.raises(CorruptError, match="header"):
        decoded(bytes(stored), "blosc")


def test_a_wrong_checksum_is_corrupt() -> None:
    stored = bytearray(CODERS["crc32c"](VALUES.tobytes()))
    stored[5] ^= 1
    with pytest.raises(CorruptError, match="CRC-32C"):
        decoded(bytes(stored), "crc32c")


def test_several_members_are_one_stream() -> None:
    data = VALUES.tobytes()
    for name in ("gzip", "bz2", "zstd"):
        assert decoded(CODERS[name](data[:50]) + CODERS[name](data[50:]), name) == data


def test_an_unknown_codec_is_named() -> None:
    coding = ChunkCoding("uint32", SHAPE, (0, 1), False, ("zstd", "lz4"))
    with pytest.raises(UnsupportedError, match="'lz4'") as caught:
        coding.refuse_unknown(key="w", file="w/.zarray")
    assert (caught.value.key, caught.value.file) == ("w", "w/.zarray")
    with pytest.raises(UnsupportedError, match="'lz4'"):
        decoded(b"x", "lz4")


@pytest.mark.parametrize("dtype", ["<c8", "<c16", "<f8", "<f2", "<i8", "|u1"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (2, 0, 1), (1, 0, 2)])
@pytest.mark.parametrize("is_big", [False, True])
def test_byte_order_and_order_of_axes_are_undone(
    dtype: str, order: tuple[int, ...], is_big: bool
) -> None:
    values = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype) * (1 if dtype == "|u1" else 3)
    stored = (
        values.transpose(order).astype(values.dtype.newbyteorder(">"))
        if is_big
        else values.transpose(order)
    )
    coding = ChunkCoding(values.dtype.name, values.shape, order, is_big, ("zlib",))
    data = zlib.compress(stored.tobytes())
    array = StoredArray("w", values.dtype.name, values.shape, Extent("f", 0))
    assert (
        bytes(EncodedChunk(coding, len(data)).decode(MemoryStore({"f": data}), array, 0))
        == values.tobytes()
    )


def test_plain_chunks_have_strides_instead() -> None:
    assert ChunkCoding("uint8", (2, 3), (0, 1)).strides is None
    assert ChunkCoding("uint8", (2, 3), (1, 0)).strides == (1, 2)
    assert ChunkCoding("uint8", (2, 3, 4), (2, 0, 1)).strides == (3, 1, 6)
    assert ChunkCoding("uint8", (1, 3), (1, 0)).strides is None
    assert ChunkCoding("uint8", (), ()).strides is None
