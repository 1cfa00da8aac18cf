"""Checksums of request bodies, as S3 spells them in headers: base64 of the big-endian sum."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol


class Checksum(Protocol):
    """A sum that is fed piece by piece."""

    def update(self, data: Any, /) -> None: ...

    def digest(self) -> bytes: ...


class RunningCrc:
    """A CRC.

    Args:
        compute: returns the CRC of data that follow data with a given CRC.
        n_bytes: its size.
    """

    def __init__(self, compute: Callable[[Any, int], int], n_bytes: int) -> None:
        self._compute = compute
        self._n_bytes = n_bytes
        self._value = 0

    def update(self, data: Any, /) -> None:
        """Feed data."""
        self._value = self._compute(data, self._value)

    def digest(self) -> bytes:
        """Return the sum, big-endian."""
        return self._value.to_bytes(self._n_bytes, "big")


def _table_crc(table: list[int], mask: int, data: Any, crc: int) -> int:
    crc ^= mask
    for byte in bytes(data):
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ mask


def _reflected_crc(polynomial: int, n_bits: int) -> Callable[[Any, int], int]:
    """Return a reflected CRC in plain Python, for small bodies where no library is installed."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
        table.append(value)
    return partial(_table_crc, table, (1 << n_bits) - 1)


def _crc64_nvme() -> Checksum:
    try:
        from awscrt.checksums import crc64nvme
    except ImportError:
        return RunningCrc(_reflected_crc(0x9A6C9329AC4BC9B5, 64), 8)
    return RunningCrc(lambda data, crc: crc64nvme(bytes(data), crc), 8)


def _crc32c() -> Checksum:
    try:
        from awscrt.checksums import crc32c
    except ImportError:
        return RunningCrc(_reflected_crc(0x82F63B78, 32), 4)
    return RunningCrc(lambda data, crc: crc32c(bytes(data), crc), 4)


MAKERS: dict[str, Callable[[], Checksum]] = {
    "content-md5": hashlib.md5,
    "x-amz-checksum-crc32": lambda: RunningCrc(zlib.crc32, 4),
    "x-amz-checksum-crc32c": _crc32c,
    "x-amz-checksum-crc64nvme": _crc64_nvme,
    "x-amz-checksum-sha1": hashlib.sha1,
    "x-amz-checksum-sha256": hashlib.sha256,
}
"""Header or trailer in lower case → its sum."""


def encoded(checksum: Checksum) -> str:
    """Return a sum as in a header."""
    return base64.b64encode(checksum.digest()).decode()
