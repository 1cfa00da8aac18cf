"""CRC-32C (Castagnoli), which zarr 3 puts behind shard indexes.

Source: RFC 3720, appendix B.4, whose test vectors are in the tests.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_POLYNOMIAL = 0x82F63B78
"""Reflected."""


def crc32c(data: bytes) -> int:
    """The checksum of some bytes; by google-crc32c, which zarr brings along, else slowly."""
    fast = _fast()
    return table_crc32c(data) if fast is None else int(fast(bytes(data)))


def table_crc32c(data: bytes) -> int:
    """The checksum in plain Python: 0.1 s per MiB, which is fine for indexes."""
    table = _table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


@cache
def _fast() -> Callable[[bytes], Any] | None:
    try:
        return import_module("google_crc32c").value  # type: ignore[no-any-return]
    except ImportError:
        return None


@cache
def _table() -> Sequence[int]:
    found = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
        found.append(crc)
    return tuple(found)
