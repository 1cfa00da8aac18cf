"""The common state and ShardedObjects as files of ``torch.save`` (backend ``torch``, version 1)::

    checkpoint/
    ├── common.pt                     the common state, a dict; written by rank 0
    └── rng_state/shard_0.1_2.4.pt    a ShardedObject (KEY/shard_OFFSET_SHAPE.pt); written by the
                                      rank with the main replica

Only ShardedObjects that the sharded strategy does not handle are stored in these files. The bytes
equal those that ``ckpt convert`` writes. Loading does not call anything that a file names, see
``core.dist_checkpointing._values.objects``.

The first Megatron checkpoints of this kind lack the last number of a ShardedObject's shape in the
file name (``rng_state/shard_0.1_2.pt``); they can also be read.

Source: megatron-core 0.12.1 and 0.16.1; files that they wrote, pinned in tests/golden
(``mcore*/**/common.pt``, ``mcore0121_zarr/**/shard_*.pt``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from typing_extensions import override

from core.dist_checkpointing._directory.durable_file import write_file
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._values.objects import load_file, stream
from core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from core.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
    require_backend,
    require_version,
)
from core.errors import CorruptError, MissingShardError, UsageError
from core.files.source_store import open_store
from core.files.store import ReadStore
from core.files.url import find_location
from core.formats.dcp.reading.data_files import METADATA
from core.formats.mcore.common_state import COMMON_FILE
from core.megatron.extras.sharded_objects import split_sharded_key

COMMON_STATE_FNAME = COMMON_FILE

_BACKEND = "torch"
_VERSION = 1
_SUFFIX = ".pt"


def register_default_common_strategies() -> None:
    """Register the strategies of this module as the defaults of ``torch``, version 1."""
    register_default_strategy(
        StrategyAction.LOAD_COMMON, _BACKEND, _VERSION, TorchCommonLoadStrategy()
    )
    register_default_strategy(
        StrategyAction.SAVE_COMMON, _BACKEND, _VERSION, TorchCommonSaveStrategy(_BACKEND, _VERSION)
    )


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """A strategy that writes common state and ShardedObjects as files of ``torch.save``."""

    syncs_files = True

    @override
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Write ``common.pt`` on rank 0; collective.

        Args:
            common_state_dict: the state that all ranks have in common.
            checkpoint_dir: an existing directory.

        Raises:
            UnsupportedError: the state has a value that cannot be saved.
            StorageError, CapacityError: the file cannot be written.
            WorkerError: rank 0 failed otherwise; on the ranks that do not write.
        """

        def write() -> None:
            if comm.rank() == 0:
                _write_value(checkpoint_dir, COMMON_STATE_FNAME, common_state_dict)

        comm.together(write)

    @override
    def save_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> None:
        """Write a file for each ShardedObject that is a main replica; collective.

        Every rank writes its own objects.

        Args:
            sharded_objects_state_dict: ShardedObjects, nested.
            checkpoint_dir: an existing directory.

        Raises:
            UsageError: a leaf is not a ShardedObject.
            UnsafeError: a key leads out of the directory.
            UnsupportedError, StorageError, CapacityError, WorkerError: as ``save_common``.
        """

        def write() -> None:
            for item in nested_values(sharded_objects_state_dict):
                if is_main_replica(_require_sharded_object(item).replica_id):
                    _write_value(checkpoint_dir, item.unique_key + _SUFFIX, item.data)

        comm.together(write)

    @override
    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]
        # Documented as a method in this class only; elsewhere it is a property.
        return True


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """A strategy that reads the files of ``TorchCommonSaveStrategy``; not collective."""

    @override
    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """Load ``common.pt``, with tensors on the CPU.

        Raises:
            MissingShardError: the checkpoint has no common state.
            CorruptError, UnsupportedError, UnsafeError, StorageError: the state cannot be loaded,
                see ``core.dist_checkpointing._values.objects``.
        """
        root = find_location(checkpoint_dir)
        # The newest Megatron versions store the common state as an object in the DCP files.
        if not (root / COMMON_STATE_FNAME).exists() and (root / METADATA).is_file():
            return bridge.load_common(root)
        with closing(open_store(root)) as store:
            state = load_file(store, COMMON_STATE_FNAME)
        if not isinstance(state, dict):
            raise CorruptError(
                f"the common state is a {type(state).__name__}, not a dict", file=COMMON_STATE_FNAME
            )
        return state

    @override
    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """Replace every ShardedObject by its stored value, in place.

        Args:
            sharded_objects_state_dict: ShardedObjects, nested; changed in place.
            checkpoint_dir: of the checkpoint.

        Raises:
            MissingShardError: the file of an object is missing; the hint lists the files of the
                same key.
            UsageError: a leaf is not a ShardedObject.
            CorruptError, UnsupportedError, UnsafeError, StorageError: an object cannot be loaded,
                see ``core.dist_checkpointing._values.objects``.
        """
        with closing(open_store(find_location(checkpoint_dir))) as store:

            def load_object(leaf: Any) -> Any:
                return load_file(store, _find_file(store, _require_sharded_object(leaf)))

            return dict_list_map_inplace(  # type: ignore[no-any-return]
                load_object, sharded_objects_state_dict
            )

    @override
    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """Return the stored ShardedObjects without data, by unique key.

        Only the names of the files are read.
        """
        metadata: ShardedStateDict = {}
        with closing(open_store(find_location(checkpoint_dir))) as store:
            for folder, names in _object_files(store):
                objects = [
                    ShardedObject.empty_from_unique_key(f"{folder}/{name}") for name in names
                ]
                # Old file names lack the last number of the shape, which is parsed as -1; infer
                # the number from the largest offset in the directory.
                last_offset = max((item.global_offset[-1] for item in objects), default=0)
                for item in objects:
                    if item.global_shape[-1] < 0:
                        item.global_shape = (*item.global_shape[:-1], last_offset + 1)
                    metadata[item.unique_key] = item
        return metadata

    @property
    @override
    def can_handle_sharded_objects(self) -> bool:
        return True

    @override
    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Raise unless the backend is ``torch``.

        Args:
            loaded_version: name of the backend (the parameter's name is the documented one).

        Raises:
            UnsupportedError: the checkpoint has another backend.
        """
        require_backend(self, loaded_version, _BACKEND)

    @override
    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Raise unless the version of the backend is 1.

        Raises:
            UnsupportedError: the checkpoint has another version.
        """
        require_version(self, loaded_version, (_VERSION,))


def _write_value(checkpoint_dir: str | Path, name: str, value: object) -> None:
    # torch.save names the directory inside its zip archive after the file.
    prefix = name.rpartition("/")[2].removesuffix(_SUFFIX)
    write_file(checkpoint_dir, name, stream(value, prefix=prefix).pieces())


def _require_sharded_object(item: Any) -> ShardedObject:
    if not isinstance(item, ShardedObject):
        raise UsageError(f"expected a ShardedObject, found a {type(item).__name__}")
    return item


def _find_file(store: ReadStore, item: ShardedObject) -> str:
    """Find the file of a ShardedObject, whose name may lack the last number of the shape.

    Raises:
        MissingShardError: neither file exists.
    """
    name = item.unique_key + _SUFFIX
    if store.exists(name):
        return name
    # The shape has its numbers joined by dots; cut the last one off.
    old_name = item.unique_key.rpartition(".")[0] + _SUFFIX
    if len(item.global_shape) > 1 and store.exists(old_name):
        return old_name
    # Name the shards that exist: the parallel sizes of the save may have been different.
    siblings = [file for file in store.files(item.key) if file.endswith(_SUFFIX)]
    hint = (
        f"the checkpoint contains these shards of {item.key}: {', '.join(siblings[:8])}"
        if siblings
        else None
    )
    raise MissingShardError(
        "the ShardedObject's file is missing", file=name, key=item.unique_key, hint=hint
    )


def _object_files(store: ReadStore, under: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each folder with ShardedObjects, with the names of its files without suffix."""
    for folder in store.folders(under):
        path = f"{under}/{folder}" if under else folder
        names = [name.removesuffix(_SUFFIX) for name in store.files(path) if name.endswith(_SUFFIX)]
        # Skip other .pt files.
        names = [name for name in names if split_sharded_key(f"{path}/{name}") is not None]
        if names:
            yield path, names
        # A key may have slashes in it, so the folders are nested.
        yield from _object_files(store, path)
