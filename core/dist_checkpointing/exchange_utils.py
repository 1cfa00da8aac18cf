"""How ranks exchange what they have loaded, each shard by its main rank (``shard_distribution``, found here, too).

There are three algorithms. What a rank needs in memory beside the tensors that it keeps:

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

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch

from core.dist_checkpointing._engine.float8 import is_float8tensor
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.parcels import Parcel, in_place, pack, parcels_of, row_bytes, unpack
from core.dist_checkpointing._ranks.shard_bytes import (
    buffer,
    copy_bytes,
    destination,
    exchange_device,
    n_bytes,
    n_elements,
    nominal,
)
from core.dist_checkpointing._ranks.shard_distribution import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
)
from core.dist_checkpointing.mapping import ShardedTensor
from core.dist_checkpointing.utils import _ShardId
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

_MAX_NAMED = 4


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
