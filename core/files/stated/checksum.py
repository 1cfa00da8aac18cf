"""A checksum that a store states about an object."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import field

from core.values import dataclass

SUM_BYTES: Mapping[str, int] = {
    "CRC-32": 4,
    "CRC-32C": 4,
    "CRC-64/NVME": 8,
    "SHA-256": 32,
    "SHA-1": 20,
    "MD5": 16,
}
"""Algorithm → bytes of a checksum; those that are faster to compute come first."""


@dataclass(frozen=True, slots=True)
class RangeSum:
    """The checksum of a range of an object.

    Args:
        start, stop: byte addresses in the object.
        value: checksum, hexadecimal.
    """

    start: int
    stop: int
    value: str


@dataclass(frozen=True, slots=True)
class StatedChecksum:
    """A checksum of an object, as its store states it.

    Args:
        algorithm: a key of ``SUM_BYTES``.
        ranges: one range for the whole object; the parts of an upload, in order and without gaps,
            if the store has a checksum of each (a *composite* checksum); () if the store does not
            state them, or was not asked for this kind: it cannot be compared with anything.
    """

    algorithm: str
    ranges: tuple[RangeSum, ...]


@dataclass(frozen=True, slots=True)
class StatedChecksums:
    """The checksums that a store states about objects.

    Args:
        by_name: name of the object → its checksums; without objects of which none is stated.
        failure: why the store could not be asked about the others; None if it could.
    """

    by_name: Mapping[str, tuple[StatedChecksum, ...]] = field(default_factory=dict)
    failure: str | None = None


def whole_checksum(algorithm: str, text: str, n_bytes: int) -> StatedChecksum | None:
    """Build the checksum of a whole object from its base64 text; None if the text is malformed."""
    value = decode_sum(algorithm, text)
    return None if value is None else StatedChecksum(algorithm, (RangeSum(0, n_bytes, value),))


def decode_sum(algorithm: str, text: str) -> str | None:
    """Return a base64 checksum in hexadecimal digits; None if it is malformed."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return data.hex() if len(data) == SUM_BYTES[algorithm] else None
