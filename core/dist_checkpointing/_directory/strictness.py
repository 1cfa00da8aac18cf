"""The reactions of ``load`` to keys that are only requested or only in the checkpoint.

*Unexpected* keys are requested, but not in the checkpoint; each rank can find its own. *Missing*
keys are in the checkpoint, but no rank requests them; to find them, ranks exchange their metadata.
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
            hint="pass strict='log_all' to load without them",
        )
    logger.warning("The state dict and the checkpoint differ. %s.", ". ".join(parts))


def _format_keys(keys: Iterable[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:_MAX_NAMED]) + (
        f" … ({len(names)} in all)" if len(names) > _MAX_NAMED else ""
    )
