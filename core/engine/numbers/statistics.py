"""Describe values: extremes, mean, standard deviation, histogram, NaN, infinities and zeros.

Extremes, mean and deviation are those of the finite elements. The mean and the sum of squared
deviations are computed in float64 for each block of elements around the block's own mean, and
merged as Chan, Golub and LeVeque do (1979), with sums that are exact until they are rounded once
(``core.engine.numbers.tally.ExactSum``). So nothing cancels, and the order of the parts does not
matter.

Complex elements are described by their magnitudes. Packed types (float4) have no values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from math import isfinite, sqrt
from typing import Any

from core.arrays.dtypes import DTYPES, itemsize
from core.engine.numbers.difference import decode_float32, decode_numbers
from core.engine.numbers.histogram import Histogram, histogram_of, merge_histograms
from core.engine.numbers.tally import ExactSum
from core.values import dataclass

_AT_ONCE = 1 << 15
"""Elements of a block; its temporary arrays then stay in the cache of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueStatistics:
    """The description of some elements.

    Args:
        n_elements: number of elements.
        n_nan, n_infinite, n_zeros: number of elements that are NaN, infinite, 0 or -0.
        least, greatest: extremes of the finite elements, exactly; None if there are none.
        total: sum of the finite elements.
        square: sum of the squared deviations of the finite elements from their mean.
        histogram: number of finite elements by sign and exponent; zeros are in ``n_zeros`` alone.
    """

    n_elements: int = 0
    n_nan: int = 0
    n_infinite: int = 0
    n_zeros: int = 0
    least: int | float | None = None
    greatest: int | float | None = None
    total: float = 0.0
    square: float = 0.0
    histogram: Histogram = field(default_factory=Histogram)

    @property
    def n_finite(self) -> int:
        """Number of elements that are neither NaN nor infinite."""
        return self.n_elements - self.n_nan - self.n_infinite

    @property
    def mean(self) -> float | None:
        """Mean of the finite elements; None if there are none, or float64 cannot hold their sum."""
        return self.total / self.n_finite if self.n_finite and isfinite(self.total) else None

    @property
    def std(self) -> float | None:
        """Standard deviation of the finite elements, of the population (divided by their number).

        None if there are none, or float64 cannot hold the sum of the squares.
        """
        return (
            sqrt(self.square / self.n_finite) if self.n_finite and isfinite(self.square) else None
        )


def merge_statistics(parts: Sequence[ValueStatistics]) -> ValueStatistics:
    """Return the description of all elements of the parts, whose order does not matter."""
    total, square = ExactSum(), ExactSum()
    for part in parts:
        total.add(part.total)
    n_finite = sum(part.n_finite for part in parts)
    mean = total.value / n_finite if n_finite else 0.0
    for part in parts:
        if part.n_finite:
            shift = part.total / part.n_finite - mean
            square.add(part.square)
            # Not shift**2: Python raises OverflowError where a product is infinite.
            square.add(part.n_finite * (shift * shift))
    return ValueStatistics(
        n_elements=sum(part.n_elements for part in parts),
        n_nan=sum(part.n_nan for part in parts),
        n_infinite=sum(part.n_infinite for part in parts),
        n_zeros=sum(part.n_zeros for part in parts),
        least=min((part.least for part in parts if part.least is not None), default=None),
        greatest=max((part.greatest for part in parts if part.greatest is not None), default=None),
        total=total.value,
        square=square.value,
        histogram=merge_histograms(part.histogram for part in parts),
    )


def describe(data: memoryview, dtype: str) -> ValueStatistics:
    """Return the description of a run of elements.

    Args:
        data: dense little-endian elements of a type that has numbers
            (``core.engine.numbers.difference.has_numbers``).
        dtype: canonical dtype name.
    """
    step = _AT_ONCE * itemsize(dtype)
    blocks = [
        _describe_block(data[start : start + step], dtype) for start in range(0, len(data), step)
    ]
    return blocks[0] if len(blocks) == 1 else merge_statistics(blocks)


def _describe_block(data: memoryview, dtype: str) -> ValueStatistics:
    """Return the description of a block, which has at least one element."""
    import numpy as np

    # Integers keep their type for exact extremes, narrow floats are faster as float32.
    kind = DTYPES[dtype].kind
    with np.errstate(all="ignore"):
        is_narrow = kind == "float" and dtype != "float64"
        values: Any = decode_float32(data, dtype) if is_narrow else decode_numbers(data, dtype)
        # A complex number is NaN if either part is, also beside an infinite one, of which numpy
        # takes the magnitude for infinite.
        if kind == "complex":
            values = np.where(np.isnan(values), np.nan, np.abs(values))
        n_elements = len(values)
        n_zeros = int(np.count_nonzero(values == 0))
        deviations = values.astype(np.float64)
        total = float(deviations.sum())
        # A NaN or an infinity makes the sum one; only then the elements are looked at one by one.
        n_nan = n_infinite = 0
        if not isfinite(total):
            n_nan = int(np.count_nonzero(np.isnan(deviations)))
            n_infinite = int(np.count_nonzero(np.isinf(deviations)))
            values = values[np.isfinite(deviations)]
            deviations = values.astype(np.float64)
            total = float(deviations.sum())
        if not len(values):
            return ValueStatistics(n_elements=n_elements, n_nan=n_nan, n_infinite=n_infinite)
        deviations -= total / len(values)
        square = float(np.einsum("i,i->", deviations, deviations))
        histogram = histogram_of(values)
    # + 0 turns the -0.0 that may be an extreme into 0.0.
    return ValueStatistics(
        n_elements=n_elements,
        n_nan=n_nan,
        n_infinite=n_infinite,
        n_zeros=n_zeros,
        least=values.min().item() + 0,
        greatest=values.max().item() + 0,
        total=total,
        square=square,
        histogram=histogram,
    )
