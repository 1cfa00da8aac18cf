"""A checksum that a checkpoint states itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stated:
    """Bytes of a file of which the checkpoint states the CRC-32.

    Args:
        start, stop: byte addresses in the file.
        crc: as stated.
        name: what they are, for people: ``record data/0``.
    """

    start: int
    stop: int
    crc: int
    name: str
