"""The numbers of a comparison against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.engine.numbers.difference import (
    Tolerance,
    ValueDifference,
    compare_elements,
    element_value,
    has_nan,
    has_numbers,
    sum_squares,
)
from core.engine.numbers.tally import Tally
from tests.formats.torch.torch_samples import DTYPES, bits, filled

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2]
INTS = [dtype for dtype in DTYPES if not dtype.is_floating_point and not dtype.is_complex]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def result(a: torch.Tensor, b: torch.Tensor, rule: Tolerance | None = None) -> ValueDifference:
    return compare_elements(
        memoryview(bits(a)),
        memoryview(bits(b)),
        dtypes=(name_of(a.dtype), name_of(b.dtype)),
        rule=rule,
    )


def changed(a: torch.Tensor, *, seed: int = 1) -> torch.Tensor:
    """The tensor with every third element replaced by random bits."""
    b = a.clone()
    flat_b, other = (
        b.reshape(-1).view(torch.uint8),
        filled(a.dtype, a.numel(), seed=seed).view(torch.uint8),
    )
    size = a.element_size()
    for index in range(0, a.numel(), 3):
        flat_b[index * size : (index + 1) * size] = other[index * size : (index + 1) * size]
    return b


def differing(a: torch.Tensor, b: torch.Tensor) -> list[bool]:
    size = a.element_size()
    first, other = bits(a), bits(b)
    return [first[i : i + size] != other[i : i + size] for i in range(0, len(first), size)]


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bits_that_differ_are_counted_in_every_type(dtype: torch.dtype) -> None:
    a = filled(dtype, 1000)
    b = changed(a)
    expected = differing(a, b)
    difference = result(a, b)
    assert (difference.n_elements, difference.n_differing) == (1000, sum(expected))
    assert difference.first == expected.index(True)
    same = result(a, a.clone())
    assert (same.n_differing, same.first, same.max_abs or 0) == (0, None, 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_statistics_of_floats_are_those_of_torch_in_float64(dtype: torch.dtype) -> None:
    a = filled(dtype, 999)
    b = changed(a)
    difference = result(a, b)
    x, y = (t.float().double() if dtype != torch.float64 else t for t in (a, b))
    assert difference.n_nan == int((x.isnan() != y.isnan()).sum())
    delta = torch.where(x.isnan() | y.isnan() | (x == y), 0.0, (x - y).abs())
    assert difference.max_abs == float(delta.max())
    assert difference.max_abs == 0 or difference.max_at == int(delta.argmax())
    ok = x.isfinite() & y.isfinite()
    for got, expected in (
        (difference.square_a, x[ok].square().sum()),
        (difference.square_b, y[ok].square().sum()),
        (difference.product, (x[ok] * y[ok]).sum()),
        (difference.square_delta, (x[ok] - y[ok]).square().sum()),
    ):
        assert got == pytest.approx(float(expected), rel=1e-9, nan_ok=True)
    if difference.cosine is not None:
        assert difference.cosine == pytest.approx(
            float(torch.cosine_similarity(x[ok], y[ok], dim=0, eps=0)), abs=1e-9
        )


@pytest.mark.parametrize("dtype", INTS, ids=name_of)
def test_differences_of_integers_are_exact(dtype: torch.dtype) -> None:
    a = filled(dtype, 300)
    b = changed(a)
    pairs = list(zip(map(int, a.tolist()), map(int, b.tolist()), strict=True))
    difference = result(a, b)
    assert difference.max_abs == max(abs(x - y) for x, y in pairs)
    assert (
        abs(pairs[difference.max_at or 0][0] - pairs[difference.max_at or 0][1])
        == difference.max_abs
    )


def test_extremes_of_integers_do_not_overflow() -> None:
    ends = torch.iinfo(torch.int64)
    assert result(torch.tensor([ends.min]), torch.tensor([ends.max])).max_abs == 2**64 - 1
    close = result(torch.tensor([ends.min]), torch.tensor([ends.max]), Tolerance(rtol=1.0))
    assert close.n_differing == 1


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.complex32], ids=name_of)
def test_complex_numbers_differ_by_their_distance(dtype: torch.dtype) -> None:
    a = torch.tensor([3 + 4j, 1 + 1j, 0j], dtype=torch.complex64).to(dtype)
    b = torch.tensor([0j, 1 + 1j, 0j], dtype=torch.complex64).to(dtype)
    difference = result(a, b)
    assert (difference.n_differing, difference.max_abs, difference.max_at, difference.first) == (
        1,
        5.0,
        0,
        0,
    )
    assert difference.square_delta == 25.0


@pytest.mark.each_value
@pytest.mark.parametrize("equal_nan", [True, False])
@pytest.mark.parametrize("rule", [(0.0, 0.0), (1e-5, 1e-8), (0.1, 0.0), (0.0, 1.0), (1.0, 1e30)])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8, torch.int16], ids=name_of)
def test_tolerances_are_those_of_torch_in_float64(
    dtype: torch.dtype, rule: tuple[float, float], equal_nan: bool
) -> None:
    a = filled(dtype, 600)
    b = changed(a)
    if dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        b[300:] = (a[300:].float() * 1.0001).to(dtype)
        a[:6] = torch.tensor([math.nan, math.nan, math.inf, math.inf, -math.inf, 0.0]).to(dtype)
        b[:6] = torch.tensor([math.nan, 1.0, math.inf, -math.inf, 2.0, -0.0]).to(dtype)
    x, y = (t if dtype == torch.float64 else t.float().double() for t in (a, b))
    expected = ~torch.isclose(x, y, rtol=rule[0], atol=rule[1], equal_nan=equal_nan)
    difference = result(a, b, Tolerance(*rule, equal_nan))
    assert difference.n_differing == int(expected.sum())
    assert difference.first == (int(expected.int().argmax()) if expected.any() else None)


def test_values_of_different_types_are_compared_as_values() -> None:
    a = torch.tensor([1.0, math.nan, 0.1, math.inf])
    b = torch.tensor([1.0, math.nan, 0.1, math.inf]).bfloat16()
    difference = result(a, b)
    assert (difference.n_differing, difference.first) == (1, 2)
    assert result(a, b, Tolerance(rtol=1e-2)).n_differing == 0
    assert result(torch.tensor([1, 2]), torch.tensor([1.0, 2.5]), Tolerance()).n_differing == 1


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.data())
def test_runs_add_up_to_the_whole(lengths: list[int], data: st.DataObject) -> None:
    n = sum(lengths)
    a = torch.arange(n, dtype=torch.float32)
    b = a.clone()
    for index in data.draw(st.lists(st.integers(0, max(n - 1, 0)), max_size=5)) if n else []:
        b[index] += data.draw(st.sampled_from([1.0, -2.0, 8.0]))
    tally = Tally()
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for start, length in data.draw(st.permutations(list(zip(starts, lengths, strict=True)))):
        part_a, part_b = a[start : start + length], b[start : start + length]
        if bits(part_a) == bits(part_b):
            tally.add_equal(length, sum_squares(memoryview(bits(part_a)), "float32"))
        else:
            tally.add(result(part_a, part_b), start=start, is_cast=None, pair=None)
    total = tally.values
    tally.sums.write_to(total)
    expected = result(a, b)
    assert (total.n_elements, total.n_differing, total.first) == (
        n,
        expected.n_differing,
        expected.first,
    )
    assert (total.max_abs, total.max_at) == (expected.max_abs, expected.max_at)
    assert total.square_a == pytest.approx(expected.square_a)
    assert total.product == pytest.approx(expected.product)


def test_long_runs_are_taken_in_parts() -> None:
    a = torch.zeros(200_000)
    b = a.clone()
    b[150_000] = 3
    difference = result(a, b)
    assert (difference.first, difference.max_at, difference.n_differing, difference.cosine) == (
        150_000,
        150_000,
        1,
        None,
    )
    assert difference.relative == math.inf


def test_what_has_no_numbers_has_no_differences() -> None:
    assert not has_numbers("float4_e2m1fn_x2")
    assert sum_squares(memoryview(b"abc"), "float4_e2m1fn_x2") == 0
    assert element_value(memoryview(b"a"), "float4_e2m1fn_x2") is None
    difference = compare_elements(
        memoryview(b"abcd"), memoryview(b"abxd"), dtypes=("float4_e2m1fn_x2",) * 2
    )
    assert (
        difference.n_differing,
        difference.first,
        difference.max_abs,
        difference.cosine,
        difference.relative,
    ) == (
        1,
        2,
        None,
        None,
        None,
    )


def test_nan_is_seen_and_left_out_of_sums() -> None:
    data = memoryview(bits(torch.tensor([3.0, math.nan, 4.0, math.inf])))
    assert has_nan(data, "float32")
    assert not has_nan(memoryview(bits(torch.tensor([1.0]))), "float32")
    assert not has_nan(memoryview(bytes(8)), "int64")
    assert sum_squares(data, "float32") == 25.0
