"""What the strategies of backend ``zarr`` share: their version, what they take and return, removal of arrays."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from core.dist_checkpointing.strategies._zarr.arrays import remove_entries
from core.dist_checkpointing.strategies.base import require_backend, require_version
from core.errors import UsageError

BACKEND, VERSION = "zarr", 1


class ZarrCheckpoints:
    """What all strategies share that load checkpoints of backend ``zarr``, version 1."""

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Removes the arrays and ShardedObjects whose keys begin with a prefix, by rank 0; every rank calls this.

        Raises:
            UsageError: the prefix is empty.
            StorageError: the system refuses; raised on every rank.
        """
        comm.barrier()
        comm.together(lambda: remove_entries(Path(checkpoint_dir), key_prefix) if comm.rank() == 0 else [])

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Returns if a checkpoint's backend (so it is, despite the name) is ``zarr``.

        Raises:
            UnsupportedError: it is another.
        """
        require_backend(self, loaded_version, BACKEND)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Returns if a checkpoint's version of the backend is 1.

        Raises:
            UnsupportedError: it is another.
        """
        require_version(self, loaded_version, (VERSION,))


def tensors_of(sharded_state_dict: ShardedStateDict) -> list[ShardedTensor]:
    """The leaves of a tree, which are ShardedTensors."""
    found = list(nested_values(sharded_state_dict))
    for leaf in found:
        if not isinstance(leaf, ShardedTensor):
            raise UsageError(
                f"the zarr strategies take ShardedTensors only, not a {type(leaf).__name__}",
                key=getattr(leaf, "key", None),
                hint="the common strategy stores ShardedObjects",
            )
    return found


def with_leaves(tree: ShardedStateDict, leaves: Iterable[object]) -> ShardedStateDict:
    """A tree whose leaves were replaced, in place, by others in the order of ``nested_values``."""
    others = iter(leaves)
    return dict_list_map_inplace(lambda _: next(others), tree)  # type: ignore[no-any-return]
