"""Casts on a device, bit for bit those of ``core.arrays.cast``.

Roundings are the device's own where they are IEEE's (float64 → float32 → float16, to nearest even); all else is done
with integers: tables of ``core.arrays.cast`` for types of at most 16 bits, the rounding to bfloat16, and every NaN,
whose sign and payload a device would not keep. Only kernels are used that CUDA has: none of uint16, uint32 or float8
tensors.
"""

from __future__ import annotations

from typing import Any

from core.arrays.cast import Cast, cast_of, patterns_of
from core.arrays.dtypes import dtype_of, itemsize
from core.device.device import Device, cast_work
from core.device.lane import Kernel, Lane, Tensor, lane_of

_SIGNED = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Names of torch's integer types that hold patterns, by their size."""


def cast_on(device: Device | None, source: str, target: str) -> Cast:
    """The function that casts dense little-endian elements; for the calling thread.

    Raises:
        UnsupportedError: the cast is not made.
        CapacityError, WorkerError: see ``core.device.device.device_errors``.
    """
    if device is None or not device.does(cast_work(source, target)):
        return cast_of(source, target)
    lane = lane_of(device)
    kernel = kernel_of(lane, source, target)
    sizes = itemsize(source), itemsize(target)
    return lambda data, out: lane.map(data, out, kernel, sizes=sizes)


def kernel_of(lane: Lane, source: str, target: str) -> Kernel:
    """The cast of bytes on the device, giving the patterns of the target."""
    if itemsize(source) <= 2 and (source, target) != ("bfloat16", "float32"):
        table = _table(lane, source, target)
        return lambda data: table.index_select(0, _indices(data, itemsize(source)))
    if dtype_of(source).kind != "float":
        return lambda data: _from_integers(data, source, target)
    if source == target:
        return lambda data: data
    rounding = _rounding(lane, target)
    return lambda data: rounding(float32_bits(data, source))


def _rounding(lane: Lane, target: str) -> Kernel:
    """From patterns of float32 (as int32)."""
    if itemsize(target) == 1:
        table = _table(lane, "bfloat16", target)
        return lambda bits: table.index_select(0, _sticky(bits))
    return {
        "float64": _to_float64,
        "float32": lambda bits: bits,
        "float16": _to_float16,
        "bfloat16": _to_bfloat16,
    }[target]


def float32_bits(data: Tensor, source: str) -> Tensor:
    """Elements of a wider float type or of bfloat16 as patterns of float32."""
    import torch

    if source == "bfloat16":
        return data.view(torch.int16).to(torch.int32) << 16
    if source == "float32":
        return data.view(torch.int32)
    assert source == "float64"
    bits = data.view(torch.int64)
    made = data.view(torch.float64).to(torch.float32).view(torch.int32)
    sign = (bits >> 32).to(torch.int32) & -0x8000_0000
    payload = (bits >> 29).to(torch.int32) & 0x3F_FFFF
    return torch.where(data.view(torch.float64).isnan(), sign | 0x7FC0_0000 | payload, made)


def _to_float64(bits: Tensor) -> Tensor:
    import torch

    wide = bits.to(torch.int64)
    nan = (wide & -0x8000_0000) << 32 | 0x7FF8 << 48 | (wide & 0x3F_FFFF) << 29
    return torch.where(_is_nan(bits), nan, bits.view(torch.float32).to(torch.float64).view(torch.int64))


def _to_float16(bits: Tensor) -> Tensor:
    import torch

    made = bits.view(torch.float32).to(torch.float16).view(torch.int16)
    payload = ((bits >> 13) & 0x3FF).clamp(min=1)  # as numpy: signalling ones stay so
    nan = ((bits >> 16) & -0x8000 | 0x7C00 | payload).to(torch.int16)
    return torch.where(_is_nan(bits), nan, made)


def _to_bfloat16(bits: Tensor) -> Tensor:
    import torch

    made = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return torch.where(_is_nan(bits), (bits >> 16) & -0x8000 | 0x7FC0, made).to(torch.int16)


def _is_nan(bits: Tensor) -> Tensor:
    return (bits & 0x7FFF_FFFF) > 0x7F80_0000


def _sticky(bits: Tensor) -> Tensor:
    """See ``core.arrays.cast``: cut to bfloat16 patterns, odd if something was cut off."""
    import torch

    return (bits >> 16) & 0xFFFF | ((bits & 0xFFFF) != 0).to(torch.int32)


def _from_integers(data: Tensor, source: str, target: str) -> Tensor:
    """32-bit integers, exact in 64 bits; wider ones are cast to nothing else."""
    import torch

    assert itemsize(source) == 4 and itemsize(target) == 8
    values = data.view(torch.int32).to(torch.int64)
    if dtype_of(source).kind == "uint":
        values = values & 0xFFFF_FFFF
    return values.to(torch.float64) if target == "float64" else values


def _indices(data: Tensor, size: int) -> Tensor:
    import torch

    if size == 1:
        return data.to(torch.int32)
    return data.view(torch.int16).to(torch.int32) & 0xFFFF


def _table(lane: Lane, source: str, target: str) -> Any:
    """The cast of every pattern, on the device."""
    return lane.table(cast_work(source, target), lambda: patterns_of(source, target).view(_SIGNED[itemsize(target)]))
