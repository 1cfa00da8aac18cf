"""Loading of ``zarr`` checkpoints in two stages: one rank per data parallel group reads and sends.

::

    storage ── TensorStore ──▶ rank that reads ── broadcast ──▶ ranks of its data parallel group

Within a group, every distinct chunk is read once, by the lowest rank that needs it, and sent
completely; a flattened tensor takes its range from the chunk. One chunk is sent at a time.

Source: megatron-core 0.12.1, the last version with this module. There, ranks wait forever for a
rank that could not read; here the outcome of each read is sent to the group, and every rank raises.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from core.dist_checkpointing.strategies._zarr.checkpoints import (
    ZarrCheckpoints,
    flatten_range,
    list_sharded_tensors,
    replace_leaves,
)
from core.dist_checkpointing.strategies.base import LoadShardedStrategy
from core.dist_checkpointing.strategies.tensorstore import (
    _load_from_array,
    load_tensorstore_metadata,
)
from core.errors import UsageError
from core.files.url import refuse_url

logger = logging.getLogger(__name__)

timers: defaultdict[str, list[float]] = defaultdict(list)
"""Durations, in seconds, of the calls to functions that ``timed`` wraps; by function name."""


def timed(verbose: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that records the durations of calls in ``timers``.

    Args:
        verbose: also log the beginning and the end of every call.
    """

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> Any:
            if verbose:
                logger.debug("%s begins", name)
            start = time.monotonic()
            result = function(*args, **kwargs)
            timers[name].append(time.monotonic() - start)
            if verbose:
                logger.debug("%s took %.3f s", name, timers[name][-1])
            return result

        return timed_function

    return decorator


@dataclass
class _ShardedTensorMetadata:
    """A rank's request for a tensor.

    Args:
        global_rank: rank in the world.
        sharded_tensor_no_data: the requested tensor.
        dist_group_rank: rank in its data parallel group.
        dist_group_ranks: global ranks of that group.
        data_size: size in bytes, if known.
    """

    global_rank: int
    sharded_tensor_no_data: ShardedTensor
    dist_group_rank: int
    dist_group_ranks: tuple[int, ...]
    data_size: int | None = None


def sharded_tensor_chunk_id(sharded_tensor: ShardedTensor) -> tuple[str, tuple[int, ...]]:
    """Return the identity of a chunk of a checkpoint: key, and global offset in elements."""
    return sharded_tensor.key, tuple(sharded_tensor.global_offset)


class TwoStageDataParallelLoadShardedStrategy(ZarrCheckpoints, LoadShardedStrategy):
    """A strategy that loads zarr 2 arrays once per data parallel group, with TensorStore.

    Tensors are loaded in place; missing data is allocated on the CPU or, without ``cpu_transfer``,
    on the GPU.

    Args:
        data_parallel_group: ranks that hold the same shards; None for all ranks.
        cpu_transfer: send through host memory, in a gloo group that is created for this purpose;
            otherwise in the given group, whose backend must be able to send from the current CUDA
            device.
    """

    def __init__(self, data_parallel_group: Any, cpu_transfer: bool = True) -> None:
        super().__init__()
        self.cpu_transfer = cpu_transfer
        self.data_parallel_group_orig = data_parallel_group
        self.data_parallel_group = None if cpu_transfer else data_parallel_group
        is_distributed = comm.has_process_group()
        ranks = dist.get_process_group_ranks(data_parallel_group) if is_distributed else [0]
        self.dp_group_ranks = tuple(sorted(ranks))
        self.dp_group_rank = comm.rank(data_parallel_group)
        self.global_rank = comm.rank()

    @override
    def load(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> ShardedStateDict:
        """Replace the leaves of a tree with loaded tensors; collective over the world.

        Args:
            sharded_state_dict: a tree of ShardedTensors.
            checkpoint_dir: directory with the arrays.

        Raises:
            UsageError: a leaf is not a ShardedTensor, or ranks of a group request different tensors
                at the same offset.
            MissingShardError: a chunk is missing.
            CorruptError: a chunk cannot be read.
            CheckpointingException: an array is missing or has another shape, or a rank failed; on
                every rank.
        """
        refuse_url(checkpoint_dir)
        # Create the group first: an error in the state dict of one rank must not stop a collective
        # call that all ranks take part in.
        self.maybe_init_gloo_group()

        def allocate() -> list[ShardedTensor]:
            tensors = list_sharded_tensors(sharded_state_dict)
            for tensor in tensors:
                tensor.init_data(self._device())
            return tensors

        # Check the trees on all ranks before the exchange, in which no rank may be missing.
        tensors = comm.together(allocate)

        def exchange() -> list[Any]:
            self._exchange_loaded_tensors(
                self._build_load_plan(tensors), tensors, Path(checkpoint_dir)
            )
            return [tensor.data for tensor in tensors]

        return replace_leaves(sharded_state_dict, comm.together(exchange))

    def summarize_load_times(self) -> None:
        """Log the maximum and the mean time of all ranks, on rank 0; collective."""
        totals = comm.gather({name: sum(seconds) for name, seconds in timers.items()})
        # Ranks other than 0 have no totals and log nothing.
        for name in sorted(set(chain.from_iterable(totals or ()))):
            seconds_by_rank = [total.get(name, 0.0) for total in totals or ()]
            mean = sum(seconds_by_rank) / len(seconds_by_rank)
            logger.info("%s: max %.3f s, mean %.3f s", name, max(seconds_by_rank), mean)

    @timed(verbose=False)
    def load_tensor_from_storage(
        self, checkpoint_dir: str | Path, ten_meta: _ShardedTensorMetadata
    ) -> torch.Tensor:
        """Load the complete shard of a tensor, also of a flattened one, to the CPU.

        Raises:
            CheckpointingException: the shard cannot be read.
        """
        return _load_from_array(
            ten_meta.sharded_tensor_no_data, Path(checkpoint_dir), apply_flattened_range=False
        )

    @timed()
    def maybe_init_gloo_group(self) -> None:
        """Create the gloo groups for ``cpu_transfer``, once; collective over the world."""
        if (
            not self.cpu_transfer
            or self.data_parallel_group is not None
            or not comm.has_process_group()
        ):
            return
        # Every rank has to take part in the creation of every group, also of other ranks' groups.
        for ranks in sorted(set(comm.all_gather(self.dp_group_ranks))):
            group = dist.new_group(ranks=list(ranks), backend="gloo")
            if self.global_rank in ranks:
                self.data_parallel_group = group

    @timed()
    def _build_load_plan(self, tensors: Sequence[ShardedTensor]) -> list[_ShardedTensorMetadata]:
        """List the chunks that the group needs, each once, in the same order on all its ranks."""
        own_requests = [
            _ShardedTensorMetadata(
                self.global_rank, ten.without_data(), self.dp_group_rank, self.dp_group_ranks
            )
            for ten in tensors
        ]
        requests = comm.all_gather(own_requests, self.data_parallel_group)
        return self.deduplicate_chunks(list(chain.from_iterable(requests)))  # type: ignore[no-any-return]

    @timed()
    def deduplicate_chunks(
        self, ten_metas: list[_ShardedTensorMetadata]
    ) -> list[_ShardedTensorMetadata]:
        """Keep, for each chunk, the request of the lowest rank in the group; sorted by chunk.

        Raises:
            UsageError: ranks request different tensors at the same offset.
        """
        readers: dict[Any, _ShardedTensorMetadata] = {}
        for meta in ten_metas:
            chunk_id = sharded_tensor_chunk_id(meta.sharded_tensor_no_data)
            other = readers.setdefault(chunk_id, meta)
            # One read serves both ranks, so they have to request the same.
            if _shard_properties(meta) != _shard_properties(other):
                raise UsageError(
                    f"ranks {other.global_rank} and {meta.global_rank} of a data parallel group "
                    f"request different tensors at offset {chunk_id[1]}: "
                    f"{_shard_properties(other)} and {_shard_properties(meta)}",
                    key=chunk_id[0],
                )
            if meta.dist_group_rank < other.dist_group_rank:
                readers[chunk_id] = meta
        return [readers[chunk_id] for chunk_id in sorted(readers)]

    @timed()
    def _exchange_loaded_tensors(
        self,
        ten_metas: Sequence[_ShardedTensorMetadata],
        tensors: Sequence[ShardedTensor],
        checkpoint_dir: Path,
    ) -> None:
        """Read and send every chunk, and fill this rank's tensors from it."""
        tensors_of_chunk: defaultdict[Any, list[ShardedTensor]] = defaultdict(list)
        for tensor in tensors:
            tensors_of_chunk[sharded_tensor_chunk_id(tensor)].append(tensor)
        for meta in ten_metas:
            # All ranks of the group take part, also those that do not need the chunk.
            shard = self._read_and_broadcast(meta, checkpoint_dir)
            for tensor in tensors_of_chunk[sharded_tensor_chunk_id(meta.sharded_tensor_no_data)]:
                assert tensor.data is not None
                tensor.data.detach().copy_(flatten_range(tensor, shard).reshape(tensor.data.shape))

    def _read_and_broadcast(
        self, meta: _ShardedTensorMetadata, checkpoint_dir: Path
    ) -> torch.Tensor:
        """Read a chunk on one rank of the group and return it on all its ranks.

        Raises:
            CheckpointingException: the chunk cannot be read; on every rank of the group.
        """
        requested = meta.sharded_tensor_no_data

        def read_or_allocate() -> torch.Tensor:
            if self.dp_group_rank == meta.dist_group_rank:
                return (
                    self.load_tensor_from_storage(checkpoint_dir, meta)
                    .to(self._device())
                    .contiguous()
                )
            return torch.empty(requested.local_shape, dtype=requested.dtype, device=self._device())

        # Exchange the outcome before the data: a rank that failed would never send.
        shard = comm.together(read_or_allocate, self.data_parallel_group)
        if len(self.dp_group_ranks) > 1:
            raw = shard.reshape(-1).view(torch.uint8)  # gloo cannot send every dtype
            comm.broadcast_bytes(raw, meta.dist_group_rank, self.data_parallel_group)
        return shard

    def _device(self) -> torch.device:
        """Return the device that shards are sent from and received on."""
        return (
            torch.device("cpu")
            if self.cpu_transfer
            else torch.device("cuda", torch.cuda.current_device())
        )

    @override
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return an unsharded ShardedTensor without data for every array, by key.

        Raises:
            CheckpointingException: an array cannot be opened, or torch does not support its dtype.
        """
        return load_tensorstore_metadata(checkpoint_dir)


def _shard_properties(meta: _ShardedTensorMetadata) -> tuple[object, ...]:
    """Return the properties that tensors filled from one chunk must share."""
    ten = meta.sharded_tensor_no_data
    return (
        tuple(ten.local_shape),
        tuple(ten.global_shape),
        ten.dtype,
        ten.prepend_axis_num,
        ten.allow_shape_mismatch,
    )
