"""ShardedTensors for tests: parts of global tensors whose every element tells its key and its
place.
"""

from __future__ import annotations

import zlib
from math import prod

import torch

from core.dist_checkpointing.mapping import ShardedTensor


def global_tensor(
    key: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A tensor with different values for different keys and places, as far as the type has so
    many.
    """
    n = prod(shape)
    start = zlib.crc32(key.encode()) % 97
    if dtype == torch.bool:
        return (torch.arange(n) * 7 + start).reshape(shape) % 3 == 0
    if dtype.is_floating_point and dtype.itemsize == 1:
        return ((torch.arange(n) + start) % 120).to(torch.uint8).view(dtype).reshape(shape)
    modulo = 251 if dtype.itemsize == 1 else 65_000
    values = (torch.arange(n) + start * 13) % modulo
    if dtype.itemsize == 2 and dtype.is_floating_point:
        return (values % 30_000).to(torch.int16).view(dtype).reshape(shape)
    return values.to(dtype).reshape(shape)


def part_of(
    key: str,
    shape: tuple[int, ...],
    *offsets: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    prepended: int = 0,
    is_filled: bool = True,
    **options: object,
) -> ShardedTensor:
    """A part of ``global_tensor(key, shape)``.

    Args:
        offsets: as for ``ShardedTensor.from_rank_offsets``; the global shape must be divisible.
        prepended: axes that only the global tensor has.
        is_filled: with its values; otherwise all are -1 (or the like).
    """
    local, start = list(shape), [0] * len(shape)
    for axis, index, n in offsets:
        local[axis] = shape[axis] // n
        start[axis] = index * local[axis]
    data = global_tensor(key, shape, dtype)
    for axis, (at, n) in enumerate(zip(start, local, strict=True)):
        data = data.narrow(axis, at, n)
    data = data.clone().reshape(local[prepended:])
    if not is_filled:
        data = torch.full_like(data.view(torch.uint8) if data.dim() else data, 255).view(data.dtype)
    return ShardedTensor.from_rank_offsets(
        key, data, *offsets, prepend_axis_num=prepended, **options
    )


def flat_part_of(
    key: str,
    shape: tuple[int, ...],
    start: int,
    stop: int,
    *,
    is_filled: bool = True,
    offsets: tuple = (),
) -> ShardedTensor:
    """Elements [start, stop) of a flattened part of ``global_tensor(key, shape)``."""
    part = part_of(key, shape, *offsets)
    data = part.data.flatten()[start:stop].clone()
    if not is_filled:
        data.fill_(-1)
    return ShardedTensor.from_rank_offsets_flat(
        key, data, part.local_shape, *offsets, flattened_range=slice(start, stop)
    )
