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

from core.dtypes import dtype_of, itemsize
from core.errors import UnsupportedError

Cast = Callable[[memoryview, memoryview], None]
"""Reads dense elements from the first buffer and writes them to the second; the element counts agree."""

_EXACT_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Integers of that many bits are exact in these types."""


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

    source_type, target_type = _numpy_type(source), _numpy_type(target)
    steps: list[Any] = []
    if source != "float32" and target != "float32" and min(itemsize(source), itemsize(target)) <= 2:
        if dtype_of(source).kind == "float":
            steps.append(np.float32)
    saturates = target == "float8_e4m3fn"

    def cast(data: memoryview, out: memoryview) -> None:
        values: Any = np.frombuffer(data, dtype=source_type)
        with np.errstate(all="ignore"):
            for step in steps:
                values = values.astype(step)
            if saturates:
                values = np.clip(values, np.float32(-448), np.float32(448))
            np.copyto(np.frombuffer(out, dtype=target_type), values, casting="unsafe")

    if itemsize(source) > 1:
        return cast
    return _by_table(cast, target_type)


def _by_table(cast: Cast, target_type: Any) -> Cast:
    """The same cast for one-byte elements, looked up in a table of all 256."""
    import numpy as np

    table = np.empty(256, target_type)
    cast(memoryview(bytes(range(256))), memoryview(table.view(np.uint8)))
    table = table.view(f"u{target_type.itemsize}")

    def look_up(data: memoryview, out: memoryview) -> None:
        indexes = np.frombuffer(data, dtype=np.uint8)
        np.take(table, indexes, out=np.frombuffer(out, dtype=table.dtype), mode="wrap")

    return look_up


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
