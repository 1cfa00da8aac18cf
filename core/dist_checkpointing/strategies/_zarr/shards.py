"""The shard that a ShardedTensor stands for, out of a stored array: where it lies, and its tensor once it was read."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.strategies._zarr.arrays import clipped
from core.dist_checkpointing.strategies.zarr_types import tensor_of
from core.errors import CheckpointingException


def stored_region(sharded_tensor: ShardedTensor, stored_shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """The region of a stored array that a ShardedTensor stands for, without what lies beyond the array.

    Raises:
        CheckpointingException: the array has another shape than the global tensor, which may not be.
    """
    if not sharded_tensor.allow_shape_mismatch and tuple(sharded_tensor.global_shape) != tuple(stored_shape):
        raise CheckpointingException(
            f"the stored shape {tuple(stored_shape)} is not the expected {tuple(sharded_tensor.global_shape)}",
            key=sharded_tensor.key,
        )
    return clipped(sharded_tensor.global_slice(), tuple(stored_shape), key=sharded_tensor.key)


def postprocess_numpy_array(
    loaded_array: Any, sharded_tensor: ShardedTensor, apply_flattened_range: bool = True
) -> torch.Tensor:
    """The tensor of an array that was loaded for a ShardedTensor, of its local shape.

    Args:
        loaded_array: numpy array, its prepended axes already indexed away. Its dtype stays.
        apply_flattened_range: whether a flattened tensor is cut to its range; else the whole shard is returned.

    Raises:
        CheckpointingException: the shape differs from the local one, where that is not allowed or cannot be padded.
        UnsupportedError: torch has no such type.
    """
    x = tensor_of(loaded_array, key=sharded_tensor.key)
    if tuple(x.shape) != tuple(sharded_tensor.local_shape):
        if not sharded_tensor.allow_shape_mismatch:
            raise _mismatch(x, sharded_tensor)
        x = pad_to_expected_shape(x, sharded_tensor)
    if apply_flattened_range and sharded_tensor.flattened_range is not None:
        x = flatten_range(sharded_tensor, x)
    return x


def _mismatch(x: torch.Tensor, sharded_tensor: ShardedTensor) -> CheckpointingException:
    return CheckpointingException(
        f"the loaded shape {tuple(x.shape)} is not the local shape {tuple(sharded_tensor.local_shape)}",
        key=sharded_tensor.key,
    )


def flatten_range(sharded_tensor: ShardedTensor, x: torch.Tensor) -> torch.Tensor:
    """The elements of a shard, 1-D, that a flattened ShardedTensor holds; all of them if it is not flattened."""
    return x.flatten()[sharded_tensor.flattened_range or slice(None)]


def pad_to_expected_shape(x: torch.Tensor, expected_sharded_ten: ShardedTensor) -> torch.Tensor:
    """A tensor with zeros appended along every axis on which it is shorter than the local shape.

    Raises:
        CheckpointingException: it has another number of axes, or is longer along one.
    """
    expected = tuple(expected_sharded_ten.local_shape)
    if x.ndim != len(expected) or any(n > most for n, most in zip(x.shape, expected, strict=True)):
        raise _mismatch(x, expected_sharded_ten)
    padded = torch.zeros(expected, dtype=x.dtype, device=x.device)
    if prod(x.shape):
        padded[tuple(slice(n) for n in x.shape)] = x
    return padded
