"""The backend ``zarr``: sharded tensors as zarr 2 arrays, one directory per key.

``core.formats.zarr.format`` describes the files. The strategies use the engine: chunks are files of
plain bytes, which it writes and reads directly, without zarr. The documented helpers use
zarr-python's arrays, in the same files. zarr-python 3 does not support bfloat16 and float8;
``zarr_types`` adds them to its registry, so that it can open and save such arrays, too.

A chunk is the shard of one rank, not compressed. Where shards do not divide an axis evenly, the
chunks do not divide it at all, and several ranks write parts of one chunk. ``.zarray`` names
bfloat16 ``bfloat16``, as megatron-core 0.12.1 writes it. Four things differ from megatron-core:
a missing chunk is an error and is never read as zeros; chunks are not locked, because ranks write
disjoint ranges of bytes, so no ``.sync`` directories remain; scalars are saved; and so are uneven
shards.

Source: the documentation of ``megatron.core.dist_checkpointing.strategies.zarr``; megatron-core
0.12.1.
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
from typing_extensions import override

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
    flatten_range,
    list_sharded_tensors,
    pad_to_expected_shape,
    postprocess_numpy_array,
    replace_leaves,
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
from core.files.remote_path import is_remote
from core.files.url import find_location
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
    """Register the strategies of this module as the defaults of backend ``zarr``, version 1."""
    register_default_strategy(
        StrategyAction.SAVE_SHARDED, BACKEND, VERSION, ZarrSaveShardedStrategy(BACKEND, VERSION)
    )
    register_default_strategy(
        StrategyAction.LOAD_SHARDED, BACKEND, VERSION, ZarrLoadShardedStrategy(BACKEND, VERSION)
    )


class ZarrSaveShardedStrategy(SaveShardedStrategy):
    """A strategy that saves sharded tensors as zarr 2 arrays."""

    syncs_files = True

    def __init__(self, backend: str, version: int) -> None:
        super().__init__(backend, version)

    @override
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's main replicas, and then the ``.zarray`` files; collective.

        Args:
            sharded_state_dict: a tree of ShardedTensors.
            checkpoint_dir: an existing directory, or the URL of a prefix.

        Raises:
            UsageError: a leaf is not a ShardedTensor, or the array of a key already exists.
            UnsupportedError: the key of a tensor is not a valid directory name, zarr does not
                support its dtype, or ranks have parts of one chunk and the directory is a URL.
            CheckpointingException: shards do not form a complete tensor, or a rank failed; on every
                rank.
        """
        location = find_location(checkpoint_dir)

        def select_own() -> list[ShardedTensor]:
            tensors = [
                ten
                for ten in list_sharded_tensors(sharded_state_dict)
                if is_main_replica(ten.replica_id)
            ]
            # Chunks of an old array could be taken for those of the new one. Where a save to an
            # object store begins, there are none.
            if not is_remote(location):
                for key in {ten.key for ten in tensors}:
                    check_no_array(location / key, key=key)
            return tensors

        prepared = prepare_save(comm.together(select_own), (), location, format=BACKEND)
        # Write .zarray after all ranks have written: without it, nobody reads the chunks.
        comm.together(prepared.write)
        comm.together(lambda: prepared.finish() if comm.rank() == 0 else None)


def _create_or_open_zarr_arrays(
    sharded_tensors: list[ShardedTensor], checkpoint_dir: Path
) -> list[zarr.Array | None]:
    """Create or open the array of every tensor that this rank writes; collective.

    The rank whose main replica has the first element of a tensor creates the array; ranks with
    other shards open it as soon as all arrays exist.

    Args:
        sharded_tensors: tensors of this rank.
        checkpoint_dir: directory with the arrays.

    Returns:
        The array of each tensor; None for a tensor that is not a main replica and not written.

    Raises:
        CheckpointingException: an array already exists, or no rank created it; on every rank.
    """

    def create() -> list[zarr.Array | None]:
        return [
            _create_zarr_array(ten, checkpoint_dir) if _should_create_array(ten) else None
            for ten in sharded_tensors
        ]

    def open_others() -> list[zarr.Array | None]:
        return [
            _open_for_writing(checkpoint_dir / ten.key)
            if arr is None and is_main_replica(ten.replica_id)
            else arr
            for ten, arr in zip(sharded_tensors, arrays, strict=True)
        ]

    # Open the arrays after all ranks have created theirs.
    arrays = comm.together(create)
    return comm.together(open_others)


def _should_create_array(ten: ShardedTensor) -> bool:
    """Check if a tensor is the main replica of the global tensor's first shard."""
    flat = ten.flattened_range
    # Several ranks may have an empty range that starts at 0; none of them has the first element.
    is_first = flat is None or (flat.start == 0 and (flat.stop > 0 or not prod(ten.local_shape)))
    return is_main_replica(ten.replica_id) and not any(ten.global_offset) and is_first


def _save_to_existing_array(sharded_tensor: ShardedTensor, arr: zarr.Array | None) -> None:
    """Write a main replica's data into its array; do nothing for another replica.

    Several processes may write to the same array at the same time, as long as each chunk is written
    by one of them, or by several as flattened ranges.

    Args:
        arr: result of ``_create_or_open_zarr_arrays`` for the tensor.

    Raises:
        UsageError: the data or the array is missing.
        UnsupportedError: the tensor is flattened, and its shard is not a plain chunk of the array,
            or the array is not stored as files.
    """
    if not is_main_replica(sharded_tensor.replica_id):
        return
    key = sharded_tensor.key
    if arr is None or sharded_tensor.data is None:
        raise UsageError(
            f"the {'array' if arr is None else 'data'} of a main replica is missing", key=key
        )
    array = numpy_of(sharded_tensor.data, key=key)
    flat = sharded_tensor.flattened_range
    if flat is None:
        arr[sharded_tensor.global_slice()] = array
        return
    # A flattened range is a run of bytes in the chunk of its shard. zarr can only write complete
    # chunks, so write the bytes into the file of the chunk.
    shard_shape = (1,) * sharded_tensor.prepend_axis_num + tuple(sharded_tensor.local_shape)
    if tuple(arr.chunks) != shard_shape:
        raise UnsupportedError(
            f"the shard of a flattened tensor has shape {shard_shape}, but the chunks of its array "
            f"have shape {arr.chunks}",
            key=key,
        )
    if not isinstance(arr.store, zarr.storage.LocalStore):
        raise UnsupportedError(
            f"a flattened tensor can only be written to a local directory, not to {arr.store}",
            key=key,
        )
    if array.size:
        array_dir = Path(arr.store.root) / arr.path
        index = sharded_tensor.local_chunk_offset_in_global()
        write_in_chunk(
            array_dir, index, flat.start * array.itemsize, memoryview(array.view(np.uint8)), key=key
        )


def _create_zarr_array(sharded_tensor: ShardedTensor, checkpoint_dir: Path) -> zarr.Array:
    """Create the array of a global tensor, without chunks, and open it for writing.

    Raises:
        CheckpointingException: the array already exists, the shards do not form a regular grid, or
            zarr does not support the dtype.
    """
    key = sharded_tensor.key
    # A chunk has at least one element per axis, also in an empty tensor.
    chunk_shape = tuple(max(extent, 1) for extent in sharded_tensor.max_allowed_chunks())
    dtype = dtype_name(sharded_tensor.dtype, key=key)
    create_array(
        checkpoint_dir / key,
        ChunkGrid(tuple(sharded_tensor.global_shape), chunk_shape),
        dtype,
        key=key,
    )
    logger.debug("created the zarr array %s", checkpoint_dir / key)
    return _open_for_writing(checkpoint_dir / key)


def _open_for_writing(path: Path) -> zarr.Array:
    # By default zarr does not write chunks of zeros, which would be reported as missing later.
    return _open_zarr_array_verbose(path, "r+").with_config({"write_empty_chunks": True})


class ZarrLoadShardedStrategy(ZarrCheckpoints, LoadShardedStrategy):
    """A strategy that loads sharded tensors from zarr 2 arrays.

    Args:
        backend, version: those of the checkpoints that are loaded: ``zarr``, 1.
    """

    def __init__(self, backend: str, version: int) -> None:
        super().__init__()
        self.backend = backend
        self.version = version

    @override
    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> ShardedStateDict:
        """Replace the leaves of a tree with loaded tensors; collective.

        Tensors with data are loaded in place; missing data is allocated on the CPU.

        Args:
            sharded_state_dict: a tree of ShardedTensors, sharded in any way.
            checkpoint_dir: directory with the arrays.

        Raises:
            UsageError: a leaf is not a ShardedTensor.
            MissingShardError: a chunk is missing.
            CorruptError: a chunk is damaged.
            CheckpointingException: an array is missing or has another shape, or a rank failed; on
                every rank.
        """

        def load_all() -> list[Any]:
            tensors = list_sharded_tensors(sharded_state_dict)
            for tensor in tensors:
                tensor.init_data("cpu")
            bridge.load_tensors(tensors, checkpoint_dir)
            return [tensor.data for tensor in tensors]

        return replace_leaves(sharded_state_dict, comm.together(load_all))

    @override
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return an unsharded ShardedTensor without data for every array, by key.

        Raises:
            CheckpointingException: an array cannot be opened, or torch does not support its dtype.
        """

        location = find_location(checkpoint_dir)
        # zarr opens directories; its arrays in object stores are read by the engine.
        if is_remote(location):
            return bridge.sharded_metadata(location, tensors_only=True)

        def read_shape_and_dtype(path: str) -> Any:
            array = _open_zarr_array_verbose(Path(path), "r")
            return array.shape, array.dtype

        return load_zarr_based_sharded_metadata(location, read_shape_and_dtype)


def _load_from_array(sharded_tensor: ShardedTensor, checkpoint_dir: Path) -> torch.Tensor:
    """Load the shard of a ShardedTensor with zarr, as a new CPU tensor of its dtype.

    Raises:
        CheckpointingException: the array is missing, has another shape where that is not allowed,
            or cannot be cast.
        MissingShardError: a chunk is missing.
    """
    arr = _open_zarr_array_verbose(checkpoint_dir / sharded_tensor.key, "r")
    region = stored_region(sharded_tensor, arr.shape)
    # zarr reads missing chunks as zeros, so check that all exist.
    check_region(checkpoint_dir, sharded_tensor.key, region)
    return postprocess_numpy_array(
        cast_array(arr[region], sharded_tensor.dtype, key=sharded_tensor.key), sharded_tensor
    )


def _open_zarr_array_verbose(path: Path, mode: str, **open_kwargs: Any) -> zarr.Array:
    """Open a zarr 2 array.

    Args:
        path: directory of the array.
        mode: ``r`` or ``r+``.
        open_kwargs: further arguments of ``zarr.open_array``.

    Raises:
        MissingShardError: the array does not exist. The content of its parent directory is logged.
        CorruptError: zarr cannot read the metadata of the array.
    """
    path = Path(path)
    try:
        return zarr.open_array(str(path), mode=mode, zarr_format=2, **open_kwargs)
    except FileNotFoundError as err:
        siblings = (
            sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else None
        )
        logger.debug("zarr array %s not found; its parent directory contains %s", path, siblings)
        reason = "" if siblings is not None else f" (the directory {path.parent} does not exist)"
        raise MissingShardError(f"there is no Zarr array at {path}{reason}", key=path.name) from err
    except (ValueError, TypeError, KeyError, OSError) as err:
        raise CorruptError(
            f"zarr cannot open the array {path}: {str(err)[:200]}", key=path.name
        ) from err


def load_zarr_based_sharded_metadata(
    checkpoint_dir: Path, get_shape_dtype_fn: Callable[[str], tuple[tuple[int], np.dtype]]
) -> ShardedStateDict:
    """Return an unsharded ShardedTensor without data for every array of a checkpoint, by key.

    Args:
        checkpoint_dir: directory with the arrays; every directory with a ``.zarray``, at any depth,
            is an array.
        get_shape_dtype_fn: function that returns shape and numpy dtype of the array at a path.

    Raises:
        UnsupportedError: torch does not support the dtype of an array.
    """
    checkpoint_dir = Path(checkpoint_dir)
    metadata: ShardedStateDict = {}
    for key in array_keys(checkpoint_dir):
        shape, dtype = get_shape_dtype_fn(str(checkpoint_dir / key))
        # The byte order of the file does not matter: reading swaps the bytes.
        torch_dtype = numpy_to_torch_dtype_dict.get(dtype.newbyteorder("="))
        if torch_dtype is None:
            raise UnsupportedError(f"torch does not support the NumPy dtype {dtype}", key=key)
        metadata[key] = bridge.build_whole_tensor(key, torch_dtype, shape)
    return metadata
