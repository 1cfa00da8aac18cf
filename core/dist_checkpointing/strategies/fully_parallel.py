"""Strategies that share the work of another strategy among ranks that hold the same shards.

Around any strategy for saving::

    rank            0         1         2
    holds        A B C     A B C     A B C      replicas, all main on rank 0
    writes       A           B         C        the same bytes in all, a third of them on each rank

Around any strategy for loading: each rank reads a part, as above, and the ranks exchange what they have read
(:mod:`core.dist_checkpointing.exchange_utils`), so that storage is read once for the whole group.

The *parallelization group* is a part of the world whose ranks replicate shards, in practice a data-parallel group. All
ranks of the world save and load together, each with its group, and what fails on one of them fails on all. In a group
of one rank, and without torch.distributed, the wrapped strategy does everything.

Source: the documented package; megatron-core 0.16.1 for what the documents leave open. Different here: a cached
distribution is recomputed when the structure of a state dict changes, at the price of one flag from each rank; objects
are shared out and exchanged within the group, not in the whole world.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.kept import CachedResult
from core.dist_checkpointing._ranks.shard_bytes import n_elements
from core.dist_checkpointing.dict_utils import dict_list_map_inplace, dict_list_map_outplace, nested_values
from core.dist_checkpointing.exchange_utils import (
    ShardDistribution,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    exchange_by_distribution,
    exchange_objects,
)
from core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
    is_main_replica,
)
from core.dist_checkpointing.strategies.async_utils import AsyncRequest
from core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
)
from core.dist_checkpointing.utils import (
    _sharded_object_id,
    _sharded_tensor_shard_id,
    _ShardId,
    extract_sharded_base,
)
from core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from core.errors import MissingShardError, UsageError


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """Shares the saving of replicated ShardedTensors among the ranks of a group; no data is sent.

    The wrapped strategy is expected to write what has a main ``replica_id``: these are set anew, see
    :func:`distribute_main_replicas_with_precomputed_distribution`. ShardedObjects stay where they are.

    Args:
        strategy: who saves.
        parallelization_group: process group, None for all ranks.
        do_cache_distribution: keep the distribution for the next save; it is computed anew when the keys, shapes,
            dtypes or main replicas of a rank have changed.
    """

    def __init__(
        self, strategy: SaveShardedStrategy, parallelization_group: Any = None, do_cache_distribution: bool = False
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = _group_or_world(parallelization_group)
        self.do_cache_distribution = do_cache_distribution
        self._cached: CachedResult[ShardDistribution | None] = CachedResult(self.parallelization_group)
        self._is_validated = False

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        """The distribution that the next save may use again."""
        return self._cached.value

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Shares the work out, then does what the wrapped strategy's ``async_save`` does.

        Raises:
            UsageError: the wrapped strategy cannot save asynchronously; on every rank, nothing was exchanged.
            CheckpointingException: see :meth:`apply_saving_parallelization`, and what the strategy raises.
        """
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise UsageError(
                f"{self.base_strategy} cannot save asynchronously", hint="call save in place of async_save"
            )
        shared = _with_own_leaves(sharded_state_dict)
        self.apply_saving_parallelization(shared)
        return comm.together(partial(self.base_strategy.async_save, shared, checkpoint_dir))

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Shares the work out, then does what the wrapped strategy's ``save`` does; raises as :meth:`async_save`."""
        shared = _with_own_leaves(sharded_state_dict)
        self.apply_saving_parallelization(shared)
        comm.together(lambda: self.base_strategy.save(shared, checkpoint_dir))

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Sets the replica ids so that every shard has its one main replica on the rank that shall save it.

        Collective over the world.

        Args:
            sharded_state_dict: changed in place.

        Raises:
            CheckpointingException: ranks of the group disagree about a shard, or (checked before the first save only)
                the shards of all ranks of the world do not make whole tensors.
        """
        group = self.parallelization_group

        def share_out() -> None:
            distribution = self._cached.get(
                sharded_state_dict,
                lambda: determine_main_replica_uniform_distribution(sharded_state_dict, group),
                is_kept=self.do_cache_distribution,
            )
            distribute_main_replicas_with_precomputed_distribution(sharded_state_dict, group, distribution)

        comm.together(share_out)
        if not self._is_validated:
            validate_sharding_integrity(determine_global_metadata(extract_sharded_base(sharded_state_dict)[0])[1])
            self._is_validated = True

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return bool(self.base_strategy.can_handle_sharded_objects)

    @property
    def syncs_files(self) -> bool:  # type: ignore[override]
        """As the wrapped strategy."""
        return self.base_strategy.syncs_files


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """Shares the loading of replicated shards among the ranks of a group, which then exchange them.

    Args:
        strategy: who loads.
        parallelization_group: process group, None for all ranks.
        do_cache_distribution: keep the distribution for the next load, as the wrapper for saving does.
        exchange_algo: broadcast, gather_rounds or gather_object; ``exchange_utils`` compares their memory.
    """

    def __init__(
        self,
        strategy: LoadShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
    ) -> None:
        super().__init__()
        self.base_strategy = strategy
        self.parallelization_group = _group_or_world(parallelization_group)
        self.do_cache_distribution = do_cache_distribution
        self.exchange_algo = exchange_algo
        self._cached: CachedResult[tuple[ShardDistribution | None, dict[_ShardId, int]]] = CachedResult(
            self.parallelization_group
        )
        self._objects_ranks: dict[_ShardId, int] = {}

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        """The distribution of tensors that the next load may use again."""
        return None if self._cached.value is None else self._cached.value[0]

    @property
    def cached_global_metadata(self) -> Any:
        """As the wrapped strategy; None if it has nothing of that name."""
        return getattr(self.base_strategy, "cached_global_metadata", None)

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """What the wrapped strategy would load, read once for the whole group. Collective over the world.

        The wrapped strategy is called once, with a part of the ShardedTensors and ShardedObjects by their ids. Tensors
        from other ranks are received into the data of their ShardedTensors, which is allocated on the CPU where there
        is none. A shard that stands at two places of a state dict is one tensor at both.

        Args:
            sharded_state_dict: ShardedTensors and ShardedObjects, nested.
            checkpoint_dir: directory of the checkpoint.

        Returns:
            The same nesting, with tensors and objects in their places.

        Raises:
            CheckpointingException: what was asked for is not in the checkpoint, or a rank failed otherwise; on all
                ranks, if only in the exchange then on those of the group.
            ValueError: no such exchange_algo.
        """
        group = self.parallelization_group
        wanted = comm.together(lambda: _checked(_with_own_leaves(sharded_state_dict)))
        distribution = comm.together(lambda: self.apply_loading_parallelization(wanted))
        if distribution is None:
            return comm.together(lambda: self.base_strategy.load(sharded_state_dict, checkpoint_dir))
        own, others, own_objects = self._parts(wanted)
        tensors, objects = comm.together(lambda: self._load_own(own, own_objects, checkpoint_dir))
        tensors = exchange_by_distribution(tensors, others, distribution, group, self.exchange_algo)
        objects = exchange_objects(objects, group)
        self.fill_in_deferred_sharded_tensors(wanted, tensors)
        self.fill_in_deferred_sharded_objects(wanted, objects)
        return wanted

    def _parts(
        self, sharded_state_dict: ShardedStateDict
    ) -> tuple[dict[_ShardId, ShardedTensor], dict[_ShardId, ShardedTensor], dict[_ShardId, ShardedObject]]:
        """The tensors that this rank loads, those that others load for it, and the objects that this rank loads."""
        own: dict[_ShardId, ShardedTensor] = {}
        others: dict[_ShardId, ShardedTensor] = {}
        objects: dict[_ShardId, ShardedObject] = {}
        for leaf in nested_values(sharded_state_dict):
            if isinstance(leaf, ShardedTensor):
                (own if is_main_replica(leaf.replica_id) else others)[_sharded_tensor_shard_id(leaf)] = leaf
            elif isinstance(leaf, ShardedObject):
                shard = _sharded_object_id(leaf)
                if self._objects_ranks[shard] == comm.rank(self.parallelization_group):
                    leaf.replica_id = 0
                    objects[shard] = leaf
        return own, others, objects

    def _load_own(
        self,
        tensors: dict[_ShardId, ShardedTensor],
        objects: dict[_ShardId, ShardedObject],
        checkpoint_dir: str | Path,
    ) -> tuple[dict[_ShardId, torch.Tensor], dict[_ShardId, Any]]:
        twice = tensors.keys() & objects.keys()
        if twice:
            raise UsageError("a tensor and an object have the same key", key=min(twice)[0])
        asked: dict[Any, Any] = {**tensors, **objects}
        loaded: dict[Any, Any] = self.base_strategy.load(asked, checkpoint_dir)
        missing = asked.keys() - loaded.keys()
        if missing:
            raise MissingShardError(f"{type(self.base_strategy).__name__} did not load a shard", key=min(missing)[0])
        return {shard: loaded[shard] for shard in tensors}, {shard: loaded[shard] for shard in objects}

    @staticmethod
    def fill_in_deferred_sharded_objects(
        sharded_state_dict: ShardedStateDict, loaded_objects: dict[_ShardId, Any]
    ) -> None:
        """Puts objects in the places of their ShardedObjects, in place.

        Args:
            sharded_state_dict: nested; leaves of other kinds stay.
            loaded_objects: key, global offset and global shape of an object → what takes its place.

        Raises:
            MissingShardError: there is none for a ShardedObject.
        """
        _fill_in(sharded_state_dict, loaded_objects, ShardedObject, _sharded_object_id)

    @staticmethod
    def fill_in_deferred_sharded_tensors(
        sharded_state_dict: ShardedStateDict, loaded_tensors: dict[_ShardId, torch.Tensor]
    ) -> None:
        """Puts tensors in the places of their ShardedTensors, in place.

        Args:
            sharded_state_dict: nested; leaves of other kinds stay.
            loaded_tensors: key, global offset and flattened range of a shard → what takes its place.

        Raises:
            MissingShardError: there is none for a ShardedTensor.
        """
        _fill_in(sharded_state_dict, loaded_tensors, ShardedTensor, _sharded_tensor_shard_id)

    def apply_loading_parallelization(self, sharded_state_dict: ShardedStateDict) -> ShardDistribution | None:
        """Shares the loading out: the shards that this rank shall load get the replica id 0, all others 1.

        Collective within the group. Objects are shared out as well, by number; their replica ids stay.

        Args:
            sharded_state_dict: changed in place.

        Returns:
            The distribution of the tensors; None in a group of one rank, where nothing is changed.

        Raises:
            CheckpointingException: ranks disagree about the dtype or the shape of a shard; on every rank.
        """
        group = self.parallelization_group

        def compute() -> tuple[ShardDistribution | None, dict[_ShardId, int]]:
            distribution = determine_main_replica_uniform_distribution(sharded_state_dict, group, True)
            return distribution, {} if distribution is None else _object_ranks(sharded_state_dict, group)

        distribution, self._objects_ranks = self._cached.get(
            sharded_state_dict, compute, is_kept=self.do_cache_distribution
        )
        distribute_main_replicas_with_precomputed_distribution(sharded_state_dict, group, distribution)
        return distribution

    @property
    def can_handle_sharded_objects(self) -> bool:
        """As the wrapped strategy."""
        return bool(self.base_strategy.can_handle_sharded_objects)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """As the wrapped strategy; not collective."""
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """As the wrapped strategy; not collective."""
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """As the wrapped strategy."""
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """As the wrapped strategy."""
        self.base_strategy.check_backend_compatibility(loaded_version)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """As the wrapped strategy."""
        self.base_strategy.check_version_compatibility(loaded_version)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict, parallelization_group: Any, precomputed_distribution: ShardDistribution | None
) -> None:
    """Sets the replica ids as a distribution says, in place: 0 on the main rank of a shard, 1 elsewhere.

    Shards that the distribution leaves to other groups get 1. Of copies within one state dict the first one counts.
    Nothing is changed in a group of one rank.

    Args:
        sharded_state_dict: what this rank holds.
        parallelization_group: process group of the distribution, None for all ranks.
        precomputed_distribution: what ``determine_main_replica_uniform_distribution`` returned for that group.

    Raises:
        ValueError: no distribution, or one that does not know a shard of the state dict.
    """
    if comm.world_size(parallelization_group) <= 1:
        return
    if precomputed_distribution is None:
        raise ValueError("a group of several ranks needs a distribution")
    rank = comm.rank(parallelization_group)
    main = {shard for shard, chosen in precomputed_distribution.main_rank_for_shard.items() if chosen == rank}
    tensors = [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor)]
    for tensor in tensors:
        if _sharded_tensor_shard_id(tensor) not in precomputed_distribution.shard_to_metadata:
            raise ValueError(f"the distribution was made for another state dict: it has no {tensor.key}")
    for tensor in tensors:
        shard = _sharded_tensor_shard_id(tensor)
        tensor.replica_id = 0 if shard in main else 1
        main.discard(shard)


def _group_or_world(group: Any) -> Any:
    """The group; that of all ranks in place of None, where torch.distributed is in use."""
    return dist.group.WORLD if group is None and comm.is_distributed() else group


def _with_own_leaves(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """The same nesting with ShardedBase leaves of its own (the data shared), so that the caller's stay as they are."""
    found: ShardedStateDict = dict_list_map_outplace(
        lambda leaf: copy(leaf) if isinstance(leaf, ShardedBase) else leaf, sharded_state_dict
    )
    return found


def _checked(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """The state dict, if other ranks may send into the data that are there.

    Raises:
        UsageError: data have another number of elements than their ShardedTensor says.
    """
    for leaf in nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedTensor) and leaf.data is not None and leaf.data.numel() != n_elements(leaf):
            raise UsageError(
                f"the data has {leaf.data.numel()} elements, the metadata says {n_elements(leaf)}", key=leaf.key
            )
    return sharded_state_dict


def _object_ranks(sharded_state_dict: ShardedStateDict, group: Any) -> dict[_ShardId, int]:
    """ShardedObject → the rank of the group that loads it, about the same number for each. Collective."""
    held = [_sharded_object_id(leaf) for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedObject)]
    ranks: dict[_ShardId, list[int]] = defaultdict(list)
    for rank, shards in enumerate(comm.all_gather(sorted(set(held)), group)):
        for shard in shards:
            ranks[shard].append(rank)
    return distribute_shards_to_ranks(ranks, dict.fromkeys(ranks, 1), comm.world_size(group), set())


def _fill_in(
    sharded_state_dict: ShardedStateDict,
    loaded: dict[_ShardId, Any],
    kind: type[Any],
    id_of: Callable[[Any], _ShardId],
) -> None:
    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, kind):
            return leaf
        if id_of(leaf) not in loaded:
            raise MissingShardError(f"nothing was loaded for the shard at offset {leaf.global_offset}", key=leaf.key)
        return loaded[id_of(leaf)]

    dict_list_map_inplace(filled, sharded_state_dict)
