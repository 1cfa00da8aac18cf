"""Strategies that divide the work of another strategy among ranks that hold the same shards.

Around any strategy for saving::

    rank            0         1         2
    holds        A B C     A B C     A B C      replicas; all main replicas on rank 0
    writes       A           B         C        the same bytes in total, a third on each rank

Around any strategy for loading: each rank reads some shards, as above, then the ranks exchange the
shards (:mod:`core.dist_checkpointing.exchange_utils`), so that each shard is read once per group.

The *parallelization group* is a part of the world whose ranks replicate shards, in practice a
data-parallel group. All ranks of the world save and load together, each with its group; a failure
on one rank is raised on all. In a group of one rank, and without torch.distributed, the wrapped
strategy does all the work.

Source: the documented package; megatron-core 0.16.1 where the documents are silent. Different
here: a cached distribution is recomputed when the structure of a state dict changes, for which
ranks exchange one flag; objects are exchanged within the group, not in the world; loading leaves
the replica ids of the caller's state dict alone, because with the ids of a load, a shard that
several groups load would have several main replicas in the next save.
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
from typing_extensions import override

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.kept import CachedResult
from core.dist_checkpointing._ranks.shard_bytes import is_empty_chunk, n_elements
from core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    nested_values,
)
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
from core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from core.errors import MissingShardError, UsageError


class FullyParallelSaveStrategyWrapper(AsyncSaveShardedStrategy):
    """A strategy that divides the saving of replicated ShardedTensors among the ranks of a group.

    No data is sent. The work is divided by new replica ids, so the wrapped strategy must write main
    replicas only, see :func:`distribute_main_replicas_with_precomputed_distribution`.
    The caller's ShardedTensors keep the new ids: the next save divides the work in the same way.
    ShardedObjects are not distributed.

    Args:
        strategy: the strategy that saves.
        parallelization_group: process group, None for all ranks.
        do_cache_distribution: reuse the distribution in the next save; it is recomputed when the
            keys, shapes, dtypes or main replicas of a rank have changed.
    """

    def __init__(
        self,
        strategy: SaveShardedStrategy,
        parallelization_group: Any = None,
        do_cache_distribution: bool = False,
    ) -> None:
        super().__init__(strategy.backend, strategy.version)
        self.base_strategy = strategy
        self.parallelization_group = _group_or_world(parallelization_group)
        self.do_cache_distribution = do_cache_distribution
        self._cached: CachedResult[ShardDistribution | None] = CachedResult(
            self.parallelization_group
        )
        self._is_validated = False

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        """The distribution that the next save may reuse."""
        return self._cached.value

    @override
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Divide the work, then call the wrapped strategy's ``async_save``.

        Replica ids are set in place.

        Raises:
            UsageError: the wrapped strategy cannot save asynchronously.
            CheckpointingException: dividing the work failed, see
                :meth:`apply_saving_parallelization`, or the wrapped strategy failed.
        """
        # The strategy is the same on every rank, so all ranks raise before they exchange anything.
        if not isinstance(self.base_strategy, AsyncSaveShardedStrategy):
            raise UsageError(
                f"{self.base_strategy} cannot save asynchronously",
                hint="call save instead of async_save",
            )
        self.apply_saving_parallelization(sharded_state_dict)
        return comm.together(
            partial(self.base_strategy.async_save, sharded_state_dict, checkpoint_dir)
        )

    @override
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Divide the work, then call the wrapped strategy's ``save``.

        Replica ids are set in place.

        Raises:
            CheckpointingException: dividing the work failed, see
                :meth:`apply_saving_parallelization`, or the wrapped strategy failed.
        """
        self.apply_saving_parallelization(sharded_state_dict)
        comm.together(lambda: self.base_strategy.save(sharded_state_dict, checkpoint_dir))

    def apply_saving_parallelization(self, sharded_state_dict: ShardedStateDict) -> None:
        """Assign the main replica of every shard to the rank that saves it.

        Replica ids are set in place. Collective over the world.

        Args:
            sharded_state_dict: changed in place.

        Raises:
            CheckpointingException: ranks of the group disagree about a shard, or the shards of all
                ranks of the world do not form complete tensors (not checked again as long as all
                groups reuse their distributions).
        """
        group = self.parallelization_group

        def distribute() -> ShardDistribution | None:
            self._is_validated = False
            return determine_main_replica_uniform_distribution(sharded_state_dict, group)

        def divide_work() -> None:
            distribution = self._cached.get(
                sharded_state_dict, distribute, is_kept=self.do_cache_distribution
            )
            distribute_main_replicas_with_precomputed_distribution(
                sharded_state_dict, group, distribution
            )

        comm.together(divide_work)
        # The check exchanges the metadata of all ranks, so it is left out if no group has a new
        # distribution.
        if comm.any_of_all(not self._is_validated):
            validate_sharding_integrity(
                determine_global_metadata(extract_sharded_base(sharded_state_dict)[0])[1]
            )
            self._is_validated = True

    @property
    @override
    def can_handle_sharded_objects(self) -> bool:
        return bool(self.base_strategy.can_handle_sharded_objects)

    @property
    @override
    def syncs_files(self) -> bool:  # type: ignore[override]
        return self.base_strategy.syncs_files


class FullyParallelLoadStrategyWrapper(LoadShardedStrategy):
    """A strategy that divides the loading of replicated shards among the ranks of a group.

    The ranks then exchange the shards.

    Args:
        strategy: the strategy that loads.
        parallelization_group: process group, None for all ranks.
        do_cache_distribution: reuse the distribution in the next load, as the wrapper for saving
            does.
        exchange_algo: broadcast, gather_rounds or gather_object; ``exchange_utils`` compares their
            memory.
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
        self._cached: CachedResult[tuple[ShardDistribution | None, dict[_ShardId, int]]] = (
            CachedResult(self.parallelization_group)
        )
        self._objects_ranks: dict[_ShardId, int] = {}

    @property
    def cached_distribution(self) -> ShardDistribution | None:
        """The distribution of tensors that the next load may reuse."""
        return None if self._cached.value is None else self._cached.value[0]

    @property
    def cached_global_metadata(self) -> Any:
        """The same attribute of the wrapped strategy; None if it does not have one."""
        return getattr(self.base_strategy, "cached_global_metadata", None)

    @override
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Load the state dict, reading every shard once per group; collective over the world.

        The wrapped strategy is called once on each rank, with this rank's part of the
        ShardedTensors and ShardedObjects, by shard id. Tensors from other ranks are received into
        the data of their ShardedTensors; missing data is allocated on the CPU. A shard that occurs
        twice in a state dict becomes one tensor, which is used twice. Replica ids are not changed,
        so that the state dict can be saved afterwards.

        Args:
            sharded_state_dict: ShardedTensors and ShardedObjects, nested.
            checkpoint_dir: directory of the checkpoint.

        Returns:
            The same nesting, with tensors and objects in place of the sharded leaves.

        Raises:
            CheckpointingException: a shard is not in the checkpoint, or a rank failed in another
                way; on all ranks, or on those of the group if the exchange failed.
            ValueError: ``exchange_algo`` is unknown.
        """
        group = self.parallelization_group
        # Divide the work; in a group of one rank there is nothing to divide.
        tree = comm.together(lambda: _check_data_sizes(_copy_leaves(sharded_state_dict)))
        distribution = comm.together(lambda: self.apply_loading_parallelization(tree))
        if distribution is None:
            return comm.together(
                lambda: self.base_strategy.load(sharded_state_dict, checkpoint_dir)
            )

        # Load this rank's part and exchange it. The exchange needs the ShardedTensors of the other
        # ranks' part, too: it receives into their data.
        own, deferred, own_objects = self._split_work(tree)
        tensors, objects = comm.together(lambda: self._load_own(own, own_objects, checkpoint_dir))
        tensors = exchange_by_distribution(
            tensors, deferred, distribution, group, self.exchange_algo
        )
        objects = exchange_objects(objects, group)
        self.fill_in_deferred_sharded_tensors(tree, tensors)
        self.fill_in_deferred_sharded_objects(tree, objects)
        return tree

    def _split_work(
        self, sharded_state_dict: ShardedStateDict
    ) -> tuple[
        dict[_ShardId, ShardedTensor], dict[_ShardId, ShardedTensor], dict[_ShardId, ShardedObject]
    ]:
        """Return the tensors that this rank loads, those that other ranks load, and its objects.

        The results are by shard id, so that a shard that occurs twice is loaded once.
        """
        own: dict[_ShardId, ShardedTensor] = {}
        deferred: dict[_ShardId, ShardedTensor] = {}
        objects: dict[_ShardId, ShardedObject] = {}
        for leaf in nested_values(sharded_state_dict):
            if isinstance(leaf, ShardedTensor) and is_empty_chunk(leaf):
                continue  # nothing is loaded into it
            if isinstance(leaf, ShardedTensor):
                (own if is_main_replica(leaf.replica_id) else deferred)[
                    _sharded_tensor_shard_id(leaf)
                ] = leaf
            elif isinstance(leaf, ShardedObject):
                shard = _sharded_object_id(leaf)
                if self._objects_ranks[shard] == comm.rank(self.parallelization_group):
                    leaf.replica_id = 0  # like the tensors that this rank loads
                    objects[shard] = leaf
        return own, deferred, objects

    def _load_own(
        self,
        tensors: dict[_ShardId, ShardedTensor],
        objects: dict[_ShardId, ShardedObject],
        checkpoint_dir: str | Path,
    ) -> tuple[dict[_ShardId, torch.Tensor], dict[_ShardId, Any]]:
        """Load this rank's tensors and objects with the wrapped strategy.

        Raises:
            UsageError: a tensor and an object have the same shard id.
            MissingShardError: the wrapped strategy did not load a shard.
        """
        duplicates = tensors.keys() & objects.keys()
        if duplicates:
            raise UsageError("a tensor and an object have the same key", key=min(duplicates)[0])
        requested: dict[Any, Any] = {**tensors, **objects}
        loaded: dict[Any, Any] = self.base_strategy.load(requested, checkpoint_dir)
        missing = requested.keys() - loaded.keys()
        if missing:
            raise MissingShardError(
                f"{type(self.base_strategy).__name__} did not return a requested shard",
                key=min(missing)[0],
            )
        return {shard: loaded[shard] for shard in tensors}, {
            shard: loaded[shard] for shard in objects
        }

    @staticmethod
    def fill_in_deferred_sharded_objects(
        sharded_state_dict: ShardedStateDict, loaded_objects: dict[_ShardId, Any]
    ) -> None:
        """Replace ShardedObjects with loaded objects, in place.

        Args:
            sharded_state_dict: nested; leaves of other types stay.
            loaded_objects: the objects, by key, global offset and global shape.

        Raises:
            MissingShardError: there is no object for a ShardedObject.
        """
        _fill_in(sharded_state_dict, loaded_objects, ShardedObject, _sharded_object_id)

    @staticmethod
    def fill_in_deferred_sharded_tensors(
        sharded_state_dict: ShardedStateDict, loaded_tensors: dict[_ShardId, torch.Tensor]
    ) -> None:
        """Replace ShardedTensors with loaded tensors, in place.

        Args:
            sharded_state_dict: nested; leaves of other types stay.
            loaded_tensors: the tensors, by key, global offset and flattened range of a shard.

        Raises:
            MissingShardError: there is no tensor for a ShardedTensor.
        """
        _fill_in(sharded_state_dict, loaded_tensors, ShardedTensor, _sharded_tensor_shard_id)

    def apply_loading_parallelization(
        self, sharded_state_dict: ShardedStateDict
    ) -> ShardDistribution | None:
        """Assign each shard to the rank that loads it.

        Tensors that this rank loads get the replica id 0, all others 1. A ShardedObject is loaded
        by the rank of its main replica, which has saved it; those whose main replica is in another
        group are divided evenly by their number. Their replica ids do not change. Collective within
        the group.

        Args:
            sharded_state_dict: changed in place.

        Returns:
            The distribution of the tensors; None in a group of one rank, where nothing is changed.

        Raises:
            CheckpointingException: ranks disagree about the dtype or shape of a shard; on every
                rank.
        """
        group = self.parallelization_group

        def compute() -> tuple[ShardDistribution | None, dict[_ShardId, int]]:
            distribution = determine_main_replica_uniform_distribution(
                sharded_state_dict, group, True
            )
            return distribution, {} if distribution is None else _distribute_objects(
                sharded_state_dict, group
            )

        distribution, self._objects_ranks = self._cached.get(
            sharded_state_dict, compute, is_kept=self.do_cache_distribution
        )
        distribute_main_replicas_with_precomputed_distribution(
            sharded_state_dict, group, distribution
        )
        return distribution

    @property
    @override
    def can_handle_sharded_objects(self) -> bool:
        return bool(self.base_strategy.can_handle_sharded_objects)

    @override
    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        return self.base_strategy.load_tensors_metadata(checkpoint_dir)

    @override
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        return self.base_strategy.load_sharded_metadata(checkpoint_dir)

    @override
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        self.base_strategy.remove_sharded_tensors(checkpoint_dir, key_prefix)

    @override
    def check_backend_compatibility(self, loaded_version: Any) -> None:
        self.base_strategy.check_backend_compatibility(loaded_version)

    @override
    def check_version_compatibility(self, loaded_version: Any) -> None:
        self.base_strategy.check_version_compatibility(loaded_version)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: Any,
    precomputed_distribution: ShardDistribution | None,
) -> None:
    """Set the replica ids in place: 0 on the main rank of a shard, 1 on other ranks.

    Shards that the distribution assigns to other groups get 1. If a shard occurs more than once in
    a state dict, only the first gets 0. Empty parts of uneven divisions stay as they are. Nothing
    is changed in a group of one rank.

    Args:
        sharded_state_dict: this rank's state dict.
        parallelization_group: process group of the distribution, None for all ranks.
        precomputed_distribution: result of ``determine_main_replica_uniform_distribution`` for that
            group.

    Raises:
        ValueError: the distribution is None, or lacks a shard of the state dict.
    """
    if comm.world_size(parallelization_group) <= 1:
        return
    if precomputed_distribution is None:
        raise ValueError("a group of several ranks requires precomputed_distribution")

    # Check all tensors before the first is changed.
    tensors = [
        leaf
        for leaf in nested_values(sharded_state_dict)
        if isinstance(leaf, ShardedTensor) and not is_empty_chunk(leaf)
    ]
    for tensor in tensors:
        if _sharded_tensor_shard_id(tensor) not in precomputed_distribution.shard_to_metadata:
            raise ValueError(
                f"the distribution belongs to a different state dict and lacks {tensor.key}"
            )

    # A shard gets the replica id 0 once, then it is removed from the shards of this rank.
    rank = comm.rank(parallelization_group)
    main_rank_for_shard = precomputed_distribution.main_rank_for_shard
    main_shards = {shard for shard, main_rank in main_rank_for_shard.items() if main_rank == rank}
    for tensor in tensors:
        shard = _sharded_tensor_shard_id(tensor)
        tensor.replica_id = 0 if shard in main_shards else 1
        main_shards.discard(shard)


def _group_or_world(group: Any) -> Any:
    """Return the group; for None, the group of all ranks if torch.distributed is in use."""
    return dist.group.WORLD if group is None and comm.has_process_group() else group


def _copy_leaves(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Copy the ShardedBase leaves of a state dict, but not their data.

    Changes of replica ids in the copy do not change the caller's state dict.
    """
    tree: ShardedStateDict = dict_list_map_outplace(
        lambda leaf: copy(leaf) if isinstance(leaf, ShardedBase) else leaf, sharded_state_dict
    )
    return tree


def _check_data_sizes(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Check that shards can be received into the data of a state dict, and return it.

    Raises:
        UsageError: data has another number of elements than its ShardedTensor declares.
    """
    for leaf in nested_values(sharded_state_dict):
        if (
            isinstance(leaf, ShardedTensor)
            and leaf.data is not None
            and leaf.data.numel() != n_elements(leaf)
        ):
            raise UsageError(
                f"the data has {leaf.data.numel()} elements, but the ShardedTensor declares "
                f"{n_elements(leaf)}",
                key=leaf.key,
            )
    return sharded_state_dict


def _distribute_objects(sharded_state_dict: ShardedStateDict, group: Any) -> dict[_ShardId, int]:
    """Assign each ShardedObject to the rank of the group that loads it; collective."""
    leaves = nested_values(sharded_state_dict)
    objects = [leaf for leaf in leaves if isinstance(leaf, ShardedObject)]
    own_shards = {_sharded_object_id(leaf) for leaf in objects}
    own_main = {_sharded_object_id(leaf) for leaf in objects if is_main_replica(leaf.replica_id)}
    # Collect the ranks that request each object and those of main replicas, alike on every rank.
    ranks_by_shard: dict[_ShardId, list[int]] = defaultdict(list)
    main_ranks: dict[_ShardId, int] = {}
    gathered = comm.all_gather((sorted(own_shards), sorted(own_main)), group)
    for rank, (shards, main_shards) in enumerate(gathered):
        for shard in shards:
            ranks_by_shard[shard].append(rank)
        for shard in main_shards:
            main_ranks.setdefault(shard, rank)
    # The sizes of objects are not known before they are loaded, so each counts as 1.
    others = {shard: ranks for shard, ranks in ranks_by_shard.items() if shard not in main_ranks}
    sizes = dict.fromkeys(others, 1)
    return main_ranks | distribute_shards_to_ranks(others, sizes, comm.world_size(group), set())


def _fill_in(
    sharded_state_dict: ShardedStateDict,
    loaded: dict[_ShardId, Any],
    leaf_type: type[Any],
    id_of: Callable[[Any], _ShardId],
) -> None:
    """Replace the leaves of a type with the loaded values of their shards, in place."""

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, leaf_type):
            return leaf
        if isinstance(leaf, ShardedTensor) and is_empty_chunk(leaf):
            leaf.init_data("cpu")
            return leaf.data
        if id_of(leaf) not in loaded:
            raise MissingShardError(
                f"the shard at offset {leaf.global_offset} was not loaded", key=leaf.key
            )
        return loaded[id_of(leaf)]

    dict_list_map_inplace(value_of, sharded_state_dict)
