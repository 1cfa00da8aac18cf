"""Who of several ranks saves or loads a replicated shard.

The ranks of a *parallelization group* hold many shards in common. A :class:`ShardDistribution` names one of the holders
of each as its *main rank*, so that the bytes are spread evenly; every rank computes it from the same metadata and so
gets the same one. The documented place of the names is ``exchange_utils``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.parcels import comparable
from core.dist_checkpointing._ranks.shard_bytes import n_bytes
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from core.dist_checkpointing.utils import _sharded_tensor_shard_id, _ShardId
from core.errors import CheckpointingException

T = TypeVar("T")


class ShardDistribution(NamedTuple):
    """Who does the work on each shard, for one parallelization group. Ranks are counted within the group.

    Args:
        main_rank_for_shard: shard → the one rank that saves or loads it.
        shards_in_this_group: the shards that this group is responsible for.
        shard_to_metadata: shard → one ShardedTensor without data that describes it.
        all_ranks_for_shard: shard → the ranks that hold or need it, ascending.
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
    """One rank for each shard, so that the sizes add up evenly.

    Each shard in turn goes to the least loaded of its holders (the lowest of equals). The order: shards of this group
    before those that it only reads, few holders before many, large before small, then by the shard itself. So the
    result depends on the arguments alone. Where every rank holds every shard, no rank gets more than 4/3 of the
    smallest possible maximum (the bound of largest-first scheduling).

    Args:
        shard_to_ranks: shard → the ranks that hold it, at least one, each in [0, num_ranks).
        shard_to_size: shard → size, in bytes.
        num_ranks: ranks in the group.
        cross_parallelization_group_loads: shards whose main replica is in another group.

    Returns:
        Shard → rank, in the order of assignment.

    Raises:
        ValueError: a shard without a holder, or with one outside the group.
    """
    for shard, ranks in shard_to_ranks.items():
        if not ranks or not all(0 <= rank < num_ranks for rank in ranks):
            raise ValueError(f"shard {shard} needs holders among ranks 0–{num_ranks - 1}, not {list(ranks)}")
    loads = [0] * num_ranks
    found: dict[T, int] = {}
    for shard in sorted(
        shard_to_ranks,
        key=lambda shard: (
            shard in cross_parallelization_group_loads,
            len(shard_to_ranks[shard]),
            -shard_to_size[shard],
            comparable(shard),
        ),
    ):
        rank = min(shard_to_ranks[shard], key=lambda rank: (loads[rank], rank))
        loads[rank] += shard_to_size[shard]
        found[shard] = rank
    return found


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict, parallelization_group: Any, ignore_groups: bool = False
) -> ShardDistribution | None:
    """A distribution of the ShardedTensors that the ranks of a group hold. One collective exchange of metadata.

    Args:
        sharded_state_dict: what this rank holds.
        parallelization_group: process group, None for all ranks.
        ignore_groups: also take shards whose main replica is in no rank of this group, as loading must; without it
            they are left to the group that has the main replica, as saving must.

    Returns:
        The same on every rank; None in a group of one rank.

    Raises:
        CheckpointingException: ranks disagree about the dtype or the shape of a shard; on every rank.
    """
    if comm.world_size(parallelization_group) <= 1:
        return None
    held = comm.collect(
        lambda: [tensor.without_data() for tensor in _sharded_tensors(sharded_state_dict)], parallelization_group
    )
    metadata: dict[_ShardId, ShardedTensor] = {}
    ranks: dict[_ShardId, list[int]] = defaultdict(list)
    main: set[_ShardId] = set()
    for rank, tensors in enumerate(held):
        for tensor in tensors:
            shard = _sharded_tensor_shard_id(tensor)
            _check_same(metadata.setdefault(shard, tensor), tensor, rank)
            if rank not in ranks[shard][-1:]:
                ranks[shard].append(rank)
            if is_main_replica(tensor.replica_id):
                main.add(shard)
    ours = set(ranks) if ignore_groups else main
    ranks = {shard: found for shard, found in ranks.items() if shard in ours}
    sizes = {shard: n_bytes(metadata[shard]) for shard in ranks}
    chosen = distribute_shards_to_ranks(ranks, sizes, len(held), ours - main)
    return ShardDistribution(chosen, ours, metadata, ranks)


def _sharded_tensors(sharded_state_dict: ShardedStateDict) -> Iterator[ShardedTensor]:
    return (value for value in nested_values(sharded_state_dict) if isinstance(value, ShardedTensor))


def _check_same(one: ShardedTensor, other: ShardedTensor, rank: int) -> None:
    for name in ("dtype", "local_shape"):
        if getattr(one, name) != getattr(other, name):
            raise CheckpointingException(
                f"ranks disagree about the {name.replace('_', ' ')} of one shard at offset {one.global_offset}: "
                f"{getattr(one, name)} and {getattr(other, name)}",
                key=one.key,
                rank=str(rank),
            )
