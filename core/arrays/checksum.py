"""CRC-32 and content digests of arrays whose parts are written in any order.

* ``crc32`` uses zlib's polynomial (zip, gzip). Sums of parts are joined with ``crc32_combine``.
* The *digest* of a byte string is the XXH3-128 of the XXH3-128s of its 1 MiB blocks, in order.
  Blocks are counted from the beginning of the string, so the digest does not depend on how the
  string was divided among processes.

``RunSum`` sums one run of consecutive bytes; ``ArraySum`` joins the runs of one array. A block that
two runs share (a *seam*) is hashed at the end, from the file; if the file cannot be read back, the
runs keep their bytes of it. ``ArrayPart`` carries the sums of one process to another.

Source: XXH3 as in xxhash 0.8.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import xxhash

from core.arrays.crc import CRC32
from core.values import dataclass

_crc32: Callable[..., int]
_combine: Callable[[int, int, int], int] | None
try:
    from zlib_ng.zlib_ng import crc32 as _crc32
    from zlib_ng.zlib_ng import crc32_combine as _combine
except ImportError:
    # No wheel for this platform: zlib computes the same sums four times slower.
    _crc32, _combine = zlib.crc32, None

BLOCK_BYTES = 1 << 20
"""Size of the blocks that a digest hashes individually."""

ALGORITHM = "xxh3-128/1MiB"
"""Name of the digest in manifests."""


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """Compute the CRC-32 of ``data``, continuing from the CRC-32 ``value`` of earlier bytes."""
    return int(_crc32(data, value))


def crc32_combine(first: int, second: int, n_second: int) -> int:
    """Compute the CRC-32 of two concatenated byte strings from their CRC-32s.

    Args:
        first, second: the CRC-32 of each string.
        n_second: length of the second string, in bytes.
    """
    if _combine is not None:
        return int(_combine(first, second, n_second))
    return combine_in_python(first, second, n_second)


def combine_in_python(first: int, second: int, n_second: int) -> int:
    """Compute ``crc32_combine`` without zlib-ng."""
    return CRC32.combine(first, second, n_second)


def crc32_of_zeros(n_bytes: int) -> int:
    """Compute the CRC-32 of ``n_bytes`` zero bytes."""
    return CRC32.combine(0xFFFFFFFF, 0xFFFFFFFF, n_bytes)


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """Compute the digest (16 bytes) of a byte string in memory."""
    view = memoryview(data)
    blocks = (
        xxhash.xxh3_128_digest(view[at : at + BLOCK_BYTES])
        for at in range(0, len(view), BLOCK_BYTES)
    )
    return xxhash.xxh3_128_digest(b"".join(blocks))


def digest_of_blocks(blocks: list[bytes]) -> bytes:
    """Compute the digest of a byte string from the hashes of all its blocks, in order."""
    return xxhash.xxh3_128_digest(b"".join(blocks))


class RunSum:
    """CRC-32 and block hashes of one run of consecutive bytes of an array, fed in order.

    Args:
        offset: position of the run in the array, in bytes.
        array_bytes: length of the array, whose last block may be short.
        crc, digest: the sums to compute.
        keeps_edges: keep the bytes before the first and after the last block that is entirely in
            the run, less than two blocks.

    Attributes:
        n_bytes: number of bytes fed so far.
        crc: CRC-32 of the bytes fed so far; 0 if switched off.
        blocks: hashes of the blocks that are entirely in the run, consecutive from ``first_block``.
        head: the bytes before the first of these blocks; empty without ``keeps_edges``.
        tail: the bytes after the last of these blocks.
    """

    __slots__ = (
        "_array_bytes",
        "_hash",
        "_keeps_edges",
        "_with_crc",
        "_with_digest",
        "blocks",
        "crc",
        "head",
        "n_bytes",
        "offset",
        "tail",
    )

    def __init__(
        self, offset: int, array_bytes: int, *, crc: bool, digest: bool, keeps_edges: bool = False
    ) -> None:
        self.offset = offset
        self.head = bytearray()
        self.tail = bytearray()
        self._keeps_edges = keeps_edges
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
        """Add the next bytes of the run."""
        if self._with_crc:
            self.crc = crc32(data, self.crc)
        if self._with_digest:
            self._feed_blocks(data)
        self.n_bytes += len(data)

    def _feed_blocks(self, data: memoryview) -> None:
        """Hash the next bytes, and store the hash of every block that they complete."""
        n_done = 0
        position = self.offset + self.n_bytes
        while n_done < len(data):
            # Take the bytes up to the end of the block that contains ``position``.
            in_block = position % BLOCK_BYTES
            block_start = position - in_block
            block_bytes = min(BLOCK_BYTES, self._array_bytes - block_start)
            part = data[n_done : n_done + block_bytes - in_block]
            n_done += len(part)
            position += len(part)
            # A block that began before the run is a seam, hashed later.
            if block_start < self.offset:
                if self._keeps_edges:
                    self.head += part
                continue
            # A complete block is hashed directly, a partial one is continued by the next call.
            if len(part) == block_bytes:
                self.blocks.append(xxhash.xxh3_128_digest(part))
                continue
            if self._hash is None:
                self._hash = xxhash.xxh3_128()
            self._hash.update(part)
            if in_block + len(part) == block_bytes:
                self.blocks.append(self._hash.digest())
                self._hash.reset()
                self.tail.clear()
            elif self._keeps_edges:
                self.tail += part


ReadArray = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes of a finished array, from an offset on."""


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """The sums of some runs of an array, as one process sends them to another.

    Args:
        runs: (offset, bytes, CRC-32) of runs with gaps between them, sorted by offset; the CRC is 0
            if switched off.
        blocks: number → hash of all blocks that are entirely in the runs; empty if digests are
            switched off.
        n_unsummed: bytes outside the runs, which were written in scattered parts, without sums.
        edges: (offset, bytes) of parts of the other blocks, if they cannot be read back.
    """

    runs: tuple[tuple[int, int, int], ...]
    blocks: Mapping[int, bytes]
    n_unsummed: int = 0
    edges: tuple[tuple[int, bytes], ...] = ()


class ArraySum:
    """CRC-32 and digest of one array, joined from its runs.

    Args:
        n_bytes: length of the array, in bytes.
        crc, digest: the sums to compute.

    Not thread-safe: the caller holds a lock around ``add`` and ``add_unsummed``.
    """

    __slots__ = (
        "_blocks",
        "_n_missing",
        "_n_unsummed",
        "_runs",
        "_seams",
        "_with_crc",
        "_with_digest",
        "n_bytes",
    )

    def __init__(self, n_bytes: int, *, crc: bool, digest: bool) -> None:
        self.n_bytes = n_bytes
        self._seams: dict[int, list[tuple[int, bytes]]] = {}  # block → (offset, bytes) of edges
        self._n_missing = n_bytes
        self._runs: list[tuple[int, int, int]] = []
        self._blocks: dict[int, bytes] = {}
        self._with_crc = crc
        self._with_digest = digest
        self._n_unsummed = 0

    @property
    def is_complete(self) -> bool:
        """True if every byte has been added."""
        return self._n_missing == 0

    def add(self, run: RunSum) -> None:
        """Add a run that has been fed completely."""
        self._n_missing -= run.n_bytes
        self._runs.append((run.offset, run.n_bytes, run.crc))
        self._blocks.update(enumerate(run.blocks, run.first_block))
        self._add_edge(run.offset, run.head)
        self._add_edge(run.offset + run.n_bytes - len(run.tail), run.tail)

    def _add_edge(self, offset: int, edge: bytes | bytearray) -> None:
        """Add bytes of a block that several runs share; the last of them completes its hash."""
        if not edge:
            return
        number = offset // BLOCK_BYTES
        edges = self._seams.setdefault(number, [])
        edges.append((offset, bytes(edge)))
        n_known = sum(len(data) for _, data in edges)
        if n_known == min(BLOCK_BYTES, self.n_bytes - number * BLOCK_BYTES):
            block = b"".join(data for _, data in sorted(self._seams.pop(number)))
            self._blocks[number] = xxhash.xxh3_128_digest(block)

    def add_unsummed(self, n_bytes: int) -> None:
        """Count bytes that were written without sums; ``finish`` will read the array again."""
        self._n_missing -= n_bytes
        self._n_unsummed += n_bytes

    def part(self, read: ReadArray) -> ArrayPart:
        """Return the sums of the runs that have been added so far.

        Args:
            read: reads the blocks that two of the runs share.
        """
        # Join the runs that follow each other without a gap.
        runs: list[tuple[int, int, int]] = []
        for offset, n_bytes, crc in sorted(self._runs):
            if runs and runs[-1][0] + runs[-1][1] == offset:
                start, n_before, crc_before = runs[-1]
                joined_crc = crc32_combine(crc_before, crc, n_bytes) if self._with_crc else 0
                runs[-1] = start, n_before + n_bytes, joined_crc
            else:
                runs.append((offset, n_bytes, crc))
        blocks = dict(self._blocks)
        # With unsummed bytes the array is read again anyway, so seams are not needed.
        if not self._with_digest or self._n_unsummed:
            return ArrayPart(tuple(runs), blocks, self._n_unsummed)
        edges = tuple(edge for edges in self._seams.values() for edge in edges)
        # Hash the seams: the blocks that are in a joined run, but in none of its parts.
        for offset, n_bytes, _ in runs:
            end = offset + n_bytes
            # Only the last block of the array may be short.
            stop = -(-end // BLOCK_BYTES) if end == self.n_bytes else end // BLOCK_BYTES
            seams = set(range(-(-offset // BLOCK_BYTES), stop)) - blocks.keys()
            blocks |= {number: self._hash_block(number, read) for number in sorted(seams)}
        return ArrayPart(tuple(runs), blocks, self._n_unsummed, edges)

    def join(self, part: ArrayPart) -> None:
        """Add the runs that another process has summed."""
        self._n_missing -= sum(n_bytes for _, n_bytes, _ in part.runs) + part.n_unsummed
        self._n_unsummed += part.n_unsummed
        self._runs += part.runs
        self._blocks.update(part.blocks)
        for offset, edge in part.edges:
            self._add_edge(offset, edge)

    def finish(self, read: ReadArray) -> tuple[int, bytes]:
        """Return the CRC-32 and digest of the complete array; 0 and b"" if switched off.

        Args:
            read: reads the seams, or the complete array if some bytes were added without sums.
        """
        assert self.is_complete
        if self._n_unsummed:
            return self._sum_again(read)
        # Join the CRC-32s of the runs, in order.
        crc = 0
        if self._with_crc:
            for _, n_bytes, run_crc in sorted(self._runs):
                crc = crc32_combine(crc, run_crc, n_bytes)
        if not self._with_digest:
            return crc, b""
        # The digest is the hash of the blocks' hashes; seams are hashed only now.
        state = xxhash.xxh3_128()
        for number in range(-(-self.n_bytes // BLOCK_BYTES)):
            block_hash = self._blocks.get(number)
            state.update(self._hash_block(number, read) if block_hash is None else block_hash)
        return crc, state.digest()

    def _hash_block(self, number: int, read: ReadArray) -> bytes:
        """Read one block and return its hash."""
        start = number * BLOCK_BYTES
        data = memoryview(bytearray(min(BLOCK_BYTES, self.n_bytes - start)))
        read(start, data)
        return xxhash.xxh3_128_digest(data)

    def _sum_again(self, read: ReadArray) -> tuple[int, bytes]:
        """Read the complete array and return its CRC-32 and digest."""
        array_run = RunSum(0, self.n_bytes, crc=self._with_crc, digest=self._with_digest)
        buffer = memoryview(bytearray(min(BLOCK_BYTES, self.n_bytes)))
        for start in range(0, self.n_bytes, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, self.n_bytes - start)]
            read(start, block)
            array_run.feed(block)
        return array_run.crc, digest_of_blocks(array_run.blocks) if self._with_digest else b""


def crc32c(data: bytes) -> int:
    """Compute the CRC-32C (Castagnoli, RFC 3720 B.4) of zarr 3 indexes and OCDBT nodes."""
    import google_crc32c

    return int(google_crc32c.value(bytes(data)))
