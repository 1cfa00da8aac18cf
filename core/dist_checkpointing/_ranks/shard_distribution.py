"""The choice of the rank that saves or loads each replicated shard.

The ranks of a *parallelization group* hold many shards in common. A :class:`ShardDistribution`
names one of the holders of each as its *main rank*, so that the bytes are spread evenly. Every rank
computes it from the same metadata, so all get the same one. The documented place of the names is
``exchange_utils``.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple, TypeVar

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.parcels import sort_key
from core.dist_checkpointing._ranks.shard_bytes import is_empty_chunk, n_bytes
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from core.dist_checkpointing.utils import _sharded_tensor_shard_id, _ShardId
from core.errors import CheckpointingException

T = TypeVar("T")


class ShardDistribution(NamedTuple):
    """The main ranks of all shards of a parallelization group; ranks are counted within the group.

    Args:
        main_rank_for_shard: the one rank that saves or loads each shard.
        shards_in_this_group: the shards that this group is responsible for.
        shard_to_metadata: for each shard, a ShardedTensor without data that describes it.
        all_ranks_for_shard: for each shard, the ranks that hold or need it, ascending.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: dict[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def distribute_shards_to_ranks(
    shard_to_ranks: dict[T, list[int]],
    shard_to_size: dict[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: set[T],
) -> dict[T, int]:
    """Assign each shard to one of its holders, so that the sizes add up evenly.

    Each shard in turn goes to the least loaded of its holders (the lowest of equals). The order:
    shards of this group before those that it only reads, few holders before many, large before
    small, then by the shard itself. So the result depends on the arguments alone. If every rank
    holds every shard, no rank gets more than 4/3 of the smallest possible maximum (the bound of
    largest-first scheduling).

    Args:
        shard_to_ranks: the ranks that hold each shard, at least one, each in [0, num_ranks).
        shard_to_size: size of each shard, in bytes.
        num_ranks: number of ranks in the group.
        cross_parallelization_group_loads: shards whose main replica is in another group.

    Returns:
        The rank of each shard, in the order of assignment.

    Raises:
        ValueError: a shard has no holder, or one outside the group.
    """
    for shard, ranks in shard_to_ranks.items():
        if not ranks or not all(0 <= rank < num_ranks for rank in ranks):
            raise ValueError(
                f"shard {shard} needs holders among ranks 0–{num_ranks - 1}, but has {list(ranks)}"
            )
    loads = [0] * num_ranks
    assignment: dict[T, int] = {}
    for shard in sorted(
        shard_to_ranks,
        key=lambda shard: (
            shard in cross_parallelization_group_loads,
            len(shard_to_ranks[shard]),
            -shard_to_size[shard],
            sort_key(shard),
        ),
    ):
        rank = min(shard_to_ranks[shard], key=lambda rank: (loads[rank], rank))
        loads[rank] += shard_to_size[shard]
        assignment[shard] = rank
    return assignment


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict, parallelization_group: Any, ignore_groups: bool = False
) -> ShardDistribution | None:
    """Distribute the ShardedTensors of a group over its ranks; collective.

    Args:
        sharded_state_dict: this rank's state. Empty parts of uneven divisions are ignored.
        parallelization_group: process group, None for all ranks.
        ignore_groups: also take shards whose main replica is on no rank of this group, as loading
            must; without it they are left to the group that has the main replica, as saving must.

    Returns:
        The same distribution on every rank; None in a group of one rank.

    Raises:
        CheckpointingException: ranks disagree about the dtype or the shape of a shard; on every
            rank.
    """
    if comm.world_size(parallelization_group) <= 1:
        return None

    def tensors_without_data() -> list[ShardedTensor]:
        leaves = nested_values(sharded_state_dict)
        return [
            leaf.without_data()
            for leaf in leaves
            if isinstance(leaf, ShardedTensor) and not is_empty_chunk(leaf)
        ]

    # Collect the ranks that hold each shard.
    tensors_by_rank = comm.collect(tensors_without_data, parallelization_group)
    metadata: dict[_ShardId, ShardedTensor] = {}
    holders: dict[_ShardId, list[int]] = defaultdict(list)
    main_shards: set[_ShardId] = set()
    for rank, tensors in enumerate(tensors_by_rank):
        for tensor in tensors:
            shard = _sharded_tensor_shard_id(tensor)
            _require_same_type(metadata.setdefault(shard, tensor), tensor, rank)
            if rank not in holders[shard][-1:]:
                holders[shard].append(rank)
            if is_main_replica(tensor.replica_id):
                main_shards.add(shard)

    # Distribute the shards that this group is responsible for.
    shards = set(holders) if ignore_groups else main_shards
    holders = {shard: ranks for shard, ranks in holders.items() if shard in shards}
    sizes = {shard: n_bytes(metadata[shard]) for shard in holders}
    main_ranks = distribute_shards_to_ranks(
        holders, sizes, len(tensors_by_rank), shards - main_shards
    )
    return ShardDistribution(main_ranks, shards, metadata, holders)


def _require_same_type(first: ShardedTensor, second: ShardedTensor, rank: int) -> None:
    """Raise unless two copies of a shard have the same dtype and shape.

    Raises:
        CheckpointingException: the second copy, on ``rank``, differs.
    """
    for name in ("dtype", "local_shape"):
        if getattr(first, name) != getattr(second, name):
            raise CheckpointingException(
                f"ranks disagree about the {name.replace('_', ' ')} of one shard at offset "
                f"{first.global_offset}: "
                f"{getattr(first, name)} and {getattr(second, name)}",
                key=first.key,
                rank=str(rank),
            )
