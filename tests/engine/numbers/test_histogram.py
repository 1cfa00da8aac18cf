"""Histograms by sign and exponent, against Python's frexp for every element."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from math import frexp

import ml_dtypes
import numpy as np
import pytest

from core.engine.numbers.histogram import Histogram, histogram_of, merge_histograms
from core.engine.numbers.statistics import describe, merge_statistics


def true_histogram(values: Sequence[int | float]) -> Histogram:
    negative: Counter[int] = Counter()
    positive: Counter[int] = Counter()
    for value in values:
        if value:
            # Integers exactly: frexp would round those of more than 53 bits.
            magnitude = abs(value)
            bits = magnitude.bit_length() if isinstance(magnitude, int) else frexp(magnitude)[1]
            exponent = bits - 1
            (negative if value < 0 else positive)[exponent] += 1
    return Histogram(dict(negative), dict(positive))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_floats_are_counted_by_their_exponents(dtype: str) -> None:
    info = np.finfo(dtype)
    rng = np.random.default_rng(1)
    values = (rng.standard_normal(5000) * 10.0 ** rng.integers(-30, 30, 5000)).astype(dtype)
    special = [0.0, -0.0, 1.0, -1.0, info.max, info.min, info.tiny, -info.tiny]
    special += [info.smallest_subnormal, -info.smallest_subnormal, info.tiny / 8]
    values = np.concatenate([values, np.array(special, dtype)])
    assert histogram_of(values) == true_histogram([float(value) for value in values])


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_integers_are_never_rounded_up(dtype: str) -> None:
    info = np.iinfo(dtype)
    values = [0, 1, 2, 3, info.max, info.max - 1, info.min, info.min + 1, info.max // 3]
    values += [(1 << 54) - 1, -((1 << 54) - 1)] if dtype == "i8" else []
    assert histogram_of(np.array(values, dtype)) == true_histogram(values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_narrow_floats_are_counted_as_they_are_stored(dtype: str) -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal(300).astype(getattr(ml_dtypes, dtype, "f2"))
    stats = describe(memoryview(values.view("u1").tobytes()), dtype)
    assert stats.histogram == true_histogram(values.astype("f8").tolist())


def test_nan_and_infinities_are_in_no_bin() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 0, 3, -0.25], "f4")
    stats = describe(memoryview(values.tobytes()), "float32")
    assert stats.histogram == Histogram({-2: 1}, {1: 1})
    assert (stats.n_nan, stats.n_infinite, stats.n_zeros) == (1, 2, 1)


def test_complex_numbers_are_counted_by_magnitude() -> None:
    values = np.array([3 + 4j, -3 - 4j, 0], "c8")
    assert describe(memoryview(values.tobytes()), "complex64").histogram == Histogram({}, {2: 2})


def test_parts_in_any_order_give_the_histogram_of_all() -> None:
    values = np.random.default_rng(3).standard_normal(200_000).astype("f4")
    complete = describe(memoryview(values.tobytes()), "float32")
    cuts = [0, 7, 40_000, 40_000, 199_999, 200_000]
    parts = [
        describe(memoryview(values[first:last].tobytes()), "float32")
        for first, last in pairwise(cuts)
    ]
    assert merge_statistics(parts[::-1]).histogram == complete.histogram
    counts = [*complete.histogram.negative.values(), *complete.histogram.positive.values()]
    assert sum(counts) == complete.n_finite - complete.n_zeros


def test_largest_exponent() -> None:
    assert Histogram({3: 1}, {-2: 5}).top == 3
    assert merge_histograms([]).top is None


def test_exponents_are_powers_of_two_exactly() -> None:
    for exponent in (-149, -126, -1, 0, 1, 127):
        value = np.array([float(Fraction(2) ** exponent)], "f4")
        assert histogram_of(value) == Histogram({}, {exponent: 1})
