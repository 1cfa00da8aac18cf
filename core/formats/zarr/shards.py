"""Shards of zarr 3 (``sharding_indexed``): one file with many chunks, so that large tensors stay
few files.

Byte picture (the index may also stand in front)::

    [inner chunk] [inner chunk] …  any order, gaps allowed
    [u64 offset, u64 bytes] …      one pair per inner chunk, C order, little endian; 2⁶⁴−1 twice: it is missing
    [u32 CRC-32C of the pairs]     if the index codecs say so

Written shards hold the array's elements in C order, cut into inner chunks that are bands of it, so
that the data of a shard is one dense run.

Source: zarr 3 specification, codec ``sharding_indexed`` 1.0; shards written by zarr-python 3.1.6
and tensorstore 0.1.86.
"""

from __future__ import annotations

import struct
import sys
from array import array as columns
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.arrays.checksum import crc32c
from core.errors import CorruptError, TruncatedError
from core.formats.zarr.grid import ChunkGrid

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore
    from core.formats.zarr.array import Sharding

_CRC_BYTES = 4
_PAIR_BYTES = 16
ABSENT = (1 << 64) - 1


def index_bytes(n_inner: int, *, has_crc: bool) -> int:
    """Return the length of the index of a shard with ``n_inner`` inner chunks."""
    return _PAIR_BYTES * n_inner + (_CRC_BYTES if has_crc else 0)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The positions of the inner chunks of a shard.

    Args:
        numbers: offset in the file and length in bytes, alternating, per inner chunk in C order.
    """

    numbers: columns[int]

    def place(self, number: int) -> tuple[int, int] | None:
        """Return offset in the file and length in bytes of an inner chunk.

        None if the shard lacks it.
        """
        offset, n_bytes = self.numbers[2 * number], self.numbers[2 * number + 1]
        return None if offset == ABSENT and n_bytes == ABSENT else (offset, n_bytes)

    @property
    def is_one_run(self) -> bool:
        """Return whether every inner chunk begins where the one before it ends."""
        offsets, lengths = self.numbers[::2], self.numbers[1::2]
        if ABSENT in offsets:
            return False
        end = offsets[0]
        for offset, n_bytes in zip(offsets, lengths, strict=True):
            if offset != end:
                return False
            end += n_bytes
        return True


def read_index(
    store: ReadStore,
    file: str,
    *,
    start: int,
    n_bytes: int,
    n_inner: int,
    sharding: Sharding,
    key: str,
) -> ShardIndex:
    """Read the index of a shard; check its CRC, and that every inner chunk lies in the shard.

    Args:
        file: the file with the shard.
        start, n_bytes: first byte and length of the shard in the file.
        n_inner: number of inner chunks of the shard.
        key: the tensor, for messages.

    Raises:
        TruncatedError: the shard is shorter than its index.
        CorruptError: the index contradicts itself.
    """
    length = index_bytes(n_inner, has_crc=sharding.has_crc)
    if length > n_bytes:
        raise TruncatedError(
            f"the shard has {n_bytes} bytes, but the index of {n_inner} inner chunks takes {length}",
            file=file,
            key=key,
            hint="copy the checkpoint again, or use an older one",
            rule="zarr.shard",
        )
    # Read the index and compare its checksum.
    index_start = start if sharding.is_index_first else start + n_bytes - length
    data = store.read(file, index_start, length)
    if sharding.has_crc:
        data, stated_crc = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
        if (crc := crc32c(data)) != stated_crc:
            raise CorruptError(
                f"checksum mismatch: the shard's index has CRC-32C {crc:#010x}, but {stated_crc:#010x} is stored",
                file=file,
                key=key,
                span=(index_start, index_start + length),
                hint="the shard is damaged or truncated; copy the checkpoint again",
                rule="zarr.shard",
            )
    # Turn offsets in the shard into offsets in the file.
    numbers = columns("Q")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    for number in range(n_inner):
        offset, n_stored = numbers[2 * number], numbers[2 * number + 1]
        if offset == ABSENT and n_stored == ABSENT:
            continue
        if offset + n_stored > n_bytes:
            raise CorruptError(
                f"the index places inner chunk {number} at bytes {offset}–{offset + n_stored} of a shard of {n_bytes}",
                file=file,
                key=key,
                hint="the shard is damaged or truncated; copy the checkpoint again",
                rule="zarr.shard",
            )
        numbers[2 * number] = start + offset
    return ShardIndex(numbers)


def dense_index(n_inner: int, inner_bytes: int) -> bytes:
    """Return the index, with its CRC, of a shard whose inner chunks follow each other in C order
    from byte 0.
    """
    pairs = b"".join(
        struct.pack("<QQ", number * inner_bytes, inner_bytes) for number in range(n_inner)
    )
    return pairs + crc32c(pairs).to_bytes(_CRC_BYTES, "little")


def are_bands(shard_shape: Shape, inner_shape: Shape) -> bool:
    """Return whether inner chunks in C order are consecutive runs of the shard's C order."""
    grid = ChunkGrid(shard_shape, inner_shape)
    rest = list(zip(grid.counts, inner_shape, strict=True))
    while rest and rest[0][1] == 1:
        rest.pop(0)
    return all(count == 1 for count, _ in rest[1:])
