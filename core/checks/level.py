"""Validation levels: how much of a checkpoint is read."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """How much of a checkpoint ``ckpt validate`` reads; each level includes those below."""

    METADATA = 1
    """File names, sizes and metadata; one file of each group with similar names and one size."""
    HEADERS = 2
    """Every container is opened: directory, headers and the position of each array."""
    DEEP = 3
    """Every byte is read, once."""
