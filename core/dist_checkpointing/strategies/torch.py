"""The backend torch_dist: DCP directories with Megatron's own conventions.

On disk, as these strategies write it (``core.formats.dcp.torch_dist`` has the details)::

    iter_0000010/
    ├── __0_0.distcp …           ``thread_count`` files of each rank that has any data
    ├── <hint>__0_1.distcp …     of these, half for the keys that begin with the separation hint
    └── .metadata                written last

Saving and loading use the engine (``core.dist_checkpointing._engine.bridge``), not torch's
distributed checkpoint, which reads the same files. The documented functions and planners for torch
are defined in ``_torch.state`` and ``_torch.planners``, and re-exported here.

Versions: 1 of the backend, as megatron-core 0.12 to 0.20 write it. Source: the documented package
``core.dist_checkpointing.strategies.torch``; the tests, in which megatron-core 0.16.1 and torch
2.13 read the files that are written here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from typing_extensions import override

from core.dist_checkpointing._background.caller import InThread
from core.dist_checkpointing._directory.removal import remove_by_prefix
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.prepared_save import (
    Agreement,
    Change,
    PreparedSave,
    prepare_save,
)
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.shard_bytes import n_elements
from core.dist_checkpointing._ranks.torch_error import torch_error
from core.dist_checkpointing.dict_utils import dict_list_map_outplace
from core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from core.dist_checkpointing.strategies._torch.planners import MCoreLoadPlanner, MCoreSavePlanner

# Scripts import these four from this module.
from core.dist_checkpointing.strategies._torch.state import (  # noqa: F401
    Leaf,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    checkpoint_name,
    flatten_state_dict,
    group_by_key,
    mcore_to_pyt_state_dict,
    sharded_tensor_to_torch_sharded_tensor,
)
from core.dist_checkpointing.strategies.async_utils import AsyncRequest
from core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    StrategyAction,
    register_default_strategy,
    require_backend,
    require_version,
)
from core.dist_checkpointing.torch_dcp.torch_metadata import contributions_of, read_torch_metadata
from core.dist_checkpointing.utils import _sharded_object_id, _sharded_tensor_shard_id, _ShardId
from core.errors import CheckpointingException, UsageError
from core.files.remote_path import is_remote
from core.files.url import find_location
from core.formats.registry import format_called

if TYPE_CHECKING:
    from core.dist_checkpointing._live.save import LiveSave

__all__ = [
    "MCoreLoadPlanner",
    "MCoreMetadata",
    "MCoreSavePlan",
    "MCoreSavePlanner",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "flatten_state_dict",
    "mcore_to_pyt_state_dict",
    "register_default_torch_strategies",
    "sharded_tensor_to_torch_sharded_tensor",
]

BACKEND = "torch_dist"
T = TypeVar("T")
VERSIONS = (1,)


class MCoreMetadata:
    """A class that ``.metadata`` files of megatron-core up to 0.15 name.

    Reading the files does not need the class.
    """


@dataclass
class MCoreSavePlan:
    """A class that ``.metadata`` files of some megatron-core versions name.

    Reading the files does not need the class.

    Args:
        mcore_data: additional data about tensors, by key.
    """

    mcore_data: dict[str, dict[str, Any]] | None = None


def register_default_torch_strategies() -> None:
    """Register the strategies of this module as the defaults of torch_dist, version 1."""
    register_default_strategy(
        StrategyAction.LOAD_SHARDED, BACKEND, 1, TorchDistLoadShardedStrategy()
    )
    register_default_strategy(
        StrategyAction.SAVE_SHARDED, BACKEND, 1, TorchDistSaveShardedStrategy(BACKEND, 1)
    )


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """A strategy that saves ShardedTensors and ShardedObjects as DCP files, some of each rank.

    Args:
        backend: name of the backend, for ``metadata.json``.
        version: version of the backend, for ``metadata.json``.
        keep_only_main_replica: save main replicas only. Otherwise the lowest rank that has any
            replica of a shard writes it, so that shards without a main replica are saved, too.
        thread_count: number of files that each rank writes, ``__<rank>_0.distcp`` and so on, if it
            has that many entries, and number of threads that write them. The entries are divided
            among the files by size, as megatron-core does.
        cached_metadata: while the structure stays the same on all ranks, reuse the agreement of
            this strategy's last save, or of the checkpoint that was loaded
            (``cached_global_metadata``), instead of exchanging and computing it again. The
            checkpoint then records it, as ``all_local_plans`` of ``.metadata``.
        separation_hint: prefix of keys; their entries go to separate files, whose names also begin
            with the prefix. ``remove_sharded_tensors`` can then delete these files.

    Attributes:
        use_cached_ckpt_structure, thread_count: the arguments; scripts set them between saves.
        cached_global_metadata: metadata of the loaded checkpoint, which scripts take from the load
            strategy; used by the next save with ``use_cached_ckpt_structure``.
        validated_loaded_metadata_reuse: whether the last save took what each rank writes from
            ``cached_global_metadata``, which it does if that holds on all ranks.

    Raises:
        UsageError: ``thread_count`` is less than 1, or a file name cannot begin with the hint.
    """

    syncs_files = True

    def __init__(
        self,
        backend: str,
        version: int,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
    ) -> None:
        super().__init__(backend, version)
        if thread_count < 1:
            raise UsageError(f"thread_count must be at least 1, not {thread_count}")
        if separation_hint is not None and (
            not separation_hint or set(separation_hint) & set("/\\\0")
        ):
            raise UsageError(
                f"a file name cannot begin with the separation hint {separation_hint!r}"
            )
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        self.cached_global_metadata: Metadata | None = None
        self.validated_loaded_metadata_reuse = False
        self._agreement: Agreement | None = None
        self._used_global_metadata: Metadata | None = None

    @override
    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]
        # Documented as a method; where it is used as a property, a method is true, too.
        return True

    @override
    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Agree with the other ranks on the files and return the remaining work; collective.

        Args:
            sharded_state_dict: ShardedTensors with data, and ShardedObjects.
            checkpoint_dir: an existing directory.

        Raises:
            CheckpointingException: an entry cannot be saved, or ranks disagree; on every rank.
        """
        prepared = self._prepare(sharded_state_dict, checkpoint_dir)
        # The client of object stores does not survive the fork of a writer.
        return AsyncRequest(
            InThread(_write) if is_remote(prepared.work.root) else _write,
            (checkpoint_dir, prepared),
            [partial(_finish, prepared.work)],
            preload_fn=prepared.staged,
        )

    @override
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write this rank's part, and the metadata after all ranks have written; collective.

        Args:
            sharded_state_dict: ShardedTensors with data, and ShardedObjects.
            checkpoint_dir: an existing directory.

        Raises:
            CheckpointingException: an entry cannot be saved or written, or ranks disagree; on every
                rank. If a rank fails to write, it is a CheckpointException of torch, too.
        """
        prepared = self._prepare(sharded_state_dict, checkpoint_dir)
        _run_as_torch(prepared.write)
        comm.together(partial(_finish, prepared.work))

    def _prepare(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> PreparedSave:
        # Select the shards that this rank writes: without the rule of main replicas, those that no
        # lower rank has.
        tensors, objects = comm.together(partial(self._select_own, sharded_state_dict))
        if not self.keep_only_main_replica:
            shards = comm.all_gather([*map(_shard_id, tensors), *map(_shard_id, objects)])
            shards_of_lower_ranks = set(chain.from_iterable(shards[: comm.rank()]))
            tensors = [item for item in tensors if _shard_id(item) not in shards_of_lower_ranks]
            objects = [item for item in objects if _shard_id(item) not in shards_of_lower_ranks]

        # Agree on the files with the other ranks, or reuse the agreement of the last save, or of a
        # checkpoint that was loaded since. A rank may lack its metadata, so that all ranks vote.
        previous, loaded = self._agreement, None
        has_new_metadata = self.cached_global_metadata is not self._used_global_metadata
        if comm.any_of_all(self.use_cached_ckpt_structure and has_new_metadata):
            self._used_global_metadata = self.cached_global_metadata
            loaded = contributions_of(self.cached_global_metadata)
            previous = Agreement(format_called(BACKEND), loaded) if loaded else None
        prepared = prepare_save(
            tensors,
            objects,
            checkpoint_dir,
            format=BACKEND,
            separation_hint=self.separation_hint,
            files_per_rank=self.thread_count,
            threads=self.thread_count,
            records_plans=self.use_cached_ckpt_structure,
            previous=previous,
        )
        self.validated_loaded_metadata_reuse = bool(loaded) and prepared.change < Change.ENTRIES
        if self.use_cached_ckpt_structure:
            self._agreement = prepared.agreement
        return prepared

    def _select_own(
        self, sharded_state_dict: ShardedStateDict
    ) -> tuple[list[ShardedTensor], list[ShardedObject]]:
        """Select the shards that this rank may write, without duplicates.

        Raises:
            UsageError: a leaf is neither ShardedTensor nor ShardedObject, or this rank has two main
                replicas of one shard.
        """
        leaves = group_by_key(sharded_state_dict, only_main_replicas=self.keep_only_main_replica)
        tensors: dict[object, ShardedTensor] = {}
        objects: dict[object, ShardedObject] = {}
        for leaf in chain.from_iterable(leaves.values()):
            shard = _shard_id(leaf)
            # Two main replicas may differ, so neither can be chosen, unless both are empty.
            is_duplicate = shard in tensors or shard in objects
            if self.keep_only_main_replica and is_duplicate and not _is_empty(leaf):
                raise UsageError(
                    "this rank has two main replicas of the same shard",
                    key=shard[0],
                    rank=str(comm.rank()),
                )
            if isinstance(leaf, ShardedTensor):
                tensors.setdefault(shard, leaf)
            else:
                objects.setdefault(shard, leaf)
        return list(tensors.values()), list(objects.values())


def _is_empty(leaf: Leaf) -> bool:
    return isinstance(leaf, ShardedTensor) and not n_elements(leaf)


def _shard_id(leaf: Leaf) -> tuple[str, _ShardId, bool]:
    """Return the name of a leaf in the checkpoint, the id of its shard, and if that is empty.

    In an uneven division, an empty shard has the offset of the one that follows it.
    """
    shard = (
        _sharded_object_id(leaf)
        if isinstance(leaf, ShardedObject)
        else _sharded_tensor_shard_id(leaf)
    )
    return checkpoint_name(leaf), shard, _is_empty(leaf)


def _write(checkpoint_dir: str | Path, prepared: PreparedSave) -> None:
    """Write this rank's part; in another process, if the save is asynchronous.

    Args:
        checkpoint_dir: not used.
        prepared: the save, as all ranks have agreed on it.
    """
    prepared.write()


def _run_as_torch(work: Callable[[], T]) -> T:
    """Run work on all ranks and return its result; a failure is also torch's CheckpointException.

    Raises:
        CheckpointingException: a rank failed; on every rank.
    """
    outcome = comm.attempt(work)
    if outcome.error is not None:
        raise torch_error(outcome)
    return outcome.result  # type: ignore[no-any-return]


def _finish(work: LiveSave) -> None:
    """Write the metadata, on rank 0."""
    if comm.rank() == 0:
        work.finish()


def _load(sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
    """Load the tensors and objects of a state dict on this rank."""
    leaves = [*chain.from_iterable(group_by_key(sharded_state_dict).values())]
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    objects = [leaf for leaf in leaves if isinstance(leaf, ShardedObject)]
    # Allocate missing data; existing data is filled in place.
    for tensor in tensors:
        tensor.init_data("cpu")
    # Read everything at once, then put the values into the nesting of the request.
    bridge.load_tensors(tensors, checkpoint_dir)
    values = bridge.load_objects(objects, checkpoint_dir) if objects else {}

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, ShardedObject):
            return values[leaf.unique_key]
        return leaf.data.detach()

    return dict_list_map_outplace(value_of, sharded_state_dict)  # type: ignore[no-any-return]


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """A strategy that loads ShardedTensors and ShardedObjects from DCP files of any sharding."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded_dir: Path | None = None
        self._global_metadata: Metadata | None = None

    @property
    def cached_global_metadata(self) -> Metadata | None:
        """The metadata of the checkpoint that was loaded last, for torch; read on demand.

        None if the checkpoint has been removed or damaged since it was loaded.
        """
        if self._global_metadata is None and self._loaded_dir is not None:
            try:
                self._global_metadata = read_torch_metadata(self._loaded_dir)
            except CheckpointingException:
                self._loaded_dir = None
        return self._global_metadata

    @override
    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]
        # Documented as a method; where it is used as a property, a method is true, too.
        return True

    @override
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """Load the requested tensors and objects; a failure is raised on all ranks.

        Args:
            sharded_state_dict: ShardedTensors and ShardedObjects. Existing data is filled in place;
                missing data is allocated on the CPU.
            checkpoint_dir: directory of the checkpoint.

        Returns:
            The same nesting with tensors of the local shape, 1-D for flattened ranges, and with the
            objects' values.

        Raises:
            CheckpointingException: an entry is missing or damaged, or has another global shape
                (unless ``allow_shape_mismatch``). It is a CheckpointException of torch, too, with
                the failures by rank.
        """
        loaded = _run_as_torch(partial(_load, sharded_state_dict, checkpoint_dir))
        # The metadata for torch are read only if a script asks for them.
        self._loaded_dir, self._global_metadata = find_location(checkpoint_dir), None
        return loaded

    @override
    def load_tensors_metadata(
        self, checkpoint_dir: str | Path, metadata: Metadata | None = None
    ) -> ShardedStateDict:
        """Return a ShardedTensor without data for every stored global tensor, by key.

        Args:
            checkpoint_dir: directory of the checkpoint.
            metadata: metadata from torch, used instead of the directory's.

        Raises:
            CheckpointingException: the metadata cannot be read.
        """
        if metadata is None:
            return bridge.sharded_metadata(checkpoint_dir, tensors_only=True)
        return {
            key: bridge.build_whole_tensor(key, entry.properties.dtype, entry.size)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    @override
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return all stored tensors by key, and all objects by unique key, without data.

        Args:
            checkpoint_dir: directory of the checkpoint.

        Raises:
            CheckpointingException: the metadata cannot be read.
        """
        return bridge.sharded_metadata(checkpoint_dir)

    @override
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the tensors and objects whose keys begin with a prefix; on one rank.

        If no key has the prefix, a warning is logged.

        Args:
            checkpoint_dir: directory of a finished checkpoint.
            key_prefix: must not be empty.

        Raises:
            UsageError: the prefix is empty.
            UnsupportedError: the remaining entries are stored in a way that new metadata cannot
                describe.
            CheckpointingException: the metadata cannot be read, or a file cannot be written.
        """
        remove_by_prefix(checkpoint_dir, key_prefix)

    @override
    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Raise unless a checkpoint's backend is torch_dist.

        Args:
            loaded_version: name of the backend (the parameter's name is the documented one).

        Raises:
            UnsupportedError: the checkpoint has another backend.
        """
        require_backend(self, loaded_version, BACKEND)

    @override
    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Raise unless a checkpoint's version of the backend is 1.

        Raises:
            UnsupportedError: the checkpoint has another version.
        """
        require_version(self, loaded_version, VERSIONS)
