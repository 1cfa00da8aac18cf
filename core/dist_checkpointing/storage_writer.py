"""A storage writer that lets ``torch.distributed.checkpoint.save`` write every supported format.

::

    dcp.save({"model": model.state_dict()}, storage_writer=CkptStorageWriter("out",
    format="safetensors"))

    prepare_global_plan   the coordinator combines the ranks' plans, lays out the files, proves that
    every
                          byte has one writer, and sends each rank its part
    write_data            every rank writes its regions: for dcp and torch_dist into files of its
        own; for
                          safetensors, zarr and torch into byte ranges of files that ranks share
    finish                the coordinator writes the rest (headers, entries that are not tensors,
    metadata),
                          waits for the disk, and publishes

Nothing is visible before the end: all ranks write into a hidden sibling of the destination, which
must be on a file system that they share. A save that fails leaves the destination as it was; its
stage is removed with the writer, or by the next save to the same destination.

Some checkpoints cannot be written region by region: Megatron's rank files, torch files with entries
that are not tensors, and everything that ``changes`` ask for. For these, ranks write a DCP
checkpoint next to the destination, and the coordinator converts it by ``core.convert.run`` and
removes it. That takes twice the space and the writing, and the coordinator converts alone.
Megatron's rank files need Megatron's names in the entry ``model``, and the arguments in ``args``.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import override

from core.catalog.file_image import FileImage
from core.convert.job import Job
from core.convert.prepare import is_file_of
from core.convert.run import run
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
from core.files.url import refuse_url
from core.formats.dcp import format as dcp
from core.formats.format import Format
from core.formats.registry import format_called
from core.stage.existing import check_replaceable
from core.stage.files import StageStore
from core.stage.stage import Stage, stage_dir_of

CheckpointId = str | os.PathLike[str]


@dataclass(slots=True)
class _RunningSave:
    """A save that has begun, on the coordinator.

    Args:
        save: the combined plans of all ranks.
        layout: the files, and the positions of tensors in them.
        stage: the hidden directory that the files are written into.
        end: leaves the stage; called by the garbage collector, or at the exit of the process, if
            not before.
        format: the format that ranks write.
        dst: destination of the stage.
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
        path: the destination, a directory; for safetensors and torch also a file.
        format: a writable format or its name: ``dcp``, ``torch_dist``, ``zarr``, ``zarr3``,
            ``safetensors``, ``torch``, ``megatron`` … Keys stay as they are, also with ``hf``;
            ``names="hf"`` translates Megatron's.
        overwrite: replace an existing checkpoint once the new one is complete.
        max_file_bytes: maximum size of a file with tensors, where the format can split; None for
            its default.
        fsync: wait until the bytes are on the disk.
        threads: number of copying threads on each rank.
        changes: fields of ``core.convert.job.Job`` that change what is written, such as ``names``,
            ``topology``, ``rename`` or ``dtype``; the module's docstring says what they cost.

    Raises:
        UnsupportedError: the format is unknown, or cannot be written.
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
        **changes: Any,
    ) -> None:
        super().__init__()
        refuse_url(path)
        self.path = Path(path)
        self.save_id = str(uuid.uuid4())
        self._format = format_called(format) if isinstance(format, str) else format
        if self._format.lay_out is None:
            raise UnsupportedError(f"the format {self._format.name} can be read, but not written")
        self._overwrite = overwrite
        self._max_file_bytes = max_file_bytes
        self._fsync = fsync
        self._threads = threads
        self._changes = changes
        self._running: _RunningSave | None = None
        self._job()

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Return the path of the destination."""
        return self.path

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether the id is a path; URLs are not."""
        return "://" not in os.fspath(checkpoint_id)

    @override
    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @override
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Abandon an unfinished save and begin a new one, elsewhere if an id is given."""
        self._abandon()
        if checkpoint_id:
            refuse_url(checkpoint_id)
            self.path = Path(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    @override
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise unless ranks communicate.

        Raises:
            UnsupportedError: the save runs without collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "ranks cannot share files without collectives",
                hint="save with use_collectives=True",
            )

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the stage and return the plans with each rank's part in ``storage_data``.

        Raises:
            UsageError: the destination exists, or ranks disagree.
            MissingShardError: no rank has a region of a tensor.
            UnsupportedError: the format cannot store an entry.
            CapacityError, StorageError: a file or directory cannot be written.
        """
        self._abandon()
        plans = _restore_cached_plans(plans)
        save = combine_plans(plans)
        self._check_destination(save)
        # Lay out what the ranks write: the checkpoint itself, or a DCP checkpoint to be converted.
        is_converted = self._is_converted(save)
        if is_converted:
            format, dst, max_file_bytes = dcp.FORMAT, self._converted_path(), None
        else:
            format, dst, max_file_bytes = self._format, self._dst(), self._max_file_bytes
        layout = lay_out(save, format, dst, max_file_bytes=max_file_bytes)
        if self._overwrite and not is_converted:
            check_replaceable(dst, [image.path for image in layout.images])
        # Begin the stage, which ends with this writer at the latest.
        stage = Stage(
            dst,
            is_file=is_file_of(format, dst),
            force=self._overwrite or is_converted or _is_empty_dir(dst),
            fsync=self._fsync,
            needed_bytes=layout.n_bytes,
        )
        _enter(stage)
        end = weakref.finalize(self, _leave, stage)
        self._running = _RunningSave(save, layout, stage, end, format, dst, max_file_bytes)
        try:
            _token_path(stage.stage_dir, self.save_id).touch()
            parts = split_by_rank(layout, save, token=self.save_id, is_converted=is_converted)
            # Create files that several ranks write to before any of them does.
            for image in _shared_images(parts):
                stage.store.create(image.path, image.size)
        except BaseException:
            self._abandon()
            raise
        return [replace(plan, storage_data=part) for plan, part in zip(plans, parts, strict=True)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's regions; the returned future is done.

        Returns:
            The size of every item; for an entry that is not a tensor also its stream, which the
            coordinator writes.

        Raises:
            StorageError: this rank does not see the coordinator's stage, or a file cannot be
                written.
            UsageError: the planner gives another tensor than it planned.
        """
        part = plan.storage_data
        assert isinstance(part, RankSave), "prepare_global_plan has set it"
        # The stage must be the coordinator's: on a file system that is not shared, its token is missing.
        stage_dir = stage_dir_of(self._converted_path() if part.is_converted else self._dst())
        if not _token_path(stage_dir, part.token).exists():
            raise StorageError(
                "this rank does not see the directory that the coordinator created",
                file=str(stage_dir),
                hint="give all ranks the same path on a file system that they share",
            )
        store = StageStore(stage_dir / "data", is_durable=self._fsync)
        try:
            results = write_part(plan, planner, part, store, threads=self._threads)
            if self._fsync:
                store.sync_files()
        except BaseException:
            self._abandon()
            raise
        finally:
            store.close()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the rest of the files and publish the checkpoint.

        Raises:
            UsageError: another save to the same destination has replaced this one.
            CheckpointingException: a file cannot be written, or the conversion fails; nothing is
                visible then.
        """
        running = self._running
        if running is None or _STAGES.get(running.stage.dst) is not running.stage:
            raise UsageError(
                "the save was abandoned because another save to the same destination began",
                file=str(self.path),
            )
        # Write entries that are not tensors, headers and metadata, and publish the stage.
        try:
            streams = {
                result.index.fqn: result.storage_data
                for of_rank in results
                for result in of_rank
                if isinstance(result.storage_data, bytes)
            }
            write_rest(
                running.save,
                running.layout,
                streams,
                running.stage.store,
                format=running.format,
                dst=running.dst,
                max_file_bytes=running.max_file_bytes,
            )
            running.stage.commit()
        finally:
            self._abandon()
        # If the ranks wrote a DCP checkpoint to be converted, convert and remove it.
        if running.dst != self._dst():
            try:
                run(self._job())
            finally:
                shutil.rmtree(running.dst, ignore_errors=True)
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {}

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
                hint="choose another one, or pass overwrite=True",
            )
        if save.objects and is_file_of(self._format, dst) and not self._format.nests:
            raise UsageError(
                f"a {dst.suffix} file holds only tensors",
                key=save.objects[0],
                hint="save into a directory, or leave the entry out",
            )

    def _is_converted(self, save: PlannedSave) -> bool:
        """Return whether ranks write a DCP checkpoint first, to be converted."""
        format = self._format
        is_cut_otherwise = format.partition == "ranks" or format.adapt is not None
        return bool(self._changes) or is_cut_otherwise or (format.nests and bool(save.objects))

    def _dst(self) -> Path:
        return Path(os.path.abspath(self.path))

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
            max_file_bytes=self._max_file_bytes,
            fsync=self._fsync,
            threads=self._threads,
            **self._changes,
        )

    def _abandon(self) -> None:
        """Remove the stage, if there is one."""
        if self._running is not None:
            self._running.end()
            self._running = None


_STAGES: dict[Path, Stage] = {}
"""The stages that this process has entered and not left, by destination."""


def _enter(stage: Stage) -> None:
    """Enter a stage, after leaving the one that a failed save to the same destination left."""
    stale = _STAGES.pop(stage.dst, None)
    if stale is not None:
        stale.__exit__(None, None, None)
    stage.__enter__()
    _STAGES[stage.dst] = stage


def _leave(stage: Stage) -> None:
    """Leave a stage that has not ended: unpublished files are removed."""
    if _STAGES.get(stage.dst) is stage:
        del _STAGES[stage.dst]
        stage.__exit__(None, None, None)


def _token_path(stage_dir: Path, token: str) -> Path:
    """Return the path of the file that identifies this save.

    By it, a rank checks that it sees the coordinator's stage, and not a directory of its own
    machine.
    """
    return stage_dir / f"save-{token}"


def _is_empty_dir(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _restore_cached_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans, or torch's cached plans where it sent none because they did not change.

    Raises:
        UnsupportedError: several cached plans might be the right ones.
    """
    if all(plan.usable for plan in plans):
        return plans
    for cached in getattr(SavePlanner, "_cached_global_plan", {}).values():
        if len(cached) == len(plans) and len(SavePlanner._cached_global_plan) == 1:
            return list(cached)
    raise UnsupportedError(
        "several planners have cached plans, and it is unknown which of them belong to this save",
        hint="save with DefaultSavePlanner(enable_plan_caching=False)",
    )


def _shared_images(parts: Sequence[RankSave]) -> list[FileImage]:
    """Return the files that several ranks write to."""
    n_writers = Counter(image.path for part in parts for image in part.images)
    images = {image.path: image for part in parts for image in part.images}
    return [image for path, image in images.items() if n_writers[path] > 1]
