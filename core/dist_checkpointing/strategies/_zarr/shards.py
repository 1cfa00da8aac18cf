"""The shard of a ShardedTensor in a stored array: its region, and its tensor once it is read."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.strategies._zarr.arrays import clip_region
from core.dist_checkpointing.strategies.zarr_types import tensor_of
from core.errors import CheckpointingException


def stored_region(
    sharded_tensor: ShardedTensor, stored_shape: tuple[int, ...]
) -> tuple[int | slice, ...]:
    """Return the region of a stored array that a ShardedTensor stands for, clipped to the array.

    Raises:
        CheckpointingException: the array has another shape than the global tensor, and no mismatch
            is allowed.
    """
    if not sharded_tensor.allow_shape_mismatch and tuple(sharded_tensor.global_shape) != tuple(
        stored_shape
    ):
        raise CheckpointingException(
            f"the stored shape is {tuple(stored_shape)}, expected {tuple(sharded_tensor.global_shape)}",
            key=sharded_tensor.key,
        )
    return clip_region(sharded_tensor.global_slice(), tuple(stored_shape), key=sharded_tensor.key)


def postprocess_numpy_array(
    loaded_array: Any, sharded_tensor: ShardedTensor, apply_flattened_range: bool = True
) -> torch.Tensor:
    """Return the tensor of an array that was loaded for a ShardedTensor, in its local shape.

    Args:
        loaded_array: numpy array, its prepended axes already indexed away. Its dtype stays.
        apply_flattened_range: cut a flattened tensor to its range; else the complete shard is
            returned.

    Raises:
        CheckpointingException: the shape differs from the local one, and no mismatch is allowed or
            it cannot be padded.
        UnsupportedError: torch does not support the dtype.
    """
    x = tensor_of(loaded_array, key=sharded_tensor.key)
    if tuple(x.shape) != tuple(sharded_tensor.local_shape):
        if not sharded_tensor.allow_shape_mismatch:
            raise _mismatch_error(x, sharded_tensor)
        x = pad_to_expected_shape(x, sharded_tensor)
    if apply_flattened_range and sharded_tensor.flattened_range is not None:
        x = flatten_range(sharded_tensor, x)
    return x


def _mismatch_error(x: torch.Tensor, sharded_tensor: ShardedTensor) -> CheckpointingException:
    return CheckpointingException(
        f"the loaded shape {tuple(x.shape)} does not match the local shape {tuple(sharded_tensor.local_shape)}",
        key=sharded_tensor.key,
    )


def flatten_range(sharded_tensor: ShardedTensor, x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a shard that a flattened ShardedTensor holds, 1-D.

    All elements if the ShardedTensor is not flattened.
    """
    return x.flatten()[sharded_tensor.flattened_range or slice(None)]


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: ShardedTensor) -> torch.Tensor:
    """Append zeros along every axis on which a tensor is shorter than the local shape.

    Raises:
        CheckpointingException: the tensor has another number of axes, or is longer along one.
    """
    expected = tuple(expected_sharded_ten.local_shape)
    if x.ndim != len(expected) or any(
        n > extent for n, extent in zip(x.shape, expected, strict=True)
    ):
        raise _mismatch_error(x, expected_sharded_ten)
    padded = torch.zeros(expected, dtype=x.dtype, device=x.device)
    if prod(x.shape):
        padded[tuple(slice(n) for n in x.shape)] = x
    return padded
