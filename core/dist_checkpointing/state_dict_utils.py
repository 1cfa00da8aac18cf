"""Preparation of state dicts for saving and loading.

Apply factories, and split the sharded from the common part. These are the documented names of
``megatron.core.dist_checkpointing.state_dict_utils``. Unlike Megatron-Core's, ``save_preprocess``
does not change the caller's state dict either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.integrity import check_irregular
from core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    extract_matching_values,
    nested_values,
)
from core.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from core.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from core.errors import MissingShardError


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its sharded and its common part.

    Factories are applied, and LocalNonpersistentObjects dropped.

    Args:
        sharded_state_dict: not changed.
        validate_access_integrity: check that the shards of all ranks form complete tensors, and log
            where common states differ; collective then.
        preprocess_common_before_consistancy_check: return the part of the common state that has to
            be the same on all ranks. It must not change its argument.

    Raises:
        UsageError: the shards do not fit together; on every rank.
        CheckpointingException: a factory or the callback failed on a rank; on every rank if
            validation is on.
    """

    def split() -> tuple[ShardedStateDict, StateDict, StateDict]:
        # Apply factories to new containers: they replace leaves in place.
        tree = dict_list_map_outplace(lambda leaf: leaf, sharded_state_dict)
        apply_factories(tree)
        sharded, common = extract_sharded_base(extract_nonpersistent(tree)[1])
        sharded = filter_out_empty_flatten_tensor(sharded)
        prepare = preprocess_common_before_consistancy_check
        return sharded, common, prepare(common) if prepare and validate_access_integrity else common

    if not validate_access_integrity:
        # Not collective without validation, so a failure stays on its rank.
        return split()[:2]
    sharded, common, compared = comm.together(split)
    global_metadata = determine_global_metadata(sharded)[1]
    validate_sharding_integrity(global_metadata, common_state_dict=compared)
    check_irregular(global_metadata)
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """Prepare a state dict for loading; the given one is not changed.

    Returns:
        The state dict with factories applied and without LocalNonpersistentObjects; the values that
        those wrapped; and the factories without data, in the original nesting, where dicts by index
        stand for lists.
    """
    # Remember the factories before they are replaced by what they build. Lists become dicts, as
    # otherwise a factory would lose its index.
    tree = filter_out_empty_flatten_tensor(sharded_state_dict)
    factories, _ = extract_matching_values(
        tree, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(tree)
    dict_list_map_inplace(ShardedTensorFactory.without_data, factories)
    local, tree = extract_nonpersistent(tree)
    dict_list_map_inplace(lambda leaf: leaf.unwrap(), local)
    return tree, local, factories


def filter_out_empty_flatten_tensor(
    sharded_state_dict: dict[Any, Any] | list[Any],
) -> ShardedStateDict:
    """Return a new tree without empty flattened ShardedTensors and without empty containers.

    A ShardedTensor is empty if its flattened range is.
    """

    def is_kept(leaf: Any) -> bool:
        flat = leaf.flattened_range if isinstance(leaf, ShardedTensor) else None
        return flat is None or flat.start != flat.stop

    tree, _ = extract_matching_values(sharded_state_dict, is_kept)
    return tree  # type: ignore[no-any-return]


def remaining_factories(factories: Any, before: Any, after: Any) -> ShardedStateDict:
    """Return the factories whose shards were all loaded, at the paths of the loaded shards.

    Args:
        factories: the factories that ``load_preprocess`` returned.
        before: the state dict that ``load_preprocess`` returned, sharded leaves only.
        after: the part of ``before`` that was loaded. It has no unexpected keys, so its lists may
            be shorter.

    Raises:
        MissingShardError: only some of a factory's shards were loaded, so they cannot be merged.
    """
    loaded = {leaf.key for leaf in nested_values(after)}
    if {leaf.key for leaf in nested_values(before)} <= loaded:
        return factories  # type: ignore[no-any-return]
    return _filter_factories(factories, before, loaded) or {}


def _filter_factories(factories: Any, before: Any, loaded: set[str]) -> Any:
    """Return the factories of a subtree whose keys were loaded; None if there are none.

    Raises:
        MissingShardError: only some of a factory's shards were loaded.
    """
    if isinstance(factories, ShardedTensorFactory):
        # A factory can merge all of its shards or none.
        flags = [leaf.key in loaded for leaf in nested_values([before])]
        if any(flags) and not all(flags):
            raise MissingShardError(
                f"the checkpoint contains only {sum(flags)} of the {len(flags)} shards that this "
                "ShardedTensorFactory merges",
                key=factories.key,
                hint="remove the factory from the state dict, or save its tensors under their own "
                "keys",
            )
        return factories if any(flags) else None
    remaining = {}
    for name, inner in factories.items():
        inner_remaining = _filter_factories(inner, before[name], loaded)
        if inner_remaining is None:
            continue
        if isinstance(before, list):
            # Items without any loaded leaf are missing from the loaded list, so later items have
            # moved up.
            name = sum(
                any(leaf.key in loaded for leaf in nested_values([item])) for item in before[:name]
            )
        remaining[name] = inner_remaining
    return remaining or None
