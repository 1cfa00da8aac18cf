"""Casts: changing the dtype of dense elements in a buffer.

Every value is rounded as torch 2.13's ``Tensor.to`` rounds it, bit for bit: to nearest even, through float32 wherever
one side is narrower than that (so float64 → bfloat16 rounds twice, as in torch), overflow to infinity, or to NaN in the
``fnuz`` types, and saturating at ±448, infinities included, in float8_e4m3fn. A NaN stays a NaN; its sign and payload
are numpy's and ml_dtypes', because torch's own depend on the instruction set.

Supported: all pairs of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 and their ``fnuz`` forms; from
float8_e8m0fnu; from bool and integers to integers and floats that hold each of their values.

Not supported: complex, packed four-bit types, to float8_e8m0fnu (scales are not rounded values), and casts that would
lose integers or fractions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from core.arrays.dtypes import dtype_of, itemsize
from core.errors import UnsupportedError

Cast = Callable[[memoryview, memoryview], None]
"""Reads dense elements from the first buffer and writes them to the second; the element counts agree."""

_EXACT_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Integers of that many bits are exact in these types."""
_AT_ONCE = 1 << 16
"""Elements."""


def check_cast(source: str, target: str, *, key: str | None = None) -> None:
    """Refuses a cast that is not made.

    Args:
        source, target: canonical dtype names.
        key: the tensor, for the message.

    Raises:
        UnsupportedError: see the module's docstring.
    """
    if source != target and not _is_made(source, target):
        raise UnsupportedError(
            f"{source} is not cast to {target}",
            key=key,
            hint="leave this tensor out of --dtype, or choose a wider type",
        )


def _is_made(source: str, target: str) -> bool:
    a, b = dtype_of(source), dtype_of(target)
    if a.kind == "float":
        return b.kind == "float" and target != "float8_e8m0fnu"
    if a.kind not in ("bool", "int", "uint"):
        return False
    value_bits = 1 if a.kind == "bool" else 8 * a.itemsize - (a.kind == "int")
    if b.kind == "float":
        return value_bits <= _EXACT_BITS.get(target, 0)
    if b.kind == "int":
        return value_bits <= 8 * b.itemsize - 1
    return b.kind == "uint" and a.kind != "int" and value_bits <= 8 * b.itemsize


@lru_cache
def cast_of(source: str, target: str) -> Cast:
    """The function that casts dense little-endian elements; numpy is imported here.

    Raises:
        UnsupportedError: the cast is not made.
    """
    check_cast(source, target)
    import numpy as np

    wide, narrow = itemsize(source), itemsize(target)
    if dtype_of(source).kind != "float":
        return _in_parts(lambda data, out: _convert(data, source, out, target), wide, narrow)
    if wide == 1 or (wide == 2 and (source, target) != ("bfloat16", "float32")):
        table = patterns_of(source, target)
        return _in_parts(
            lambda data, out: np.take(table, _view(data, wide), out=_view(out, narrow), mode="wrap"), wide, narrow
        )
    if narrow == 1:
        table = patterns_of("bfloat16", target)
        return _in_parts(
            lambda data, out: np.take(table, _sticky(data, source), out=_view(out, 1), mode="wrap"), wide, narrow
        )
    return _in_parts(lambda data, out: _convert(data, source, out, target), wide, narrow)


def _in_parts(cast: Callable[[memoryview, memoryview], object], wide: int, narrow: int) -> Cast:
    """The cast, a few elements at a time, so that temporary arrays stay small and in the cache."""

    def cast_all(data: memoryview, out: memoryview) -> None:
        for first in range(0, len(data) // wide, _AT_ONCE):
            last = first + _AT_ONCE
            cast(data[first * wide : last * wide], out[first * narrow : last * narrow])

    return cast_all


def _convert(data: memoryview, source: str, out: memoryview, target: str) -> None:
    """The cast by numpy and ml_dtypes, the reference for the faster ways."""
    import numpy as np

    values: Any = np.frombuffer(data, dtype=_numpy_type(source))
    with np.errstate(all="ignore"):
        if dtype_of(source).kind == "float" and source != "float32" and min(itemsize(source), itemsize(target)) <= 2:
            values = values.astype(np.float32)
        if target == "float8_e4m3fn":
            values = np.clip(values, np.float32(-448), np.float32(448))
        np.copyto(np.frombuffer(out, dtype=_numpy_type(target)), values, casting="unsafe")


@lru_cache
def patterns_of(source: str, target: str) -> Any:
    """The cast of every bit pattern of a type of at most 16 bits, as unsigned integers."""
    import numpy as np

    patterns: Any = np.arange(1 << 8 * itemsize(source), dtype=f"u{itemsize(source)}")
    table: Any = np.empty(len(patterns), dtype=f"u{itemsize(target)}")
    _convert(memoryview(patterns.view(np.uint8)), source, memoryview(table.view(np.uint8)), target)
    return table


def _sticky(data: memoryview, source: str) -> Any:
    """float32 or float64 cut to bfloat16 patterns, odd if something was cut off.

    That keeps eight bits and the knowledge on which side of a tie the value lies, so rounding from there to the four or
    fewer bits of an eight-bit type is rounding from float32 (S. Boldo, G. Melquiond, "When double rounding is odd").
    """
    import numpy as np

    values: Any = np.frombuffer(data, dtype=_numpy_type(source))
    with np.errstate(all="ignore"):
        bits = values.astype(np.float32, copy=False).view(np.uint32)
    return (bits >> 16).astype(np.uint16) | ((bits & 0xFFFF) != 0)


def _view(buffer: memoryview, size: int) -> Any:
    import numpy as np

    return np.frombuffer(buffer, dtype=f"u{size}")


def _numpy_type(name: str) -> Any:
    import numpy as np

    spelling = dtype_of(name).numpy
    assert spelling is not None
    if hasattr(np, spelling) and spelling != "bool":
        return np.dtype(spelling)
    if spelling == "bool":
        return np.dtype(np.bool_)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, spelling))
