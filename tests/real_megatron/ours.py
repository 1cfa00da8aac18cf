"""Whose ``dist_checkpointing`` megatron-core uses in this process: its own, or this project's."""

from __future__ import annotations


def is_in_place() -> bool:
    """Return whether megatron-core saves and loads through this project (``as_megatron``)."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.__name__ == "core.dist_checkpointing"
