"""The exchange of loaded shards between ranks, where each shard is loaded by its main rank only.

The ranks of a *parallelization group* hold many shards in common. A :class:`ShardDistribution`
names one of the holders of each as its *main rank*, so that the bytes are spread evenly. Every rank
computes it from the same metadata, so all get the same one.

There are three algorithms, which differ in the memory that a rank needs in addition to its own
tensors:

============== =================================================================================
broadcast      one parcel: the largest shard that the rank forwards but does not keep, or 4 MiB
               of small ones
gather_rounds  the same: the largest parcel, in slices of all ranks; in large groups 256 KiB for
               each rank, if that is more
gather_object  about the same: slices of the parcel, several times, because they are pickled
============== =================================================================================

A parcel is a shard, or several small ones together. It is sent as bytes, so tensors of every dtype
can be exchanged. A tensor is received into the memory that its ShardedTensor already has, or into
new CPU memory if it has none. For groups whose backend transfers only device memory (NCCL), bytes
pass through the current device.

All functions with a group are collective. They fail on all ranks of the group or on none:
everything that can fail on one rank (a missing shard, no memory) is done before the first exchange,
and its outcome is shared with all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch

from core.dist_checkpointing._engine.torch_dtypes import is_float8tensor
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.shard_bytes import (
    Parcel,
    allocate_bytes,
    bytes_in_place,
    exchange_device,
    is_empty_chunk,
    make_parcels,
    n_bytes,
    n_elements,
    pack_into,
    receive_buffer,
    row_bytes,
    slice_bytes,
    sort_key,
    unpack,
    with_nominal_dtype,
)
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, is_main_replica
from core.dist_checkpointing.utils import _sharded_tensor_shard_id, _ShardId
from core.errors import CheckpointingException, CorruptError, MissingShardError, list_some

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

_N_PICKLED_COPIES = 8
"""Slices that fit into the memory of one parcel; pickling, sending and unpickling copies each."""
T = TypeVar("T")


def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None = None,
    parallelization_group: Any = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchange tensors in rounds; in each round every rank sends one parcel to all others.

    Each rank sends its largest parcels first, so that the parcels of a round have similar sizes.
    The smaller ones are padded.

    Arguments, result and errors are those of :func:`exchange_by_distribution`.
    """
    group = parallelization_group
    rank, n_ranks = comm.rank(group), comm.world_size(group)
    # Round n consists of the n-th parcel of each rank, and None for ranks that have fewer.
    by_rank: list[list[Parcel]] = [[] for _ in range(n_ranks)]
    for parcel in _parcels(_require_distribution(shard_distribution)):
        by_rank[parcel.main_rank].append(parcel)
    rounds = list(zip_longest(*by_rank))
    # A round is sent in slices, so that those of all ranks together are as large as one parcel.
    step = slice_bytes(max(map(row_bytes, rounds), default=0), n_ranks)

    def prepare() -> tuple[dict[_ShardId, torch.Tensor], torch.Tensor]:
        distribution = _require_distribution(shard_distribution)
        tensors = _prepare_tensors(loaded_tensors, unloaded_shards, distribution, group)
        return tensors, allocate_bytes(step * n_ranks, exchange_device(group))

    # Check and allocate everything before the first exchange, so that no rank fails in between.
    tensors, scratch = comm.together(prepare, group)
    for parcels in rounds:
        # Ranks without a parcel send padding, because a gather needs the same size from all.
        width = row_bytes(parcels)
        for start in range(0, width, step):
            slices = scratch[: min(step, width - start) * n_ranks].view(n_ranks, -1)
            if parcels[rank] is not None:
                pack_into(parcels[rank], tensors, slices[rank], start)
            comm.gather_bytes(slices, group)
            for source, parcel in enumerate(parcels):
                if parcel is not None and source != rank:
                    unpack(parcel, tensors, slices[source], start)
    return tensors


def exchange_loaded_tensors_gather_object(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Any = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchange tensors one after another, pickled, which is slow; no distribution is needed.

    Arguments, result and errors are those of :func:`exchange_by_distribution`; a shard that two
    ranks loaded is also an error.

    Args:
        loaded_tensors, unloaded_shards, parallelization_group: as for the other algorithms.
        shard_distribution: not used; ranks tell each other what they have loaded.
    """
    group = parallelization_group
    distribution = _distribution_of_loaded(loaded_tensors, unloaded_shards, group)
    parcels = _parcels(distribution)
    step = slice_bytes(max((parcel.n_bytes for parcel in parcels), default=0), _N_PICKLED_COPIES)

    def prepare() -> tuple[dict[_ShardId, torch.Tensor], torch.Tensor]:
        tensors = _prepare_tensors(loaded_tensors, unloaded_shards, distribution, group)
        return tensors, allocate_bytes(step, torch.device("cpu"))

    # Check what can be checked before the first exchange, then send each parcel in slices.
    tensors, scratch = comm.together(prepare, group)
    for parcel in parcels:
        is_source = parcel.main_rank == comm.rank(group)
        for start in range(0, parcel.n_bytes, step):
            own = scratch[: min(step, parcel.n_bytes - start)]
            if is_source:
                pack_into(parcel, tensors, own, start)
            array = comm.broadcast(own.numpy() if is_source else None, parcel.main_rank, group)
            if not is_source:
                unpack(parcel, tensors, torch.from_numpy(array), start)
    return tensors


def _distribution_of_loaded(
    loaded: dict[_ShardId, torch.Tensor], unloaded: dict[_ShardId, ShardedTensor], group: Any
) -> ShardDistribution:
    """Return the distribution by which the ranks of a group have loaded shards; collective.

    It contains the shards that a rank lacks and another one has loaded.

    Args:
        loaded, unloaded, group: arguments of :func:`exchange_by_distribution`.

    Raises:
        CheckpointingException: two ranks have loaded the same shard.
    """
    descriptions = comm.collect(
        lambda: (
            list(loaded),
            {shard: tensor.without_data() for shard, tensor in unloaded.items()},
        ),
        group,
    )
    main_ranks = _unite(
        [dict.fromkeys(shards, rank) for rank, (shards, _) in enumerate(descriptions)]
    )
    metadata: dict[_ShardId, ShardedTensor] = {}
    ranks_by_shard: dict[_ShardId, list[int]] = {}
    for rank, (_, tensors) in enumerate(descriptions):
        for shard in tensors.keys() & main_ranks.keys():
            metadata.setdefault(shard, tensors[shard])
            ranks_by_shard.setdefault(shard, []).append(rank)
    return ShardDistribution(
        {shard: main_ranks[shard] for shard in metadata}, set(metadata), metadata, ranks_by_shard
    )


def exchange_loaded_objects_gather_object(
    loaded_objects: dict[_ShardId, Any],
) -> dict[_ShardId, Any]:
    """Return the objects that any rank of the world loaded, on every rank; collective.

    This rank's own objects are returned unchanged, those of other ranks as unpickled copies.

    Raises:
        CheckpointingException: two ranks loaded objects with the same id, or an object cannot be
            pickled; on every rank.
    """
    return exchange_objects(loaded_objects)


def exchange_objects(loaded_objects: dict[_ShardId, Any], group: Any = None) -> dict[_ShardId, Any]:
    """Return the objects that any rank of a group loaded, on every rank of it; collective.

    Raises:
        CheckpointingException: two ranks loaded objects with the same id, or an object cannot be
            pickled; on every rank.
    """
    # Own objects replace their unpickled copies.
    return {**_unite(comm.collect(lambda: loaded_objects, group)), **loaded_objects}


def _unite(by_rank: list[dict[_ShardId, Any]]) -> dict[_ShardId, Any]:
    """Return all entries of all ranks in one dict.

    Raises:
        CheckpointingException: two ranks have entries with the same id.
    """
    united: dict[_ShardId, Any] = {}
    for rank, entries in enumerate(by_rank):
        duplicates = united.keys() & entries.keys()
        if duplicates:
            raise CheckpointingException(
                f"two ranks loaded the same shards: {_format_shards(duplicates)}", rank=str(rank)
            )
        united.update(entries)
    return united


def exchange_loaded_tensors_broadcast(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Any = None,
) -> dict[_ShardId, torch.Tensor]:
    """Exchange tensors one after another, each from the rank that loaded it to the whole group.

    Arguments, result and errors are those of :func:`exchange_by_distribution`.
    """
    group = parallelization_group
    parcels = _parcels(_require_distribution(shard_distribution))
    device = exchange_device(group)

    def prepare() -> tuple[dict[_ShardId, torch.Tensor], torch.Tensor]:
        distribution = _require_distribution(shard_distribution)
        tensors = _prepare_tensors(loaded_tensors, unloaded_shards, distribution, group)
        staged = [
            parcel.n_bytes for parcel in parcels if bytes_in_place(parcel, tensors, device) is None
        ]
        return tensors, allocate_bytes(max(staged, default=0), device)

    # Check and allocate everything before the first exchange, so that no rank fails in between.
    tensors, scratch = comm.together(prepare, group)
    for parcel in parcels:
        # A parcel that is one contiguous tensor on the right device is sent without a copy.
        in_place = bytes_in_place(parcel, tensors, device)
        buffer = scratch[: parcel.n_bytes] if in_place is None else in_place
        is_source = parcel.main_rank == comm.rank(group)
        if in_place is None and is_source:
            pack_into(parcel, tensors, buffer)
        comm.broadcast_bytes(buffer, parcel.main_rank, group)
        if in_place is None and not is_source:
            unpack(parcel, tensors, buffer)
    return tensors


def exchange_by_distribution(
    loaded_tensors: dict[_ShardId, torch.Tensor],
    unloaded_shards: dict[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Any = None,
    exchange_algo: str = "broadcast",
) -> dict[_ShardId, torch.Tensor]:
    """Return the tensors that this rank needs, after each was loaded by its main rank; collective.

    Args:
        loaded_tensors: the tensors that this rank loaded, by shard.
        unloaded_shards: the shards that this rank needs from others. They are received into their
            ``data``, or into new CPU memory where it is None.
        shard_distribution: the distribution by which the tensors were loaded.
        parallelization_group: process group of the distribution, None for all ranks.
        exchange_algo: "broadcast", "gather_rounds" or "gather_object"; the module's docstring
            compares their memory.

    Returns:
        ``loaded_tensors`` and one tensor for each of ``unloaded_shards``.

    Raises:
        ValueError: the algorithm is unknown, or the distribution is None.
        CheckpointingException: a main rank has not loaded its shard, or with another dtype or
            number of elements than the distribution records, or a required shard is not in the
            distribution; on every rank.
    """
    exchanges = {
        "broadcast": exchange_loaded_tensors_broadcast,
        "gather_rounds": exchange_loaded_tensors_gather_rounds,
        "gather_object": exchange_loaded_tensors_gather_object,
    }
    if exchange_algo not in exchanges:
        raise ValueError(
            f"exchange_algo must be one of {', '.join(exchanges)}, got {exchange_algo!r}"
        )
    exchange = exchanges[exchange_algo]
    distribution = _require_distribution(shard_distribution)
    return exchange(loaded_tensors, unloaded_shards, distribution, parallelization_group)


def _require_distribution(distribution: ShardDistribution | None) -> ShardDistribution:
    if distribution is None:
        raise ValueError("shard_distribution is None, but exchanging tensors requires it")
    return distribution


def _shards_to_exchange(distribution: ShardDistribution) -> list[_ShardId]:
    """Return the shards that a rank needs that does not load them itself."""
    return [
        shard
        for shard, rank in distribution.main_rank_for_shard.items()
        if any(other != rank for other in distribution.all_ranks_for_shard[shard])
    ]


def _parcels(distribution: ShardDistribution) -> list[Parcel]:
    """Return the parcels that are exchanged; the same list on every rank."""
    shards = _shards_to_exchange(distribution)
    sizes = {shard: n_bytes(distribution.shard_to_metadata[shard]) for shard in shards}
    return make_parcels(sizes, distribution.main_rank_for_shard)


def _prepare_tensors(
    loaded: dict[_ShardId, torch.Tensor],
    unloaded: dict[_ShardId, ShardedTensor],
    distribution: ShardDistribution,
    group: Any,
) -> dict[_ShardId, torch.Tensor]:
    """Return the tensors to send and the memory to receive into, after all checks of an exchange.

    Raises:
        CheckpointingException: as :func:`exchange_by_distribution`, but on this rank only.
    """
    # Check what this rank sends.
    rank = comm.rank(group)
    tensors = {shard: with_nominal_dtype(tensor) for shard, tensor in loaded.items()}
    for shard in _shards_to_exchange(distribution):
        if distribution.main_rank_for_shard[shard] == rank:
            if shard not in tensors:
                raise _missing_error([shard])
            _check_loaded(tensors[shard], distribution.shard_to_metadata[shard])
    # Check that every shard that this rank needs will be sent to it.
    missing = [
        shard for shard in unloaded if rank not in distribution.all_ranks_for_shard.get(shard, ())
    ]
    if missing:
        raise _missing_error(missing)
    # Allocate the memory to receive into.
    for shard_id, tensor in unloaded.items():
        if shard_id not in tensors:
            tensors[shard_id] = receive_buffer(tensor)
    return tensors


def _check_loaded(tensor: torch.Tensor, expected: ShardedTensor) -> None:
    if tensor.numel() != n_elements(expected):
        raise CorruptError(
            f"the loaded shard has {tensor.numel()} elements, expected {n_elements(expected)}",
            key=expected.key,
        )
    if tensor.dtype != expected.dtype:
        raise CorruptError(
            f"the loaded shard has dtype {tensor.dtype}, expected {expected.dtype}",
            key=expected.key,
        )


def _missing_error(shards: Iterable[_ShardId]) -> MissingShardError:
    return MissingShardError(f"no rank in the group loaded {_format_shards(shards)}")


def _format_shards(shards: Iterable[_ShardId]) -> str:
    return list_some(sorted({f"{key} at offset {offset}" for key, offset, _ in shards}), 4)


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
                f"shard {shard} needs one or more ranks from 0 to {num_ranks - 1}, "
                f"got {list(ranks)}"
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
            first = metadata.setdefault(shard, tensor)
            for name in ("dtype", "local_shape"):
                if getattr(first, name) != getattr(tensor, name):
                    raise CheckpointingException(
                        f"ranks disagree on the {name.replace('_', ' ')} of the shard at offset "
                        f"{first.global_offset}: "
                        f"{getattr(first, name)} and {getattr(tensor, name)}",
                        key=first.key,
                        rank=str(rank),
                    )
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
