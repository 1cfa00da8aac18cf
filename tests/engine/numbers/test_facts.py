"""What is said about the numbers of an array, against torch, for every floating-point type."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch

from core.arrays.dtypes import DTYPES, numpy_dtype
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.numbers.facts import ValueFacts, ValueObserver
from core.engine.numbers.kinds import KINDS

HUGE = 2.0**100


def facts_of(
    data: bytes, dtype: str, *, cuts: list[int] | None = None, seed: int = 0
) -> ValueFacts:
    """Fed in runs that end at ``cuts`` (elements), in any order."""
    size = DTYPES[dtype].itemsize
    array = StoredArray("x", dtype, (len(data) // size,), Extent("f", 0))
    observer = ValueObserver()
    assert observer.sees(array)
    borders = [0, *(cuts or []), array.shape[0]]
    runs = list(pairwise(borders))
    random.Random(seed).shuffle(runs)
    for start, stop in runs:
        if start < stop:
            observer.feed(array, start, memoryview(data)[start * size : stop * size])
    observer.finish(array)
    return observer.facts["x"]


def by_torch(data: bytes, dtype: str) -> dict[str, tuple[int, int | None]]:
    """Brute force: (how many, index of the first) of NaN, infinite and huge elements."""
    if hasattr(torch, dtype):
        elements = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    else:  # one of jax's own
        with np.errstate(invalid="ignore"):
            values = np.frombuffer(data, numpy_dtype(dtype)).astype(np.float64)
        elements = torch.from_numpy(values)
    if dtype.startswith("complex"):
        parts = torch.view_as_real(elements.to(torch.complex128))
    else:
        parts = elements.to(torch.float64).reshape(-1, 1)
    counts = {}
    for name, mask in (
        ("nan", parts.isnan()),
        ("infinite", parts.isinf()),
        ("huge", parts.isfinite() & (parts.abs() >= HUGE) & (DTYPES[dtype].itemsize > 1)),
    ):
        where = mask.any(dim=1).nonzero().flatten().tolist()
        counts[name] = (len(where), where[0] if where else None)
    return counts


def all_patterns(dtype: str) -> bytes:
    """Every pattern of small types; of others, all exponents with some fractions, and random
    ones.
    """
    n_bytes = KINDS[dtype].n_bytes
    if n_bytes <= 2:
        return np.arange(1 << (8 * n_bytes), dtype=f"<u{n_bytes}").tobytes()
    n_fraction, n_exponent = (23, 8) if n_bytes == 4 else (52, 11)
    exponents = np.arange(1 << (n_exponent + 1), dtype=np.uint64) << np.uint64(n_fraction)
    fractions = np.array([0, 1, 1 << (n_fraction - 1), (1 << n_fraction) - 1], np.uint64)
    patterns = (exponents[:, None] | fractions[None, :]).reshape(-1).astype(f"<u{n_bytes}")
    noise = np.random.default_rng(1).integers(0, 256, 8000 * n_bytes, np.uint8).view(f"<u{n_bytes}")
    return np.concatenate([patterns, noise]).tobytes()


FLOATS = [
    name
    for name, row in DTYPES.items()
    if row.kind in ("float", "complex") and row.value_bits is None
]


def test_every_floating_point_type_is_known() -> None:
    assert set(FLOATS) == set(KINDS)


@pytest.mark.parametrize("dtype", FLOATS)
def test_counts_of_all_patterns_are_those_of_torch(dtype: str) -> None:
    data = all_patterns(dtype)
    n = len(data) // DTYPES[dtype].itemsize
    rng = random.Random(dtype)
    facts = facts_of(data, dtype, cuts=sorted(rng.sample(range(n), 7)), seed=3)
    wanted = by_torch(data, dtype)
    for name in ("nan", "infinite", "huge"):
        count = getattr(facts, name)
        assert (count.n, count.first) == wanted[name], name


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_pattern_alone_among_usual_numbers(dtype: str) -> None:
    """The quick test of a block must not overlook one, wherever it stands and whatever the signs of
    the others.
    """
    size, n_bytes = DTYPES[dtype].itemsize, KINDS[dtype].n_bytes
    patterns = np.frombuffer(all_patterns(dtype), f"<u{n_bytes}")
    rng = np.random.default_rng(2)
    chosen = patterns if len(patterns) <= 256 else rng.choice(patterns, 300, replace=False)
    top = {1: 0x38, 2: 0x3C00, 4: 0x3F80_0000, 8: 0x3FF0 << 48}[n_bytes]  # about 1 in each type
    for number, pattern in enumerate(chosen):
        values = np.full(60, top, f"<u{n_bytes}")
        if dtype != "float8_e8m0fnu":
            values[:: 2 + number % 3] |= values.dtype.type(1 << (8 * n_bytes - 1))
        values[number % 60] = pattern
        data = values.tobytes()
        assert len(data) % size == 0
        facts, wanted = facts_of(data, dtype), by_torch(data, dtype)
        for name in ("nan", "infinite", "huge"):
            count = getattr(facts, name)
            assert (count.n, count.first) == wanted[name], (name, hex(int(pattern)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(1,), (7,), (40, 5)])
def test_one_value_everywhere_is_told_and_one_exception_ends_it(
    dtype: str, shape: tuple[int, ...]
) -> None:
    n, size = prod(shape), DTYPES[dtype].itemsize
    pattern = 0x35 if size == 1 else 0x3F80
    data = bytearray(pattern.to_bytes(size, "little") * n)
    assert facts_of(bytes(data), dtype, cuts=[n // 3, n // 2]).value == pattern
    if n == 1:
        return
    for at in (0, n // 3, n - 1):
        other = bytearray(data)
        other[at * size] ^= 1
        assert facts_of(bytes(other), dtype, cuts=[n // 3, n // 2], seed=at).value is None
    assert facts_of(bytes(n * size), dtype).value == 0


def test_other_types_are_not_looked_at() -> None:
    observer = ValueObserver()
    assert not any(
        observer.sees(StoredArray("x", dtype, (3,), Extent("f", 0)))
        for dtype in DTYPES
        if DTYPES[dtype].kind in ("int", "bool")
    )
