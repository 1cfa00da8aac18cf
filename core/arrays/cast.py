"""Casts: changing the dtype of dense elements in a buffer.

Every value is rounded as torch 2.13's ``Tensor.to`` rounds it, bit for bit:

- to nearest even, through float32 wherever one side is narrower than that (so float64 → bfloat16
  rounds twice, as in torch);
- overflow becomes infinity, or NaN in the ``fnuz`` types; float8_e4m3fn saturates at ±448,
  infinities included;
- a NaN stays a NaN; its sign and payload are those of numpy and ml_dtypes, because torch's own
  depend on the instruction set.

Supported: all pairs of float64, float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 and their
``fnuz`` forms; from float8_e8m0fnu and jax's own types (float8_e3m4, float4_e2m1fn, int4 …); from
bool and integers to integers and floats that represent each of their values exactly.

Not supported: complex, packed four-bit types, bits; to float8_e8m0fnu (scales are not rounded
values) and jax's own types; casts that would lose integers or fractions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from core.arrays.dtypes import dtype_of, itemsize, numpy_dtype
from core.errors import UnsupportedError

Cast = Callable[[memoryview, memoryview], None]
"""Casts the dense elements of the first buffer into the second, which has room for as many."""

_EXACT_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Type → bits of the integers that it represents exactly."""
_SOURCES_ONLY = frozenset(
    ("float8_e8m0fnu", "float8_e3m4", "float8_e4m3b11fnuz", "float4_e2m1fn", "int4", "int2")
)
"""Types that are only cast from: scales, which are not rounded values, and types without torch's
rounding."""
_INFINITY = {"float16": (0x7FFF, 0x7C00), "float8_e5m2": (0x7F, 0x7C)}
"""Type that large values overflow → bits of the magnitude, and the pattern of infinity in them."""
_BATCH_SIZE = 1 << 16
"""Elements per batch, so that temporary arrays stay small and in the cache."""


def check_cast(source: str, target: str, *, key: str | None = None) -> None:
    """Raise unless a tensor can be cast from one dtype to another.

    Args:
        source, target: canonical dtype names.
        key: the tensor, for the message.

    Raises:
        UnsupportedError: the cast is not supported (see the module's docstring), or a dtype is
            unknown.
    """
    if not is_supported(source, target):
        raise UnsupportedError(
            f"casting {source} to {target} is not supported",
            key=key,
            hint="exclude this tensor from --dtype, or choose a wider type",
        )


def is_supported(source: str, target: str) -> bool:
    """Return whether a cast is supported; it is between equal dtypes.

    Args:
        source, target: canonical dtype names.

    Raises:
        UnsupportedError: a dtype is unknown.
    """
    if source == target:
        return True
    old, new = dtype_of(source), dtype_of(target)
    if target in _SOURCES_ONLY:
        return False
    if old.kind == "float":
        return new.kind == "float"
    if old.kind not in ("bool", "int", "uint"):
        return False
    # The new type must represent every integer of the old type.
    n_bits = old.value_bits or 8 * old.itemsize
    value_bits = 1 if old.kind == "bool" else n_bits - (old.kind == "int")
    if new.kind == "float":
        return value_bits <= _EXACT_BITS.get(target, 0)
    if new.kind == "int":
        return value_bits <= 8 * new.itemsize - 1
    return new.kind == "uint" and old.kind != "int" and value_bits <= 8 * new.itemsize


@lru_cache
def find_cast(source: str, target: str) -> Cast:
    """Return the function that casts dense little-endian elements from one dtype to another.

    Raises:
        UnsupportedError: the cast is not supported.
    """
    check_cast(source, target)
    import numpy as np

    in_bytes, out_bytes = itemsize(source), itemsize(target)
    is_float = dtype_of(source).kind == "float"
    if is_float and (
        in_bytes == 1 or (in_bytes == 2 and (source, target) != ("bfloat16", "float32"))
    ):
        # From at most 16 bits: look up each bit pattern in a table of all casts. numpy widens
        # bfloat16 to float32 faster than that.
        table = patterns_of(source, target)

        def cast_batch(data: memoryview, out: memoryview) -> None:
            patterns = np.frombuffer(data, dtype=f"u{in_bytes}")
            # Patterns are in range, and mode="raise" would copy the output once more.
            np.take(table, patterns, out=np.frombuffer(out, dtype=f"u{out_bytes}"), mode="wrap")

    elif is_float and out_bytes == 1:
        # From wide floats to eight bits: reduce to bfloat16 patterns first, then look those up.
        # Values are rounded to odd: cut off, with the last bit set if any bits were lost. That
        # keeps eight bits and the side of a tie on which the value is, so rounding from there to
        # the four or fewer bits of an eight-bit type is rounding from float32 (S. Boldo,
        # G. Melquiond, "When double rounding is odd").
        table = patterns_of("bfloat16", target)

        def cast_batch(data: memoryview, out: memoryview) -> None:
            values: Any = np.frombuffer(data, dtype=numpy_dtype(source))
            with np.errstate(all="ignore"):
                bits = values.astype(np.float32, copy=False).view(np.uint32)
            patterns = (bits >> 16).astype(np.uint16) | ((bits & 0xFFFF) != 0)
            np.take(table, patterns, out=np.frombuffer(out, dtype="u1"), mode="wrap")

    else:

        def cast_batch(data: memoryview, out: memoryview) -> None:
            _convert(data, source, out, target)

    def cast_all(data: memoryview, out: memoryview) -> None:
        for first in range(0, len(data) // in_bytes, _BATCH_SIZE):
            last = first + _BATCH_SIZE
            cast_batch(
                data[first * in_bytes : last * in_bytes], out[first * out_bytes : last * out_bytes]
            )

    return cast_all


def count_overflows(data: memoryview, source: str, out: memoryview, target: str) -> int:
    """Return the number of finite elements of ``data`` that became infinite in ``out``.

    Only float16 and float8_e5m2 are searched: bfloat16 has the range of float32, float8_e4m3fn
    saturates, and values that become NaN in the ``fnuz`` types are not counted.

    Args:
        data: dense elements of the type ``source``.
        out: the same elements, cast to ``target``.
    """
    if target not in _INFINITY or dtype_of(source).kind != "float":
        return 0
    import numpy as np

    magnitude, infinity = _INFINITY[target]
    patterns = np.frombuffer(out, dtype=f"u{itemsize(target)}")
    infinite = (patterns & magnitude) == infinity
    n_infinite = int(np.count_nonzero(infinite))
    if n_infinite:
        values: Any = np.frombuffer(data, dtype=numpy_dtype(source))[infinite]
        n_infinite -= int(np.count_nonzero(np.isinf(values.astype(np.float64))))
    return n_infinite


def _convert(data: memoryview, source: str, out: memoryview, target: str) -> None:
    """Cast elements with numpy and ml_dtypes; the tables of the faster casts are built with it."""
    import numpy as np

    values: Any = np.frombuffer(data, dtype=numpy_dtype(source))
    with np.errstate(all="ignore"):
        # torch casts through float32 wherever one side is narrower than that.
        if (
            dtype_of(source).kind == "float"
            and source != "float32"
            and min(itemsize(source), itemsize(target)) <= 2
        ):
            values = values.astype(np.float32)
        # torch saturates in float8_e4m3fn, where ml_dtypes overflows to NaN.
        if target == "float8_e4m3fn":
            values = np.clip(values, np.float32(-448), np.float32(448))
        np.copyto(np.frombuffer(out, dtype=numpy_dtype(target)), values, casting="unsafe")


@lru_cache
def patterns_of(source: str, target: str) -> Any:
    """Cast every bit pattern of a type of at most 16 bits.

    Returns:
        The results by pattern, an array of unsigned integers.
    """
    import numpy as np

    patterns: Any = np.arange(1 << 8 * itemsize(source), dtype=f"u{itemsize(source)}")
    table: Any = np.empty(len(patterns), dtype=f"u{itemsize(target)}")
    _convert(memoryview(patterns.view(np.uint8)), source, memoryview(table.view(np.uint8)), target)
    return table
