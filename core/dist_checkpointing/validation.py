"""Checks of a state dict before saving and loading.

They compare state dicts between ranks and with a checkpoint. These are the documented names of
``megatron.core.dist_checkpointing.validation``.

Keys may be only requested or only in the checkpoint (``StrictHandling``). *Unexpected* keys are
requested, but not in the checkpoint; each rank can find its own. *Missing* keys are in the
checkpoint, but no rank requests them; to find them, ranks exchange their metadata.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from core.dist_checkpointing._directory.sums import STAGE
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.integrity import check_sharding
from core.dist_checkpointing.core import CONFIG_FNAME, maybe_load_config
from core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    diff,
    extract_matching_values,
    nested_values,
)
from core.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
)
from core.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from core.errors import (
    CheckpointingException,
    MissingShardError,
    UnsupportedError,
    UsageError,
    list_some,
)
from core.files.url import find_location
from core.formats.mcore.common_state import COMMON_FILE
from core.opening.open import open_checkpoint

__all__ = [
    "CkptShardedMetadata",
    "StrictHandling",
    "adjust_non_strict_load",
    "chosen_strategy",
    "determine_global_metadata",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "validate_integrity_and_strict_load",
    "validate_sharded_objects_handling",
    "validate_sharding_integrity",
    "verify_checkpoint_and_load_strategy",
]

logger = logging.getLogger(__name__)

_LocalMetadata = list[ShardedTensor | ShardedObject]
"""The shards that one rank has or requests, without data."""
_GlobalMetadata = list[_LocalMetadata]
"""The shards of every rank, by rank."""
CkptShardedMetadata = dict[str, ShardedTensor | ShardedObject]
"""The content of a checkpoint, without data: tensors by key, objects by unique key."""

_MAX_NAMED = 20
_OLDER = "use an older checkpoint"


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: _LocalMetadata | None = None,
    global_metadata: _GlobalMetadata | None = None,
    ckpt_sharded_metadata: CkptShardedMetadata | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Compare the requested shards with the checkpoint, and the ranks' requests with each other.

    Collective if ``strict`` raises an error, because ranks may differ in their unexpected keys.

    Args:
        sharded_state_dict: only ShardedBase leaves.
        strict: reaction to differences.
        validate_access_integrity: check that the ranks' shards form complete tensors; needs
            ``global_metadata``.
        local_metadata: shards that this rank requests; None takes them from the state dict.
        global_metadata: shards that all ranks request; if None, no key counts as missing.
        ckpt_sharded_metadata: content of the checkpoint; required for every ``strict`` except
            ASSUME_OK_UNEXPECTED.

    Returns:
        The state dict without unexpected keys; missing keys, the same on all ranks; unexpected keys
        of this rank.

    Raises:
        UsageError: a required argument is None, or, on every rank, shards do not fit together.
        MissingShardError: keys differ, and ``strict`` forbids it; on every rank.
    """
    missing_keys: set[str] = set()
    unexpected_keys: set[str] = set()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise UsageError(
                f"strict={strict.value!r} requires ckpt_sharded_metadata, the checkpoint's metadata"
            )
        # Find the keys that differ, and drop those that the checkpoint lacks from the request.
        requested = (
            local_metadata
            if local_metadata is not None
            else list(nested_values(sharded_state_dict))
        )
        missing_keys, unexpected_keys = missing_and_unexpected_keys(
            ckpt_sharded_metadata,
            requested,
            global_metadata if StrictHandling.requires_global_app_metadata(strict) else None,
        )
        sharded_state_dict = adjust_non_strict_load(sharded_state_dict, unexpected_keys)
        # React to the differences: an error is raised on all ranks, a warning logged by each rank.
        if strict is StrictHandling.IGNORE_ALL:
            missing_keys, unexpected_keys = set(), set()
        elif strict in RAISING:
            comm.together(
                lambda: maybe_report_missing_and_unexpected_keys(
                    missing_keys, unexpected_keys, True
                )
            )
        elif strict in LOGGING:
            maybe_report_missing_and_unexpected_keys(missing_keys, unexpected_keys, False)
    # Check the requests of all ranks. All have the same metadata, so all come to the same result.
    if validate_access_integrity:
        if global_metadata is None:
            raise UsageError(
                "validate_access_integrity requires global_metadata, the metadata of all ranks"
            )
        validate_sharding_integrity(global_metadata)
    return sharded_state_dict, missing_keys, unexpected_keys


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Return the strategies to load a checkpoint with, checked against its ``metadata.json``.

    Args:
        checkpoint_dir: of a distributed checkpoint.
        sharded_strategy: a strategy, or (backend, version) of a registered one; None for the one
            that the checkpoint names.
        common_strategy: a strategy, or (backend, version) of a registered one; None for the one
            that the checkpoint names.

    Raises:
        UsageError: the directory does not exist.
        MissingShardError: the save did not finish.
        UnsupportedError: the directory is not a distributed checkpoint.
        CheckpointingException: a strategy is not registered, or does not support this checkpoint.
    """
    if not str(checkpoint_dir):
        raise UsageError("no checkpoint directory was given")
    config = maybe_load_config(checkpoint_dir)
    # Without metadata.json, find out why, so that the error names the next step.
    if config is None:
        raise build_missing_metadata_error(find_location(checkpoint_dir))
    # Choose the requested strategies, or those that metadata.json names.
    sharded: LoadShardedStrategy = chosen_strategy(
        StrategyAction.LOAD_SHARDED,
        sharded_strategy,
        (config.sharded_backend, config.sharded_backend_version),
    )
    common: LoadCommonStrategy = chosen_strategy(
        StrategyAction.LOAD_COMMON,
        common_strategy,
        (config.common_backend, config.common_backend_version),
    )
    # A requested strategy may be another one than that which wrote the checkpoint.
    sharded.check_backend_compatibility(config.sharded_backend)
    sharded.check_version_compatibility(config.sharded_backend_version)
    common.check_backend_compatibility(config.common_backend)
    common.check_version_compatibility(config.common_backend_version)
    return sharded, common


def chosen_strategy(action: StrategyAction, strategy: Any, default: tuple[str, int]) -> Any:
    """Return a strategy as it is, or the registered one for a (backend, version) or for None.

    Args:
        action: action of the registered strategy.
        strategy: a strategy, (backend, version) of a registered one, or None.
        default: (backend, version) to use for None.

    Raises:
        CheckpointingException: no strategy is registered for the backend and version.
    """
    if strategy is None:
        return get_default_strategy(action, *default)
    return get_default_strategy(action, *strategy) if isinstance(strategy, tuple) else strategy


def validate_sharding_integrity(
    global_metadata: Sequence[Iterable[ShardedBase]],
    common_state_dict: CommonStateDict | None = None,
) -> None:
    """Check that the ranks' shards form complete tensors and objects; log differing common states.

    Collective only with a common state. Ranks with the same metadata come to the same result.

    Args:
        global_metadata: the shards of each rank, by rank.
        common_state_dict: the common state of this rank; given when saving.

    Raises:
        UsageError: dtypes, shapes or grids of a key differ, or a shard does not have exactly one
            main replica. The message names the key, the shard and the ranks.
    """
    if common_state_dict is not None:
        _compare_common_states(common_state_dict)
    check_sharding(global_metadata)


def _compare_common_states(common_state_dict: CommonStateDict) -> None:
    """Log a warning on every rank whose common state differs from rank 0's, which is saved.

    Raises:
        UsageError: the common state of rank 0 cannot be pickled.
    """
    if comm.world_size() == 1:
        return
    is_saved = comm.rank() == 0
    # Send the state of rank 0 to all ranks. If it cannot be pickled, send the error instead, so
    # that the other ranks do not wait.
    problem, packed = comm.broadcast(
        _pickle_common_state(common_state_dict) if is_saved else (None, b"")
    )
    if problem is not None:
        raise UsageError(f"the common state of rank 0 cannot be pickled: {problem}", rank="0")
    if is_saved:
        return
    # Compare it with the state of this rank. A difference is only logged, because only the caller
    # knows which values may differ.
    try:
        only_on_rank_0, only_on_this_rank, unequal = diff(pickle.loads(packed), common_state_dict)
    except Exception as err:  # a user's class may raise anything when it is unpickled or compared
        logger.warning(
            "cannot compare the common state of rank %d with that of rank 0: %s", comm.rank(), err
        )
        return
    if only_on_rank_0 or only_on_this_rank or unequal:
        # The documented sentence, which scripts look for in their logs.
        logger.warning(
            "Rank %d common state dict differs from rank 0 common state dict. "
            "Keys only on rank 0: %s, Keys only on %d: %s, Mismatched keys: %s",
            comm.rank(),
            _format_paths(only_on_rank_0),
            comm.rank(),
            _format_paths(only_on_this_rank),
            _format_paths(unequal),
        )


def _format_paths(paths: list[Any]) -> str:
    omitted = len(paths) - _MAX_NAMED
    return f"{paths[:_MAX_NAMED]}" + (f" and {omitted} more" if omitted > 0 else "")


def _pickle_common_state(common_state_dict: CommonStateDict) -> tuple[str | None, bytes]:
    """Pickle a common state, with tensors in host memory.

    Returns:
        The error, or None; and the pickle, empty after an error.
    """

    def on_host(leaf: Any) -> Any:
        return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf

    try:
        return None, pickle.dumps(dict_list_map_outplace(on_host, common_state_dict))
    except Exception as err:  # pickle passes on any error of a user's class
        return f"{type(err).__name__}: {err}", b""


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict,
) -> tuple[_LocalMetadata, _GlobalMetadata]:
    """Return the shards of this rank and the shards of every rank, without data; collective.

    Args:
        sharded_state_dict: only ShardedTensors and ShardedObjects.
    """
    local: _LocalMetadata = []

    # Within the collective call, so that an error on one rank is raised on all.
    def strip_data() -> _LocalMetadata:
        local.extend(leaf.without_data() for leaf in nested_values(sharded_state_dict))
        return local

    return local, comm.collect(strip_data)


def validate_sharded_objects_handling(
    sharded_strategy: SaveShardedStrategy | LoadShardedStrategy,
    common_strategy: SaveCommonStrategy | LoadCommonStrategy,
) -> None:
    """Raise unless one of the strategies handles ShardedObjects.

    Raises:
        UnsupportedError: neither strategy handles ShardedObjects.
    """
    if not (
        sharded_strategy.can_handle_sharded_objects or common_strategy.can_handle_sharded_objects
    ):
        raise UnsupportedError(
            f"neither {sharded_strategy} nor {common_strategy} handles ShardedObjects",
            hint="choose a strategy whose can_handle_sharded_objects is true",
        )


class StrictHandling(Enum):
    """The reactions of ``load`` to different keys in state dict and checkpoint.

    All but the first read the checkpoint's metadata before loading, and omit unexpected keys from
    the load. Those that end in ``_all`` also find missing keys, for which ranks exchange their
    metadata; with ``validate_access_integrity`` ranks do so in any case.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Do not compare keys; the load strategy raises if the checkpoint lacks a requested key."""
    LOG_UNEXPECTED = "log_unexpected"
    """Log a warning for unexpected keys."""
    LOG_ALL = "log_all"
    """Log a warning for unexpected and for missing keys."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Raise for unexpected keys, before data is read."""
    RAISE_ALL = "raise_all"
    """Raise for unexpected and for missing keys, before data is read."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Return the unexpected keys with the state dict."""
    RETURN_ALL = "return_all"
    """Return the missing and the unexpected keys with the state dict."""
    IGNORE_ALL = "ignore_all"
    """Omit unexpected keys without a message."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Check if the checkpoint's keys are needed."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Check if the keys that other ranks request are needed."""
        return val in _ALL

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Check if ``load`` returns missing and unexpected keys with the state dict."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


_ALL = (
    StrictHandling.IGNORE_ALL,
    StrictHandling.RAISE_ALL,
    StrictHandling.RETURN_ALL,
    StrictHandling.LOG_ALL,
)
RAISING = (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
LOGGING = (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Parse the value of a StrictHandling; a StrictHandling is returned unchanged.

    Raises:
        ValueError: no StrictHandling has this value.
    """
    if isinstance(strict, StrictHandling):
        return strict
    values = [flag.value for flag in StrictHandling]
    if strict not in values:
        raise ValueError(f"strict is {strict!r}, expected one of {', '.join(values)}")
    return StrictHandling(strict)


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]
) -> ShardedStateDict:
    """Remove the ShardedBase leaves with the given keys from a state dict.

    Raises:
        UsageError: a leaf is not a ShardedBase.
    """

    def is_removed(leaf: Any) -> bool:
        if not isinstance(leaf, ShardedBase):
            raise UsageError(
                f"expected only sharded leaves in the state dict, found a {type(leaf).__name__}"
            )
        return leaf.key in sharded_keys_to_remove

    _, remaining = extract_matching_values(sharded_state_dict, is_removed)
    return remaining  # type: ignore[no-any-return]


def missing_and_unexpected_keys(
    ckpt_sharded_metadata: Mapping[str, ShardedBase],
    local_metadata: Iterable[ShardedBase],
    global_metadata: Iterable[Iterable[ShardedBase]] | None = None,
) -> tuple[set[str], set[str]]:
    """Compare requested keys with those of the checkpoint.

    Args:
        ckpt_sharded_metadata: all tensors and objects of the checkpoint.
        local_metadata: tensors and objects that this rank requests.
        global_metadata: tensors and objects that each rank requests, by rank.

    Returns:
        The missing keys, empty without ``global_metadata``; and the unexpected keys of this rank.
    """
    stored = {leaf.key for leaf in ckpt_sharded_metadata.values()}
    unexpected = {requested.key for requested in local_metadata} - stored
    if global_metadata is None:
        return set(), unexpected
    requested_by_all = {leaf.key for leaves in global_metadata for leaf in leaves}
    return stored - requested_by_all, unexpected


def maybe_report_missing_and_unexpected_keys(
    missing_keys: set[str], unexpected_keys: set[str], raise_error: bool = True
) -> None:
    """Raise, or log a warning, if keys are missing or unexpected.

    Raises:
        MissingShardError: keys are missing or unexpected, and ``raise_error``.
    """
    parts = []
    if missing_keys:
        parts.append(
            "Missing keys (in the checkpoint, but not requested by any rank): "
            f"{_format_keys(missing_keys)}"
        )
    if unexpected_keys:
        parts.append(
            "Unexpected keys (requested by this rank, but not in the checkpoint): "
            f"{_format_keys(unexpected_keys)}"
        )
    if not parts:
        return
    if raise_error:
        raise MissingShardError(
            f"the state dict and the checkpoint differ. {'. '.join(parts)}",
            hint="pass strict='log_all' to load only the keys that both contain",
        )
    logger.warning("The state dict and the checkpoint differ. %s.", ". ".join(parts))


def _format_keys(keys: Iterable[str]) -> str:
    return list_some(sorted(keys), _MAX_NAMED)


def build_missing_metadata_error(checkpoint_dir: Path) -> CheckpointingException:
    """Build the error for a path without a ``metadata.json``; the error is not raised.

    Returns:
        UsageError: the path does not exist, is a file, or is a directory that contains a
            checkpoint.
        MissingShardError: a save into the directory did not finish.
        UnsupportedError: the directory is a checkpoint of another format, or not a checkpoint.
    """
    path = str(checkpoint_dir)
    if not checkpoint_dir.exists():
        return UsageError(
            f"the checkpoint directory {path} does not exist", hint="check the spelling of the path"
        )
    if not checkpoint_dir.is_dir():
        hint = f"if the file belongs to a checkpoint, pass its directory: {checkpoint_dir.parent}"
        return UsageError(
            f"{path} is a file, not the directory of a distributed checkpoint", hint=hint
        )
    # A save that did not finish: with its staging directory, or by Megatron, which has none.
    if (checkpoint_dir / STAGE).is_dir():
        return MissingShardError(
            f"the save into this directory did not finish: it contains {STAGE}, "
            f"but no {CONFIG_FNAME}",
            file=path,
            hint=f"if the save is still running, wait for it to finish; otherwise, {_OLDER}",
        )
    if (checkpoint_dir / COMMON_FILE).is_file():
        return MissingShardError(
            f"{CONFIG_FNAME} is missing; it is written last, so the save did not finish",
            file=path,
            hint=_OLDER,
        )
    # Opening also finds a checkpoint below the directory, as in a training root.
    try:
        source = open_checkpoint(checkpoint_dir, samples=True)
    except CheckpointingException as err:
        return UnsupportedError(
            f"{path} is not a distributed checkpoint: {CONFIG_FNAME} is missing; {err.message}",
            hint=err.hint,
        )
    source.store.close()
    if source.path.resolve() != checkpoint_dir.resolve():
        return UsageError(
            f"{path} is not a distributed checkpoint, but contains one: {source.path.name}",
            hint=f"load {source.path}",
        )
    return UnsupportedError(
        f"{path} is a checkpoint in the format {source.format.name}, not a distributed checkpoint",
        hint=f"convert it: ckpt convert {checkpoint_dir} --to torch_dist",
    )
