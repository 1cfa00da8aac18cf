"""CRC-32 and content digests, computed in pieces that finish in any order.

* ``crc32`` is zlib's polynomial (zip, gzip). Pieces are joined with ``crc32_combine``.
* The *digest* of a byte string is the XXH3-128 of the XXH3-128s of its 1 MiB blocks, in order. Blocks are counted from
  the beginning of the string, so the digest does not depend on who hashed which part.

``RunSum`` follows the bytes of one consecutive run; ``ArraySum`` joins the runs of one array. A block that two runs
share (a *seam*) is hashed at the end, from the file. ``ArrayPart`` is what one of several processes has of an array.

Source: zlib's ``crc32_combine`` (multiplication by x^(8n) modulo the polynomial, bits reflected); XXH3 as in
xxhash 0.8.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import xxhash

_crc32: Callable[..., int]
_combine: Callable[[int, int, int], int] | None
try:
    from zlib_ng.zlib_ng import crc32 as _crc32
    from zlib_ng.zlib_ng import crc32_combine as _combine
except ImportError:  # a platform without wheels: the same numbers, four times slower
    _crc32, _combine = zlib.crc32, None

BLOCK_BYTES = 1 << 20
"""Bytes of the blocks that a digest is made of."""

ALGORITHM = "xxh3-128/1MiB"
"""How manifests call the digest."""

_POLYNOMIAL = 0xEDB88320


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32 of ``data``, continuing from ``value``."""
    return int(_crc32(data, value))


def crc32_combine(first: int, second: int, n_second: int) -> int:
    """CRC-32 of two strings put together.

    Args:
        first, second: CRC-32 of each.
        n_second: bytes of the second.
    """
    if _combine is not None:
        return int(_combine(first, second, n_second))
    return combine_in_python(first, second, n_second)


def combine_in_python(first: int, second: int, n_second: int) -> int:
    """``crc32_combine`` without zlib-ng; operators of lengths that were seen before are kept."""
    return _times(_power(n_second), first) ^ second


def crc32_of_zeros(n_bytes: int) -> int:
    """CRC-32 of ``n_bytes`` zero bytes."""
    return _times(_power(n_bytes), 0xFFFFFFFF) ^ 0xFFFFFFFF


def _times(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC's; bit 31 is x^0."""
    product = 0
    bit = 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _power(n_bytes: int) -> int:
    """x^(8 * n_bytes) modulo the polynomial."""
    power = 1 << 31
    exponent = n_bytes
    square = _times(1 << 30, 1 << 30)  # x^2
    square = _times(square, square)
    square = _times(square, square)  # x^8
    while exponent:
        if exponent & 1:
            power = _times(power, square)
        square = _times(square, square)
        exponent >>= 1
    return power


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The digest (16 bytes) of a string that is in memory as a whole."""
    view = memoryview(data)
    blocks = (xxhash.xxh3_128_digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES))
    return xxhash.xxh3_128_digest(b"".join(blocks))


def digest_of_blocks(blocks: list[bytes]) -> bytes:
    """The digest of a string from the hashes of all of its blocks."""
    return xxhash.xxh3_128_digest(b"".join(blocks))


class RunSum:
    """CRC-32 and block hashes of one run of consecutive bytes of an array, fed in order.

    Args:
        offset: where the run begins in the array, in bytes.
        array_bytes: length of the whole array, whose last block may be short.
        crc, digest: what to compute.

    Attributes:
        n_bytes: how much has been fed.
        crc: CRC-32 of what has been fed; 0 if switched off.
        blocks: hashes of the blocks that lie wholly in the run, consecutive from ``first_block``.
    """

    __slots__ = ("_array_bytes", "_hash", "_with_crc", "_with_digest", "blocks", "crc", "n_bytes", "offset")

    def __init__(self, offset: int, array_bytes: int, *, crc: bool, digest: bool) -> None:
        self.offset = offset
        self.n_bytes = 0
        self.crc = 0
        self.blocks: list[bytes] = []
        self._array_bytes = array_bytes
        self._with_crc = crc
        self._with_digest = digest
        self._hash: xxhash.xxh3_128 | None = None

    @property
    def first_block(self) -> int:
        """Number of the first block that begins in the run."""
        return -(-self.offset // BLOCK_BYTES)

    def feed(self, data: memoryview) -> None:
        """Takes the next bytes of the run."""
        if self._with_crc:
            self.crc = crc32(data, self.crc)
        if self._with_digest:
            self._feed_blocks(data)
        self.n_bytes += len(data)

    def _feed_blocks(self, data: memoryview) -> None:
        at = 0
        position = self.offset + self.n_bytes
        while at < len(data):
            in_block = position % BLOCK_BYTES
            block_bytes = min(BLOCK_BYTES, self._array_bytes - position + in_block)
            piece = data[at : at + block_bytes - in_block]
            if position - in_block >= self.offset:  # else the block began before the run
                if len(piece) == block_bytes:
                    self.blocks.append(xxhash.xxh3_128_digest(piece))
                else:
                    self._feed_part(piece, is_last=in_block + len(piece) == block_bytes)
            at += len(piece)
            position += len(piece)

    def _feed_part(self, piece: memoryview, *, is_last: bool) -> None:
        if self._hash is None:
            self._hash = xxhash.xxh3_128()
        self._hash.update(piece)
        if is_last:
            self.blocks.append(self._hash.digest())
            self._hash.reset()


ReadArray = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes of a finished array from an offset on."""


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """The sums of some runs of an array, as they travel between processes.

    Args:
        runs: (offset, bytes, CRC-32) of runs that do not touch each other, by offset; the CRC is 0 if switched off.
        blocks: hashes by number, of all blocks that lie wholly in the runs; none if digests are switched off.
        n_unsummed: bytes beside the runs that were written piecemeal.
    """

    runs: tuple[tuple[int, int, int], ...]
    blocks: Mapping[int, bytes]
    n_unsummed: int = 0


class ArraySum:
    """CRC-32 and digest of one array, joined from its runs.

    Args:
        n_bytes: of the array.
        crc, digest: what to compute.

    Not safe for threads: the caller holds a lock around ``add`` and ``add_unsummed``.
    """

    __slots__ = ("_blocks", "_n_missing", "_n_unsummed", "_runs", "_with_crc", "_with_digest", "n_bytes")

    def __init__(self, n_bytes: int, *, crc: bool, digest: bool) -> None:
        self.n_bytes = n_bytes
        self._n_missing = n_bytes
        self._runs: list[tuple[int, int, int]] = []
        self._blocks: dict[int, bytes] = {}
        self._with_crc = crc
        self._with_digest = digest
        self._n_unsummed = 0

    @property
    def is_complete(self) -> bool:
        """Whether every byte has been accounted for."""
        return self._n_missing == 0

    def add(self, run: RunSum) -> None:
        """Takes a run that has been fed to its end."""
        self._n_missing -= run.n_bytes
        self._runs.append((run.offset, run.n_bytes, run.crc))
        self._blocks.update(enumerate(run.blocks, run.first_block))

    def add_unsummed(self, n_bytes: int) -> None:
        """Takes ``n_bytes`` that were written piecemeal; the array will be read again as a whole."""
        self._n_missing -= n_bytes
        self._n_unsummed += n_bytes

    def part(self, read: ReadArray) -> ArrayPart:
        """What has been added so far.

        Args:
            read: used for blocks that two of the runs share.
        """
        runs: list[tuple[int, int, int]] = []
        for offset, n_bytes, crc in sorted(self._runs):
            if runs and runs[-1][0] + runs[-1][1] == offset:
                start, n_before, before = runs[-1]
                joined = crc32_combine(before, crc, n_bytes) if self._with_crc else 0
                runs[-1] = start, n_before + n_bytes, joined
            else:
                runs.append((offset, n_bytes, crc))
        blocks = dict(self._blocks)
        for offset, n_bytes, _ in runs if self._with_digest and not self._n_unsummed else ():
            end = offset + n_bytes
            last = -(-end // BLOCK_BYTES) if end == self.n_bytes else end // BLOCK_BYTES
            for number in range(-(-offset // BLOCK_BYTES), last):
                if number not in blocks:
                    blocks[number] = self._seam(number, read)
        return ArrayPart(tuple(runs), blocks, self._n_unsummed)

    def join(self, part: ArrayPart) -> None:
        """Takes what another process has of the array."""
        self._n_missing -= sum(n_bytes for _, n_bytes, _ in part.runs) + part.n_unsummed
        self._n_unsummed += part.n_unsummed
        self._runs += part.runs
        self._blocks.update(part.blocks)

    def finish(self, read: ReadArray) -> tuple[int, bytes]:
        """CRC-32 and digest of the complete array; 0 and b"" where switched off.

        Args:
            read: used for seams only, or for everything if some bytes came unsummed.
        """
        assert self.is_complete
        if self._n_unsummed:
            return self._by_reading(read)
        crc = 0
        if self._with_crc:
            for _, n_bytes, of_run in sorted(self._runs):
                crc = crc32_combine(crc, of_run, n_bytes)
        if not self._with_digest:
            return crc, b""
        state = xxhash.xxh3_128()
        for number in range(-(-self.n_bytes // BLOCK_BYTES)):
            block = self._blocks.get(number)
            state.update(self._seam(number, read) if block is None else block)
        return crc, state.digest()

    def _seam(self, number: int, read: ReadArray) -> bytes:
        start = number * BLOCK_BYTES
        data = memoryview(bytearray(min(BLOCK_BYTES, self.n_bytes - start)))
        read(start, data)
        return xxhash.xxh3_128_digest(data)

    def _by_reading(self, read: ReadArray) -> tuple[int, bytes]:
        whole = RunSum(0, self.n_bytes, crc=self._with_crc, digest=self._with_digest)
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self.n_bytes)))
        for start in range(0, self.n_bytes, BLOCK_BYTES):
            piece = buffer[: min(BLOCK_BYTES, self.n_bytes - start)]
            read(start, piece)
            whole.feed(piece)
        return whole.crc, xxhash.xxh3_128_digest(b"".join(whole.blocks)) if self._with_digest else b""


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli, RFC 3720 B.4), which zarr 3 and OCDBT put behind indexes and nodes."""
    import google_crc32c

    return int(google_crc32c.value(bytes(data)))
