"""Validation levels: the amount of data that is read."""

from __future__ import annotations

from enum import IntEnum


class Level(IntEnum):
    """The amount of data that ``ckpt validate`` reads; each level includes those below."""

    METADATA = 1
    """File names, sizes and metadata; one file of each group with similar names and equal sizes."""
    HEADERS = 2
    """Every container is opened: directory, headers and the position of each array."""
    DEEP = 3
    """Every byte is read."""
