"""Loading of ``zarr`` checkpoints by TensorStore.

TensorStore reads every codec of zarr 2 and every element type of ``core.formats.zarr.dtypes``, bfloat16 included. It
takes a chunk that is absent for one of zeros; here chunks are looked for first, and one that is not there is an error.

The strategies of ``zarr``, which need no TensorStore, are the default ones; ``register_default_tensorstore_strategies``
changes that.

Source: the documentation of ``megatron.core.dist_checkpointing.strategies.tensorstore``; megatron-core 0.12.1.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import tensorstore as ts
import torch

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from core.dist_checkpointing.strategies._zarr.arrays import check_region, clipped
from core.dist_checkpointing.strategies._zarr.checkpoints import (
    BACKEND,
    VERSION,
    ZarrCheckpoints,
    tensors_of,
    with_leaves,
)
from core.dist_checkpointing.strategies._zarr.shards import postprocess_numpy_array, stored_region
from core.dist_checkpointing.strategies.base import LoadShardedStrategy, StrategyAction, register_default_strategy
from core.dist_checkpointing.strategies.zarr import load_zarr_based_sharded_metadata
from core.dist_checkpointing.strategies.zarr_types import cast_array
from core.errors import CorruptError, MissingShardError, UsageError
from core.formats.zarr.metadata2 import ARRAY_FILE

logger = logging.getLogger(__name__)


def register_default_tensorstore_strategies() -> None:
    """Makes TensorStore the default way of loading checkpoints of backend ``zarr``, version 1."""
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, TensorStoreLoadShardedStrategy())


class TensorStoreLoadShardedStrategy(ZarrCheckpoints, LoadShardedStrategy):
    """Loads sharded tensors from zarr 2 arrays by TensorStore.

    Args:
        load_directly_on_device: load into the data of the ShardedTensors, wherever they are, in place of giving new
            tensors on the CPU.
    """

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
        self.load_directly_on_device = load_directly_on_device

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> ShardedStateDict:
        """The same tree with tensors as leaves; every rank calls this.

        Args:
            sharded_state_dict: its leaves are ShardedTensors, sharded in whichever way.
            checkpoint_dir: holds the arrays.

        Raises:
            UsageError: a leaf is no ShardedTensor, or has no data that could be loaded into.
            CorruptError: a chunk is absent (MissingShardError) or cannot be read.
            CheckpointingException: there is no such array or one of another shape, or a rank failed; raised on every
                rank.
        """

        def loaded() -> list[torch.Tensor]:
            return [
                _load_from_array(ten, Path(checkpoint_dir), self.load_directly_on_device)
                for ten in tensors_of(sharded_state_dict)
            ]

        return with_leaves(sharded_state_dict, comm.together(loaded))

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Key → ShardedTensor without data and sharding, of every array.

        Raises:
            CheckpointingException: an array cannot be opened, or torch has no such type.
        """
        return load_tensorstore_metadata(checkpoint_dir)


def load_tensorstore_metadata(checkpoint_dir: str | Path) -> ShardedStateDict:
    """Key → ShardedTensor without data and sharding, of every array that TensorStore opens.

    Raises:
        CheckpointingException: one cannot be opened, or torch has no such type.
    """

    def shape_dtype(path: str) -> Any:
        array = open_ts_array(Path(path))
        return tuple(array.shape), array.dtype.numpy_dtype

    return load_zarr_based_sharded_metadata(Path(checkpoint_dir), shape_dtype)


def merge_global_slice_with_shape(
    global_slice: tuple[int | slice, ...], actual_shape: tuple[int, ...], key: str
) -> tuple[int | slice, ...]:
    """The part of a slice of the global tensor that lies in a stored array of another shape.

    megatron-core 0.12.1 fails where no part does, as happens to a rank that holds padded rows only; here the slice is
    empty then.

    Args:
        global_slice: per axis an index, or a slice with start and stop, in elements.
        actual_shape: of the stored array.
        key: the tensor, for messages.

    Raises:
        CheckpointingException: the numbers of axes differ, or an index lies beyond the array.
    """
    return clipped(global_slice, tuple(actual_shape), key=key)


def _load_from_array(
    sharded_tensor: ShardedTensor,
    checkpoint_dir: Path,
    load_directly_on_device: bool = False,
    apply_flattened_range: bool = True,
) -> torch.Tensor:
    """The tensor that a ShardedTensor stands for, of its dtype.

    Args:
        load_directly_on_device: load into its data; else the tensor is a new one on the CPU.
        apply_flattened_range: whether a flattened tensor is cut to its range; else the whole shard is returned.

    Raises:
        UsageError: there is no data to load into.
        CheckpointingException: the array is not there, has another shape, cannot be read or not be cast.
    """
    x = cast_array(_load_regular_chunk(sharded_tensor, checkpoint_dir), sharded_tensor.dtype, key=sharded_tensor.key)
    loaded = postprocess_numpy_array(x, sharded_tensor, apply_flattened_range)
    if not load_directly_on_device:
        return loaded
    if sharded_tensor.data is None:
        raise UsageError("the tensor has no data to load into", key=sharded_tensor.key, hint="call init_data first")
    sharded_tensor.data.detach().copy_(loaded)
    return sharded_tensor.data


def _load_regular_chunk(sharded_tensor: ShardedTensor, checkpoint_dir: Path) -> Any:
    """The stored part of a shard, as a numpy array; flattened ones whole."""
    key = sharded_tensor.key
    arr = open_ts_array(checkpoint_dir / key)
    region = stored_region(sharded_tensor, tuple(arr.shape))
    check_region(checkpoint_dir, key, region)
    try:
        return arr[region].read().result()
    except (ValueError, OSError) as err:
        raise CorruptError(f"TensorStore cannot read the array: {str(err)[:300]}", key=key) from err


def open_ts_array(arr_path: Path) -> Any:
    """A ``tensorstore.TensorStore`` of a zarr 2 array.

    Args:
        arr_path: its directory.

    Raises:
        MissingShardError: there is no ``.zarray``.
        CorruptError: TensorStore cannot open it.
    """
    arr_path = Path(arr_path)
    if not (arr_path / ARRAY_FILE).is_file():
        raise MissingShardError(f"there is no zarr array {arr_path}", key=arr_path.name)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{arr_path.absolute()}/"}}
    try:
        return ts.open(spec, open=True, read=True).result()
    except (ValueError, OSError) as err:
        raise CorruptError(f"TensorStore cannot open {arr_path}: {str(err)[:300]}", key=arr_path.name) from err
