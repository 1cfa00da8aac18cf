"""Cast elements on a device, bit for bit as ``core.arrays.cast`` does.

Rounding is the device's own where it follows IEEE 754 (float64 → float32 → float16, to nearest
even). All else is done with integers: tables of ``core.arrays.cast`` for types of at most 16 bits,
the rounding to bfloat16, and every NaN, whose sign and payload a device would not keep. Only
kernels that CUDA has are used: none of uint16, uint32 or float8 tensors.
"""

from __future__ import annotations

from typing import Any

from core.arrays.cast import Cast, cast_of, patterns_of
from core.arrays.dtypes import dtype_of, itemsize
from core.device.device import Device, cast_work
from core.device.lane import Kernel, Lane, Tensor, lane_of

_SIGNED = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Names of torch's integer types for bit patterns, by their bytes."""


def cast_on(device: Device | None, source: str, target: str) -> Cast:
    """Return the function that casts dense little-endian elements, for use in the calling thread.

    Args:
        device: does the cast if it does this kind of work; else the CPU path does.
        source, target: dtype names.

    Raises:
        UnsupportedError: no such cast exists.
        CapacityError, WorkerError: the device fails (``core.device.device.device_errors``).
    """
    if device is None or not device.does(cast_work(source, target)):
        return cast_of(source, target)
    lane = lane_of(device)
    kernel = kernel_of(lane, source, target)
    sizes = itemsize(source), itemsize(target)
    return lambda data, out: lane.map(data, out, kernel, sizes=sizes)


def kernel_of(lane: Lane, source: str, target: str) -> Kernel:
    """Return the kernel that casts bytes on the device to bit patterns of the target type."""
    import torch

    if itemsize(source) <= 2 and (source, target) != ("bfloat16", "float32"):
        # A type of at most 16 bits has so few patterns that a table holds all results.
        table = _table(lane, source, target)
        if itemsize(source) == 1:
            return lambda data: table.index_select(0, data.to(torch.int32))
        return lambda data: table.index_select(0, data.view(torch.int16).to(torch.int32) & 0xFFFF)
    if dtype_of(source).kind != "float":
        return lambda data: _from_integers(data, source, target)
    if source == target:
        return lambda data: data
    cast = _cast_from_float32(lane, target)
    return lambda data: cast(float32_bits(data, source))


def _cast_from_float32(lane: Lane, target: str) -> Kernel:
    """Return the kernel that casts patterns of float32 (as int32) to the target type."""
    if itemsize(target) == 1:
        # Rounded to odd in bfloat16, a table of bfloat16 gives the correctly rounded result.
        table = _table(lane, "bfloat16", target)
        return lambda bits: table.index_select(0, _truncate_sticky(bits))
    return {
        "float64": _to_float64,
        "float32": lambda bits: bits,
        "float16": _to_float16,
        "bfloat16": _to_bfloat16,
    }[target]


def float32_bits(data: Tensor, source: str) -> Tensor:
    """Return elements of float64, float32 or bfloat16 as patterns of float32 (int32)."""
    import torch

    if source == "bfloat16":
        return data.view(torch.int16).to(torch.int32) << 16
    if source == "float32":
        return data.view(torch.int32)
    assert source == "float64"
    bits = data.view(torch.int64)
    rounded = data.view(torch.float64).to(torch.float32).view(torch.int32)
    # A NaN keeps its sign and the upper bits of its payload, and becomes a quiet one.
    sign = (bits >> 32).to(torch.int32) & -0x8000_0000
    payload = (bits >> 29).to(torch.int32) & 0x3F_FFFF
    return torch.where(data.view(torch.float64).isnan(), sign | 0x7FC0_0000 | payload, rounded)


def _to_float64(bits: Tensor) -> Tensor:
    import torch

    wide = bits.to(torch.int64)
    nan = (wide & -0x8000_0000) << 32 | 0x7FF8 << 48 | (wide & 0x3F_FFFF) << 29
    return torch.where(
        is_nan(bits), nan, bits.view(torch.float32).to(torch.float64).view(torch.int64)
    )


def _to_float16(bits: Tensor) -> Tensor:
    import torch

    rounded = bits.view(torch.float32).to(torch.float16).view(torch.int16)
    payload = ((bits >> 13) & 0x3FF).clamp(min=1)  # as numpy: signalling NaNs stay signalling
    nan = ((bits >> 16) & -0x8000 | 0x7C00 | payload).to(torch.int16)
    return torch.where(is_nan(bits), nan, rounded)


def _to_bfloat16(bits: Tensor) -> Tensor:
    import torch

    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16  # to nearest, ties to even
    return torch.where(is_nan(bits), (bits >> 16) & -0x8000 | 0x7FC0, rounded).to(torch.int16)


def is_nan(bits: Tensor) -> Tensor:
    """Return which patterns of float32 are NaN."""
    return (bits & 0x7FFF_FFFF) > 0x7F80_0000


def _truncate_sticky(bits: Tensor) -> Tensor:
    """Cut patterns of float32 to bfloat16's bits, and set the last bit if anything was cut off.

    Rounding the result to a narrower type gives what rounding the float32 would give.
    """
    import torch

    return (bits >> 16) & 0xFFFF | ((bits & 0xFFFF) != 0).to(torch.int32)


def _from_integers(data: Tensor, source: str, target: str) -> Tensor:
    """Cast 32-bit integers to 64-bit integers or float64, exactly; no other cast of them exists."""
    import torch

    assert itemsize(source) == 4 and itemsize(target) == 8
    values = data.view(torch.int32).to(torch.int64)
    if dtype_of(source).kind == "uint":
        values = values & 0xFFFF_FFFF
    return values.to(torch.float64) if target == "float64" else values


def _table(lane: Lane, source: str, target: str) -> Any:
    """Return the cast of every pattern of the source type, as a table on the device."""
    return lane.load_table(
        cast_work(source, target),
        lambda: patterns_of(source, target).view(_SIGNED[itemsize(target)]),
    )
