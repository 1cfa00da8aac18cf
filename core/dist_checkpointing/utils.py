"""Functions that split sharded state dicts by kind of leaf, change key prefixes, and log times.

These are the documented names of ``megatron.core.dist_checkpointing.utils``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from core.dist_checkpointing._engine.torch_dtypes import dequantize_tensor, is_float8tensor
from core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    nested_values,
)
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
"""The identity of a shard: key, global offset, and the flattened range or None."""

Split = tuple[ShardedStateDict, StateDict]
"""The selected leaves and all others, each in the original nesting."""

fallback_logger = logging.getLogger(__name__)

_names: list[str] = []
_loggers: list[logging.Logger] = []


def zip_strict(*args: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Zip iterables of equal length.

    Raises:
        ValueError: the lengths differ. Raised by the call, not during iteration.
    """
    lists = [list(arg) for arg in args]
    lengths = [len(items) for items in lists]
    if len(set(lengths)) > 1:
        raise ValueError(
            f"cannot zip iterables of different lengths: {', '.join(map(str, lengths))}"
        )
    return zip(*lists, strict=True)


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    flat = sharded_tensor.flattened_range
    return (
        sharded_tensor.key,
        tuple(sharded_tensor.global_offset),
        None if flat is None else (flat.start, flat.stop),
    )


def _sharded_object_id(sharded_object: ShardedObject) -> _ShardId:
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def _split(sharded_state_dict: ShardedStateDict, *kinds: type) -> Split:
    return extract_matching_values(sharded_state_dict, lambda leaf: isinstance(leaf, kinds))


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> Split:
    """Split off the ShardedTensors."""
    return _split(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> Split:
    """Split off the ShardedTensors and ShardedTensorFactories."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(sharded_state_dict: ShardedStateDict) -> Split:
    """Split off the ShardedTensors, ShardedTensorFactories and LocalNonpersistentObjects."""
    return _split(sharded_state_dict, ShardedTensor, LocalNonpersistentObject, ShardedTensorFactory)


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> Split:
    """Split off the ShardedBase objects of all kinds."""
    return _split(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> Split:
    """Split off the LocalNonpersistentObjects."""
    return _split(sharded_state_dict, LocalNonpersistentObject)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put a prefix before the key of every sharded leaf, in place."""
    _rename_keys(sharded_state_dict, lambda key: prefix + key)


def replace_prefix_for_sharding(
    sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str
) -> None:
    """Replace the prefix of the key of every sharded leaf, in place.

    Raises:
        ValueError: a key does not begin with the old prefix. The keys of the leaves before it have
            already changed.
    """

    def replace_prefix(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(f"the key {key!r} does not begin with {old_prefix!r}")
        return new_prefix + key.removeprefix(old_prefix)

    _rename_keys(sharded_state_dict, replace_prefix)


def apply_prefix_mapping(
    sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]
) -> None:
    """Replace prefixes of the keys of sharded leaves, in place.

    A key that begins with none of the prefixes does not change.

    Args:
        sharded_state_dict: the tree.
        prefix_map: from old prefix to new prefix; the first that a key begins with is replaced.
    """

    def map_prefix(key: str) -> str:
        old = next((prefix for prefix in prefix_map if key.startswith(prefix)), None)
        return key if old is None else prefix_map[old] + key.removeprefix(old)

    _rename_keys(sharded_state_dict, map_prefix)


def _rename_keys(sharded_state_dict: ShardedStateDict, new_key: Callable[[str], str]) -> None:
    def rename(leaf: Any) -> Any:
        if isinstance(leaf, ShardedBase):
            leaf.key = new_key(leaf.key)
        return leaf

    dict_list_map_inplace(rename, sharded_state_dict)


def force_all_tensors_to_non_fp8(sharded_state_dict: ShardedStateDict) -> None:
    """Replace Transformer Engine's float8 data by ordinary tensors, in place.

    The new tensors have the dtypes that the float8 tensors report.
    """
    for leaf in nested_values(sharded_state_dict):
        if isinstance(leaf, ShardedBase) and is_float8tensor(leaf.data):
            leaf.data = dequantize_tensor(leaf.data)


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Add a name and a logger for the messages within the block.

    Args:
        name: appended to the names of the enclosing blocks, unless empty or None.
        current_logger: None for the logger of the innermost block that has one, else
            ``fallback_logger``.

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
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = float("-inf"),
    level: int | None = None,
) -> Iterator[None]:
    """Log how long the block took.

    Args:
        name: the block's name, within the names of ``logger_stack``.
        logger: None for the one that ``logger_stack`` chooses.
        threshold: seconds; a shorter block is not logged.
        level: log level; None for DEBUG, or for WARNING with a threshold.
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
    """Log a debug message, with the names and the logger of ``logger_stack``."""
    with logger_stack() as (names, target):
        target.debug("%s %s", names, msg)


def _clean_metadata_for_serialization(metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return content metadata without process groups and without the entry ``dp_cp_group``.

    Neither can be stored. Megatron-Core does not document this function, but training scripts that
    save by other means import it.
    """
    # Compare class names, because torch may be built without the class ProcessGroup.
    if metadata is None:
        return None
    return {
        name: value
        for name, value in metadata.items()
        if name != "dp_cp_group"
        and not any(kind.__name__ == "ProcessGroup" for kind in type(value).__mro__)
    }
