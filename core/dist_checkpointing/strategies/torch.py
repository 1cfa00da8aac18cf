"""The backend torch_dist: DCP directories with conventions of Megatron's own.

On disk, of what the strategies here write (``core.formats.dcp.torch_dist`` has the rest)::

    iter_0000010/
    ├── __0_0.distcp …       a file a rank that holds anything; ``<hint>__0_0.distcp`` beside it for a separation hint
    └── .metadata            last

Saving and loading go through the engine (``core.dist_checkpointing._engine.bridge``); torch's distributed checkpoint
has no part in it. It reads the same files, and the documented functions and planners for it are in ``torch_state`` and
``torch_planners``, found here, too.

Versions: 1 of the backend, as megatron-core 0.12 to 0.20 write it. Source: the documented package
``core.dist_checkpointing.strategies.torch``; the tests, in which megatron-core 0.16.1 and torch 2.13 read what is
written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from core.dist_checkpointing._directory.removal import remove_entries
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._engine.prepared_save import Agreement, PreparedSave, prepare_save
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import dict_list_map_outplace
from core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from core.dist_checkpointing.strategies._torch.keys import (  # noqa: F401 - scripts import them from here
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
)
from core.dist_checkpointing.strategies._torch.planners import MCoreLoadPlanner, MCoreSavePlanner
from core.dist_checkpointing.strategies._torch.state import (
    Leaf,
    by_key,
    flatten_state_dict,
    mcore_to_pyt_state_dict,
    name_of,
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
from core.dist_checkpointing.torch_dcp.torch_metadata import read_torch_metadata
from core.dist_checkpointing.utils import _sharded_object_id, _sharded_tensor_shard_id, _ShardId
from core.errors import UsageError

if TYPE_CHECKING:
    from core.live.save import LiveSave

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
VERSIONS = (1,)


class MCoreMetadata:
    """The name of a class in ``.metadata`` of megatron-core up to 0.15. Files are read without it."""


@dataclass
class MCoreSavePlan:
    """The name of a class in ``.metadata`` of some megatron-core versions. Files are read without it.

    Args:
        mcore_data: facts about tensors, by key.
    """

    mcore_data: dict[str, dict[str, Any]] | None = None


def register_default_torch_strategies() -> None:
    """Makes the strategies here the default ones of torch_dist, version 1."""
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, 1, TorchDistLoadShardedStrategy())
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, 1, TorchDistSaveShardedStrategy(BACKEND, 1))


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves ShardedTensors and ShardedObjects as DCP files, every rank its own.

    Args:
        backend: name that ``metadata.json`` will have.
        version: of the backend, likewise.
        keep_only_main_replica: save main replicas only. Otherwise all replicas are offered, and each shard is written
            by the lowest rank that has it; then every shard is saved even if nobody holds a main replica.
        thread_count: threads that write, on each rank. They write one file together.
        cached_metadata: while the structure stays the same on all ranks, use what they agreed on in the last save of
            this strategy, in place of exchanging and computing it again.
        separation_hint: entries whose keys begin so go to files of their own, whose names begin so, too;
            ``remove_sharded_tensors`` can then delete them as a whole.

    Attributes:
        use_cached_ckpt_structure, thread_count: the arguments; scripts set them between saves.
        cached_global_metadata: scripts hand over what a load strategy has; not needed here.

    Raises:
        UsageError: less than one thread, or a hint that cannot begin the name of a file.
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
            raise UsageError(f"{thread_count} threads cannot write anything")
        if separation_hint is not None and (not separation_hint or set(separation_hint) & set("/\\\0")):
            raise UsageError(f"a file's name cannot begin with the separation hint {separation_hint!r}")
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.use_cached_ckpt_structure = cached_metadata
        self.separation_hint = separation_hint
        self.cached_global_metadata: Metadata | None = None
        self._agreement: Agreement | None = None

    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]  # documented as a method, which is true, too
        """True."""
        return True

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> AsyncRequest:
        """Agrees with the other ranks on what goes where; collective. The rest is up to the request.

        Args:
            sharded_state_dict: ShardedTensors with data, and ShardedObjects.
            checkpoint_dir: exists.

        Raises:
            CheckpointingException: something cannot be saved, or ranks disagree; on every rank.
        """
        prepared = self._prepared(sharded_state_dict, checkpoint_dir)
        return AsyncRequest(
            _write, (checkpoint_dir, prepared), [partial(_finish, prepared.work)], preload_fn=prepared.staged
        )

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Writes this rank's part, and the metadata once all ranks have written; collective.

        Args:
            sharded_state_dict: ShardedTensors with data, and ShardedObjects.
            checkpoint_dir: exists.

        Raises:
            CheckpointingException: something cannot be saved or written, or ranks disagree; on every rank.
        """
        prepared = self._prepared(sharded_state_dict, checkpoint_dir)
        comm.together(prepared.write)
        comm.together(partial(_finish, prepared.work))

    def _prepared(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> PreparedSave:
        tensors, objects = comm.together(partial(self._own, sharded_state_dict))
        if not self.keep_only_main_replica:
            tensors, objects = _once(tensors, objects)
        prepared = prepare_save(
            tensors,
            objects,
            checkpoint_dir,
            format=BACKEND,
            separation_hint=self.separation_hint,
            threads=self.thread_count,
            previous=self._agreement,
        )
        if self.use_cached_ckpt_structure:
            self._agreement = prepared.agreement
        return prepared

    def _own(self, sharded_state_dict: ShardedStateDict) -> tuple[list[ShardedTensor], list[ShardedObject]]:
        """What this rank may write.

        Raises:
            UsageError: a leaf is neither tensor nor object, or this rank has two main replicas of one shard.
        """
        leaves = by_key(sharded_state_dict, only_main_replicas=self.keep_only_main_replica)
        tensors: dict[object, ShardedTensor] = {}
        objects: dict[object, ShardedObject] = {}
        for shard, leaf in ((_shard_id(leaf), leaf) for several in leaves.values() for leaf in several):
            if self.keep_only_main_replica and (shard in tensors or shard in objects):
                raise UsageError("this rank has two main replicas of one shard", key=shard[0], rank=str(comm.rank()))
            if isinstance(leaf, ShardedTensor):
                tensors.setdefault(shard, leaf)
            else:
                objects.setdefault(shard, leaf)
        return list(tensors.values()), list(objects.values())


def _shard_id(leaf: Leaf) -> tuple[str, _ShardId]:
    """The name in the checkpoint, which tells objects from tensors, and the shard."""
    shard = _sharded_object_id(leaf) if isinstance(leaf, ShardedObject) else _sharded_tensor_shard_id(leaf)
    return name_of(leaf), shard


def _once(
    tensors: list[ShardedTensor], objects: list[ShardedObject]
) -> tuple[list[ShardedTensor], list[ShardedObject]]:
    """What of it no lower rank has, too; collective."""
    shards = comm.all_gather([*map(_shard_id, tensors), *map(_shard_id, objects)])
    taken = {shard for lower in shards[: comm.rank()] for shard in lower}
    return (
        [tensor for tensor in tensors if _shard_id(tensor) not in taken],
        [item for item in objects if _shard_id(item) not in taken],
    )


def _write(checkpoint_dir: str | Path, prepared: PreparedSave) -> None:
    """Writes this rank's share; in another process, if the save is asynchronous."""
    prepared.write()


def _finish(work: LiveSave) -> None:
    """Writes the metadata on rank 0."""
    if comm.rank() == 0:
        work.finish()


def _loaded(sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
    leaves = [*chain.from_iterable(by_key(sharded_state_dict).values())]
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
    objects = [leaf for leaf in leaves if isinstance(leaf, ShardedObject)]
    for tensor in tensors:
        tensor.init_data("cpu")
    bridge.load_tensors(tensors, checkpoint_dir)
    values = bridge.load_objects(objects, checkpoint_dir) if objects else {}

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, ShardedObject):
            return values[leaf.unique_key]
        return leaf.data.detach()

    return dict_list_map_outplace(value_of, sharded_state_dict)  # type: ignore[no-any-return]


class TorchDistLoadShardedStrategy(LoadShardedStrategy):
    """Loads ShardedTensors and ShardedObjects out of DCP files, however they were cut there."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded_dir: Path | None = None
        self._global_metadata: Metadata | None = None

    @property
    def cached_global_metadata(self) -> Metadata | None:
        """torch's metadata of the checkpoint that was loaded last; read when it is asked for."""
        if self._global_metadata is None and self._loaded_dir is not None:
            self._global_metadata = read_torch_metadata(self._loaded_dir)
        return self._global_metadata

    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]  # documented as a method, which is true, too
        """True."""
        return True

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> StateDict:
        """What this rank asks for; collective only in that a failure of one rank is raised on all.

        Args:
            sharded_state_dict: of ShardedTensors and ShardedObjects. Data that are there are filled in place; others
                are made, on the CPU.
            checkpoint_dir: of the checkpoint.

        Returns:
            The same nesting with tensors of the local shape, 1-D for flattened ranges, and with the objects' values.

        Raises:
            CheckpointingException: something is not there, has another global shape (unless ``allow_shape_mismatch``),
                or is damaged.
        """
        loaded = comm.together(partial(_loaded, sharded_state_dict, checkpoint_dir))
        self._loaded_dir, self._global_metadata = Path(checkpoint_dir), None
        return loaded

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Metadata | None = None) -> ShardedStateDict:
        """Every stored tensor, by key, as a ShardedTensor without data that is all of it.

        Args:
            checkpoint_dir: of the checkpoint.
            metadata: torch's, in place of that of the directory.

        Raises:
            CheckpointingException: the metadata cannot be read.
        """
        if metadata is None:
            return bridge.sharded_metadata(checkpoint_dir, tensors_only=True)
        return {
            key: bridge.whole_tensor(key, entry.properties.dtype, entry.size)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Every stored tensor and object, by key and by unique key, without data.

        Args:
            checkpoint_dir: of the checkpoint.

        Raises:
            CheckpointingException: the metadata cannot be read.
        """
        return bridge.sharded_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Removes the tensors and objects whose keys begin with a prefix; on one rank.

        Args:
            checkpoint_dir: of a finished checkpoint.
            key_prefix: not empty. Where nothing begins so, a warning is logged.

        Raises:
            CheckpointingException: as for ``core.dist_checkpointing._directory.removal.remove_entries``.
        """
        remove_entries(checkpoint_dir, key_prefix)

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Checks that a checkpoint's backend is torch_dist.

        Args:
            loaded_version: the backend's name (the parameter is documented under this one).

        Raises:
            UnsupportedError: it is another.
        """
        require_backend(self, loaded_version, BACKEND)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Checks that a checkpoint's version of the backend is 1.

        Args:
            loaded_version: of the checkpoint.

        Raises:
            UnsupportedError: it is another.
        """
        require_version(self, loaded_version, VERSIONS)
