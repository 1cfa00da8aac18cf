"""The shard of a ShardedTensor in a stored array: its region, and the tensor read from it."""

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
    """Return the region of a stored array that a ShardedTensor represents, clipped to the array.

    Args:
        stored_shape: shape of the array, in elements.

    Raises:
        CheckpointingException: the array has another shape than the global tensor, and
            ``allow_shape_mismatch`` is False.
    """
    global_shape = tuple(sharded_tensor.global_shape)
    if not sharded_tensor.allow_shape_mismatch and global_shape != tuple(stored_shape):
        raise CheckpointingException(
            f"the stored shape is {tuple(stored_shape)}, expected {global_shape}",
            key=sharded_tensor.key,
        )
    return clip_region(sharded_tensor.global_slice(), tuple(stored_shape), key=sharded_tensor.key)


def postprocess_numpy_array(
    loaded_array: Any, sharded_tensor: ShardedTensor, apply_flattened_range: bool = True
) -> torch.Tensor:
    """Convert an array that was loaded for a ShardedTensor to a tensor of the local shape.

    Args:
        loaded_array: numpy array without the prepended axes. Its dtype does not change.
        apply_flattened_range: return only the range of a flattened tensor; otherwise return the
            complete shard.

    Raises:
        CheckpointingException: the shape differs from the local shape, and
            ``allow_shape_mismatch`` is False or the array cannot be padded.
        UnsupportedError: torch does not support the dtype.
    """
    x = tensor_of(loaded_array, key=sharded_tensor.key)
    # The region of the shard was clipped if the stored array is smaller; pad it.
    if tuple(x.shape) != tuple(sharded_tensor.local_shape):
        if not sharded_tensor.allow_shape_mismatch:
            raise _mismatch_error(x, sharded_tensor)
        x = pad_to_expected_shape(x, sharded_tensor)
    if apply_flattened_range and sharded_tensor.flattened_range is not None:
        x = flatten_range(sharded_tensor, x)
    return x


def _mismatch_error(x: torch.Tensor, sharded_tensor: ShardedTensor) -> CheckpointingException:
    local_shape = tuple(sharded_tensor.local_shape)
    return CheckpointingException(
        f"the loaded shape {tuple(x.shape)} does not match the local shape {local_shape}",
        key=sharded_tensor.key,
    )


def flatten_range(sharded_tensor: ShardedTensor, x: torch.Tensor) -> torch.Tensor:
    """Return the elements of a shard that belong to a flattened ShardedTensor, 1-D.

    These are all elements if the ShardedTensor is not flattened.
    """
    return x.flatten()[sharded_tensor.flattened_range or slice(None)]


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: ShardedTensor) -> torch.Tensor:
    """Pad a tensor with zeros at the end of every axis on which it is shorter than the local shape.

    Raises:
        CheckpointingException: the tensor has another number of axes, or an axis is longer than the
            local shape.
    """
    # Never drop elements: a longer tensor is an error.
    expected = tuple(expected_sharded_ten.local_shape)
    if x.ndim != len(expected) or any(
        n > extent for n, extent in zip(x.shape, expected, strict=True)
    ):
        raise _mismatch_error(x, expected_sharded_ten)
    padded = torch.zeros(expected, dtype=x.dtype, device=x.device)
    if prod(x.shape):
        padded[tuple(slice(n) for n in x.shape)] = x
    return padded
