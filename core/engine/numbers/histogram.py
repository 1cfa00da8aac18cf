"""Count elements by sign and binary exponent.

The bins are fixed: every element falls into that of its sign and of the exponent e with
2**e <= abs(x) < 2**(e + 1), whatever the other elements are. So one pass suffices, the counts are
exact, and those of blocks, bands and threads are added in any order. Zeros, NaN and infinities are
in no bin; a page chooses which exponents it shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from core.values import dataclass


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of finite elements other than 0, by sign and exponent.

    Args:
        negative, positive: exponent e → number of elements with 2**e <= abs(x) < 2**(e + 1),
            without empty bins.
    """

    negative: Mapping[int, int] = field(default_factory=dict)
    positive: Mapping[int, int] = field(default_factory=dict)

    @property
    def top(self) -> int | None:
        """The largest exponent; None if all bins are empty."""
        return max((*self.negative, *self.positive), default=None)


def merge_histograms(parts: Iterable[Histogram]) -> Histogram:
    """Return the histogram of all elements of the parts."""
    negative: Counter[int] = Counter()
    positive: Counter[int] = Counter()
    for part in parts:
        negative.update(part.negative)
        positive.update(part.positive)
    return Histogram(dict(negative), dict(positive))


def histogram_of(values: Any) -> Histogram:
    """Count finite elements.

    Args:
        values: numpy array of float32, float64 or integers.
    """
    import numpy as np

    if values.dtype.kind != "f":
        values = _as_floats(values)
    # Sign and exponent are the upper bits; the exponent field of zeros and subnormals is 0.
    n_bytes = values.dtype.itemsize
    n_mantissa, bias = (23, 127) if n_bytes == 4 else (52, 1023)
    fields = (values.view(f"u{n_bytes}") >> np.array(n_mantissa, f"u{n_bytes}")).astype(np.intp)
    n_fields = 2 * (bias + 1)
    counts = np.bincount(fields, minlength=2 * n_fields)
    signs: list[Counter[int]] = []
    for first in (0, n_fields):
        of_sign = counts[first : first + n_fields].copy()
        of_sign[0] = 0
        numbers = of_sign.nonzero()[0]
        pairs = zip((numbers - bias).tolist(), of_sign[numbers].tolist(), strict=True)
        signs.append(Counter(dict(pairs)))
    if counts[0] or counts[n_fields]:
        small = values[(fields & (n_fields - 1)) == 0]
        small = small[small != 0]
        # frexp returns mantissas in [0.5, 1).
        exponents = np.frexp(small)[1] - 1
        for sign, mask in zip(signs, (small > 0, small < 0), strict=True):
            sign.update(exponents[mask].tolist())
    positive, negative = signs
    return Histogram(dict(negative), dict(positive))


def _as_floats(values: Any) -> Any:
    """Return integers as float64 with their sign and exponent, which rounding must not raise."""
    import numpy as np

    is_negative = values < 0
    # Unsigned, the magnitude of the most negative number does not overflow.
    magnitudes = values.astype(np.int64).view("u8") if values.dtype.kind == "i" else values
    magnitudes = np.where(is_negative, np.uint64(0) - magnitudes.astype("u8"), magnitudes)
    # float64 has 53 bits: of longer numbers, the lower ones are cut off.
    magnitudes = np.where(magnitudes >> np.uint64(53), magnitudes & ~np.uint64(0x7FF), magnitudes)
    floats = magnitudes.astype("f8")
    return np.where(is_negative, -floats, floats)
