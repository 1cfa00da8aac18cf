from __future__ import annotations

import math
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from core.arrays.dtypes import DTYPES
from core.engine.numbers.difference import has_numbers
from core.engine.numbers.statistics import ValueStatistics, describe, merge_statistics

SPECIAL = {"float": [math.nan, math.inf, -math.inf, -0.0], "complex": [math.nan, math.inf, 0]}
NUMERIC = [name for name in DTYPES if has_numbers(name)]
N = 70_001  # several blocks, the last one uneven


def numpy_type(name: str) -> np.dtype[Any]:
    if name == "complex32":
        return np.dtype("c8")
    number = DTYPES[name].numpy
    return np.dtype(getattr(np, number or "", None) or getattr(ml_dtypes, number or ""))


def sample(name: str) -> tuple[bytes, np.ndarray]:
    """Elements of every sort, as bytes and as numpy's numbers."""
    rng = np.random.default_rng(1)
    kind = DTYPES[name].kind
    if kind in ("int", "uint", "bool"):
        raw = rng.integers(0, 256, N * DTYPES[name].itemsize, dtype="u1")
        values = (raw & 1).astype(bool) if kind == "bool" else raw.view(numpy_type(name))
        return values.tobytes(), values
    plain = rng.standard_normal(N) * 0.02 + (0.5 if name == "float8_e8m0fnu" else 0.001)
    if name == "float8_e8m0fnu":
        plain = np.abs(plain)
    if kind == "complex":
        parts = {"complex128": "f8", "complex64": "f4", "complex32": "f2"}[name]
        halves = np.stack([plain, plain[::-1]], axis=1).astype(parts)
        halves[5], halves[9], halves[11] = (math.nan, math.inf), (1, -math.inf), (0, 0)
        return halves.tobytes(), halves.astype("f8").view("c16")[:, 0]
    with np.errstate(all="ignore"):
        if name in ("float64", "float32", "float16", "bfloat16", "float8_e5m2"):
            plain[[5, 9, 11, 40_000]] = SPECIAL["float"]
        values = plain.astype(numpy_type(name))
    return values.tobytes(), values.astype("f8")


@pytest.mark.parametrize("name", NUMERIC)
def test_statistics_are_those_of_numpy_in_float64(name: str) -> None:
    data, values = sample(name)
    stats = describe(memoryview(data), name)

    magnitudes = np.abs(values) if values.dtype.kind == "c" else values
    is_nan = np.isnan(values) if values.dtype.kind in "fc" else np.zeros(N, bool)
    is_infinite = np.isinf(values) & ~is_nan if values.dtype.kind in "fc" else is_nan
    finite = magnitudes[~is_nan & ~is_infinite]
    assert stats.n_elements == N
    assert (stats.n_nan, stats.n_infinite) == (is_nan.sum(), is_infinite.sum())
    assert stats.n_zeros == (values == 0).sum()
    assert (stats.least, stats.greatest) == (finite.min(), finite.max())
    assert stats.mean == pytest.approx(math.fsum(finite.tolist()) / len(finite), rel=1e-12)
    exact = finite.astype("f8")
    assert stats.std == pytest.approx(float(np.std(exact)), rel=1e-12)


def test_integers_beyond_float64_keep_their_extremes() -> None:
    values = np.array([-(2**63), 2**63 - 1, 2**53 + 1], "i8")
    stats = describe(memoryview(values.tobytes()), "int64")
    assert (stats.least, stats.greatest) == (-(2**63), 2**63 - 1)


def test_a_large_mean_does_not_cancel_the_deviation() -> None:
    values = 1e9 + np.random.default_rng(2).standard_normal(200_000)
    stats = describe(memoryview(values.tobytes()), "float64")
    assert stats.std == pytest.approx(float(np.std(values - 1e9)), rel=1e-9)


def test_parts_may_be_merged_in_any_order() -> None:
    data, _ = sample("float32")
    parts = [describe(memoryview(data)[at : at + 4096], "float32") for at in range(0, 4 * N, 4096)]
    merged = merge_statistics(parts)
    random.Random(3).shuffle(parts)
    assert merge_statistics(parts) == merged
    assert merged.std == pytest.approx(describe(memoryview(data), "float32").std, rel=1e-12)


def test_without_finite_elements_there_is_no_mean() -> None:
    values = np.array([math.nan, math.inf], "f4")
    stats = describe(memoryview(values.tobytes()), "float32")
    assert (stats.n_nan, stats.n_infinite) == (1, 1)
    assert (stats.least, stats.greatest, stats.mean, stats.std) == (None,) * 4
    assert merge_statistics([]) == ValueStatistics()


def test_a_sum_beyond_float64_is_not_stated() -> None:
    values = np.array([1.7e308, 1.7e308, -1.0])
    stats = describe(memoryview(values.tobytes()), "float64")
    assert (stats.least, stats.greatest) == (-1.0, 1.7e308)
    assert (stats.mean, stats.std, stats.n_infinite) == (None, None, 0)
    # Merging such parts neither fails nor states a number.
    assert merge_statistics([stats, stats]).std is None
