"""A result that ranks compute together and keep from one save or load to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.dict_utils import nested_values
from core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from core.dist_checkpointing.utils import _sharded_object_id, _sharded_tensor_shard_id

T = TypeVar("T")


class CachedResult(Generic[T]):
    """A result for a state dict, valid as long as no rank's state dict changes its structure.

    Args:
        group: process group whose ranks compute the result together.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.structure: object = None
        self.value: T | None = None

    def get(
        self, sharded_state_dict: ShardedStateDict, compute: Callable[[], T], *, is_kept: bool
    ) -> T:
        """Return the result, computed anew if necessary; collective.

        Args:
            sharded_state_dict: this rank's state dict; the result is a function of those of all
                ranks.
            compute: compute the result; collective.
            is_kept: use and keep an earlier result, if all ranks do.
        """
        structure = (
            [_fingerprint(value) for value in nested_values(sharded_state_dict)]
            if is_kept
            else None
        )
        if not comm.any_of_all(not is_kept or structure != self.structure, self.group):
            return self.value  # type: ignore[return-value]
        value = compute()
        if is_kept:
            self.value, self.structure = value, structure
        return value


def _fingerprint(value: object) -> object:
    """Return those properties of a leaf that a distribution may depend on."""
    if isinstance(value, ShardedTensor):
        return (
            *_sharded_tensor_shard_id(value),
            value.local_shape,
            value.dtype,
            is_main_replica(value.replica_id),
        )
    if isinstance(value, ShardedObject):
        return *_sharded_object_id(value), is_main_replica(value.replica_id)
    return None
