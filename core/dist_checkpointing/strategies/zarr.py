"""The backend ``zarr``: sharded tensors as zarr 2 arrays, one directory per key (``core.formats.zarr.format``).

The strategies run on the engine: chunks are files of plain bytes, which it fills and reads directly, without zarr.
The documented helpers beside them work on zarr-python's arrays and on the same files. zarr-python 3 has no bfloat16 and
no 8-bit floats of its own; ``zarr_types`` tells its registry of them, so that such arrays open and save by it, too.

Chunk = what one rank holds, not compressed, ``bfloat16`` in ``.zarray``: as megatron-core 0.12.1 writes. Unlike there,
a chunk that is absent is an error, never zeros; nothing is locked, so no ``.sync`` directories are left behind, since
pieces of one chunk are disjoint ranges of bytes; and scalars are saved.

Source: the documentation of ``megatron.core.dist_checkpointing.strategies.zarr``; megatron-core 0.12.1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.prepared_save import prepare_save
from core.dist_checkpointing._engine.torch_dtypes import dtype_name
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from core.dist_checkpointing.strategies._zarr.arrays import (
    array_keys,
    check_no_array,
    check_region,
    create_array,
    write_in_chunk,
)
from core.dist_checkpointing.strategies._zarr.checkpoints import (
    BACKEND,
    VERSION,
    ZarrCheckpoints,
    tensors_of,
    with_leaves,
)
from core.dist_checkpointing.strategies._zarr.shards import (
    flatten_range,
    pad_to_expected_shape,
    postprocess_numpy_array,
    stored_region,
)
from core.dist_checkpointing.strategies.base import (
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)
from core.dist_checkpointing.strategies.zarr_types import (
    cast_array,
    numpy_of,
    numpy_to_torch_dtype_dict,
    torch_to_numpy_dtype_dict,
)
from core.errors import CorruptError, MissingShardError, UnsupportedError, UsageError
from core.files.url import refuse_url
from core.formats.zarr.grid import ChunkGrid

__all__ = [
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "flatten_range",
    "load_zarr_based_sharded_metadata",
    "numpy_to_torch_dtype_dict",
    "pad_to_expected_shape",
    "postprocess_numpy_array",
    "register_default_zarr_strategies",
    "torch_to_numpy_dtype_dict",
]

logger = logging.getLogger(__name__)


def register_default_zarr_strategies() -> None:
    """Makes the strategies of this module the default ones for backend ``zarr``, version 1."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, ZarrSaveShardedStrategy(BACKEND, VERSION))
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, ZarrLoadShardedStrategy(BACKEND, VERSION))


class ZarrSaveShardedStrategy(SaveShardedStrategy):
    """Saves sharded tensors as zarr 2 arrays."""

    syncs_files = True

    def __init__(self, backend: str, version: int) -> None:
        super().__init__(backend, version)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Writes the main replicas; every rank calls this, and writes what it holds. ``.zarray`` files come last.

        Args:
            sharded_state_dict: its leaves are ShardedTensors.
            checkpoint_dir: exists.

        Raises:
            UsageError: a leaf is no ShardedTensor, or an array of such a key is there already.
            UnsupportedError: the shards of a tensor are no regular grid, its key is no name of a directory, or zarr
                has no such type.
            CheckpointingException: shards do not make up their tensor, or a rank failed; raised on every rank.
        """
        refuse_url(checkpoint_dir)
        checkpoint_dir = Path(checkpoint_dir)

        def mine() -> list[ShardedTensor]:
            tensors = [ten for ten in tensors_of(sharded_state_dict) if is_main_replica(ten.replica_id)]
            for key in {ten.key for ten in tensors}:
                check_no_array(checkpoint_dir / key, key=key)
            return tensors

        prepared = prepare_save(comm.together(mine), (), checkpoint_dir, format=BACKEND)
        comm.together(prepared.write)
        comm.together(lambda: prepared.finish() if comm.rank() == 0 else None)


def _create_or_open_zarr_arrays(sharded_tensors: list[ShardedTensor], checkpoint_dir: Path) -> list[zarr.Array | None]:
    """The array of every tensor that this rank writes; a collective call.

    The rank that holds the first element of a tensor's main replica creates its array; those with other parts of it
    open that one, once all are there.

    Args:
        sharded_tensors: what this rank holds.
        checkpoint_dir: where the arrays are, or shall be.

    Returns:
        None for a tensor that is not the main replica, which is not written.

    Raises:
        CheckpointingException: an array exists already, or nobody created it; raised on every rank.
    """

    def created() -> list[zarr.Array | None]:
        return [
            _create_zarr_array(ten, checkpoint_dir) if _should_create_array(ten) else None for ten in sharded_tensors
        ]

    def opened() -> list[zarr.Array | None]:
        return [
            _open_for_writing(checkpoint_dir / ten.key) if arr is None and is_main_replica(ten.replica_id) else arr
            for ten, arr in zip(sharded_tensors, arrays, strict=True)
        ]

    arrays = comm.together(created)
    return comm.together(opened)


def _should_create_array(ten: ShardedTensor) -> bool:
    """Whether a tensor is the main replica of the part that begins with the global tensor's first element."""
    held = ten.flattened_range
    is_first = held is None or (held.start == 0 and (held.stop > 0 or not prod(ten.local_shape)))
    return is_main_replica(ten.replica_id) and not any(ten.global_offset) and is_first


def _save_to_existing_array(sharded_tensor: ShardedTensor, arr: zarr.Array | None) -> None:
    """Writes a main replica's data into its array; nothing for another replica.

    Several processes may write parts of one array at once, as long as every chunk is written by one of them or in
    flattened pieces.

    Args:
        arr: as ``_create_or_open_zarr_arrays`` gave it.

    Raises:
        UsageError: there is no data, or no array for them.
        UnsupportedError: the tensor is flattened, and its shard is no plain chunk of the array, or no file.
    """
    if not is_main_replica(sharded_tensor.replica_id):
        return
    key = sharded_tensor.key
    if arr is None or sharded_tensor.data is None:
        raise UsageError(f"there is no {'array' if arr is None else 'data'} for a main replica", key=key)
    x = numpy_of(sharded_tensor.data, key=key)
    held = sharded_tensor.flattened_range
    if held is None:
        arr[sharded_tensor.global_slice()] = x
        return
    if tuple(arr.chunks) != (1,) * sharded_tensor.prepend_axis_num + tuple(sharded_tensor.local_shape):
        raise UnsupportedError(
            f"the shard {sharded_tensor.local_shape} of a flattened tensor is no chunk {arr.chunks} of its array",
            key=key,
        )
    if not isinstance(arr.store, zarr.storage.LocalStore):
        raise UnsupportedError(f"pieces of a chunk are written into files, not into {arr.store}", key=key)
    if x.size:
        array_dir = Path(arr.store.root) / arr.path
        index = sharded_tensor.local_chunk_offset_in_global()
        write_in_chunk(array_dir, index, held.start * x.itemsize, memoryview(x.view(np.uint8)), key=key)


def _create_zarr_array(sharded_tensor: ShardedTensor, checkpoint_dir: Path) -> zarr.Array:
    """A new array for a global tensor, without chunks as yet, opened for writing.

    Raises:
        CheckpointingException: it exists already, the shards are no regular grid, or zarr has no such type.
    """
    key = sharded_tensor.key
    chunk_shape = tuple(max(extent, 1) for extent in sharded_tensor.max_allowed_chunks())
    dtype = dtype_name(sharded_tensor.dtype, key=key)
    create_array(checkpoint_dir / key, ChunkGrid(tuple(sharded_tensor.global_shape), chunk_shape), dtype, key=key)
    logger.debug("created the zarr array %s", checkpoint_dir / key)
    return _open_for_writing(checkpoint_dir / key)


def _open_for_writing(path: Path) -> zarr.Array:
    # Without the option, zarr would leave out chunks of zeros.
    return _open_zarr_array_verbose(path, "r+").with_config({"write_empty_chunks": True})


class ZarrLoadShardedStrategy(ZarrCheckpoints, LoadShardedStrategy):
    """Loads sharded tensors from zarr 2 arrays.

    Args:
        backend, version: those of the checkpoints that are loaded: ``zarr``, 1.
    """

    def __init__(self, backend: str, version: int) -> None:
        super().__init__()
        self.backend = backend
        self.version = version

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> ShardedStateDict:
        """The same tree with tensors as leaves; every rank calls this.

        Tensors with data are loaded in place; others get data on the CPU.

        Args:
            sharded_state_dict: its leaves are ShardedTensors, sharded in whichever way.
            checkpoint_dir: holds the arrays.

        Raises:
            UsageError: a leaf is no ShardedTensor.
            CorruptError: a chunk is absent (MissingShardError) or damaged.
            CheckpointingException: there is no such array or one of another shape, or a rank failed; raised on every
                rank.
        """

        def filled() -> list[Any]:
            tensors = tensors_of(sharded_state_dict)
            for tensor in tensors:
                tensor.init_data("cpu")
            bridge.load_tensors(tensors, Path(checkpoint_dir))
            return [tensor.data for tensor in tensors]

        return with_leaves(sharded_state_dict, comm.together(filled))

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Key → ShardedTensor without data and sharding, of every array.

        Raises:
            CheckpointingException: an array cannot be opened, or torch has no such type.
        """
        return load_zarr_based_sharded_metadata(Path(checkpoint_dir), _zarr_shape_dtype)


def _zarr_shape_dtype(path: str) -> Any:
    """(shape, numpy dtype) of an array."""
    array = _open_zarr_array_verbose(Path(path), "r")
    return array.shape, array.dtype


def _load_from_array(sharded_tensor: ShardedTensor, checkpoint_dir: Path) -> torch.Tensor:
    """A new CPU tensor with what a ShardedTensor stands for, of its dtype, read by zarr.

    Raises:
        CheckpointingException: there is no such array, its shape differs and may not, or the cast is not made.
        MissingShardError: a chunk is absent.
    """
    arr = _open_zarr_array_verbose(checkpoint_dir / sharded_tensor.key, "r")
    region = stored_region(sharded_tensor, arr.shape)
    check_region(checkpoint_dir, sharded_tensor.key, region)
    return postprocess_numpy_array(
        cast_array(arr[region], sharded_tensor.dtype, key=sharded_tensor.key), sharded_tensor
    )


def _open_zarr_array_verbose(path: Path, mode: str, **open_kwargs: Any) -> zarr.Array:
    """An array of zarr 2.

    Args:
        path: its directory.
        mode: ``r`` or ``r+``.
        open_kwargs: further arguments of ``zarr.open_array``.

    Raises:
        MissingShardError: there is none; what is there instead is logged.
        CorruptError: its metadata cannot be read by zarr.
    """
    path = Path(path)
    try:
        return zarr.open_array(str(path), mode=mode, zarr_format=2, **open_kwargs)
    except FileNotFoundError as err:
        inside = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else None
        logger.debug("no zarr array %s; its directory holds %s", path, inside)
        missing = "" if inside is not None else f": the directory {path.parent} does not exist"
        raise MissingShardError(f"there is no zarr array {path}{missing}", key=path.name) from err
    except (ValueError, TypeError, KeyError, OSError) as err:
        raise CorruptError(f"zarr cannot open the array {path}: {str(err)[:200]}", key=path.name) from err


def load_zarr_based_sharded_metadata(
    checkpoint_dir: Path, get_shape_dtype_fn: Callable[[str], tuple[tuple[int], np.dtype]]
) -> ShardedStateDict:
    """Key → ShardedTensor without data and sharding, of every array of a checkpoint.

    Args:
        checkpoint_dir: its directories that hold a ``.zarray``, at any depth, are the arrays.
        get_shape_dtype_fn: path of an array → its shape and numpy dtype.

    Raises:
        UnsupportedError: torch has no such type.
    """
    checkpoint_dir = Path(checkpoint_dir)
    return {
        key: _whole_tensor(key, *get_shape_dtype_fn(str(checkpoint_dir / key))) for key in array_keys(checkpoint_dir)
    }


def _whole_tensor(key: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ShardedTensor:
    found = numpy_to_torch_dtype_dict.get(dtype.newbyteorder("="))
    if found is None:
        raise UnsupportedError(f"torch has no element type for numpy's {dtype}", key=key)
    return bridge.whole_tensor(key, found, shape)
