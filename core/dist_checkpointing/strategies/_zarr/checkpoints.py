"""The common parts of the ``zarr`` strategies: version, checks of arguments, removal of arrays."""

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
    """A base of all strategies that load checkpoints of backend ``zarr``, version 1."""

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and ShardedObjects whose keys begin with a prefix; collective.

        Rank 0 removes all of them.

        Raises:
            UsageError: the prefix is empty.
            StorageError: a file cannot be removed; on every rank.
        """
        # Wait for ranks that may still be reading.
        comm.barrier()
        comm.together(
            lambda: remove_entries(Path(checkpoint_dir), key_prefix) if comm.rank() == 0 else []
        )

    def check_backend_compatibility(self, loaded_version: str) -> None:
        """Raise unless a checkpoint's backend is ``zarr``.

        Args:
            loaded_version: name of the backend (the parameter's name is the documented one).

        Raises:
            UnsupportedError: the checkpoint has another backend.
        """
        require_backend(self, loaded_version, BACKEND)

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise unless a checkpoint's version of the backend is 1.

        Raises:
            UnsupportedError: the checkpoint has another version.
        """
        require_version(self, loaded_version, (VERSION,))


def tensors_of(sharded_state_dict: ShardedStateDict) -> list[ShardedTensor]:
    """Return the leaves of a tree, which must be ShardedTensors.

    Raises:
        UsageError: a leaf is not a ShardedTensor.
    """
    leaves = list(nested_values(sharded_state_dict))
    for leaf in leaves:
        if not isinstance(leaf, ShardedTensor):
            raise UsageError(
                f"the zarr strategies accept only ShardedTensors, not a {type(leaf).__name__}",
                key=getattr(leaf, "key", None),
                hint="use the common strategy for ShardedObjects",
            )
    return leaves


def replace_leaves(tree: ShardedStateDict, leaves: Iterable[object]) -> ShardedStateDict:
    """Replace the leaves of a tree in place and return the tree.

    Args:
        tree: dicts and lists.
        leaves: new leaves, in the order of ``nested_values``.
    """
    new_leaves = iter(leaves)
    return dict_list_map_inplace(lambda _: next(new_leaves), tree)  # type: ignore[no-any-return]
