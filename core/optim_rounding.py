"""A few elements rounded without numpy: samples of masters are too small to load it for.

What ``core.cast`` does at length; the tests hold both against each other for every sort of number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

MOST = 4096
"""Elements beyond which numpy is faster, its import included."""

_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}
"""Bits of infinity; greater ones, without the sign, are NaNs."""
_CODES = {"float16": "H", "bfloat16": "H", "float32": "I"}


def rounding_of(source: str, target: str) -> Callable[[bytes], bytes] | None:
    """The function that rounds dense little-endian elements to nearest even; None where only numpy does.

    NaNs stay NaNs, with bits of their own.
    """
    return {("float32", "bfloat16"): _to_bfloat16, ("float32", "float16"): _to_float16}.get((source, target))


def is_nan(data: bytes, dtype: str) -> bool | None:
    """Whether one element is no number; None if the dtype is not known here."""
    if dtype not in _INFINITIES:
        return None
    (bits,) = struct.unpack(f"<{_CODES[dtype]}", data)
    return bool(bits & (1 << 8 * len(data) - 1) - 1 > _INFINITIES[dtype])


def _to_bfloat16(data: bytes) -> bytes:
    n = len(data) // 4
    return struct.pack(f"<{n}H", *map(_bfloat16_bits, struct.unpack(f"<{n}I", data)))


def _bfloat16_bits(bits: int) -> int:
    if bits & 0x7FFF_FFFF > _INFINITIES["float32"]:
        return bits >> 16 | 0x40
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16  # ties to even; a carry leads on to infinity


def _to_float16(data: bytes) -> bytes:
    return b"".join(map(_float16, struct.unpack(f"<{len(data) // 4}f", data)))


def _float16(value: float) -> bytes:
    try:
        return struct.pack("<e", value)
    except OverflowError:
        return struct.pack("<e", float("inf") if value > 0 else float("-inf"))
