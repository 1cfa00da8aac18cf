"""A storage writer that lets ``torch.distributed.checkpoint.save`` write every supported format.

::

    writer = CkptStorageWriter("out", format="safetensors")
    dcp.save({"model": model.state_dict()}, storage_writer=writer)

    prepare_global_plan   the coordinator combines the ranks' plans, lays out the files, proves that
                          every byte has one writer, and sends each rank its part
    write_data            every rank writes its regions: for dcp and torch_dist into its own files;
                          for safetensors, zarr and torch into byte ranges of files that ranks share
    finish                the coordinator writes everything else (headers, entries that are not
                          tensors, metadata), flushes it to disk, and publishes the checkpoint

The checkpoint is not visible before the end: all ranks write into a hidden staging directory next
to the destination, which must be on a file system that they share. A save that fails does not
change the destination. Its staging directory is removed with the writer, or by the next save to the
same destination.

The destination may also be the URL of a prefix of an object store, for dcp and torch_dist. Every
rank uploads its own files there, and the coordinator puts the metadata last
(``_directory.bucket_publication``). The objects of a save that fails are deleted likewise.

Some checkpoints cannot be written region by region: Megatron's rank files, torch files with entries
that are not tensors, and all checkpoints with ``changes``. For these, ranks write a DCP checkpoint
next to the destination, and the coordinator converts it by ``core.verbs.convert.run`` and removes
it. That takes twice the disk space and twice the writing, and the coordinator converts alone.
Megatron's rank files require Megatron's names in the entry ``model``, and the arguments in
``args``.

Source: torch 2.13
``torch/distributed/checkpoint/{storage,planner,state_dict_saver,default_planner}.py``.

Not supported: saving without collectives (``use_collectives=False``), because shared files need a
coordinator.
"""

from __future__ import annotations

import os
import shutil
import uuid
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from core.dist_checkpointing._directory.bucket_publication import BucketPublication
from core.dist_checkpointing._directory.sums import SUMS
from core.dist_checkpointing.torch_dcp.bucket_save import (
    BucketSave,
    begin_bucket_save,
    upload_part,
)
from core.dist_checkpointing.torch_dcp.planned_files import write_part, write_rest
from core.dist_checkpointing.torch_dcp.planned_save import (
    PlannedSave,
    RankSave,
    SaveLayout,
    combine_plans,
    lay_out,
    split_by_rank,
)
from core.errors import StorageError, UnsupportedError, UsageError
from core.files.object_listing import is_listed
from core.files.remote_path import RemotePath, absolute_location, is_remote
from core.files.url import find_location
from core.formats.dcp import format as dcp
from core.formats.dcp.metadata_writer import DCP_VERSION
from core.formats.format import Format
from core.formats.registry import format_called
from core.publish.manifest.file import manifest_name
from core.publish.manifest.partial_sums import write_combined
from core.publish.stage.existing import check_replaceable
from core.publish.stage.files import StageStore
from core.publish.stage.folder_lock import stage_dir_of
from core.publish.stage.stage import Stage
from core.verbs.convert.job import Job
from core.verbs.convert.run import run

CheckpointId = str | os.PathLike[str]


@dataclass(slots=True)
class _RunningSave:
    """A save that has begun, on the coordinator.

    Args:
        save: the combined plans of all ranks.
        layout: the files, and the positions of tensors in them.
        stage: the staging directory that the files are written into.
        end: removes the staging directory; called when the writer is garbage-collected or the
            process exits, if not before.
        format: the format that ranks write.
        dst: the directory or file that the staging directory becomes.
        max_file_bytes: maximum size of the files that ranks write.
    """

    save: PlannedSave
    layout: SaveLayout
    stage: Stage
    end: Callable[[], object]
    format: Format
    dst: Path
    max_file_bytes: int | None


class CkptStorageWriter(StorageWriter):
    """A storage writer that writes a (sharded) state dict as a checkpoint in any format.

    Args:
        path: the destination, a directory; for safetensors and torch also a file. With the formats
            dcp and torch_dist, it may be the URL of a prefix of an object store.
        format: a writable format or its name: ``dcp``, ``torch_dist``, ``zarr``, ``zarr3``,
            ``safetensors``, ``torch``, ``megatron`` … Keys do not change, not even with ``hf``;
            ``names="hf"`` translates Megatron's.
        overwrite: replace an existing checkpoint once the new one is complete.
        max_file_bytes: maximum size of a file with tensors, where the format can split; None for
            its default.
        fsync: flush the files to disk before the checkpoint is published.
        threads: number of copying threads on each rank.
        manifest: write ``ckpt-manifest.json``, too, with checksums that are computed from the bytes
            as they are written; files that several ranks fill are read back for it. Checkpoints
            that are converted have a manifest in any case.
        changes: fields of ``core.verbs.convert.job.Job`` that change what is written, such as
            ``names``, ``topology``, ``rename`` or ``dtype``; the module's docstring describes their
            cost.

    Raises:
        UnsupportedError: the format cannot be written.
        UsageError: the format is unknown, or ``path`` is on another host.
        TypeError: a keyword is not a field of Job.
    """

    def __init__(
        self,
        path: CheckpointId,
        format: str | Format = "dcp",
        *,
        overwrite: bool = False,
        max_file_bytes: int | None = None,
        fsync: bool = True,
        threads: int = 2,
        manifest: bool = False,
        **changes: Any,
    ) -> None:
        super().__init__()
        self.path = find_location(path)
        self.save_id = str(uuid.uuid4())
        self._format = format_called(format) if isinstance(format, str) else format
        if self._format.lay_out is None:
            raise UnsupportedError(f"the format {self._format.name} can be read, but not written")
        self._overwrite = overwrite
        self._max_file_bytes = max_file_bytes
        self._fsync = fsync
        self._threads = threads
        self._has_manifest = manifest
        self._changes = changes
        self._running: _RunningSave | None = None
        self._upload: BucketSave | None = None
        # Create the job only to check the changes, so that a wrong keyword is an error here and not
        # at the first save.
        self._job()

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Path or URL of the destination."""
        return str(self.path) if is_remote(self.path) else self.path

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether the id is a path, or the URL of an object store."""
        try:
            location = find_location(checkpoint_id)
        except UsageError:
            return False
        return not is_remote(location) or is_listed(location)

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @override
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Abandon an unfinished save and begin a new one, at another path if an id is given."""
        self._abandon()
        if checkpoint_id:
            self.path = find_location(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise unless the save uses collectives.

        Raises:
            UnsupportedError: the save runs without collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "a save without collectives is not supported: ranks share files, which requires a "
                "coordinator",
                hint="save with use_collectives=True",
            )

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the staging directory and return the plans, with each rank's part.

        Returns:
            The plans of all ranks, with a ``RankSave`` in ``storage_data``.

        Raises:
            UsageError: the destination exists, or ranks disagree on a tensor.
            MissingShardError: no rank writes a region of a tensor.
            UnsupportedError: the format cannot store an entry.
            CapacityError, StorageError: a file or directory cannot be written.
        """
        # An earlier save with this writer may have failed on another rank, which torch does not
        # report here.
        self._abandon()
        # Combine the plans.
        plans = _restore_cached_plans(plans)
        save = combine_plans(plans)
        if is_remote(self.path):
            return self._begin_upload(save, plans, self.path)
        self._check_destination(save)
        # Lay out what the ranks write: the checkpoint itself, or a DCP checkpoint to be converted.
        is_converted = self._is_converted(save)
        if is_converted:
            format, dst, max_file_bytes = dcp.FORMAT, self._converted_path(), None
        else:
            format, dst, max_file_bytes = self._format, self._dst(), self._max_file_bytes
        layout = lay_out(save, format, dst, max_file_bytes=max_file_bytes)
        # Only checkpoints may be replaced; the conversion checks this itself.
        if self._overwrite and not is_converted:
            check_replaceable(dst, [image.path for image in layout.images])
        # Create the staging directory, which is removed with this writer at the latest.
        stage = Stage(
            dst,
            is_file=format.writes_file(dst),
            force=self._overwrite or is_converted or _is_empty_dir(dst),
            fsync=self._fsync,
            needed_bytes=layout.n_bytes,
        )
        _enter(stage)
        end = weakref.finalize(self, _leave, stage)
        self._running = _RunningSave(save, layout, stage, end, format, dst, max_file_bytes)
        try:
            # Leave a token by which the ranks recognise the directory, and split the work.
            _token_path(stage.stage_dir, self.save_id).touch()
            if self._has_manifest and not is_converted:
                (stage.stage_dir / SUMS).mkdir()
            parts = split_by_rank(layout, save, token=self.save_id, is_converted=is_converted)
            # Create the files that several ranks write to before any of the ranks opens them.
            n_writers = Counter(image.path for part in parts for image in part.images)
            shared = {
                image.path: image.size
                for part in parts
                for image in part.images
                if n_writers[image.path] > 1
            }
            for name, n_bytes in shared.items():
                stage.store.create(name, n_bytes)
        except BaseException:
            self._abandon()
            raise
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's regions.

        Returns:
            A completed future with the size of every item. The result for an entry that is not a
            tensor also contains its stream, which the coordinator writes.

        Raises:
            StorageError: this rank cannot see the coordinator's staging directory, or a file cannot
                be written.
            UsageError: a tensor from the planner does not have the planned dtype or shape.
        """
        part = plan.storage_data
        assert isinstance(part, RankSave), "prepare_global_plan has set it"
        if is_remote(self.path):
            try:
                results = upload_part(plan, planner, part, self.path, threads=self._threads)
            except BaseException:
                self._abandon()
                raise
            return _completed(results)
        # Check that this is the coordinator's staging directory: on a file system that is not
        # shared, the token is missing.
        stage_dir = stage_dir_of(self._converted_path() if part.is_converted else self._dst())
        if not _token_path(stage_dir, part.token).exists():
            raise StorageError(
                "the coordinator created this directory, but this rank cannot see it",
                file=str(stage_dir),
                hint="use the same path on all ranks, on a file system that they share",
            )
        # Write the regions. Each rank flushes what it has written, because fsync on another machine
        # would not.
        store = StageStore(stage_dir / "data", is_durable=self._fsync)
        try:
            sums_dir = stage_dir / SUMS
            results = write_part(
                plan,
                planner,
                part,
                store,
                threads=self._threads,
                sums_dir=sums_dir if sums_dir.is_dir() else None,
            )
            if self._fsync:
                store.sync_files()
        except BaseException:
            self._abandon()
            raise
        finally:
            store.close()
        return _completed(results)

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what the ranks have not written, and publish the checkpoint.

        Raises:
            UsageError: another save to the same destination began before this one ended.
            CheckpointingException: a file cannot be written, or the conversion fails; the
                destination is then unchanged.
        """
        streams = {
            result.index.fqn: result.storage_data
            for of_rank in results
            for result in of_rank
            if isinstance(result.storage_data, bytes)
        }
        if self._upload is not None:
            upload, self._upload = self._upload, None
            upload.finish(streams)
        else:
            self._finish_stage(streams)
        # torch broadcasts this metadata to all ranks, which need no file positions.
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {}
        metadata.version = DCP_VERSION

    def _begin_upload(
        self, save: PlannedSave, plans: list[SavePlan], root: RemotePath
    ) -> list[SavePlan]:
        """Return the plans for a save to an object store, with each rank's part.

        Raises:
            UnsupportedError: ranks cannot write the files of the format one by one.
            UsageError, StorageError: the destination cannot be written.
        """
        if self._is_converted(save):
            raise UnsupportedError(
                f"{self._format.name} with these options is written by a conversion, which needs "
                "a local directory",
                file=str(root),
                hint="save as dcp or torch_dist, and convert: ckpt convert URL DST",
            )
        # Torch has no hook for a failed save, so its writer may still be alive and hold the lock.
        stale = _UPLOADS.pop(root, None)
        if stale is not None:
            stale.abandon()
        upload = self._upload = begin_bucket_save(
            save,
            self._format,
            root,
            overwrite=self._overwrite,
            manifest=self._has_manifest,
            max_file_bytes=self._max_file_bytes,
        )
        _UPLOADS[root] = upload.publication
        weakref.finalize(self, upload.publication.abandon)
        parts = split_by_rank(
            upload.layout, save, token=upload.publication.token, is_converted=False
        )
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    def _finish_stage(self, streams: dict[str, bytes]) -> None:
        """Write what the ranks have not written, and publish the staging directory.

        Args:
            streams: the entries that are not tensors, by key.
        """
        running = self._running
        if running is None or _STAGES.get(running.stage.dst) is not running.stage:
            raise UsageError(
                "the save was abandoned because another save to the same destination began",
                file=str(self.path),
            )
        # Write entries that are not tensors, headers and metadata, and publish the directory.
        try:
            write_rest(
                running.save,
                running.layout,
                streams,
                running.stage.store,
                format=running.format,
                dst=running.dst,
                max_file_bytes=running.max_file_bytes,
            )
            sums_dir = running.stage.stage_dir / SUMS
            if sums_dir.is_dir():
                is_file = running.stage.is_file
                write_combined(
                    running.stage.data_dir,
                    sums_dir,
                    manifest_name(running.dst.name if is_file else None),
                    fsync=self._fsync,
                )
            running.stage.commit()
        finally:
            self._abandon()
        # If the ranks wrote a DCP checkpoint instead of the destination, convert and remove it.
        if running.dst != self._dst():
            try:
                run(self._job())
            finally:
                shutil.rmtree(running.dst, ignore_errors=True)

    def _check_destination(self, save: PlannedSave) -> None:
        """Raise unless the destination is free and can hold all entries.

        Raises:
            UsageError: the destination exists, or is a file that holds only tensors while there are
                other entries.
        """
        dst = self._dst()
        if os.path.lexists(dst) and not self._overwrite and not _is_empty_dir(dst):
            raise UsageError(
                "the destination exists",
                file=str(dst),
                hint="choose another path, or pass overwrite=True",
            )
        if save.objects and self._format.writes_only_tensors(dst):
            raise UsageError(
                f"a {dst.suffix} file can store only tensors, and this entry is not a tensor",
                key=save.objects[0],
                hint="save to a directory, or remove the entry from the state dict",
            )

    def _is_converted(self, save: PlannedSave) -> bool:
        """Return whether ranks write a DCP checkpoint, which is then converted."""
        # A format that is written rank by rank, or adapts the tensors, has other regions than the
        # plans. A torch file with other entries is one pickle, which cannot be written in parts.
        format = self._format
        is_cut_otherwise = format.is_rank_local or format.adapt is not None
        is_pickle = format.keeps_nesting and bool(save.objects)
        return bool(self._changes) or is_cut_otherwise or is_pickle

    def _dst(self) -> Path:
        return absolute_location(self.path)

    def _converted_path(self) -> Path:
        """Return the path of the DCP checkpoint to be converted."""
        dst = self._dst()
        return dst.parent / f".{dst.name}.ckpt-dcp"

    def _job(self) -> Job:
        """Return the conversion of the DCP checkpoint."""
        return Job(
            src=self._converted_path(),
            dst=self._dst(),
            to=self._format.name,
            force=self._overwrite or _is_empty_dir(self._dst()),
            max_shard_size=self._max_file_bytes,
            fsync=self._fsync,
            threads=self._threads,
            **self._changes,
        )

    def _abandon(self) -> None:
        """Remove the staging directory, or the objects that were uploaded, if there are any."""
        if self._running is not None:
            self._running.end()
            self._running = None
        if self._upload is not None:
            self._upload.publication.abandon()
            self._upload = None


_STAGES: dict[Path, Stage] = {}
"""The staging directories that this process has created and not ended, by destination."""
_UPLOADS: weakref.WeakValueDictionary[RemotePath, BucketPublication] = weakref.WeakValueDictionary()
"""The saves to object stores that this process has begun, by destination."""


def _enter(stage: Stage) -> None:
    """Create a staging directory, in place of one from a failed save to the same destination."""
    # Torch has no hook for a failed save, so its writer may still be alive and hold the lock.
    stale = _STAGES.pop(stage.dst, None)
    if stale is not None:
        stale.__exit__(None, None, None)
    stage.__enter__()
    _STAGES[stage.dst] = stage


def _leave(stage: Stage) -> None:
    """Remove a staging directory, unless it was published or another save has replaced it."""
    if _STAGES.get(stage.dst) is stage:
        del _STAGES[stage.dst]
        stage.__exit__(None, None, None)


def _token_path(stage_dir: Path, token: str) -> Path:
    """Return the path of the file that identifies this save.

    A rank checks for this file to be sure that it sees the coordinator's staging directory, and not
    a directory on its own machine.
    """
    return stage_dir / f"save-{token}"


def _completed(results: list[WriteResult]) -> Future[list[WriteResult]]:
    done: Future[list[WriteResult]] = Future()
    done.set_result(results)
    return done


def _is_empty_dir(path: Path) -> bool:
    # Whether a bucket has objects is found out when its prefix is locked.
    return not is_remote(path) and path.is_dir() and not any(path.iterdir())


def _restore_cached_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans, or torch's cached ones if it sent none because they did not change.

    Raises:
        UnsupportedError: there are no cached plans, or several that might belong to this save.
    """
    if all(plan.usable for plan in plans):
        return plans
    # torch caches the global plans by planner class in a private class attribute, without the name
    # of the destination, so only a single entry is unambiguous.
    for cached in getattr(SavePlanner, "_cached_global_plan", {}).values():
        if len(cached) == len(plans) and len(SavePlanner._cached_global_plan) == 1:
            return list(cached)
    raise UnsupportedError(
        "cannot determine which cached plans belong to this save",
        hint="save with DefaultSavePlanner(enable_plan_caching=False)",
    )
