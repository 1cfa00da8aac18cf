"""Loading of ``zarr`` checkpoints in two stages: one rank of a data parallel group reads, the others receive.

::

    storage ── TensorStore ──▶ rank that reads ── broadcast ──▶ ranks of its data parallel group

Within a group, every distinct chunk is read once, by the lowest rank that wants it, and sent whole; a flattened tensor
takes its range of it. One chunk is in flight at a time.

Source: megatron-core 0.12.1, the last with this module. There, ranks wait forever for one that could not read; here the
outcome of each reading is told to the group, and every rank raises.
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

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from core.dist_checkpointing.strategies._zarr.checkpoints import ZarrCheckpoints, tensors_of, with_leaves
from core.dist_checkpointing.strategies._zarr.shards import flatten_range
from core.dist_checkpointing.strategies.base import LoadShardedStrategy
from core.dist_checkpointing.strategies.tensorstore import _load_from_array, load_tensorstore_metadata
from core.errors import UsageError

logger = logging.getLogger(__name__)

timers: defaultdict[str, list[float]] = defaultdict(list)
"""Function name → seconds of its calls in this process, of those that ``timed`` wraps."""


def timed(verbose: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that enters how long calls take in ``timers``.

    Args:
        verbose: log the beginning and the end of every call, too.
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
    """What one rank wants.

    Args:
        global_rank: of that rank, in the world.
        sharded_tensor_no_data: the tensor.
        dist_group_rank: the rank's number in its data parallel group.
        dist_group_ranks: global ranks of that group.
        data_size: bytes, where known.
    """

    global_rank: int
    sharded_tensor_no_data: ShardedTensor
    dist_group_rank: int
    dist_group_ranks: tuple[int, ...]
    data_size: int | None = None


def sharded_tensor_chunk_id(sharded_tensor: ShardedTensor) -> tuple[str, tuple[int, ...]]:
    """What tells the chunks of a checkpoint apart: the key, and the offset in the global tensor, in elements."""
    return sharded_tensor.key, tuple(sharded_tensor.global_offset)


class TwoStageDataParallelLoadShardedStrategy(ZarrCheckpoints, LoadShardedStrategy):
    """Loads sharded tensors from zarr 2 arrays once per data parallel group, by TensorStore.

    Tensors are loaded in place; those without data get it, on the CPU or, without ``cpu_transfer``, on the GPU.

    Args:
        data_parallel_group: ranks that hold the same shards; None for all ranks.
        cpu_transfer: send by way of host memory, in a gloo group that is made for it; else over the given group, whose
            backend must be able to send from the current CUDA device.
    """

    def __init__(self, data_parallel_group: Any, cpu_transfer: bool = True) -> None:
        super().__init__()
        self.cpu_transfer = cpu_transfer
        self.data_parallel_group_orig = data_parallel_group
        self.data_parallel_group = None if cpu_transfer else data_parallel_group
        is_distributed = comm.is_distributed()
        ranks = dist.get_process_group_ranks(data_parallel_group) if is_distributed else [0]
        self.dp_group_ranks = tuple(sorted(ranks))
        self.dp_group_rank = comm.rank(data_parallel_group)
        self.global_rank = comm.rank()

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> ShardedStateDict:
        """The same tree with tensors as leaves; every rank of the world calls this.

        Args:
            sharded_state_dict: its leaves are ShardedTensors.
            checkpoint_dir: holds the arrays.

        Raises:
            UsageError: a leaf is no ShardedTensor, or ranks of a group want different tensors at one offset.
            CorruptError: a chunk is absent (MissingShardError) or cannot be read.
            CheckpointingException: there is no such array or one of another shape, or a rank failed; raised on every
                rank.
        """
        self.maybe_init_gloo_group()

        def allocated() -> list[ShardedTensor]:
            tensors = tensors_of(sharded_state_dict)
            for tensor in tensors:
                tensor.init_data(self._device())
            return tensors

        tensors = comm.together(allocated)

        def exchanged() -> list[Any]:
            self._exchange_loaded_tensors(self._build_load_plan(tensors), tensors, Path(checkpoint_dir))
            return [tensor.data for tensor in tensors]

        return with_leaves(sharded_state_dict, comm.together(exchanged))

    def summarize_load_times(self) -> None:
        """Logs, on rank 0, the greatest and the mean of all ranks' times; every rank calls this."""
        totals = comm.gather({name: sum(seconds) for name, seconds in timers.items()})
        for name in sorted(set(chain.from_iterable(totals or ()))):
            of_ranks = [found.get(name, 0.0) for found in totals or ()]
            logger.info("%s: max %.3f s, mean %.3f s", name, max(of_ranks), sum(of_ranks) / len(of_ranks))

    @timed(verbose=False)
    def load_tensor_from_storage(self, checkpoint_dir: str | Path, ten_meta: _ShardedTensorMetadata) -> torch.Tensor:
        """A tensor's whole shard, on the CPU.

        Raises:
            CheckpointingException: it cannot be read.
        """
        return _load_from_array(ten_meta.sharded_tensor_no_data, Path(checkpoint_dir), apply_flattened_range=False)

    @timed()
    def maybe_init_gloo_group(self) -> None:
        """Makes the gloo groups for ``cpu_transfer``, once; every rank of the world calls this."""
        if not self.cpu_transfer or self.data_parallel_group is not None or not comm.is_distributed():
            return
        for ranks in sorted(set(comm.all_gather(self.dp_group_ranks))):
            group = dist.new_group(ranks=list(ranks), backend="gloo")
            if self.global_rank in ranks:
                self.data_parallel_group = group

    @timed()
    def _build_load_plan(self, tensors: Sequence[ShardedTensor]) -> list[_ShardedTensorMetadata]:
        """What the group wants, each chunk once, in an order that all its ranks find."""
        wanted = [
            _ShardedTensorMetadata(self.global_rank, ten.without_data(), self.dp_group_rank, self.dp_group_ranks)
            for ten in tensors
        ]
        return self.deduplicate_chunks(list(chain.from_iterable(comm.all_gather(wanted, self.data_parallel_group))))  # type: ignore[no-any-return]

    @timed()
    def deduplicate_chunks(self, ten_metas: list[_ShardedTensorMetadata]) -> list[_ShardedTensorMetadata]:
        """Of those that want the same chunk, the one with the lowest rank in the group; sorted by chunk.

        Raises:
            UsageError: some want different tensors at one offset.
        """
        found: dict[Any, _ShardedTensorMetadata] = {}
        for meta in ten_metas:
            chunk_id = sharded_tensor_chunk_id(meta.sharded_tensor_no_data)
            other = found.setdefault(chunk_id, meta)
            if _whole_shard(meta) != _whole_shard(other):
                raise UsageError(
                    f"ranks {other.global_rank} and {meta.global_rank} of one data parallel group want different "
                    f"tensors at offset {chunk_id[1]}: {_whole_shard(other)} and {_whole_shard(meta)}",
                    key=chunk_id[0],
                )
            if meta.dist_group_rank < other.dist_group_rank:
                found[chunk_id] = meta
        return [found[chunk_id] for chunk_id in sorted(found)]

    @timed()
    def _exchange_loaded_tensors(
        self, ten_metas: Sequence[_ShardedTensorMetadata], tensors: Sequence[ShardedTensor], checkpoint_dir: Path
    ) -> None:
        """Reads and sends every chunk, and fills the tensors from it."""
        wanting: defaultdict[Any, list[ShardedTensor]] = defaultdict(list)
        for tensor in tensors:
            wanting[sharded_tensor_chunk_id(tensor)].append(tensor)
        for meta in ten_metas:
            shard = self._sent(meta, checkpoint_dir)
            for tensor in wanting[sharded_tensor_chunk_id(meta.sharded_tensor_no_data)]:
                assert tensor.data is not None
                tensor.data.detach().copy_(flatten_range(tensor, shard).reshape(tensor.data.shape))

    def _sent(self, meta: _ShardedTensorMetadata, checkpoint_dir: Path) -> torch.Tensor:
        """A chunk, on every rank of the group, as it was read by one of them.

        Raises:
            CheckpointingException: it could not be read; on every rank of the group.
        """
        wanted = meta.sharded_tensor_no_data

        def shard_to_send_or_fill() -> torch.Tensor:
            if self.dp_group_rank == meta.dist_group_rank:
                return self.load_tensor_from_storage(checkpoint_dir, meta).to(self._device()).contiguous()
            return torch.empty(wanted.local_shape, dtype=wanted.dtype, device=self._device())

        shard = comm.together(shard_to_send_or_fill, self.data_parallel_group)
        if len(self.dp_group_ranks) > 1:
            raw = shard.reshape(-1).view(torch.uint8)  # gloo does not send every element type
            comm.broadcast_bytes(raw, meta.dist_group_rank, self.data_parallel_group)
        return shard

    def _device(self) -> torch.device:
        """Where shards are sent from and received."""
        return torch.device("cpu") if self.cpu_transfer else torch.device("cuda", torch.cuda.current_device())

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Key → ShardedTensor without data and sharding, of every array.

        Raises:
            CheckpointingException: an array cannot be opened, or torch has no such type.
        """
        return load_tensorstore_metadata(checkpoint_dir)


def _whole_shard(meta: _ShardedTensorMetadata) -> tuple[object, ...]:
    """What must be equal of tensors that are filled from one chunk."""
    ten = meta.sharded_tensor_no_data
    return tuple(ten.local_shape), tuple(ten.global_shape), ten.dtype, ten.prepend_axis_num, ten.allow_shape_mismatch
