"""The documented entry points for saving and loading sharded state dicts.

A *sharded state dict* is a tree of dicts and lists. Its ShardedTensors and ShardedObjects are this
rank's parts of global tensors and objects; everything else in it is *common state*, equal on all
ranks and stored once. Called by all ranks::

    save   apply factories → split into common and sharded part → strategies write into a
           staging directory → publish the staging directory
    load   choose the strategies that metadata.json names → read the common state
           → read objects and tensors → merge what factories had split

An error on one rank is raised on every rank, and a failed save leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from core.dist_checkpointing._directory.bucket_publication import BucketPublication
from core.dist_checkpointing._directory.publication import DirectoryPublication
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.core import CheckpointingConfig
from core.dist_checkpointing.dict_utils import extract_matching_values, merge
from core.dist_checkpointing.import_hook import replaces_megatron
from core.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from core.dist_checkpointing.state_dict_utils import (
    load_preprocess,
    remaining_factories,
    save_preprocess,
)
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
from core.files.object_listing import forget_listings
from core.files.remote_path import absolute_location, is_remote
from core.files.url import find_location, refuse_url

if TYPE_CHECKING:
    from core.dist_checkpointing.core import CheckpointingConfig


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
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict]
    | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    overwrite: bool | None = None,
    manifest: bool = False,
) -> AsyncRequest | None:
    """Save the sharded and common state of all ranks as a checkpoint; collective.

    Args:
        sharded_state_dict: this rank's state; not changed.
        checkpoint_dir: an existing, empty directory on a file system that all ranks share, or the
            URL of a prefix of an object store without objects.
        sharded_strategy: writes tensors, and objects if it supports them: a strategy, (backend,
            version) of a registered one, or None for torch_dist.
        common_strategy: writes everything else: a strategy, (backend, version) of a registered one,
            or None for torch.
        validate_access_integrity: check that the ranks' shards form complete tensors, and log where
            common states differ.
        async_sharded_save: write the tensors later, when the returned request is executed.
        preprocess_common_before_consistancy_check: return the part of the common state that has to
            be the same on all ranks. It must not change its argument.
        content_metadata: description of the checkpoint's content, for ``load_content_metadata``.
            Process groups in it are skipped.
        overwrite: replace the checkpoint in the directory once the new one is complete. Files that
            belong to no checkpoint stay, unless a new file has the same name. None: True after
            ``as_megatron``, as Megatron's training script expects it, otherwise False.
        manifest: write ``ckpt-manifest.json``, too, which ``ckpt validate`` compares the files
            with. The strategies of this package compute the checksums from the bytes as they are
            written; the files of other strategies are read back.

    Returns:
        None, or with ``async_sharded_save`` a request that the caller schedules. Its last finalize
        function publishes the checkpoint.

    Raises:
        CheckpointingException: the directory is missing or not empty, the shards do not fit
            together, the strategy cannot save asynchronously, or a rank failed. Raised on every
            rank; the directory is then unchanged.
        ValueError: an argument is not a strategy.
    """

    def begin() -> tuple[Any, SaveCommonStrategy, ShardedStateDict]:
        find_location(checkpoint_dir)
        strategies = _choose_save_strategies(
            sharded_strategy, common_strategy, is_async=async_sharded_save
        )
        if content_metadata is None:
            return *strategies, sharded_state_dict
        content = _clean_metadata_for_serialization(content_metadata)
        return *strategies, sharded_state_dict | {_CONTENT_METADATA_KEY: content}

    # Choose the strategies. They must be the same on all ranks, which would otherwise wait in
    # different collectives.
    sharded, common, sharded_state_dict = _require_agreement(
        begin,
        validate_access_integrity=validate_access_integrity,
        async_sharded_save=async_sharded_save,
        manifest=manifest,
    )
    # Split the state dict.
    tree, state = comm.together(
        lambda: save_preprocess(
            sharded_state_dict,
            validate_access_integrity,
            preprocess_common_before_consistancy_check,
        )
    )
    # Rank 0 creates the staging directory that all ranks write into.
    target = absolute_location(find_location(checkpoint_dir))
    publications = BucketPublication if is_remote(target) else DirectoryPublication
    data_dir = publications.data_dir_of(target)
    publication = comm.together(
        lambda: (
            publications(
                target,
                overwrite=replaces_megatron() if overwrite is None else overwrite,
                manifest=manifest,
            )
            if comm.rank() == 0
            else None
        )
    )

    def check_visible() -> None:
        if not publications.is_visible(target):
            raise UsageError(
                "rank 0 created this directory, but this rank cannot see it",
                file=str(data_dir),
                hint="save to a file system or an object store that all ranks share",
            )

    try:
        # Write the common state first, so that only tensors are left for an asynchronous save.
        comm.together(check_visible)
        tensors = _save_common(tree, state, sharded, common, data_dir)
        publish = _Publish(
            publication,
            CheckpointingConfig(sharded.backend, sharded.version, common.backend, common.version),
            sharded.syncs_files and common.syncs_files,
        )
        # Write the tensors, now or by the returned request, and publish as the very last step.
        if async_sharded_save:
            request: AsyncRequest = comm.together(lambda: sharded.async_save(tensors, data_dir))
            request.add_finalize_fn(publish)
            return request
        comm.together(lambda: sharded.save(tensors, data_dir))
        publish()
    except BaseException:
        # BaseException, because an interrupted save must not leave its staging directory either.
        if publication:
            publication.abandon()
        raise
    return None


@dataclass(frozen=True, slots=True)
class _Publish:
    """The last step of a save, which publishes the checkpoint; called on every rank.

    Args:
        publication: None on all ranks but rank 0.
        config: content of the new checkpoint's ``metadata.json``.
        is_synced: True if the strategies have already flushed their files to disk.
    """

    publication: DirectoryPublication | BucketPublication | None
    config: CheckpointingConfig
    is_synced: bool

    def __call__(self) -> None:
        """Make the checkpoint visible; collective."""

        def publish_on_coordinator() -> None:
            forget_listings()
            if self.publication:
                self.publication.publish(self.config, is_synced=self.is_synced)

        comm.together(publish_on_coordinator)

    def abandon(self) -> None:
        """Remove the staging directory, after an asynchronous save has failed."""
        if self.publication:
            self.publication.abandon()


def _choose_save_strategies(
    sharded_strategy: Any, common_strategy: Any, *, is_async: bool
) -> tuple[Any, SaveCommonStrategy]:
    """Return the strategies for tensors and for the common state, after checking their kinds.

    Raises:
        ValueError: an argument is not a strategy of its kind.
        UnsupportedError: the strategy cannot save asynchronously.
        CheckpointingException: no strategy is registered for a backend and version.
    """
    # Defaults come from the documented functions, which programs replace to save in another format.
    if sharded_strategy is None:
        sharded_strategy = get_default_save_sharded_strategy()
    if common_strategy is None:
        common_strategy = get_default_save_common_strategy()
    sharded = chosen_strategy(StrategyAction.SAVE_SHARDED, sharded_strategy, ("torch_dist", 1))
    common = chosen_strategy(StrategyAction.SAVE_COMMON, common_strategy, ("torch", 1))
    if not isinstance(sharded, SaveShardedStrategy):
        raise ValueError(
            f"sharded_strategy is a {type(sharded).__name__}, not a SaveShardedStrategy"
        )
    if not isinstance(common, SaveCommonStrategy):
        raise ValueError(f"common_strategy is a {type(common).__name__}, not a SaveCommonStrategy")
    if is_async and not isinstance(sharded, AsyncSaveShardedStrategy):
        raise UnsupportedError(
            f"{sharded} cannot save asynchronously",
            hint="choose a strategy that supports it, such as ('torch_dist', 1)",
        )
    return sharded, common


def _save_common(
    tree: ShardedStateDict,
    state: StateDict,
    sharded: SaveShardedStrategy,
    common: SaveCommonStrategy,
    data_dir: Path,
) -> ShardedStateDict:
    """Save the common state, and objects that the sharded strategy does not handle; collective.

    Returns:
        The remaining leaves, for the sharded strategy to save.

    Raises:
        UnsupportedError: neither strategy handles the objects.
        CheckpointingException: a strategy failed on some rank.
    """

    # Strategies may be collective themselves, so every call is a step that all ranks begin, and
    # that none begins if another rank failed in the previous step.
    comm.together(lambda: common.save_common(state, data_dir))
    if sharded.can_handle_sharded_objects:
        return tree
    validate_sharded_objects_handling(sharded, common)
    objects, tensors = _split_objects(tree)
    comm.together(lambda: common.save_sharded_objects(objects, data_dir))
    return tensors


def _require_agreement(begin: Callable[[], tuple[T, U, V]], **arguments: object) -> tuple[T, U, V]:
    """Run ``begin`` on every rank and raise unless all ranks chose the same strategies; collective.

    Args:
        begin: returns a strategy for shards, one for common states, and a third value that is not
            compared.
        arguments: further arguments that have to be the same on all ranks.

    Returns:
        The result of ``begin`` on this rank.

    Raises:
        UsageError: the strategies or arguments of two ranks differ, so that they would wait for
            each other forever.
        CheckpointingException: ``begin`` failed on some rank.
    """
    # Describe strategies by their class names: strategies themselves need not be picklable.
    chosen: list[tuple[T, U, V]] = []

    def begin_and_describe() -> dict[str, object]:
        chosen.append(begin())
        kinds = [
            f"{type(strategy).__module__}.{type(strategy).__qualname__}"
            for strategy in chosen[0][:2]
        ]
        return {"sharded_strategy": kinds[0], "common_strategy": kinds[1], **arguments}

    # Compare every rank with rank 0. All ranks have the same list, so all raise the same error.
    arguments_of_rank_0, *arguments_of_others = comm.collect(begin_and_describe)
    for rank, arguments_of_rank in enumerate(arguments_of_others, 1):
        for name, value in arguments_of_rank_0.items():
            if arguments_of_rank[name] != value:
                raise UsageError(
                    f"ranks made the call with different arguments: {name} is {value} on rank 0, "
                    f"but {arguments_of_rank[name]} on rank {rank}",
                    rank=str(rank),
                    hint="pass the same arguments on all ranks",
                )
    return chosen[0]


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
    """Load the state that this rank requests, however the checkpoint is sharded; collective.

    Args:
        sharded_state_dict: the state to load: ShardedTensors with or without data, ShardedObjects,
            factories. LocalNonpersistentObjects are returned unwrapped; other values are ignored.
        checkpoint_dir: of a distributed checkpoint.
        sharded_strategy: reads tensors: a strategy, (backend, version) of a registered one, or None
            for the one that the checkpoint names.
        common_strategy: reads everything else: a strategy, (backend, version) of a registered one,
            or None for the one that the checkpoint names.
        validate_access_integrity: check that the ranks together request complete tensors.
        strict: reaction to keys that are only in the state dict or only in the checkpoint.

    Returns:
        The common state, merged with the loaded values: plain tensors and objects in place of the
            sharded ones. With ``strict`` return_unexpected or return_all also the missing and
            the unexpected keys. Missing keys are the same on all ranks; with return_unexpected
            there are none.

    Raises:
        CheckpointingException: the checkpoint does not exist, is incomplete or damaged, keys differ
            and ``strict`` forbids it, or a rank failed; on every rank.
        ValueError: ``strict`` is not a valid value, or the common state already has a value at the
            path of a loaded one.
    """

    def begin() -> tuple[LoadShardedStrategy, LoadCommonStrategy, StrictHandling]:
        return *verify_checkpoint_and_load_strategy(
            checkpoint_dir, sharded_strategy, common_strategy
        ), handling

    def begin_load() -> tuple[ShardedStateDict, ShardedStateDict]:
        force_all_tensors_to_non_fp8(sharded_state_dict)
        tree, local, factories = load_preprocess(sharded_state_dict)
        merge(state, local)
        return extract_sharded_base(tree)[0], factories

    # Choose the strategies, which must be the same on all ranks, and load the common state.
    handling = comm.together(lambda: parse_strict_flag(strict))
    path = find_location(checkpoint_dir)
    sharded, common, _ = _require_agreement(
        begin, strict=handling.value, validate_access_integrity=validate_access_integrity
    )
    state = comm.together(lambda: common.load_common(path))
    # Split the request, and add the values of its LocalNonpersistentObjects to the common state.
    requested, factories = comm.together(begin_load)

    # Compare the request with the checkpoint and with the other ranks. Metadata is read and
    # exchanged only where the arguments require it, because both are slow on many ranks.
    stored = local_metadata = global_metadata = None
    if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
        stored = comm.together(lambda: load_sharded_metadata(checkpoint_dir, sharded, common))
    if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
        local_metadata, global_metadata = determine_global_metadata(requested)
    to_load, missing, unexpected = validate_integrity_and_strict_load(
        requested, handling, validate_access_integrity, local_metadata, global_metadata, stored
    )

    # Load tensors, and objects by the common strategy if the sharded one does not support them.
    loaded_objects: StateDict = {}
    tensors = to_load
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        objects, tensors = _split_objects(to_load)
        loaded_objects = comm.together(lambda: common.load_sharded_objects(objects, path))
    loaded_tensors = comm.together(lambda: sharded.load(tensors, path))

    # Merge all into the common state. Factories come last: they need their loaded shards in place.
    def finish() -> StateDict:
        merge(merge(state, loaded_objects), loaded_tensors)
        return apply_factory_merges(state, remaining_factories(factories, requested, to_load))

    comm.together(finish)
    return (
        (state, missing, unexpected)
        if StrictHandling.requires_returning_mismatch_keys(handling)
        else state
    )


def load_common_state_dict(checkpoint_dir: str | Path) -> StateDict:
    """Load the common state of a checkpoint; not collective.

    Raises:
        CheckpointingException: the checkpoint does not exist or cannot be read.
    """
    _, common = verify_checkpoint_and_load_strategy(checkpoint_dir)
    return common.load_common(find_location(checkpoint_dir))


def load_tensors_metadata(
    checkpoint_dir: str | Path, sharded_strategy: LoadShardedStrategy | None = None
) -> CkptShardedMetadata:
    """Return a ShardedTensor without data for every global tensor, by key; not collective.

    Args:
        checkpoint_dir: of a distributed checkpoint.
        sharded_strategy: None for the one that the checkpoint names.

    Raises:
        CheckpointingException: the checkpoint does not exist or cannot be read.
    """
    sharded, _ = verify_checkpoint_and_load_strategy(checkpoint_dir, sharded_strategy)
    return sharded.load_tensors_metadata(find_location(checkpoint_dir))


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | None = None,
    common_strategy: LoadCommonStrategy | None = None,
) -> CkptShardedMetadata:
    """Return the metadata of all tensors, by key, and of all sharded objects, by unique key.

    Each ShardedTensor stands for a complete global tensor. None has data. Not collective.

    Args:
        checkpoint_dir: of a distributed checkpoint.
        sharded_strategy: None for the one that the checkpoint names.
        common_strategy: None for the one that the checkpoint names; used for objects that the
            sharded strategy does not handle.

    Raises:
        CheckpointingException: the checkpoint does not exist or cannot be read.
    """
    sharded, common = verify_checkpoint_and_load_strategy(
        checkpoint_dir, sharded_strategy, common_strategy
    )
    metadata = dict(sharded.load_sharded_metadata(find_location(checkpoint_dir)))
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        metadata |= common.load_sharded_metadata(find_location(checkpoint_dir))
    return metadata


def load_plain_tensors(checkpoint_dir: str | Path) -> StateDict:
    """Load all tensors of a checkpoint as complete tensors, by key; collective.

    Every rank gets all tensors.

    Raises:
        CheckpointingException: as ``load``.
    """
    metadata = load_tensors_metadata(checkpoint_dir)
    state = load(metadata, checkpoint_dir, validate_access_integrity=False)
    return {key: state[key] for key in metadata}  # type: ignore[call-overload]


def load_content_metadata(
    checkpoint_dir: str | Path | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return the ``content_metadata`` that was passed to ``save``; None if there was none.

    Args:
        checkpoint_dir: the checkpoint whose common state is read.
        preloaded_state_dict: a common state that is already loaded, so that no file is read.

    Raises:
        ValueError: neither argument was given.
        CheckpointingException: the checkpoint does not exist or cannot be read.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("load_content_metadata needs checkpoint_dir or preloaded_state_dict")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(_CONTENT_METADATA_KEY)


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Remove the tensors whose keys begin with ``key_prefix``; called by one rank.

    Raises:
        CheckpointingException: the checkpoint does not exist, or its backend cannot remove tensors.
    """
    refuse_url(checkpoint_dir)
    sharded, _ = verify_checkpoint_and_load_strategy(checkpoint_dir)
    sharded.remove_sharded_tensors(Path(checkpoint_dir), key_prefix)


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> SaveShardedStrategy:
    """Return the registered strategy that saves tensors.

    Raises:
        CheckpointingException: no strategy is registered for the backend and version.
    """
    strategy: SaveShardedStrategy = get_default_strategy(
        StrategyAction.SAVE_SHARDED, backend, version
    )
    return strategy


def get_default_save_common_strategy(
    backend: str = "torch", version: int = 1
) -> SaveCommonStrategy:
    """Return the registered strategy that saves common states.

    Raises:
        CheckpointingException: no strategy is registered for the backend and version.
    """
    strategy: SaveCommonStrategy = get_default_strategy(
        StrategyAction.SAVE_COMMON, backend, version
    )
    return strategy


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """Return the strategy that loads the tensors of a checkpoint.

    Raises:
        CheckpointingException: the checkpoint does not exist, or no strategy is registered for its
            backend.
    """
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]
