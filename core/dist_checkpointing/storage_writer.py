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
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from core.dist_checkpointing.torch_dcp.planned_files import write_part
from core.dist_checkpointing.torch_dcp.planned_save import (
    PlannedSave,
    RankSave,
    build_item_chunk,
    combine_plans,
    is_tensor,
    lay_out,
    split_by_rank,
)
from core.dist_checkpointing.torch_dcp.running_save import (
    RunningSave,
    SavePlace,
    StagedSave,
    UploadedSave,
)
from core.errors import UnsupportedError, UsageError
from core.files.object_listing import is_listed
from core.files.remote_path import absolute_location, is_remote
from core.files.url import find_location
from core.formats.dcp import format as dcp
from core.formats.dcp.metadata_writer import DCP_VERSION
from core.formats.format import Format
from core.formats.registry import format_called
from core.publish.stage.existing import check_replaceable
from core.publish.stage.protocol import StageRequest
from core.publish.stage.replacement import is_vacant
from core.publish.stage.stage import Stage
from core.verbs.convert.job import Job
from core.verbs.convert.run import run

CheckpointId = str | os.PathLike[str]


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
        self._running: RunningSave | None = None
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
                "saving without collectives is not supported, because ranks share files and need "
                "a coordinator",
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
        is_converted = self._is_converted(save)
        self._check_destination(save, is_converted=is_converted)
        # Lay out what the ranks write: the checkpoint itself, or a DCP checkpoint to be converted.
        if is_converted:
            format, dst, max_file_bytes = dcp.FORMAT, self._converted_path(), None
        else:
            format, dst, max_file_bytes = self._format, self._dst(), self._max_file_bytes
        layout = lay_out(save, format, dst, max_file_bytes=max_file_bytes)
        place: SavePlace
        if is_remote(dst):
            place = UploadedSave(
                dst, layout, overwrite=self._overwrite, manifest=self._has_manifest
            )
        else:
            # Only checkpoints may be replaced; the conversion checks this itself.
            if self._overwrite and not is_converted:
                check_replaceable(dst, [image.path for image in layout.images])
            request = StageRequest(
                is_file=format.writes_file(dst),
                force=self._overwrite or is_converted,
                fsync=self._fsync,
                n_bytes=layout.n_bytes,
            )
            stage = Stage(dst, request)
            has_manifest = self._has_manifest and not is_converted
            place = StagedSave(stage, self.save_id, fsync=self._fsync, manifest=has_manifest)
        # What is written is removed with this writer at the latest.
        end = weakref.finalize(self, place.abandon)
        self._running = RunningSave(save, layout, format, dst, max_file_bytes, place, end)
        try:
            parts = split_by_rank(layout, save, token=place.token, is_converted=is_converted)
            place.begin(parts)
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
        dst = self._converted_path() if part.is_converted else self._dst()
        results = []
        try:
            place = UploadedSave if is_remote(dst) else StagedSave
            data_dir, sums_dir = place.join(dst, part.token)
            write_part(
                plan,
                planner,
                part,
                data_dir,
                threads=self._threads,
                fsync=self._fsync,
                sums_dir=sums_dir,
            )
            # Return every other entry, which torch sends to the coordinator with the results.
            for item in plan.items:
                stream = None if is_tensor(item) else planner.resolve_data(item).getvalue()
                n_bytes = build_item_chunk(item).n_bytes if stream is None else len(stream)
                results.append(
                    WriteResult(index=item.index, size_in_bytes=n_bytes, storage_data=stream)
                )
        except BaseException:
            self._abandon()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

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
        running = self._running
        if running is None or running.is_replaced:
            raise UsageError(
                "the save was abandoned because another save to the same destination began",
                file=str(self.path),
            )
        try:
            running.finish(streams)
        finally:
            self._abandon()
        # If the ranks wrote a DCP checkpoint instead of the destination, convert and remove it.
        if running.dst != self._dst():
            try:
                run(self._job())
            finally:
                shutil.rmtree(running.dst, ignore_errors=True)
        # torch broadcasts this metadata to all ranks, which need no file positions.
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {}
        metadata.version = DCP_VERSION

    def _check_destination(self, save: PlannedSave, *, is_converted: bool) -> None:
        """Raise unless the destination is free and can hold all entries.

        Raises:
            UsageError: the destination exists, or is a file that holds only tensors while there are
                other entries.
            UnsupportedError: it is in an object store, and the save needs a conversion.
        """
        dst = self._dst()
        if is_remote(dst):
            if is_converted:
                raise UnsupportedError(
                    f"with these options, {self._format.name} can only be saved to a local "
                    "directory",
                    file=str(dst),
                    hint="save as dcp or torch_dist, then convert: ckpt convert URL DST --to "
                    f"{self._format.name}",
                )
            return
        if os.path.lexists(dst) and not self._overwrite and not is_vacant(dst, is_file=False):
            raise UsageError(
                "the destination already exists",
                file=str(dst),
                hint="choose a different path, or pass overwrite=True",
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
            force=self._overwrite,
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
