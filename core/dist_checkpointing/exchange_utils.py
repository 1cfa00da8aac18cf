"""Who of several ranks saves or loads a replicated shard, and how the others get what it loaded.

The ranks of a *parallelization group* hold many shards in common. A :class:`ShardDistribution` names one of the holders
of each as its *main rank*, so that the bytes are spread evenly; every rank computes it from the same metadata and so
gets the same one. After a distributed load the ranks exchange tensors by one of three algorithms. What a rank needs in
memory beside the tensors that it keeps:

============== =========================================================================================
broadcast      one parcel: the largest shard that it passes on but does not keep, or 4 MiB of small ones
gather_rounds  as many parcels as there are ranks, and one, each as large as the largest of the round
gather_object  everything that the whole group loads, twice (in pickles, and out of them)
============== =========================================================================================

A parcel is a shard, or several small ones together. It travels as bytes, so every dtype does. Tensors received lie in
the memory that their ShardedTensor has already; without any, on the CPU. Groups whose backend moves only device memory
(NCCL) are served through the current device.

All functions with a group are collective. They fail on all of its ranks or on none: what can fail on one rank (a shard
that is not there, no memory) is done before the first exchange, and agreed on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch

from core.dist_checkpointing import comm
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.float8 import is_float8tensor
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from core.dist_checkpointing.parcels import Parcel, comparable, in_place, pack, parcels_of, row_bytes, unpack
from core.dist_checkpointing.shard_bytes import (
    buffer,
    copy_bytes,
    destination,
    exchange_device,
    n_bytes,
    n_elements,
    nominal,
)
from core.dist_checkpointing.utils import _sharded_tensor_shard_id, _ShardId
from core.errors import CheckpointingException, CorruptError, MissingShardError

__all__ = [
    "ShardDistribution",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "exchange_objects",
    "is_float8tensor",
]

T = TypeVar("T")

_MAX_NAMED = 4


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


def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None = None,
    parallelization_group: Any = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchanges tensors in rounds, in each of which every rank gives one parcel to all the others.

    The largest of each rank go first, so that the parcels of a round are of similar size: the smaller ones are padded.

    Args, returns, raises: see :func:`exchange_by_distribution`.
    """
    group = parallelization_group
    by_rank: list[list[Parcel]] = [[] for _ in range(comm.world_size(group))]
    for parcel in _parcels(_given(shard_distribution)):
        by_rank[parcel.main_rank].append(parcel)
    rounds = list(zip_longest(*by_rank))
    device = exchange_device(group)

    def prepared() -> tuple[dict[_ShardId, torch.Tensor], torch.Tensor, torch.Tensor]:
        width = max(map(row_bytes, rounds), default=0)
        found = _prepared(loaded_tensors, unloaded_shards, _given(shard_distribution), group)
        return found, buffer(width, device), buffer(width * len(by_rank), device)

    found, given, taken = comm.together(prepared, group)
    rank = comm.rank(group)
    for row in rounds:
        width = row_bytes(row)
        if row[rank] is not None:
            pack(row[rank], found, given)
        comm.gather_bytes(taken[: width * len(row)], given[:width], group)
        for source, parcel in enumerate(row):
            if parcel is not None and source != rank:
                unpack(parcel, found, taken[source * width :])
    return found


def exchange_loaded_tensors_gather_object(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Any = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchanges tensors by pickling all of them to all ranks: simple, slow and hungry, for comparison.

    Args, returns, raises: see :func:`exchange_by_distribution`; a shard that two ranks loaded is an error, too.
    """

    def sent() -> dict[_ShardId, tuple[torch.dtype, torch.Tensor]]:
        # As bytes of their own: pickle takes not every dtype, and a view would drag its whole storage along.
        found = {}
        for shard, tensor in loaded_tensors.items():
            values = nominal(tensor)
            raw = buffer(values.numel() * values.dtype.itemsize, torch.device("cpu"))
            copy_bytes(values, raw, is_received=False)
            found[shard] = values.dtype, raw
        return found

    def kept() -> dict[_ShardId, torch.Tensor]:
        found = dict(loaded_tensors)
        for shard, tensor in unloaded_shards.items():
            if shard not in everything:
                raise _missing([shard])
            if shard not in found:
                dtype, raw = everything[shard]
                _check_loaded(raw.view(dtype), tensor)
                found[shard] = destination(tensor)
                copy_bytes(found[shard], raw, is_received=True)
        return found

    everything = _united(comm.collect(sent, parallelization_group))
    return comm.together(kept, parallelization_group)


def exchange_loaded_objects_gather_object(loaded_objects: dict[_ShardId, Any]) -> dict[_ShardId, Any]:
    """The objects that any rank of the world loaded, on every rank (its own ones as they are). Collective.

    Raises:
        CheckpointingException: two ranks loaded an object of one id, or one cannot be pickled; on every rank.
    """
    return exchange_objects(loaded_objects)


def exchange_objects(loaded_objects: dict[_ShardId, Any], group: Any = None) -> dict[_ShardId, Any]:
    """What :func:`exchange_loaded_objects_gather_object` does, within a group."""
    return {**_united(comm.collect(lambda: loaded_objects, group)), **loaded_objects}


def _united(by_rank: list[dict[_ShardId, Any]]) -> dict[_ShardId, Any]:
    """All entries of all ranks.

    Raises:
        CheckpointingException: two ranks have an entry of one id.
    """
    found: dict[_ShardId, Any] = {}
    for rank, entries in enumerate(by_rank):
        twice = found.keys() & entries.keys()
        if twice:
            raise CheckpointingException(f"two ranks loaded the same shards: {_named(twice)}", rank=str(rank))
        found.update(entries)
    return found


def exchange_loaded_tensors_broadcast(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Any = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchanges tensors one after another, each from the rank that loaded it to the whole group.

    Args, returns, raises: see :func:`exchange_by_distribution`.
    """
    group = parallelization_group
    parcels = _parcels(_given(shard_distribution))
    device = exchange_device(group)

    def prepared() -> tuple[dict[_ShardId, torch.Tensor], torch.Tensor]:
        found = _prepared(loaded_tensors, unloaded_shards, _given(shard_distribution), group)
        staged = [parcel.n_bytes for parcel in parcels if in_place(parcel, found, device) is None]
        return found, buffer(max(staged, default=0), device)

    found, scratch = comm.together(prepared, group)
    for parcel in parcels:
        own = in_place(parcel, found, device)
        moved = scratch[: parcel.n_bytes] if own is None else own
        is_source = parcel.main_rank == comm.rank(group)
        if own is None and is_source:
            pack(parcel, found, moved)
        comm.broadcast_bytes(moved, parcel.main_rank, group)
        if own is None and not is_source:
            unpack(parcel, found, moved)
    return found


def exchange_by_distribution(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Any = None,
    exchange_algo: str = "broadcast",
) -> dict[_ShardId, torch.Tensor]:
    """The tensors that this rank needs, after each was loaded by its main rank. Collective.

    Args:
        loaded_tensors: shard → what this rank loaded.
        unloaded_shards: shard → what this rank needs from others; received into ``data``, which is allocated on the
            CPU where it is None.
        shard_distribution: the one by which the tensors were loaded.
        parallelization_group: its process group, None for all ranks.
        exchange_algo: "broadcast", "gather_rounds" or "gather_object"; the module's docstring compares their memory.

    Returns:
        ``loaded_tensors`` and one tensor for each of ``unloaded_shards``.

    Raises:
        ValueError: no such algorithm, or no distribution.
        CheckpointingException: a main rank has not loaded its shard, or not with the dtype and number of elements that
            the distribution says, or a shard that is needed is not distributed; on every rank.
    """
    exchanges = {
        "broadcast": exchange_loaded_tensors_broadcast,
        "gather_rounds": exchange_loaded_tensors_gather_rounds,
        "gather_object": exchange_loaded_tensors_gather_object,
    }
    if exchange_algo not in exchanges:
        raise ValueError(f"exchange_algo is one of {', '.join(exchanges)}, not {exchange_algo!r}")
    exchange = exchanges[exchange_algo]
    return exchange(loaded_tensors, unloaded_shards, _given(shard_distribution), parallelization_group)


def _given(distribution: ShardDistribution | None) -> ShardDistribution:
    if distribution is None:
        raise ValueError("an exchange needs the distribution by which the tensors were loaded")
    return distribution


def _exchanged(distribution: ShardDistribution) -> list[_ShardId]:
    """The shards that some rank needs beside the one that loads it."""
    return [
        shard
        for shard, rank in distribution.main_rank_for_shard.items()
        if any(other != rank for other in distribution.all_ranks_for_shard[shard])
    ]


def _parcels(distribution: ShardDistribution) -> list[Parcel]:
    sizes = {shard: n_bytes(distribution.shard_to_metadata[shard]) for shard in _exchanged(distribution)}
    return parcels_of(sizes, distribution.main_rank_for_shard)


def _prepared(
    loaded: dict[_ShardId, torch.Tensor],
    unloaded: dict[_ShardId, ShardedTensor],
    distribution: ShardDistribution,
    group: Any,
) -> dict[_ShardId, torch.Tensor]:
    """The tensors to send and the memory to receive into, after all checks that an exchange needs.

    Raises:
        CheckpointingException: as :func:`exchange_by_distribution` says; on this rank only.
    """
    rank = comm.rank(group)
    found = {shard: nominal(tensor) for shard, tensor in loaded.items()}
    for shard in _exchanged(distribution):
        if distribution.main_rank_for_shard[shard] == rank:
            if shard not in found:
                raise _missing([shard])
            _check_loaded(found[shard], distribution.shard_to_metadata[shard])
    missing = [shard for shard in unloaded if rank not in distribution.all_ranks_for_shard.get(shard, ())]
    if missing:
        raise _missing(missing)
    for shard_id, tensor in unloaded.items():
        if shard_id not in found:
            found[shard_id] = destination(tensor)
    return found


def _check_loaded(tensor: torch.Tensor, expected: ShardedTensor) -> None:
    for what, value, other in (
        ("elements", tensor.numel(), n_elements(expected)),
        ("dtype", tensor.dtype, expected.dtype),
    ):
        if value != other:
            raise CorruptError(f"a shard was loaded with {what} {value}, {other} was asked for", key=expected.key)


def _missing(shards: Iterable[_ShardId]) -> MissingShardError:
    return MissingShardError(f"no rank of the group has loaded {_named(shards)}")


def _named(shards: Iterable[_ShardId]) -> str:
    found = sorted({f"{key} at offset {offset}" for key, offset, _ in shards})
    return ", ".join(found[:_MAX_NAMED]) + (f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else "")
