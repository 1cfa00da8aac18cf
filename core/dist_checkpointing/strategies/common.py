"""The common state, and ShardedObjects that have no other home, as files of ``torch.save``::

    checkpoint/
    ├── common.pt                             the common state, a dict; rank 0 writes it
    └── rng_state/shard_0.1_2.4.pt            a ShardedObject: its key, offset and shape; its main replica writes it

Backend ``torch``, version 1. The bytes are those that ``ckpt convert`` writes. Nothing that a file names is called when
it is loaded, see ``core.dist_checkpointing._values.objects``.

The first checkpoints of this kind lack the last number of a ShardedObject's shape (``rng_state/shard_0.1_2.pt``);
they are read.

Source: megatron-core 0.12.1 and 0.16.1; files that they wrote, pinned in tests/golden (``mcore*/**/common.pt``,
``mcore0121_zarr/**/shard_*.pt``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from core.dist_checkpointing._directory.durable_file import write_file
from core.dist_checkpointing._engine import bridge
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._values.objects import load_file, stream
from core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from core.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
    require_backend,
    require_version,
)
from core.errors import CorruptError, MissingShardError, UsageError
from core.files.store import LocalStore
from core.formats.dcp.format import METADATA
from core.formats.mcore.common_state import COMMON_FILE
from core.formats.mcore.objects import parts_of_sharded_object

COMMON_STATE_FNAME = COMMON_FILE

_BACKEND = "torch"
_VERSION = 1
_SUFFIX = ".pt"


def register_default_common_strategies() -> None:
    """Makes the strategies of this module the default ones of the backend ``torch``, version 1."""
    register_default_strategy(StrategyAction.LOAD_COMMON, _BACKEND, _VERSION, TorchCommonLoadStrategy())
    register_default_strategy(
        StrategyAction.SAVE_COMMON, _BACKEND, _VERSION, TorchCommonSaveStrategy(_BACKEND, _VERSION)
    )


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Writes common state and ShardedObjects as files of ``torch.save``."""

    syncs_files = True

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: str | Path) -> None:
        """Writes ``common.pt``; collective, rank 0 writes.

        Args:
            common_state_dict: what all ranks have alike.
            checkpoint_dir: exists.

        Raises:
            UnsupportedError: it holds something that cannot be saved.
            StorageError, CapacityError: the system refuses.
            WorkerError: one of these, on the ranks that do not write.
        """

        def write() -> None:
            if comm.rank() == 0:
                _write(checkpoint_dir, COMMON_STATE_FNAME, common_state_dict)

        comm.together(write)

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Writes a file for each ShardedObject that is a main replica; collective, every rank writes its own.

        Args:
            sharded_objects_state_dict: ShardedObjects, nested.
            checkpoint_dir: exists.

        Raises:
            UsageError: a leaf is no ShardedObject.
            UnsafeError: a key leads out of the directory.
            UnsupportedError, StorageError, CapacityError, WorkerError: as for ``save_common``.
        """

        def write() -> None:
            for item in nested_values(sharded_objects_state_dict):
                if is_main_replica(_checked(item).replica_id):
                    _write(checkpoint_dir, item.unique_key + _SUFFIX, item.data)

        comm.together(write)

    def can_handle_sharded_objects(self) -> bool:  # type: ignore[override]  # documented as a method, here alone
        """True."""
        return True


class TorchCommonLoadStrategy(LoadCommonStrategy):
    """Reads what ``TorchCommonSaveStrategy`` writes; every rank for itself."""

    def load_common(self, checkpoint_dir: str | Path) -> StateDict:
        """The content of ``common.pt``, tensors on the CPU.

        A checkpoint of Megatron's newest dialect has an item of ``.metadata`` instead, which is read in its place.

        Raises:
            MissingShardError: there is neither.
            CorruptError, UnsupportedError, UnsafeError, StorageError: see ``core.dist_checkpointing._values.objects``.
        """
        root = Path(checkpoint_dir)
        if not (root / COMMON_STATE_FNAME).exists() and (root / METADATA).is_file():
            return bridge.load_common(root)
        with closing(LocalStore(root)) as store:
            found = load_file(store, COMMON_STATE_FNAME)
        if not isinstance(found, dict):
            raise CorruptError(f"the common state is a {type(found).__name__}, not a dict", file=COMMON_STATE_FNAME)
        return found

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> StateDict:
        """The same containers, every ShardedObject in them replaced by what is stored for it.

        Args:
            sharded_objects_state_dict: ShardedObjects, nested; changed in place.
            checkpoint_dir: of the checkpoint.

        Raises:
            MissingShardError: the file of one is not there; names it, and those of the same key.
            UsageError: a leaf is no ShardedObject.
            CorruptError, UnsupportedError, UnsafeError, StorageError: see ``core.dist_checkpointing._values.objects``.
        """
        with closing(LocalStore(Path(checkpoint_dir))) as store:
            return dict_list_map_inplace(  # type: ignore[no-any-return]
                lambda item: load_file(store, _file_of(store, _checked(item))), sharded_objects_state_dict
            )

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> ShardedStateDict:
        """The stored ShardedObjects without data, by unique key; the files are not opened."""
        found: ShardedStateDict = {}
        with closing(LocalStore(Path(checkpoint_dir))) as store:
            for folder, names in _object_files(store):
                items = [ShardedObject.empty_from_unique_key(f"{folder}/{name}") for name in names]
                last = max((item.global_offset[-1] for item in items), default=0)
                for item in items:
                    if item.global_shape[-1] < 0:
                        item.global_shape = (*item.global_shape[:-1], last + 1)
                    found[item.unique_key] = item
        return found

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def check_backend_compatibility(self, loaded_version: Any) -> None:
        """Checks a backend's name.

        Args:
            loaded_version: the backend that ``metadata.json`` names (the parameter's name is the documented one).

        Raises:
            UnsupportedError: it is not ``torch``.
        """
        require_backend(self, loaded_version, _BACKEND)

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Checks a backend's version.

        Raises:
            UnsupportedError: it is not 1.
        """
        require_version(self, loaded_version, (_VERSION,))


def _write(checkpoint_dir: str | Path, name: str, value: object) -> None:
    prefix = name.rpartition("/")[2].removesuffix(_SUFFIX)
    write_file(checkpoint_dir, name, stream(value, prefix=prefix).pieces())


def _checked(item: Any) -> ShardedObject:
    if not isinstance(item, ShardedObject):
        raise UsageError(f"a {type(item).__name__} is no ShardedObject")
    return item


def _file_of(store: LocalStore, item: ShardedObject) -> str:
    """The file of a ShardedObject: the usual one, or the one that lacks the last number of the shape.

    Raises:
        MissingShardError: neither is there.
    """
    name = item.unique_key + _SUFFIX
    if store.exists(name):
        return name
    older = item.unique_key.rpartition(".")[0] + _SUFFIX
    if len(item.global_shape) > 1 and store.exists(older):
        return older
    siblings = [other for other in store.files(item.key) if other.endswith(_SUFFIX)]
    hint = f"of {item.key} there are: {', '.join(siblings[:8])}" if siblings else None
    raise MissingShardError("the ShardedObject's file does not exist", file=name, key=item.unique_key, hint=hint)


def _object_files(store: LocalStore, under: str = "") -> Iterator[tuple[str, list[str]]]:
    """Folders that hold ShardedObjects, and their files' names without the suffix."""
    for folder in store.folders(under):
        path = f"{under}/{folder}" if under else folder
        names = [name.removesuffix(_SUFFIX) for name in store.files(path) if name.endswith(_SUFFIX)]
        names = [name for name in names if parts_of_sharded_object(f"{path}/{name}") is not None]
        if names:
            yield path, names
        yield from _object_files(store, path)
