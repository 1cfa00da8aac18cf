"""CRC-64/NVME as it is defined, for comparison."""

from __future__ import annotations

import importlib.util

HAS_AWSCRT = importlib.util.find_spec("awscrt") is not None


def crc64_nvme(data: bytes) -> int:
    """Compute the CRC bit by bit, as its definition says."""
    crc = 2**64 - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x9A6C9329AC4BC9B5 if crc & 1 else 0)
    return crc ^ (2**64 - 1)
