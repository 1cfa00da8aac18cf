"""Shard indexes and CRC-32C."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from core.arrays.checksum import crc32c
from core.errors import CorruptError, TruncatedError
from core.files.store import MemoryStore
from core.formats.zarr.array import Sharding
from core.formats.zarr.decode import ChunkCoding
from core.formats.zarr.shards import (
    ABSENT,
    ShardIndex,
    are_bands,
    dense_index,
    index_bytes,
    read_shard_index,
)

INNER = ChunkCoding("float32", (2, 2), (0, 1))


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
    ],
)
def test_the_checksum_is_that_of_the_rfc(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


def shard(
    pairs: list[tuple[int, int]], *, data: bytes = bytes(64), is_first: bool = False
) -> tuple[bytes, int]:
    """A shard with that index, its CRC right."""
    index = b"".join(struct.pack("<QQ", *pair) for pair in pairs)
    index += crc32c(index).to_bytes(4, "little")
    return (index + data if is_first else data + index), len(pairs)


def indexed(
    data_and_count: tuple[bytes, int], *, start: int = 0, is_first: bool = False
) -> ShardIndex:
    data, n_inner = data_and_count
    sharding = Sharding(INNER, has_crc=True, is_index_first=is_first)
    store = MemoryStore({"s": bytes(start) + data})
    return read_shard_index(
        store, "s", start=start, n_bytes=len(data), n_inner=n_inner, sharding=sharding, key="w"
    )


@pytest.mark.parametrize("start", [0, 100])
@pytest.mark.parametrize("is_first", [False, True])
def test_places_are_those_of_the_file(start: int, is_first: bool) -> None:
    index = indexed(
        shard([(16, 16), (ABSENT, ABSENT), (0, 16)], is_first=is_first),
        start=start,
        is_first=is_first,
    )
    assert [index.place(n) for n in range(3)] == [(start + 16, 16), None, (start, 16)]
    assert not index.is_one_run


def test_what_we_write_is_one_run() -> None:
    index = indexed((bytes(64) + dense_index(4, 16), 4))
    assert index.is_one_run
    assert [index.place(n) for n in range(4)] == [(0, 16), (16, 16), (32, 16), (48, 16)]
    assert len(dense_index(4, 16)) == index_bytes(4, has_crc=True)


@pytest.mark.parametrize(
    "pair", [(1000, 16), (0, 1000), (ABSENT, 16), (0, ABSENT), (ABSENT - 5, 16)]
)
def test_inner_chunks_outside_the_shard_are_corrupt(pair: tuple[int, int]) -> None:
    with pytest.raises(CorruptError, match="inner chunk 1") as caught:
        indexed(shard([(0, 16), pair]))
    assert (caught.value.file, caught.value.key) == ("s", "w")


def test_a_wrong_checksum_is_corrupt() -> None:
    data, n_inner = shard([(0, 16), (16, 16)])
    with pytest.raises(CorruptError, match="CRC-32C"):
        indexed((data[:-1] + bytes([data[-1] ^ 1]), n_inner))


def test_an_index_longer_than_the_shard_is_not_read() -> None:
    data, _ = shard([(0, 16)])
    with pytest.raises(TruncatedError, match="needs"):
        indexed((data, 1 << 50))


@pytest.mark.parametrize(
    ("shard_shape", "inner_shape"),
    [
        ((), ()),
        ((8,), (2,)),
        ((8, 6), (2, 6)),
        ((4, 6), (1, 2)),
        ((4, 6), (2, 3)),
        ((1, 6), (1, 2)),
        ((4, 1, 6), (2, 1, 6)),
    ],
)
def test_bands_are_told_from_tiles(
    shard_shape: tuple[int, ...], inner_shape: tuple[int, ...]
) -> None:
    elements = np.arange(int(np.prod(shard_shape))).reshape(shard_shape)
    counts = tuple(n // step for n, step in zip(shard_shape, inner_shape, strict=True))
    pieces = [
        elements[
            tuple(
                slice(i * step, (i + 1) * step) for i, step in zip(index, inner_shape, strict=True)
            )
        ].ravel()
        for index in np.ndindex(*counts)
    ]
    is_one_run = np.concatenate(pieces).tolist() == elements.ravel().tolist()
    assert are_bands(shard_shape, inner_shape) == is_one_run
