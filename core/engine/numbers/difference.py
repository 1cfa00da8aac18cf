"""Compare two runs of numbers: how many differ, by how much, where first, and in which direction.

Without a tolerance two elements are equal if their bits are. So ``0.0`` and ``-0.0`` differ (by 0),
and NaNs are equal if their payloads are. With a tolerance they are equal as defined by
``torch.isclose``, with A as the input and B as the other::

    |A - B| <= atol + rtol * |B|     equal infinities are close; NaN is close to NaN if equal_nan

computed in float64 (exactly converted; the difference of integers of one type is exact), where
torch computes in the tensors' own type. Elements of different types are equal if their values are.

Statistics count only elements that are finite on both sides, except that ``max_abs`` counts
infinities. numpy is imported only for the first run that differs.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

from core.arrays.cast import find_cast
from core.arrays.dtypes import DTYPES, itemsize, numpy_dtype
from core.values import dataclass

Number = int | float

_AT_ONCE = 1 << 16
"""Elements that are compared at once; the temporary arrays then stay in the cache."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits within which two values count as equal: ``|A - B| <= atol + rtol * |B|``.

    Args:
        rtol, atol: relative and absolute tolerance.
        equal_nan: NaN is equal to NaN.
    """

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = True


@dataclass(slots=True)
class ValueDifference:
    """The result of comparing elements of two arrays A and B.

    Args:
        n_elements: elements that were compared.
        n_differing: elements that are not equal.
        n_nan: elements of which one is NaN and the other is not.
        max_abs: greatest |A - B|; exact for integers of one type. 0 if no elements differ, None if
            the values are not numbers.
        max_at: flat index of that element.
        first: flat index of the first element that differs, None if none does.
        square_a, square_b, product, square_delta: sums of A², B², A·B and (A - B)² over finite
            elements.
    """

    n_elements: int = 0
    n_differing: int = 0
    n_nan: int = 0
    max_abs: Number | None = 0
    max_at: int | None = None
    first: int | None = None
    square_a: float = 0.0
    square_b: float = 0.0
    product: float = 0.0
    square_delta: float = 0.0

    def add(self, other: ValueDifference, *, start: int = 0) -> None:
        """Add the result of comparing another run, which begins ``start`` elements later."""
        self.n_elements += other.n_elements
        self.n_differing += other.n_differing
        self.n_nan += other.n_nan
        # Of equal maxima the first position counts, so the order of adding does not matter.
        if other.max_abs is None or self.max_abs is None:
            self.max_abs = None
        elif other.max_at is not None and (
            self.max_at is None
            or other.max_abs > self.max_abs
            or (other.max_abs == self.max_abs and other.max_at + start < self.max_at)
        ):
            self.max_abs, self.max_at = other.max_abs, other.max_at + start
        if other.first is not None and (self.first is None or other.first + start < self.first):
            self.first = other.first + start
        self.square_a += other.square_a
        self.square_b += other.square_b
        self.product += other.product
        self.square_delta += other.square_delta

    @property
    def share(self) -> float:
        """Fraction of elements that differ."""
        return self.n_differing / self.n_elements if self.n_elements else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between A and B as vectors.

        None if one of them is zero, or if the values are not numbers.
        """
        norm = sqrt(self.square_a) * sqrt(self.square_b)
        if self.max_abs is None or not 0 < norm < inf or self.product != self.product:
            return None
        return max(-1.0, min(1.0, self.product / norm))

    @property
    def relative(self) -> float | None:
        """|A - B| / |A| as vectors; inf if only A is zero, None if undefined."""
        if self.max_abs is None or self.square_delta != self.square_delta:
            return None
        if self.square_delta == 0:
            return 0.0
        if self.square_a == 0 or self.square_delta == inf:  # the sums are beyond any number
            return inf
        return sqrt(self.square_delta / self.square_a)


def compare_elements(
    a: memoryview, b: memoryview, *, dtypes: tuple[str, str], rule: Tolerance | None = None
) -> ValueDifference:
    """Compare two runs of the same number of elements.

    Args:
        a, b: dense little-endian elements.
        dtypes: dtype names of A and of B.
        rule: the tolerance; None compares bits (or values, if the dtypes differ).
    """
    size_a, size_b = itemsize(dtypes[0]), itemsize(dtypes[1])
    n = len(a) // size_a
    result = ValueDifference()
    for first in range(0, n, _AT_ONCE):
        last = min(first + _AT_ONCE, n)
        part_a, part_b = a[first * size_a : last * size_a], b[first * size_b : last * size_b]
        # Positions in the result of a block count from the start of that block.
        result.add(_compare_block(part_a, part_b, dtypes, rule), start=first)
    return result


def sum_squares(data: memoryview, dtype: str) -> float:
    """Return the sum of the squares of the finite elements; 0 for types without numeric values."""
    import numpy as np

    if not has_numbers(dtype):
        return 0.0
    size = itemsize(dtype)
    total = 0.0
    for first in range(0, len(data), _AT_ONCE * size):
        values = _float64_parts(decode_numbers(data[first : first + _AT_ONCE * size], dtype))
        with np.errstate(all="ignore"):
            part = float(np.einsum("i,i->", values, values))
            # Usually all elements are finite; the mask is computed only if the sum is not.
            if not part < inf:
                values = values[np.isfinite(values)]
                part = float(np.einsum("i,i->", values, values))
        total += part
    return total


def has_numbers(dtype: str) -> bool:
    """Return True if elements of a type have values that can be subtracted."""
    return DTYPES[dtype].kind not in ("packed", "bits")


def has_nan(data: memoryview, dtype: str) -> bool:
    """Return True if any element is NaN."""
    import numpy as np

    if DTYPES[dtype].kind not in ("float", "complex"):
        return False
    return bool(np.isnan(decode_numbers(data, dtype)).any())


def element_value(data: memoryview, dtype: str) -> Number | None:
    """Return the value of the first element, or None if the type has no values.

    For a complex element it is the real part.
    """
    if not has_numbers(dtype):
        return None
    value = decode_numbers(data, dtype)[0]
    if DTYPES[dtype].kind == "complex":
        value = value.real
    return int(value) if DTYPES[dtype].kind in ("int", "uint", "bool") else float(value)


def _compare_block(
    a: memoryview, b: memoryview, dtypes: tuple[str, str], rule: Tolerance | None
) -> ValueDifference:
    """Compare two runs whose temporary arrays fit into the cache; see ``compare_elements``."""
    import numpy as np

    # Packed types have no values: compare only their bits.
    if not (has_numbers(dtypes[0]) and has_numbers(dtypes[1])):
        result = _count_differing(_differing_bits(a, b, itemsize(dtypes[0])))
        result.max_abs = None
        return result
    # Mark the elements that differ: beyond the tolerance, in any bit, or, if the dtypes differ, in
    # value, where NaN equals NaN as payloads of different types cannot be compared.
    values_a, values_b = decode_numbers(a, dtypes[0]), decode_numbers(b, dtypes[1])
    with np.errstate(all="ignore"):
        delta = _distance(values_a, values_b)
        if rule is not None:
            is_different = ~_is_close(values_a, values_b, delta, rule)
        elif dtypes[0] == dtypes[1]:
            is_different = _differing_bits(a, b, itemsize(dtypes[0]))
        else:
            is_different = (values_a != values_b) & ~(np.isnan(values_a) & np.isnan(values_b))
        result = _count_differing(is_different)
        _fill_statistics(result, values_a, values_b, delta)
    return result


def _count_differing(is_different: Any) -> ValueDifference:
    """Return a result with its counts and without statistics."""
    import numpy as np

    n = int(np.count_nonzero(is_different))
    return ValueDifference(len(is_different), n, first=int(is_different.argmax()) if n else None)


def _fill_statistics(result: ValueDifference, values_a: Any, values_b: Any, delta: Any) -> None:
    """Set the statistics of a result; ``delta`` is |A - B|, NaN where A or B is NaN."""
    import numpy as np

    # The maximum; usually all elements are finite, and then nothing has to be masked.
    top = delta.max()
    has_non_finite = delta.dtype.kind == "f" and not top < inf
    if has_non_finite:
        nan_a, nan_b = np.isnan(values_a), np.isnan(values_b)
        result.n_nan = int(np.count_nonzero(nan_a != nan_b))
        # The difference of two equal infinities is NaN, and counts as 0.
        delta = np.where(nan_a | nan_b | (values_a == values_b), 0.0, delta)
        top = delta.max()
    if top > 0:
        result.max_abs = int(top) if delta.dtype.kind == "u" else float(top)
        result.max_at = int(delta.argmax())

    # The sums, over elements that are finite on both sides.
    parts_a, parts_b = _float64_parts(values_a), _float64_parts(values_b)
    if has_non_finite:
        is_finite = np.isfinite(parts_a) & np.isfinite(parts_b)
        parts_a, parts_b = parts_a[is_finite], parts_b[is_finite]
    difference = parts_a - parts_b
    result.square_a = float(np.einsum("i,i->", parts_a, parts_a))
    result.square_b = float(np.einsum("i,i->", parts_b, parts_b))
    result.product = float(np.einsum("i,i->", parts_a, parts_b))
    result.square_delta = float(np.einsum("i,i->", difference, difference))


def _is_close(values_a: Any, values_b: Any, delta: Any, rule: Tolerance) -> Any:
    """Return the mask of the elements that are equal within the tolerance."""
    import numpy as np

    allowed = rule.atol + rule.rtol * np.abs(
        values_b if values_b.dtype.kind == "c" else _float64_parts(values_b)
    )
    # Equal infinities are close, although their difference is NaN.
    is_close = (values_a == values_b) | ((delta <= allowed) & np.isfinite(delta))
    if rule.equal_nan:
        is_close |= np.isnan(values_a) & np.isnan(values_b)
    return is_close


def _distance(values_a: Any, values_b: Any) -> Any:
    """Return |A - B|: exact and unsigned for integers of one type, else in float64."""
    import numpy as np

    if values_a.dtype == values_b.dtype and values_a.dtype.kind in "iu":
        # The difference of two int64 may exceed int64, but always fits into uint64.
        unsigned = f"u{values_a.dtype.itemsize}"
        ua, ub = values_a.view(unsigned), values_b.view(unsigned)
        return np.where(values_a > values_b, ua - ub, ub - ua)
    if values_a.dtype.kind != "c" and values_b.dtype.kind != "c":
        values_a, values_b = _float64_parts(values_a), _float64_parts(values_b)
    return np.abs(values_a - values_b)


def _float64_parts(values: Any) -> Any:
    """Return values as float64; complex ones as alternating real and imaginary parts."""
    import numpy as np

    if values.dtype.kind == "c":
        return values.view(np.float64)
    return values if values.dtype == np.float64 else values.astype(np.float64)


def _differing_bits(a: memoryview, b: memoryview, size: int) -> Any:
    """Return the mask of the elements that differ in any bit."""
    import numpy as np

    if size <= 8:
        return np.frombuffer(a, f"u{size}") != np.frombuffer(b, f"u{size}")
    # numpy has no 16-byte integer: compare the two halves of each element.
    halves = np.frombuffer(a, "u8") != np.frombuffer(b, "u8")
    return halves.reshape(-1, size // 8).any(axis=1)


def decode_numbers(data: memoryview, dtype: str) -> Any:
    """Decode elements to numbers of a numpy type.

    Returns:
        Integers in their own type, bool as bytes, floats as float64, complex ones as complex128.
    """
    import numpy as np

    row = DTYPES[dtype]
    if row.kind == "bool":
        return np.frombuffer(data, "u1")
    if row.value_bits is not None and row.kind == "int":
        return np.frombuffer(data, numpy_dtype(dtype)).astype("i1")
    if row.kind in ("int", "uint"):
        return np.frombuffer(data, f"{row.kind[0]}{row.itemsize}")
    if row.kind == "complex":
        parts = {"complex128": "f8", "complex64": "f4", "complex32": "f2"}[dtype]
        with np.errstate(invalid="ignore"):
            return np.frombuffer(data, parts).astype("f8").view("c16")
    if dtype == "float64":
        return np.frombuffer(data, "f8")
    # Converting a signalling NaN raises numpy's "invalid" warning.
    with np.errstate(invalid="ignore"):
        return decode_float32(data, dtype).astype("f8")


def decode_float32(data: memoryview, dtype: str) -> Any:
    """Decode floats of at most 32 bits to float32."""
    import numpy as np

    if dtype == "float32":
        return np.frombuffer(data, "f4")
    if dtype == "bfloat16":
        # bfloat16 is the upper half of a float32.
        return (np.frombuffer(data, "u2").astype("u4") << np.uint32(16)).view("f4")
    wide: Any = np.empty(len(data) // DTYPES[dtype].itemsize, "f4")
    find_cast(dtype, "float32")(data, memoryview(wide.view("u1")))
    return wide
