"""What two runs of numbers have in common: how many differ, by how much, where first, and in which direction.

Exact: two elements are equal if their bits are. So ``0.0`` and ``-0.0`` differ (by 0), and NaNs are equal if their
payloads are. With a tolerance they are equal as ``torch.isclose`` has it, A being the input and B the other::

    |A - B| <= atol + rtol * |B|        equal infinities are close; NaN is close to NaN unless equal_nan is switched off

computed in float64 (exactly converted; the difference of integers of one type is exact), where torch computes in the
tensors' own type. Elements of different types are equal if their values are.

Statistics are those of the elements that are finite on both sides; only in ``max_abs`` an infinity counts. numpy is
imported here, when the first differing run is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

from core.arrays.cast import cast_of
from core.arrays.dtypes import DTYPES, itemsize

Number = int | float

_AT_ONCE = 1 << 16
"""Elements; the temporary arrays then stay in the cache."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Which values count as equal; see the module's docstring."""

    rtol: float = 0.0
    atol: float = 0.0
    equal_nan: bool = True


@dataclass(slots=True)
class Values:
    """What a comparison of elements found.

    Args:
        n_elements: compared.
        n_differing: that are not equal.
        n_nan: of which one is NaN and the other is not.
        max_abs: greatest |A - B|; exact for integers of one type. 0 if none differ, None if values are not numbers.
        max_at: flat index of that element.
        first: flat index of the first element that differs, None if none does.
        square_a, square_b, product, square_delta: sums of A², B², A·B and (A - B)² over finite elements.
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

    def add(self, other: Values, *, start: int = 0) -> None:
        """Adds what was found in another run, ``start`` elements further on."""
        self.n_elements += other.n_elements
        self.n_differing += other.n_differing
        self.n_nan += other.n_nan
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
        """Differing elements, of all."""
        return self.n_differing / self.n_elements if self.n_elements else 0.0

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between A and B as vectors; None where one is zero, or it cannot be told."""
        norm = sqrt(self.square_a) * sqrt(self.square_b)
        if self.max_abs is None or not 0 < norm < inf or self.product != self.product:
            return None
        return max(-1.0, min(1.0, self.product / norm))

    @property
    def relative(self) -> float | None:
        """Length of A - B in lengths of A; inf where A is zero and B is not, None where it cannot be told."""
        if self.max_abs is None or self.square_delta != self.square_delta:
            return None
        if self.square_delta == 0:
            return 0.0
        return sqrt(self.square_delta / self.square_a) if self.square_a > 0 else inf


def compared(a: memoryview, b: memoryview, *, dtypes: tuple[str, str], rule: Tolerance | None = None) -> Values:
    """Compares two runs of as many elements.

    Args:
        a, b: dense little-endian elements.
        dtypes: of A and of B.
        rule: None for exact.
    """
    size_a, size_b = itemsize(dtypes[0]), itemsize(dtypes[1])
    n = len(a) // size_a
    found = Values()
    for first in range(0, n, _AT_ONCE):
        last = min(first + _AT_ONCE, n)
        part_a, part_b = a[first * size_a : last * size_a], b[first * size_b : last * size_b]
        found.add(_compared(part_a, part_b, dtypes, rule), start=first)
    return found


def square_sum(data: memoryview, dtype: str) -> float:
    """The sum of the squares of the finite elements of a run; 0 for what are no numbers."""
    import numpy as np

    if not has_numbers(dtype):
        return 0.0
    size = itemsize(dtype)
    total = 0.0
    for first in range(0, len(data), _AT_ONCE * size):
        values = _parts(_decoded(data[first : first + _AT_ONCE * size], dtype))
        with np.errstate(all="ignore"):
            part = float(np.einsum("i,i->", values, values))
            if not part < inf:
                values = values[np.isfinite(values)]
                part = float(np.einsum("i,i->", values, values))
        total += part
    return total


def has_numbers(dtype: str) -> bool:
    """Whether elements of a type have values that can be subtracted."""
    return DTYPES[dtype].kind != "packed"


def holds_nan(data: memoryview, dtype: str) -> bool:
    """Whether one of some elements is NaN."""
    import numpy as np

    if DTYPES[dtype].kind not in ("float", "complex"):
        return False
    return bool(np.isnan(_decoded(data, dtype)).any())


def shown(data: memoryview, dtype: str) -> Number | None:
    """The value of one element; the real part of a complex one, None for what is no number."""
    if not has_numbers(dtype):
        return None
    value = _decoded(data, dtype)[0]
    if DTYPES[dtype].kind == "complex":
        value = value.real
    return int(value) if DTYPES[dtype].kind in ("int", "uint", "bool") else float(value)


def _compared(a: memoryview, b: memoryview, dtypes: tuple[str, str], rule: Tolerance | None) -> Values:
    """As ``compared``, for a run that fits into the cache."""
    import numpy as np

    if not (has_numbers(dtypes[0]) and has_numbers(dtypes[1])):
        found = _counted(_differing_bits(a, b, itemsize(dtypes[0])))
        found.max_abs = None
        return found
    va, vb = _decoded(a, dtypes[0]), _decoded(b, dtypes[1])
    with np.errstate(all="ignore"):
        delta = _distance(va, vb)
        if rule is not None:
            is_different = ~_close(va, vb, delta, rule)
        elif dtypes[0] == dtypes[1]:
            is_different = _differing_bits(a, b, itemsize(dtypes[0]))
        else:
            is_different = (va != vb) & ~(np.isnan(va) & np.isnan(vb))
        found = _counted(is_different)
        _measure(found, va, vb, delta)
    return found


def _counted(is_different: Any) -> Values:
    import numpy as np

    n = int(np.count_nonzero(is_different))
    return Values(len(is_different), n, first=int(is_different.argmax()) if n else None)


def _measure(found: Values, va: Any, vb: Any, delta: Any) -> None:
    """Puts the statistics into what was found; ``delta`` is |A - B|, NaN where one of them is."""
    import numpy as np

    top = delta.max()
    is_odd = delta.dtype.kind == "f" and not top < inf
    if is_odd:
        nan_a, nan_b = np.isnan(va), np.isnan(vb)
        found.n_nan = int(np.count_nonzero(nan_a != nan_b))
        delta = np.where(nan_a | nan_b | (va == vb), 0.0, delta)  # equal infinities differ by NaN
        top = delta.max()
    if top > 0:
        found.max_abs = int(top) if delta.dtype.kind == "u" else float(top)
        found.max_at = int(delta.argmax())
    xa, xb = _parts(va), _parts(vb)
    if is_odd:
        is_finite = np.isfinite(xa) & np.isfinite(xb)
        xa, xb = xa[is_finite], xb[is_finite]
    difference = xa - xb
    found.square_a = float(np.einsum("i,i->", xa, xa))
    found.square_b = float(np.einsum("i,i->", xb, xb))
    found.product = float(np.einsum("i,i->", xa, xb))
    found.square_delta = float(np.einsum("i,i->", difference, difference))


def _close(va: Any, vb: Any, delta: Any, rule: Tolerance) -> Any:
    """Which elements are equal within the tolerance."""
    import numpy as np

    allowed = rule.atol + rule.rtol * np.abs(vb if vb.dtype.kind == "c" else _parts(vb))
    is_close = (va == vb) | ((delta <= allowed) & np.isfinite(delta))
    if rule.equal_nan:
        is_close |= np.isnan(va) & np.isnan(vb)
    return is_close


def _distance(va: Any, vb: Any) -> Any:
    """|A - B|: exact and unsigned for integers of one type, else in float64."""
    import numpy as np

    if va.dtype == vb.dtype and va.dtype.kind in "iu":
        unsigned = f"u{va.dtype.itemsize}"
        ua, ub = va.view(unsigned), vb.view(unsigned)
        return np.where(va > vb, ua - ub, ub - ua)
    if va.dtype.kind != "c" and vb.dtype.kind != "c":
        va, vb = _parts(va), _parts(vb)
    return np.abs(va - vb)


def _parts(values: Any) -> Any:
    """Values as float64; real and imaginary parts one after the other."""
    import numpy as np

    if values.dtype.kind == "c":
        return values.view(np.float64)
    return values if values.dtype == np.float64 else values.astype(np.float64)


def _differing_bits(a: memoryview, b: memoryview, size: int) -> Any:
    """Which elements differ as opaque bits."""
    import numpy as np

    if size <= 8:
        return np.frombuffer(a, f"u{size}") != np.frombuffer(b, f"u{size}")
    halves = np.frombuffer(a, "u8") != np.frombuffer(b, "u8")
    return halves.reshape(-1, size // 8).any(axis=1)


def _decoded(data: memoryview, dtype: str) -> Any:
    """Elements as numbers: integers as they are, floats as float64, complex ones as complex128; bool as bytes."""
    import numpy as np

    row = DTYPES[dtype]
    if row.kind == "bool":
        return np.frombuffer(data, "u1")
    if row.kind in ("int", "uint"):
        return np.frombuffer(data, f"{row.kind[0]}{row.itemsize}")
    if row.kind == "complex":
        parts = {"complex128": "f8", "complex64": "f4", "complex32": "f2"}[dtype]
        with np.errstate(invalid="ignore"):
            return np.frombuffer(data, parts).astype("f8").view("c16")
    if dtype == "float64":
        return np.frombuffer(data, "f8")
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return _single(data, dtype).astype("f8")


def _single(data: memoryview, dtype: str) -> Any:
    """Floats of at most 32 bits as float32."""
    import numpy as np

    if dtype == "float32":
        return np.frombuffer(data, "f4")
    if dtype == "bfloat16":
        return (np.frombuffer(data, "u2").astype("u4") << np.uint32(16)).view("f4")
    wide: Any = np.empty(len(data) // DTYPES[dtype].itemsize, "f4")
    cast_of(dtype, "float32")(data, memoryview(wide.view("u1")))
    return wide
