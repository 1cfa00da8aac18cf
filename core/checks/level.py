"""How much of a checkpoint is read to validate it."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """How much is read."""

    METADATA = 1
    """File names, sizes and metadata; one file of those that look alike."""
    HEADERS = 2
    """Every container is opened: its directory, its headers, where each array lies."""
    DEEP = 3
    """Every byte, once."""
