"""Shards of zarr 3 (codec ``sharding_indexed``): many inner chunks in one file.

Byte picture (the index may also come first)::

    [inner chunk] [inner chunk] …  any order, gaps allowed
    [u64 offset, u64 bytes] …      one pair per inner chunk, C order, little endian;
                                   2⁶⁴−1 twice if the inner chunk is missing
    [u32 CRC-32C of the pairs]     if the index codecs include crc32c

Written shards contain the elements in C order, divided into inner chunks that are bands, so that
the data of a shard is one dense run.

Source: zarr 3 specification, codec ``sharding_indexed`` 1.0; shards written by zarr-python 3.1.6
and tensorstore 0.1.86.
"""

from __future__ import annotations

import struct
import sys
from array import array as columns
from typing import TYPE_CHECKING

from core.arrays.checksum import crc32c
from core.errors import CorruptError, TruncatedError
from core.formats.zarr.grid import ChunkGrid
from core.values import dataclass

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
        numbers: for every inner chunk in C order its offset in the file and its length, in bytes.
    """

    numbers: columns[int]

    def place(self, number: int) -> tuple[int, int] | None:
        """Return the offset in the file and the length of an inner chunk, in bytes.

        None if the shard lacks the inner chunk.
        """
        offset, n_bytes = self.numbers[2 * number], self.numbers[2 * number + 1]
        return None if offset == ABSENT and n_bytes == ABSENT else (offset, n_bytes)

    @property
    def is_one_run(self) -> bool:
        """True if every inner chunk begins at the end of the one before it."""
        offsets, lengths = self.numbers[::2], self.numbers[1::2]
        if ABSENT in offsets:
            return False
        end = offsets[0]
        for offset, n_bytes in zip(offsets, lengths, strict=True):
            if offset != end:
                return False
            end += n_bytes
        return True


def read_shard_index(
    store: ReadStore,
    file: str,
    *,
    start: int,
    n_bytes: int,
    n_inner: int,
    sharding: Sharding,
    key: str,
) -> ShardIndex:
    """Read the index of a shard; check its CRC and that every inner chunk is inside the shard.

    Args:
        file: the file with the shard.
        start, n_bytes: first byte and length of the shard in the file.
        n_inner: number of inner chunks of the shard.
        sharding: where the index is, and whether it has a CRC.
        key: the tensor, for messages.

    Raises:
        TruncatedError: the shard is shorter than its index.
        CorruptError: the checksum does not match, or an inner chunk ends beyond the shard.
    """
    # The metadata fixes the length of the index.
    length = index_bytes(n_inner, has_crc=sharding.has_crc)
    if length > n_bytes:
        raise TruncatedError(
            f"the shard is {n_bytes} bytes long, but its index of {n_inner} inner chunks alone "
            f"needs {length} bytes",
            file=file,
            key=key,
            hint="copy the checkpoint again, or use an older one",
            rule="zarr.shard",
        )
    # Read the index and compare its checksum.
    index_start = start if sharding.is_index_first else start + n_bytes - length
    data = store.read(file, index_start, length)
    if sharding.has_crc:
        data, stored_crc = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
        if (crc := crc32c(data)) != stored_crc:
            raise CorruptError(
                f"checksum mismatch: the CRC-32C of the shard's index is {crc:#010x}, but "
                f"{stored_crc:#010x} is recorded",
                file=file,
                key=key,
                span=(index_start, index_start + length),
                hint="the shard is damaged or truncated; copy the checkpoint again",
                rule="zarr.shard",
            )
    # Offsets count from the shard's first byte, which need not be the file's: OCDBT stores several
    # shards in one file.
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
                f"inner chunk {number} ends at byte {offset + n_stored} according to the index, "
                f"but the shard is only {n_bytes} bytes long",
                file=file,
                key=key,
                hint="the shard is damaged or truncated; copy the checkpoint again",
                rule="zarr.shard",
            )
        numbers[2 * number] = start + offset
    return ShardIndex(numbers)


def dense_index(n_inner: int, inner_bytes: int) -> bytes:
    """Return the index, with its CRC, of a shard whose inner chunks are dense and in C order."""
    pairs = b"".join(
        struct.pack("<QQ", number * inner_bytes, inner_bytes) for number in range(n_inner)
    )
    return pairs + crc32c(pairs).to_bytes(_CRC_BYTES, "little")


def are_bands(shard_shape: Shape, inner_shape: Shape) -> bool:
    """Return whether inner chunks in C order are consecutive runs of the shard's C order.

    That is so for inner shapes of the form (1, …, 1, n, full, …, full).
    """
    counts = ChunkGrid(shard_shape, inner_shape).counts
    first_axis = next((axis for axis, extent in enumerate(inner_shape) if extent > 1), len(counts))
    return all(count == 1 for count in counts[first_axis + 1 :])
