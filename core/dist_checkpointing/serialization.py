"""Saving and loading sharded state dicts: the documented entry points.

A *sharded state dict* is a tree of dicts and lists. Its ShardedTensors and ShardedObjects are what this rank has of
global tensors and objects; everything else in it is *common state*, equal on all ranks and stored once. Called by all
ranks::

    save   factories → common and sharded part → strategies write into a stage → the stage is published
    load   metadata.json names the strategies → common state → objects and tensors → factories merge

An error on one rank is raised on every rank, and a save that failed leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from core.dist_checkpointing._directory.publication import Publication, data_dir_of
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.core import CheckpointingConfig
from core.dist_checkpointing.dict_utils import extract_matching_values, merge
from core.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from core.dist_checkpointing.state_dict_utils import load_preprocess, remaining_factories, save_preprocess
from core.dist_checkpointing.strategies.async_utils import AsyncRequest
from core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from core.dist_checkpointing.utils import (
    _clean_metadata_for_serialization,
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from core.dist_checkpointing.validation import (
    CkptShardedMetadata,
    StrictHandling,
    chosen_strategy,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    verify_checkpoint_and_load_strategy,
)
from core.errors import UnsupportedError, UsageError
from core.files.store import translate_os_errors
from core.files.url import refuse_url

_CONTENT_METADATA_KEY = "content_metadata"
T = TypeVar("T")
U = TypeVar("U")
V = TypeVar("V")
Loaded = StateDict | tuple[StateDict, set[str], set[str]]


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> AsyncRequest | None:
    """Saves what all ranks hold; every rank calls it.

    Args:
        sharded_state_dict: what this rank holds; not changed.
        checkpoint_dir: an existing, empty directory on a file system that all ranks share.
        sharded_strategy: writes tensors (and, if it can, objects); a strategy, (backend, version) of a registered one,
            or None for torch_dist.
        common_strategy: writes everything else; likewise.
        validate_access_integrity: check that the ranks' shards make whole tensors, and log where common states differ.
        async_sharded_save: write tensors later, by the request that is returned.
        preprocess_common_before_consistancy_check: what of the common state has to be the same on all ranks. It must
            not change its argument.
        content_metadata: says what the checkpoint contains; for ``load_content_metadata``. Process groups in it are
            left out.
        overwrite: replace the checkpoint that the directory holds, once the new one is complete. Files that belong to
            no checkpoint stay, unless a new one has their name.

    Returns:
        None, or with ``async_sharded_save`` a request that the caller schedules. Its last finalize function publishes
        the checkpoint.

    Raises:
        CheckpointingException: the directory is missing or not empty, the shards do not fit together, the strategy
            cannot save asynchronously, or a rank failed. On every rank; the directory then is as it was before.
        ValueError: an argument is no strategy.
    """

    def begin() -> tuple[Any, SaveCommonStrategy, ShardedStateDict]:
        refuse_url(checkpoint_dir)
        chosen = _save_strategies(sharded_strategy, common_strategy, is_async=async_sharded_save)
        if content_metadata is None:
            return *chosen, sharded_state_dict
        content = _clean_metadata_for_serialization(content_metadata)
        return *chosen, sharded_state_dict | {_CONTENT_METADATA_KEY: content}

    sharded, common, sharded_state_dict = _agreed(
        begin, validate_access_integrity=validate_access_integrity, async_sharded_save=async_sharded_save
    )
    tree = comm.together(
        lambda: save_preprocess(
            sharded_state_dict, validate_access_integrity, preprocess_common_before_consistancy_check
        )
    )
    target = Path(os.path.abspath(checkpoint_dir))
    publication = comm.together(lambda: Publication(target, overwrite=overwrite) if comm.rank() == 0 else None)
    try:
        tensors = _save_common(*tree, sharded, common, data_dir_of(target))
        publish = _Publish(
            publication,
            CheckpointingConfig(sharded.backend, sharded.version, common.backend, common.version),
            sharded.syncs_files and common.syncs_files,
        )
        if async_sharded_save:
            request: AsyncRequest = comm.together(lambda: sharded.async_save(tensors, data_dir_of(target)))
            request.add_finalize_fn(publish)
            return request
        comm.together(lambda: sharded.save(tensors, data_dir_of(target)))
        publish()
    except BaseException:
        if publication:
            publication.abandon()
        raise
    return None


@dataclass(frozen=True, slots=True)
class _Publish:
    """The last step of a save, on every rank.

    Args:
        publication: None but on rank 0.
        config: of the new checkpoint.
        is_synced: the strategies have waited for the disk.
    """

    publication: Publication | None
    config: CheckpointingConfig
    is_synced: bool

    def __call__(self) -> None:
        """Makes the checkpoint visible; collective."""
        comm.together(self._on_coordinator)

    def _on_coordinator(self) -> None:
        if self.publication:
            self.publication.publish(self.config, is_synced=self.is_synced)

    def abandon(self) -> None:
        """Called in place of that if an asynchronous save has failed."""
        if self.publication:
            self.publication.abandon()


def _save_strategies(sharded_strategy: Any, common_strategy: Any, *, is_async: bool) -> tuple[Any, SaveCommonStrategy]:
    sharded = chosen_strategy(StrategyAction.SAVE_SHARDED, sharded_strategy, ("torch_dist", 1))
    common = chosen_strategy(StrategyAction.SAVE_COMMON, common_strategy, ("torch", 1))
    if not isinstance(sharded, SaveShardedStrategy):
        raise ValueError(f"sharded_strategy is a {type(sharded).__name__}, no SaveShardedStrategy")
    if not isinstance(common, SaveCommonStrategy):
        raise ValueError(f"common_strategy is a {type(common).__name__}, no SaveCommonStrategy")
    if is_async and not isinstance(sharded, AsyncSaveShardedStrategy):
        raise UnsupportedError(
            f"{sharded} cannot save asynchronously", hint="choose a strategy that can, such as ('torch_dist', 1)"
        )
    return sharded, common


def _save_common(
    tree: ShardedStateDict,
    state: StateDict,
    sharded: SaveShardedStrategy,
    common: SaveCommonStrategy,
    data_dir: Path,
) -> ShardedStateDict:
    """Saves the common state, and objects that the sharded strategy does not handle; returns what is left for that.

    Collective, as strategies may be: so each call of one is a step of its own, which all ranks begin.
    """
    comm.together(lambda: _check_seen(data_dir))
    comm.together(lambda: common.save_common(state, data_dir))
    if sharded.can_handle_sharded_objects:
        return tree
    validate_sharded_objects_handling(sharded, common)
    objects, tensors = _split_objects(tree)
    comm.together(lambda: common.save_sharded_objects(objects, data_dir))
    return tensors


def _check_seen(data_dir: Path) -> None:
    with translate_os_errors(str(data_dir), doing="look at"):
        is_seen = data_dir.is_dir()
    if not is_seen:
        raise UsageError(
            "this rank does not see the directory that rank 0 has made",
            file=str(data_dir),
            hint="save into a file system that all ranks share",
        )


def _agreed(begin: Callable[[], tuple[T, U, V]], **arguments: object) -> tuple[T, U, V]:
    """What ``begin`` returns: a strategy for shards, one for common states, and something else. Collective.

    Raises:
        UsageError: ranks were called with other strategies or arguments, so they would wait for each other.
    """
    begun: list[tuple[T, U, V]] = []

    def described() -> dict[str, object]:
        begun.append(begin())
        kinds = [f"{type(strategy).__module__}.{type(strategy).__qualname__}" for strategy in begun[0][:2]]
        return {"sharded_strategy": kinds[0], "common_strategy": kinds[1], **arguments}

    first, *others = comm.collect(described)
    for rank, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise UsageError(
                    f"ranks were called with different arguments: {name} is {value} on rank 0, {other[name]} on rank "
                    f"{rank}",
                    rank=str(rank),
                    hint="call it on all ranks with the same arguments",
                )
    return begun[0]


def _split_objects(tree: ShardedStateDict) -> tuple[ShardedStateDict, ShardedStateDict]:
    return extract_matching_values(tree, lambda leaf: isinstance(leaf, ShardedObject))


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> Loaded:
    """Loads what this rank asks for, in whatever way the checkpoint was sharded; every rank calls it.

    Args:
        sharded_state_dict: says what to load: ShardedTensors with or without data, ShardedObjects, factories.
            LocalNonpersistentObjects are returned unwrapped; other values are not looked at.
        checkpoint_dir: of a distributed checkpoint.
        sharded_strategy: reads tensors; a strategy, (backend, version) of a registered one, or None for the one that
            the checkpoint names.
        common_strategy: reads everything else; likewise.
        validate_access_integrity: check that the ranks together ask for whole tensors.
        strict: what to do where keys of state dict and checkpoint differ.

    Returns:
        The common state, merged with what was loaded: plain tensors and objects at the places of the sharded ones.
        With ``strict`` return_unexpected or return_all also the missing and the unexpected keys; missing ones are the
        same on all ranks, and none for return_unexpected.

    Raises:
        CheckpointingException: no such checkpoint, not complete, damaged, keys differ and ``strict`` raises, or a rank
            failed; on every rank.
        ValueError: ``strict`` is none of the values, or a loaded value and one of the common state are at one place.
    """

    def begin() -> tuple[LoadShardedStrategy, LoadCommonStrategy, StrictHandling]:
        return *verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy, common_strategy), handling

    handling = comm.together(lambda: parse_strict_flag(strict))
    where = Path(checkpoint_dir)
    sharded, common, _ = _agreed(begin, strict=handling.value, validate_access_integrity=validate_access_integrity)
    state = comm.together(lambda: common.load_common(where))
    requested, factories = comm.together(lambda: _begin_load(sharded_state_dict, state))
    stored = local = everyone = None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
        stored = comm.together(lambda: load_sharded_metadata(checkpoint_dir, sharded, common))
    if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
        local, everyone = determine_global_metadata(requested)
    wanted, missing, unexpected = validate_integrity_and_strict_load(
        requested, handling, validate_access_integrity, local, everyone, stored
    )
    objects: StateDict = {}
    tensors = wanted
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        held, tensors = _split_objects(wanted)
        objects = comm.together(lambda: common.load_sharded_objects(held, where))
    loaded = comm.together(lambda: sharded.load(tensors, where))

    def finish() -> StateDict:
        merge(merge(state, objects), loaded)
        return apply_factory_merges(state, remaining_factories(factories, requested, wanted))

    comm.together(finish)
    return (state, missing, unexpected) if StrictHandling.requires_returning_mismatch_keys(handling) else state


def _begin_load(sharded_state_dict: ShardedStateDict, state: StateDict) -> tuple[ShardedStateDict, ShardedStateDict]:
    """The ShardedTensors and ShardedObjects to load, and the factories that made some of them.

    What LocalNonpersistentObjects wrapped is merged into ``state``.
    """
    force_all_tensors_to_non_fp8(sharded_state_dict)
    wanted, local, factories = load_preprocess(sharded_state_dict)
    merge(state, local)
    return extract_sharded_base(wanted)[0], factories


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """The common state of a checkpoint; on this rank alone.

    Raises:
        CheckpointingException: no such checkpoint, or it cannot be read.
    """
    _, common = verify_checkpoint_and_load_strategy(checkpoint_dir)
    return common.load_common(Path(checkpoint_dir))


def load_tensors_metadata(
    checkpoint_dir: str | Path, sharded_strategy: LoadShardedStrategy | None = None
) -> CkptShardedMetadata:
    """Key → ShardedTensor without data that is the whole global tensor; on this rank alone.

    Args:
        checkpoint_dir: of a distributed checkpoint.
        sharded_strategy: None for the one that the checkpoint names.

    Raises:
        CheckpointingException: no such checkpoint, or it cannot be read.
    """
    sharded, _ = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy)
    return sharded.load_tensors_metadata(Path(checkpoint_dir))


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
) -> CkptShardedMetadata:
    """As ``load_tensors_metadata``, and unique key → ShardedObject without data.

    Args:
        checkpoint_dir: of a distributed checkpoint.
        sharded_strategy: None for the one that the checkpoint names.
        common_strategy: likewise; asked for objects that the other one does not handle.

    Raises:
        CheckpointingException: no such checkpoint, or it cannot be read.
    """
    sharded, common = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy, common_strategy)
    found = dict(sharded.load_sharded_metadata(Path(checkpoint_dir)))
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        found |= common.load_sharded_metadata(Path(checkpoint_dir))
    return found


def load_plain_tensors(checkpoint_dir: str | Path) -> StateDict:
    """Key → whole tensor, for all tensors of a checkpoint; every rank calls it and gets all.

    Raises:
        CheckpointingException: as for ``load``.
    """
    wanted = load_tensors_metadata(checkpoint_dir)
    state = load(wanted, checkpoint_dir, validate_access_integrity=False)
    return {key: state[key] for key in wanted}  # type: ignore[call-overload]


def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """What ``save`` was given as ``content_metadata``; None if nothing.

    Args:
        checkpoint_dir: whose common state is read.
        preloaded_state_dict: a state that has been loaded, so that nothing needs to be read.

    Raises:
        ValueError: neither was given.
        CheckpointingException: no such checkpoint, or it cannot be read.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("load_content_metadata needs checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT_METADATA_KEY)


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Removes the tensors whose keys begin with ``key_prefix`` from a checkpoint; called by one rank.

    Raises:
        CheckpointingException: no such checkpoint, or its backend cannot do it.
    """
    sharded, _ = verify_checkpoint_and_load_strategy(checkpoint_dir)
    sharded.remove_sharded_tensors(Path(checkpoint_dir), key_prefix)


def get_default_save_sharded_strategy(backend: str = "torch_dist", version: int = 1) -> SaveShardedStrategy:
    """The registered strategy that saves tensors.

    Raises:
        CheckpointingException: there is none of that backend and version.
    """
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)  # type: ignore[no-any-return]


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> SaveCommonStrategy:
    """The registered strategy that saves common states.

    Raises:
        CheckpointingException: there is none of that backend and version.
    """
    return get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)  # type: ignore[no-any-return]


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """The strategy that loads the tensors of a checkpoint.

    Raises:
        CheckpointingException: no such checkpoint, or no strategy for its backend.
    """
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]
