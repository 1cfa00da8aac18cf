"""The reactions of ``load`` to keys that are only requested or only in the checkpoint.

*Unexpected* keys are requested and not in the checkpoint; a rank alone can find them. *Missing*
keys are in the checkpoint and no rank requests them; that takes the metadata of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from core.dist_checkpointing.dict_utils import extract_matching_values
from core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict
from core.errors import MissingShardError, UsageError

logger = logging.getLogger("core.dist_checkpointing.validation")

_MAX_NAMED = 20


class StrictHandling(Enum):
    """The reactions of ``load`` to different keys in state dict and checkpoint.

    All but the first one read the checkpoint's metadata before anything else and leave unexpected
    keys out of the load. Those that end in ``_all`` also look for missing keys, for which ranks
    exchange their metadata; with ``validate_access_integrity`` they do so anyway.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Keys are not compared; the load strategy raises if the checkpoint lacks one."""
    LOG_UNEXPECTED = "log_unexpected"
    """A warning for unexpected keys."""
    LOG_ALL = "log_all"
    """A warning for unexpected and for missing keys."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """An error for unexpected keys, before data is read."""
    RAISE_ALL = "raise_all"
    """An error for unexpected and for missing keys, before data is read."""
    RETURN_UNEXPECTED = "return_unexpected"
    """``load`` returns the unexpected keys with the state dict."""
    RETURN_ALL = "return_all"
    """``load`` returns the missing and the unexpected keys with the state dict."""
    IGNORE_ALL = "ignore_all"
    """Unexpected keys are left out silently."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Return whether the checkpoint's keys are needed."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Return whether the keys that other ranks request are needed."""
        return val in _ALL

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Return whether ``load`` returns missing and unexpected keys with the state dict."""
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
    """Return the StrictHandling with the given value; a StrictHandling is returned as it is.

    Raises:
        ValueError: no StrictHandling has the value.
    """
    if isinstance(strict, StrictHandling):
        return strict
    values = [flag.value for flag in StrictHandling]
    if strict not in values:
        raise ValueError(f"strict is {strict!r}, not one of {', '.join(values)}")
    return StrictHandling(strict)


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: set[str]
) -> ShardedStateDict:
    """Return the state dict without the ShardedBase leaves of the given keys.

    Raises:
        UsageError: a leaf is not a ShardedBase.
    """

    def is_removed(leaf: Any) -> bool:
        if not isinstance(leaf, ShardedBase):
            raise UsageError(f"a {type(leaf).__name__} is among the sharded leaves of a state dict")
        return leaf.key in sharded_keys_to_remove

    _, rest = extract_matching_values(sharded_state_dict, is_removed)
    return rest  # type: ignore[no-any-return]


def missing_and_unexpected_keys(
    ckpt_sharded_metadata: Mapping[str, ShardedBase],
    local_metadata: Iterable[ShardedBase],
    global_metadata: Iterable[Iterable[ShardedBase]] | None = None,
) -> tuple[set[str], set[str]]:
    """Return the missing and the unexpected keys; no missing ones without global metadata.

    Args:
        ckpt_sharded_metadata: all tensors and objects of the checkpoint.
        local_metadata: those that this rank requests.
        global_metadata: those that each rank requests.
    """
    stored = {leaf.key for leaf in ckpt_sharded_metadata.values()}
    unexpected = {requested.key for requested in local_metadata} - stored
    if global_metadata is None:
        return set(), unexpected
    return stored - {
        requested.key for of_rank in global_metadata for requested in of_rank
    }, unexpected


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
            f"Missing keys (in the checkpoint, and no rank requests them): {_format_keys(missing_keys)}"
        )
    if unexpected_keys:
        parts.append(
            f"Unexpected keys (requested by this rank, and not in the checkpoint): {_format_keys(unexpected_keys)}"
        )
    if not parts:
        return
    if raise_error:
        raise MissingShardError(
            f"the state dict and the checkpoint differ. {'. '.join(parts)}",
            hint="load with strict='log_all' to go on without them",
        )
    logger.warning("The state dict and the checkpoint differ. %s.", ". ".join(parts))


def _format_keys(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:_MAX_NAMED]) + (
        f" … ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
    )
