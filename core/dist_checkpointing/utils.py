"""Parts of sharded state dicts by kind of leaf, prefixes of their keys, and timed log messages.

The documented names of ``megatron.core.dist_checkpointing.utils``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from core.dist_checkpointing._engine.float8 import dequantized, is_float8tensor
from core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, nested_values
from core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)

_ShardId = tuple[str, tuple[int, ...], tuple[int, ...] | None]
"""What copies of a shard have in common: key, global offset and, where there is one, the flattened range."""

Split = tuple[ShardedStateDict, StateDict]
"""The leaves asked for and all others, each in the original nesting."""

fallback_logger = logging.getLogger(__name__)

_names: list[str] = []
_loggers: list[logging.Logger] = []


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """``zip`` of iterables of equal length.

    Raises:
        ValueError: the lengths differ; it names them, and nothing was yielded.
    """
    lists = [list(arg) for arg in args]
    lengths = [len(items) for items in lists]
    if len(set(lengths)) > 1:
        raise ValueError(f"iterables of {lengths} elements cannot be zipped")
    return zip(*lists, strict=True)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    held = sharded_tensor.flattened_range
    return sharded_tensor.key, tuple(sharded_tensor.global_offset), None if held is None else (held.start, held.stop)


def _sharded_object_id(sharded_object: ShardedObject) -> _ShardId:
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def _split(sharded_state_dict: ShardedStateDict, *kinds: type) -> Split:
    return extract_matching_values(sharded_state_dict, lambda leaf: isinstance(leaf, kinds))


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> Split:
    """The ShardedTensors, and everything else."""
    return _split(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> Split:
    """The ShardedTensors and ShardedTensorFactories, and everything else."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: ShardedStateDict) -> Split:
    """The ShardedTensors, ShardedTensorFactories and LocalNonpersistentObjects, and everything else."""
    return _split(sharded_state_dict, ShardedTensor, LocalNonpersistentObject, ShardedTensorFactory)


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> Split:
    """The ShardedBase objects of all kinds, and everything else."""
    return _split(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> Split:
    """The LocalNonpersistentObjects, and everything else."""
    return _split(sharded_state_dict, LocalNonpersistentObject)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Puts a prefix before the key of every sharded leaf, in place."""
    _rename(sharded_state_dict, lambda key: prefix + key)


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replaces the prefix of the key of every sharded leaf, in place.

    Raises:
        ValueError: a key does not begin with the old prefix; those before it have been renamed.
    """

    def renamed(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(f"the key {key!r} does not begin with {old_prefix!r}")
        return new_prefix + key.removeprefix(old_prefix)

    _rename(sharded_state_dict, renamed)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]) -> None:
    """Replaces prefixes of keys of sharded leaves, in place; keys with none of the prefixes stay.

    Args:
        sharded_state_dict: the tree.
        prefix_map: old prefix → new prefix; the first one that a key begins with counts.
    """

    def renamed(key: str) -> str:
        old = next((prefix for prefix in prefix_map if key.startswith(prefix)), None)
        return key if old is None else prefix_map[old] + key.removeprefix(old)

    _rename(sharded_state_dict, renamed)


def _rename(sharded_state_dict: ShardedStateDict, renamed: Callable[[str], str]) -> None:
    def rename(leaf: Any) -> Any:
        if isinstance(leaf, ShardedBase):
            leaf.key = renamed(leaf.key)
        return leaf

    dict_list_map_inplace(rename, sharded_state_dict)


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replaces eight-bit data of Transformer Engine by ordinary tensors of the dtype that it passes for, in place."""
    for leaf in nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedBase) and is_float8tensor(leaf.data):
            leaf.data = dequantized(leaf.data)


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Within the block, messages carry one more name, and go to a logger.

    Args:
        name: added to the names of the blocks around; none if empty.
        current_logger: that of the innermost block that has one by default, else ``fallback_logger``.

    Yields:
        All names, joined by dots, and the logger.
    """
    if name:
        _names.append(name)
    if current_logger:
        _loggers.append(current_logger)
    try:
        yield ".".join(_names), _loggers[-1] if _loggers else fallback_logger
    finally:
        if name:
            _names.pop()
        if current_logger:
            _loggers.pop()


@contextmanager
def debug_time(
    name: str, logger: logging.Logger | None = None, threshold: float = float("-inf"), level: int | None = None
) -> Iterator[None]:
    """Logs how long the block took.

    Args:
        name: what it is called, within the names of ``logger_stack``.
        logger: see ``logger_stack``.
        threshold: seconds; a shorter block is not logged.
        level: of the message; DEBUG by default, WARNING with a threshold.
    """
    if level is None:
        level = logging.DEBUG if threshold == float("-inf") else logging.WARNING
    with logger_stack(name, logger) as (names, target):
        start = perf_counter()
        try:
            yield
        finally:
            seconds = perf_counter() - start
            if seconds >= threshold:
                target.log(level, "%s took %.4fs", names, seconds)


def debug_msg(msg: str) -> None:
    """Logs a message for debugging, with the names and to the logger of ``logger_stack``."""
    with logger_stack() as (names, target):
        target.debug("%s %s", names, msg)


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Metadata of the content without what cannot be stored: process groups, and whatever is called ``dp_cp_group``.

    Not documented, but training scripts that save by other means import it.
    """
    if metadata is None:
        return None
    return {
        name: value
        for name, value in metadata.items()
        if name != "dp_cp_group" and not any(kind.__name__ == "ProcessGroup" for kind in type(value).__mro__)
    }
