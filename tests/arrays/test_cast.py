"""Casts, against torch itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.arrays.cast import check_cast, find_cast
from core.arrays.dtypes import DTYPES, itemsize
from core.errors import UnsupportedError

FLOATS = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)


def patterns(dtype: str) -> np.ndarray:
    """Bit patterns of a float type: all of them up to 16 bits, else dense samples around every
    16-bit neighbour.
    """
    rng = np.random.default_rng(7)
    size = itemsize(dtype)
    if size <= 2:
        return np.arange(1 << 8 * size, dtype=f"u{size}")
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    fine = np.arange(1 << 19, dtype=np.uint32) << 13
    random = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    single = np.concatenate(
        [
            random,
            high,
            high + 1,
            high + 0x7FFF,
            high + 0x8000,
            high + 0x8001,
            fine + 0x1000,
            fine + 1,
        ]
    )
    if size == 4:
        return single
    with np.errstate(all="ignore"):
        wide = single[:: 1 << 2].view(np.float32).astype(np.float64).view(np.uint64)
    random = rng.integers(0, 1 << 64, 1 << 18, dtype=np.uint64)
    near_ties = np.concatenate(
        [wide + np.uint64(d) for d in (1, 0x0FFFFFFF, 0x10000000, 0x10000001)]
    )
    return np.concatenate([random, wide, near_ties])


def by_torch(raw: np.ndarray, source: str, target: str) -> np.ndarray:
    values = (
        torch.from_numpy(raw.view(np.uint8).copy())
        .view(getattr(torch, source))
        .to(getattr(torch, target))
    )
    return values.view(torch.uint8).numpy().view(f"u{itemsize(target)}")


def by_us(raw: np.ndarray, source: str, target: str) -> np.ndarray:
    out = np.zeros(raw.size, dtype=f"u{itemsize(target)}")
    find_cast(source, target)(memoryview(raw.view(np.uint8)), memoryview(out.view(np.uint8)))
    return out


def is_nan(raw: np.ndarray, dtype: str) -> np.ndarray:
    values = torch.from_numpy(raw.view(np.uint8).copy()).view(getattr(torch, dtype))
    return values.to(torch.float64).isnan().numpy()


@pytest.mark.each_value
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_float_casts_equal_torch_bit_for_bit_and_nan_stays_nan(source: str, target: str) -> None:
    if source == target:
        return
    raw = patterns(source)
    ours, theirs = by_us(raw, source, target), by_torch(raw, source, target)
    nan = is_nan(raw, source)
    assert np.array_equal(ours[~nan], theirs[~nan])
    assert is_nan(ours[nan], target).all() and is_nan(theirs[nan], target).all()


INTEGERS = [
    (source, target)
    for source in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
    for target in (
        *FLOATS[:4],
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
    )
    if source != target
]


@pytest.mark.parametrize(("source", "target"), INTEGERS)
def test_integer_casts_keep_every_value_or_are_refused(source: str, target: str) -> None:
    info = np.iinfo(source) if source != "bool" else np.iinfo("uint8")
    top = 1 if source == "bool" else info.max
    chosen = [
        v for v in (info.min, info.min + 1, 0, 1, top - 1, top) if source != "bool" or v in (0, 1)
    ]
    values = np.array(chosen, dtype=source)
    try:
        check_cast(source, target)
    except UnsupportedError:
        assert source != "bool"
        return
    raw = values.view(f"u{values.itemsize}")
    ours = by_us(raw, source, target)
    assert np.array_equal(ours, by_torch(raw, source, target))
    back = torch.from_numpy(ours.view(np.uint8).copy()).view(getattr(torch, target)).tolist()
    assert [int(v) for v in back] == [int(v) for v in values]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("complex64", "complex128"),
        ("float32", "complex64"),
        ("float32", "int32"),
        ("int64", "int32"),
        ("int64", "float64"),
        ("uint8", "int8"),
        ("int8", "uint8"),
        ("float32", "float8_e8m0fnu"),
        ("float4_e2m1fn_x2", "float32"),
        ("float32", "bool"),
    ],
)
def test_casts_that_lose_values_are_refused(source: str, target: str) -> None:
    with pytest.raises(UnsupportedError, match="^casting .* is not supported"):
        check_cast(source, target, key="w")


def test_a_dtype_is_always_cast_to_itself() -> None:
    for name in DTYPES:
        check_cast(name, name)


def test_scales_are_cast_from_float8_e8m0fnu() -> None:
    raw = np.arange(255, dtype=np.uint8)
    assert np.array_equal(
        by_us(raw, "float8_e8m0fnu", "float32"), by_torch(raw, "float8_e8m0fnu", "float32")
    )
