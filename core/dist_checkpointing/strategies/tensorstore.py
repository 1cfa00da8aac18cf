"""Loading of ``zarr`` checkpoints with TensorStore.

TensorStore reads every codec of zarr 2 and every dtype of ``core.formats.zarr.array``, including
bfloat16. It reads a missing chunk as zeros; here the chunks are checked first, and a missing chunk
is an error.

The strategies of the module ``zarr``, which do not need TensorStore, are the defaults;
``register_default_tensorstore_strategies`` changes that.

Source: the documentation of ``megatron.core.dist_checkpointing.strategies.tensorstore``;
megatron-core 0.12.1.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import tensorstore as ts
import torch
from typing_extensions import override

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from core.dist_checkpointing.strategies._zarr.arrays import check_region, clip_region
from core.dist_checkpointing.strategies._zarr.checkpoints import (
    BACKEND,
    VERSION,
    ZarrCheckpoints,
    list_sharded_tensors,
    postprocess_numpy_array,
    replace_leaves,
    stored_region,
)
from core.dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from core.dist_checkpointing.strategies.zarr import load_zarr_based_sharded_metadata
from core.dist_checkpointing.strategies.zarr_types import cast_array
from core.errors import CorruptError, MissingShardError, UsageError
from core.files.url import refuse_url
from core.formats.zarr.metadata2 import ARRAY_FILE

logger = logging.getLogger(__name__)


def register_default_tensorstore_strategies() -> None:
    """Register TensorStore as the default loader of backend ``zarr``, version 1."""
    register_default_strategy(
        StrategyAction.LOAD_SHARDED, BACKEND, VERSION, TensorStoreLoadShardedStrategy()
    )


class TensorStoreLoadShardedStrategy(ZarrCheckpoints, LoadShardedStrategy):
    """A strategy that loads sharded tensors from zarr 2 arrays with TensorStore.

    Args:
        load_directly_on_device: load into the data of the ShardedTensors, on any device, instead of
            returning new tensors on the CPU.
    """

    def __init__(self, load_directly_on_device: bool = False) -> None:
        super().__init__()
        self.load_directly_on_device = load_directly_on_device

    @override
    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> ShardedStateDict:
        """Replace the leaves of a tree with loaded tensors; collective.

        Args:
            sharded_state_dict: a tree of ShardedTensors, sharded in any way.
            checkpoint_dir: directory with the arrays.

        Raises:
            UsageError: a leaf is not a ShardedTensor, or has no data to load into.
            MissingShardError: a chunk is missing.
            CorruptError: a chunk cannot be read.
            CheckpointingException: an array is missing or has another shape, or a rank failed; on
                every rank.
        """

        refuse_url(checkpoint_dir)

        def load_all() -> list[torch.Tensor]:
            return [
                _load_from_array(ten, Path(checkpoint_dir), self.load_directly_on_device)
                for ten in list_sharded_tensors(sharded_state_dict)
            ]

        return replace_leaves(sharded_state_dict, comm.together(load_all))

    @override
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return an unsharded ShardedTensor without data for every array, by key.

        Raises:
            CheckpointingException: an array cannot be opened, or torch does not support its dtype.
        """
        return load_tensorstore_metadata(checkpoint_dir)


def load_tensorstore_metadata(checkpoint_dir: str | Path) -> ShardedStateDict:
    """Return an unsharded ShardedTensor without data for every array, by key.

    Raises:
        CheckpointingException: TensorStore cannot open an array, or torch does not support its
            dtype.
    """

    refuse_url(checkpoint_dir)

    def read_shape_and_dtype(path: str) -> Any:
        array = open_ts_array(Path(path))
        return tuple(array.shape), array.dtype.numpy_dtype

    return load_zarr_based_sharded_metadata(Path(checkpoint_dir), read_shape_and_dtype)


def merge_global_slice_with_shape(
    global_slice: tuple[int | slice, ...], actual_shape: tuple[int, ...], key: str
) -> tuple[int | slice, ...]:
    """Clip a slice of the global tensor to a stored array of another shape.

    If nothing remains, as for a rank that has only padding rows, the slice is empty; megatron-core
    0.12.1 fails then.

    Args:
        global_slice: an index, or a slice with start and stop, per axis; in elements.
        actual_shape: shape of the stored array, in elements.
        key: name of the tensor, for errors.

    Raises:
        CheckpointingException: the numbers of axes differ, or an index is outside the array.
    """
    return clip_region(global_slice, tuple(actual_shape), key=key)


def _load_from_array(
    sharded_tensor: ShardedTensor,
    checkpoint_dir: Path,
    load_directly_on_device: bool = False,
    apply_flattened_range: bool = True,
) -> torch.Tensor:
    """Load the shard of a ShardedTensor, in its dtype.

    Args:
        load_directly_on_device: load into the data of the ShardedTensor; otherwise into a new
            tensor on the CPU.
        apply_flattened_range: return only the range of a flattened tensor; otherwise return the
            complete shard.

    Raises:
        UsageError: there is no data to load into.
        CheckpointingException: the array is missing, has another shape, cannot be read or cannot be
            cast.
    """
    # Read the stored part of the shard; TensorStore would read missing chunks as zeros.
    key = sharded_tensor.key
    arr = open_ts_array(checkpoint_dir / key)
    region = stored_region(sharded_tensor, tuple(arr.shape))
    check_region(checkpoint_dir, key, region)
    try:
        array = arr[region].read().result()
    except (ValueError, OSError) as err:
        raise CorruptError(f"TensorStore cannot read the array: {str(err)[:300]}", key=key) from err

    # Convert it to a tensor of the requested dtype and shape.
    array = cast_array(array, sharded_tensor.dtype, key=key)
    loaded = postprocess_numpy_array(array, sharded_tensor, apply_flattened_range)
    if not load_directly_on_device:
        return loaded
    if sharded_tensor.data is None:
        raise UsageError(
            "the tensor has no data to load into", key=key, hint="call init_data first"
        )
    sharded_tensor.data.detach().copy_(loaded)
    return sharded_tensor.data


def open_ts_array(arr_path: Path) -> Any:
    """Open a zarr 2 array as a ``tensorstore.TensorStore``.

    Args:
        arr_path: directory of the array.

    Raises:
        MissingShardError: ``.zarray`` is missing.
        CorruptError: TensorStore cannot open the array.
    """
    arr_path = Path(arr_path)
    if not (arr_path / ARRAY_FILE).is_file():
        raise MissingShardError(f"there is no Zarr array at {arr_path}", key=arr_path.name)
    # TensorStore needs an absolute path, with a slash at the end for a directory.
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{arr_path.absolute()}/"}}
    try:
        return ts.open(spec, open=True, read=True).result()
    except (ValueError, OSError) as err:
        raise CorruptError(
            f"TensorStore cannot open {arr_path}: {str(err)[:300]}", key=arr_path.name
        ) from err
