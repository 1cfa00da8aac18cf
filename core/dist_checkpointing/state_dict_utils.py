"""State dicts on their way to a checkpoint and back: factories applied, sharded and common parts told apart.

The documented names of ``megatron.core.dist_checkpointing.state_dict_utils``. Unlike there, the caller's state dict
stays as it is when it is saved, too.
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
from core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity
from core.errors import MissingShardError


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
) -> tuple[ShardedStateDict, StateDict]:
    """The sharded and the common part of a state dict, factories applied, LocalNonpersistentObjects left out.

    Args:
        sharded_state_dict: not changed.
        validate_access_integrity: check that the shards of all ranks make whole tensors, and log where common states
            differ; collective then.
        preprocess_common_before_consistancy_check: what of the common state has to be the same on all ranks. It must
            not change its argument.

    Raises:
        UsageError: the shards do not fit together; on every rank.
        CheckpointingException: a factory or the callback failed on some rank; on every rank if validation is on.
    """

    def split() -> tuple[ShardedStateDict, StateDict, StateDict]:
        built = dict_list_map_outplace(lambda leaf: leaf, sharded_state_dict)
        apply_factories(built)
        sharded, common = extract_sharded_base(extract_nonpersistent(built)[1])
        sharded = filter_out_empty_flatten_tensor(sharded)
        prepare = preprocess_common_before_consistancy_check
        return sharded, common, prepare(common) if prepare and validate_access_integrity else common

    if not validate_access_integrity:
        return split()[:2]
    sharded, common, compared = comm.together(split)
    global_metadata = determine_global_metadata(sharded)[1]
    validate_sharding_integrity(global_metadata, common_state_dict=compared)
    check_irregular(global_metadata)
    return sharded, common


def load_preprocess(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """What a load starts from; the given state dict is not changed.

    Returns:
        The state dict with factories applied and without LocalNonpersistentObjects; what those wrapped; and the
        factories, without data, at their places, lists being dicts by index.
    """
    wanted = filter_out_empty_flatten_tensor(sharded_state_dict)
    factories, _ = extract_matching_values(
        wanted, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(wanted)
    dict_list_map_inplace(ShardedTensorFactory.without_data, factories)
    local, wanted = extract_nonpersistent(wanted)
    dict_list_map_inplace(lambda leaf: leaf.unwrap(), local)
    return wanted, local, factories


def filter_out_empty_flatten_tensor(sharded_state_dict: dict[Any, Any] | list[Any]) -> ShardedStateDict:
    """A new tree without the ShardedTensors whose flattened range is empty, and without empty containers."""

    def is_kept(leaf: Any) -> bool:
        flat = leaf.flattened_range if isinstance(leaf, ShardedTensor) else None
        return flat is None or flat.start != flat.stop

    kept, _ = extract_matching_values(sharded_state_dict, is_kept)
    return kept  # type: ignore[no-any-return]


def remaining_factories(factories: Any, before: Any, after: Any) -> ShardedStateDict:
    """The factories of which everything is left, at the places that they have then.

    Args:
        factories: as ``load_preprocess`` returns them.
        before: the state dict that it returns, sharded leaves only.
        after: what of it was loaded: unexpected keys may have been left out, so lists may be shorter.

    Raises:
        MissingShardError: of what a factory made only a part was loaded, so it cannot be merged.
    """
    kept = {leaf.key for leaf in nested_values(after)}
    if {leaf.key for leaf in nested_values(before)} <= kept:
        return factories  # type: ignore[no-any-return]
    return _remaining(factories, before, kept) or {}


def _remaining(factories: Any, before: Any, kept: set[str]) -> Any:
    """The same for a part of the trees; None if nothing is left."""
    if isinstance(factories, ShardedTensorFactory):
        return factories if _is_left(before, kept, factories) else None
    found = {}
    for place, inner in factories.items():
        rest = _remaining(inner, before[place], kept)
        if rest is not None:
            earlier = before[:place] if isinstance(before, list) else []
            left = sum(any(leaf.key in kept for leaf in nested_values([item])) for item in earlier)
            found[left if isinstance(before, list) else place] = rest
    return found or None


def _is_left(made: Any, kept: set[str], factory: ShardedTensorFactory) -> bool:
    there = [leaf.key in kept for leaf in nested_values([made])]
    if any(there) and not all(there):
        raise MissingShardError(
            f"of {len(there)} shards that a factory made, the checkpoint has {sum(there)}, so they cannot be merged",
            key=factory.key,
            hint="leave the factory out of the state dict, or save its tensors under their own keys",
        )
    return any(there)
