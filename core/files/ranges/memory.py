"""Divide the memory for reading an object store."""

from __future__ import annotations

from core.values import dataclass

MIB = 1 << 20
MAX_PART_BYTES = 4 * MIB
"""Number of bytes of a request; longer ranges are divided."""
_MIN_PART_BYTES = MIB
_MAX_BYTES, _MIN_BYTES = 80 * MIB, 9 * MIB
_AMPLE_LIMIT, _SCARCE_LIMIT = 512 * MIB, 192 * MIB
"""Memory limits of a process from which on, and up to which, reading takes the most and the least
memory.
"""


@dataclass(frozen=True, slots=True)
class ReadingMemory:
    """The memory that reading one store takes.

    Args:
        kept_bytes: pages of metadata that are kept.
        ahead_bytes: ranges in flight, and those that have arrived and not been used.
        part_bytes: bytes of a request.
    """

    kept_bytes: int
    ahead_bytes: int
    part_bytes: int

    def n_bytes(self, threads: int) -> int:
        """Return the total; each reading thread may wait for one part of its own beside it."""
        return self.kept_bytes + self.ahead_bytes + threads * self.part_bytes


def divide_memory(limit_bytes: int | None, *, n_requests: int) -> ReadingMemory:
    """Divide the part of a process's memory that reading a store may take.

    Args:
        limit_bytes: memory limit of the process; None for no limit.
        n_requests: maximum number of requests at the same time.
    """
    # The share grows with the limit only between the two, so that a limit that is too low can be
    # answered with one that suffices.
    n_bytes = _MAX_BYTES
    if limit_bytes is not None and limit_bytes < _AMPLE_LIMIT:
        above = max(0, limit_bytes - _SCARCE_LIMIT)
        n_bytes = _MIN_BYTES + (_MAX_BYTES - _MIN_BYTES) * above // (_AMPLE_LIMIT - _SCARCE_LIMIT)
    kept_bytes = n_bytes // 5
    ahead_bytes = n_bytes - kept_bytes
    part_bytes = max(_MIN_PART_BYTES, min(MAX_PART_BYTES, ahead_bytes // n_requests))
    return ReadingMemory(kept_bytes, ahead_bytes, part_bytes)
