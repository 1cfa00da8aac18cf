"""core.megatron.optimizer.proof: masters that round to weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.arrays.cast import find_cast
from core.engine.catalog.stored import Extent, StoredArray
from core.files.store import MemoryStore
from core.megatron.optimizer.proof import (
    is_master,
    is_nan_element,
    rounding_of,
    rounds_to,
    sample_array,
)


def stored(
    tensor: torch.Tensor, name: str, strides: tuple[int, ...] | None = None
) -> tuple[StoredArray, bytes]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return StoredArray(name, dtype, tuple(tensor.shape), Extent(name, 0, strides)), data


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (300,), (40, 50)])
def test_a_master_rounds_to_its_weight(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    master = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    (a, data), (b, rounded) = stored(master, "a"), stored(master.to(dtype), "b")
    store = MemoryStore({"a": data, "b": rounded})
    assert is_master(store, a, b)
    if master.numel():
        other, changed = stored((master + 1).to(dtype), "b")
        assert not is_master(MemoryStore({"a": data, "b": changed}), a, other)


def test_another_number_of_elements_is_no_master() -> None:
    a, data = stored(torch.zeros(8), "a")
    b, weights = stored(torch.zeros(6, dtype=torch.bfloat16), "b")
    assert not is_master(MemoryStore({"a": data, "b": weights}), a, b)


def test_strides_are_honoured() -> None:
    values = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    (a, data), (b, weights) = stored(values.t(), "a"), stored(values.to(torch.bfloat16), "b", None)
    view = StoredArray("b", "bfloat16", (100, 60), Extent("b", 0, (1, 100)))
    store = MemoryStore({"a": data, "b": weights})
    assert is_master(store, a, view)
    assert not is_master(store, a, StoredArray("b", "bfloat16", (100, 60), b.extent))


def test_a_sample_is_from_the_beginning_the_middle_and_the_end() -> None:
    a, data = stored(torch.arange(1000, dtype=torch.float32), "a")
    numbers = np.frombuffer(sample_array(MemoryStore({"a": data}), a), np.float32)
    assert numbers.tolist() == [*range(16), *range(500, 516), *range(984, 1000)]


def test_nans_equal_each_other_and_zeros_keep_their_sign() -> None:
    nan = np.array([np.nan], np.float32).tobytes()
    other = np.array([0x7FC1], np.uint16).tobytes()
    assert rounds_to(nan, "float32", other, "bfloat16")
    assert not rounds_to(np.array([1], np.float32).tobytes(), "float32", other, "bfloat16")
    assert not rounds_to(np.array([0.0], np.float32).tobytes(), "float32", b"\x00\x80", "bfloat16")


def edges() -> bytes:
    """float32 bits around every place where rounding to 16 bits turns: ties, subnormals, overflow,
    NaNs; and others.
    """
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    lows = np.array(
        [0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32
    )
    return bytes((tops[:, None] | lows[None, :]).ravel().astype("<u4").tobytes())


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_a_few_elements_are_rounded_as_numpy_rounds_them(target: str) -> None:
    few = rounding_of("float32", target)
    assert few is not None
    data = edges()
    wanted = bytearray(len(data) // 2)
    find_cast("float32", target)(memoryview(data), memoryview(wanted))
    rounded = few(data)
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00}[target]
    a, b = (np.frombuffer(bits, "<u2") & 0x7FFF for bits in (rounded, wanted))
    is_number = b <= infinity
    assert np.array_equal(a > infinity, ~is_number)
    assert np.array_equal(
        np.frombuffer(rounded, "<u2")[is_number], np.frombuffer(wanted, "<u2")[is_number]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_no_number_is_told_without_numpy(dtype: str) -> None:
    size = 4 if dtype == "float32" else 2
    infinity = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype]
    sign = 1 << 8 * size - 1
    for bits in (0, 1, infinity - 1, infinity):
        for signed in (bits, bits | sign):
            assert is_nan_element(signed.to_bytes(size, "little"), dtype) is False
    for bits in (infinity + 1, sign - 1, sign | infinity + 1):
        assert is_nan_element(bits.to_bytes(size, "little"), dtype) is True
    assert is_nan_element(b"\x7f", "float8_e4m3fn") is None
