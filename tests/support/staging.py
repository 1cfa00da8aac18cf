"""What a staging pool keeps for the next save."""

from __future__ import annotations

from core.dist_checkpointing._background.staging import StagingPool


def free_bytes(pool: StagingPool) -> int:
    """Return the bytes of the blocks that no copy uses."""
    return sum(block.n_bytes for block in pool._free)
