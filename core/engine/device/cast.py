"""Cast elements on a device, bit for bit as ``core.arrays.cast`` does.

Where the device's rounding follows IEEE 754 it is used (float64 → float32 → float16, to nearest
even). Everything else is done with integers: tables of ``core.arrays.cast`` for types of at most 16
bits, the rounding to bfloat16, and every NaN, whose sign and payload a device would not keep. Only
kernels that CUDA has are used, which excludes those for uint16, uint32 and float8 tensors.
"""

from __future__ import annotations

from typing import Any

from core.arrays.cast import Cast, find_cast, patterns_of
from core.arrays.dtypes import dtype_of, itemsize
from core.engine.device.device import Device, cast_work
from core.engine.device.lane import Kernel, Lane, Tensor, lane_of

_SIGNED = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
"""Names of torch's integer types for bit patterns, by size in bytes."""


def cast_on(device: Device | None, source: str, target: str) -> Cast:
    """Return the function that casts dense little-endian elements, for use in the calling thread.

    Args:
        device: the device to use, if it does this kind of work; the CPU path is used otherwise.
        source, target: dtype names.

    Raises:
        UnsupportedError: no such cast exists.
        CapacityError: the device is out of memory.
        WorkerError: the device failed otherwise.
    """
    if device is None or not device.does(cast_work(source, target)):
        return find_cast(source, target)
    lane = lane_of(device)
    kernel = kernel_of(lane, source, target)
    sizes = itemsize(source), itemsize(target)
    return lambda data, out: lane.map(data, out, kernel, sizes=sizes)


def kernel_of(lane: Lane, source: str, target: str) -> Kernel:
    """Return the kernel that casts bytes on the device to bit patterns of the target type."""
    import torch

    # A type of at most 16 bits has so few patterns that a table holds all results. bfloat16 to
    # float32 only shifts the bits, which is faster.
    if itemsize(source) <= 2 and (source, target) != ("bfloat16", "float32"):
        table = _table(lane, source, target)
        if itemsize(source) == 1:
            return lambda data: table.index_select(0, data.to(torch.int32))
        # torch has no kernels for uint16: mask the sign that int16 has extended.
        return lambda data: table.index_select(0, data.view(torch.int16).to(torch.int32) & 0xFFFF)
    if dtype_of(source).kind != "float":
        return lambda data: _from_integers(data, source, target)
    if source == target:
        return lambda data: data
    # As in torch, all other casts of floats go through float32, so those of float64 to narrower
    # types round twice.
    cast = _cast_from_float32(lane, target)
    return lambda data: cast(float32_bits(data, source))


def _cast_from_float32(lane: Lane, target: str) -> Kernel:
    """Return the kernel that casts patterns of float32 (as int32) to the target type."""
    # float8: round to odd in bfloat16 first (cut the lower bits, and set the last bit kept if any
    # of them was set); rounding that to float8, by a table, gives the same as rounding float32.
    if itemsize(target) == 1:
        import torch

        table = _table(lane, "bfloat16", target)
        return lambda bits: table.index_select(
            0, (bits >> 16) & 0xFFFF | ((bits & 0xFFFF) != 0).to(torch.int32)
        )
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
    """Cast patterns of float32 to patterns of float64 (int64)."""
    import torch

    # A NaN keeps its sign and payload, and becomes a quiet one.
    wide = bits.to(torch.int64)
    nan = (wide & -0x8000_0000) << 32 | 0x7FF8 << 48 | (wide & 0x3F_FFFF) << 29
    return torch.where(
        mask_nan(bits), nan, bits.view(torch.float32).to(torch.float64).view(torch.int64)
    )


def _to_float16(bits: Tensor) -> Tensor:
    """Round patterns of float32 to patterns of float16 (int16)."""
    import torch

    rounded = bits.view(torch.float32).to(torch.float16).view(torch.int16)
    # As in numpy, a NaN keeps its sign and the upper bits of its payload, and a signalling NaN
    # stays signalling; if those bits are 0, one is set, because the pattern would be infinity.
    payload = ((bits >> 13) & 0x3FF).clamp(min=1)
    nan = ((bits >> 16) & -0x8000 | 0x7C00 | payload).to(torch.int16)
    return torch.where(mask_nan(bits), nan, rounded)


def _to_bfloat16(bits: Tensor) -> Tensor:
    """Round patterns of float32 to patterns of bfloat16 (int16)."""
    import torch

    # To nearest, ties to even: add half of the last bit kept, or just less if that bit is even.
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    # A NaN keeps its sign only.
    return torch.where(mask_nan(bits), (bits >> 16) & -0x8000 | 0x7FC0, rounded).to(torch.int16)


def mask_nan(bits: Tensor) -> Tensor:
    """Return a mask of the patterns of float32 that are NaN."""
    return (bits & 0x7FFF_FFFF) > 0x7F80_0000


def _from_integers(data: Tensor, source: str, target: str) -> Tensor:
    """Cast 32-bit integers to 64-bit integers or float64, exactly."""
    import torch

    assert itemsize(source) == 4 and itemsize(target) == 8, "the only casts of 32-bit integers"
    # torch has no kernels for uint32: read int32, and mask the sign that int64 has extended.
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
