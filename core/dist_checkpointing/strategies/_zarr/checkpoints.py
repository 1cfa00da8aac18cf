"""The common parts of the ``zarr`` strategies.

These are the version, checks of arguments, the removal of arrays, and the shard of a ShardedTensor
in a stored array: its region, and the tensor read from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from core.dist_checkpointing.strategies._zarr.arrays import clip_region, remove_arrays
from core.dist_checkpointing.strategies.base import require_backend, require_version
from core.dist_checkpointing.strategies.zarr_types import tensor_of
from core.errors import CheckpointingException, UsageError

BACKEND, VERSION = "zarr", 1


class ZarrCheckpoints:
    """A base of all strategies that load checkpoints of backend ``zarr``, version 1."""

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and ShardedObjects whose keys begin with a prefix; collective.

        Rank 0 removes all of them.

        Raises:
            UsageError: the prefix is empty.
            StorageError: a file cannot be removed; on every rank.
        """
        # Wait for ranks that may still be reading.
        comm.barrier()
        comm.together(
            lambda: remove_arrays(Path(checkpoint_dir), key_prefix) if comm.rank() == 0 else []
        )

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise unless a checkpoint's backend is ``zarr``.

        Args:
            loaded_version: name of the backend (the parameter's name is the documented one).

        Raises:
            UnsupportedError: the checkpoint has another backend.
        """
        require_backend(self, loaded_version, BACKEND)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless a checkpoint's version of the backend is 1.

        Raises:
            UnsupportedError: the checkpoint has another version.
        """
        require_version(self, loaded_version, (VERSION,))


def list_sharded_tensors(sharded_state_dict: ShardedStateDict) -> list[ShardedTensor]:
    """Return the leaves of a tree, which must be ShardedTensors.

    Raises:
        UsageError: a leaf is not a ShardedTensor.
    """
    leaves = list(nested_values(sharded_state_dict))
    for leaf in leaves:
        if not isinstance(leaf, ShardedTensor):
            raise UsageError(
                f"the zarr strategies accept only ShardedTensors, not a {type(leaf).__name__}",
                key=getattr(leaf, "key", None),
                hint="use the common strategy for ShardedObjects",
            )
    return leaves


def replace_leaves(tree: ShardedStateDict, leaves: Iterable[object]) -> ShardedStateDict:
    """Replace the leaves of a tree in place and return the tree.

    Args:
        tree: dicts and lists.
        leaves: new leaves, in the order of ``nested_values``.
    """
    new_leaves = iter(leaves)
    return dict_list_map_inplace(lambda _: next(new_leaves), tree)  # type: ignore[no-any-return]


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
