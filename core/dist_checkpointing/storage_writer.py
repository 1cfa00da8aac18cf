"""Lets ``torch.distributed.checkpoint.save`` write every format that this project writes.

::

    dcp.save({"model": model.state_dict()}, storage_writer=CkptStorageWriter("out", format="safetensors"))

    prepare_global_plan   the coordinator adds up what the ranks have, lays out the files, proves that every byte has
                          one writer, and sends each rank its part
    write_data            every rank writes its regions: dcp and torch_dist get files of each rank's own; of
                          safetensors, zarr and torch files, which ranks share, each writes byte ranges of its own
    finish                the coordinator writes what is left (headers, entries that are no tensors, metadata), waits
                          for the disk, and publishes

Nothing is visible before the end: all ranks write into a hidden sibling of the destination, which must be on a file
system that they share. A save that fails leaves the destination as it was; what it leaves of its stage goes with the
writer, or with the next save to the same place.

Where the ranks' regions cannot be the files' (Megatron's rank files, torch files with entries that are no tensors, and
whatever ``changes`` ask for), ranks write a DCP checkpoint beside the destination, the coordinator converts it by
``core.convert.run`` and removes it. That takes the space and the writing twice, and the conversion is the coordinator's
alone. Megatron's rank files need Megatron's names in the entry ``model``, and the arguments in ``args``.

Source: torch 2.13 ``torch/distributed/checkpoint/{storage,planner,state_dict_saver,default_planner}.py``.

Not supported: saving without collectives (``use_collectives=False``), because shared files need a coordinator.
"""

from __future__ import annotations

import os
import shutil
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from core.catalog.file_image import FileImage
from core.convert.job import Job
from core.convert.prepare import is_file_of
from core.convert.run import run
from core.dist_checkpointing.torch_dcp.planned_files import write_part, write_rest
from core.dist_checkpointing.torch_dcp.planned_save import Layout, Part, Planned, lay_out, parts, planned
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
class _Running:
    """What the coordinator knows of a save that has begun.

    Args:
        save: what is saved.
        layout: where tensors go.
        stage: where the files are.
        end: leaves the stage; called by the garbage collector, or at the exit of the process, if not before.
        format: what ranks write.
        dst: of the stage.
        max_file_bytes: of the files that ranks write.
    """

    save: Planned
    layout: Layout
    stage: Stage
    end: Callable[[], object]
    format: Format
    dst: Path
    max_file_bytes: int | None


class CkptStorageWriter(StorageWriter):
    """Writes a (sharded) state dict as a checkpoint in any format.

    Args:
        path: the destination, a directory; for safetensors and torch also a file.
        format: a writable format or its name: ``dcp``, ``torch_dist``, ``zarr``, ``zarr3``, ``safetensors``, ``torch``,
            ``megatron`` … Keys stay as they are, also with ``hf``; ``names="hf"`` translates Megatron's.
        overwrite: replace a checkpoint that is there, once the new one is complete.
        max_file_bytes: most bytes of a file with tensors, where the format can split; None for its default.
        fsync: wait until the bytes are on the disk.
        threads: that copy, on each rank.
        changes: fields of ``core.convert.job.Job`` that change what is written, such as ``names``, ``topology``,
            ``rename`` or ``dtype``; see above what they cost.

    Raises:
        UnsupportedError: the format is not known, or not written.
        TypeError: a field that Job does not have.
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
        self.save_id = _new_id()
        self._format = format_called(format) if isinstance(format, str) else format
        if self._format.lay_out is None:
            raise UnsupportedError(f"format {self._format.name} can be read, but not written")
        self._overwrite = overwrite
        self._max_file_bytes = max_file_bytes
        self._fsync = fsync
        self._threads = threads
        self._changes = changes
        self._running: _Running | None = None
        self._job()

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Where it is written to."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether it is a path; addresses of other storage are none."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Ids of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Gives up a save that has not ended; a new one begins, somewhere else if an id is given."""
        self._abandon()
        if checkpoint_id:
            refuse_url(checkpoint_id)
            self.path = Path(checkpoint_id)
        self.save_id = _new_id()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Checks the way in which ranks work together.

        Raises:
            UnsupportedError: they do not.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "ranks that do not talk to each other cannot share files", hint="use_collectives=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans with what each rank is to write in ``storage_data``; begins the stage.

        Raises:
            UsageError: the destination is taken, or ranks disagree.
            MissingShardError: nobody has a region of a tensor.
            UnsupportedError: the format cannot hold what is to be written.
            CapacityError, StorageError: the system refuses.
        """
        self._abandon()
        plans = _whole_plans(plans)
        save = planned(plans)
        self._check_destination(save)
        is_converted = self._is_converted(save)
        format, dst = (dcp.FORMAT, self._converted_path()) if is_converted else (self._format, self._dst())
        max_file_bytes = None if is_converted else self._max_file_bytes
        layout = lay_out(save, format, dst, max_file_bytes=max_file_bytes)
        if self._overwrite and not is_converted:
            check_replaceable(dst, [image.path for image in layout.images])
        stage = Stage(
            dst,
            is_file=is_file_of(format, dst),
            force=self._overwrite or is_converted or _is_empty_dir(dst),
            fsync=self._fsync,
            needed_bytes=layout.n_bytes,
        )
        _enter(stage)
        end = weakref.finalize(self, _leave, stage)
        self._running = _Running(save, layout, stage, end, format, dst, max_file_bytes)
        try:
            _token_path(stage.stage_dir, self.save_id).touch()
            made = parts(layout, save, token=self.save_id, is_converted=is_converted)
            for image in _shared(made):
                stage.store.create(image.path, image.size)
        except BaseException:
            self._abandon()
            raise
        return [replace(plan, storage_data=part) for plan, part in zip(plans, made, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's regions; the future is done.

        Returns:
            For every item its size; for an entry that is no tensor also its stream, which the coordinator writes.

        Raises:
            StorageError: this rank does not see the coordinator's stage, or the system refuses.
            UsageError: the planner gives another tensor than it planned.
        """
        part = plan.storage_data
        assert isinstance(part, Part), "prepare_global_plan has put it there"
        stage_dir = stage_dir_of(self._converted_path() if part.is_converted else self._dst())
        if not _token_path(stage_dir, part.token).exists():
            raise StorageError(
                "this rank does not see what the coordinator has made there",
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

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes what is left, and publishes the checkpoint.

        Raises:
            UsageError: another save to the same destination took over.
            CheckpointingException: the system refuses, or the conversion does; nothing is visible.
        """
        running = self._running
        if running is None or _STAGES.get(running.stage.dst) is not running.stage:
            raise UsageError("the save was given up: another one to the same place began", file=str(self.path))
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
        if running.dst != self._dst():
            try:
                run(self._job())
            finally:
                shutil.rmtree(running.dst, ignore_errors=True)
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {}

    def _check_destination(self, save: Planned) -> None:
        """Raises a UsageError if the destination is taken, or cannot hold what is there."""
        dst = self._dst()
        if os.path.lexists(dst) and not self._overwrite and not _is_empty_dir(dst):
            raise UsageError("the destination exists", file=str(dst), hint="choose another one, or pass overwrite=True")
        if save.objects and is_file_of(self._format, dst) and not self._format.nests:
            raise UsageError(
                f"a {dst.suffix} file holds only tensors", key=save.objects[0], hint="give a directory, or leave it out"
            )

    def _is_converted(self, save: Planned) -> bool:
        """Whether ranks write a DCP checkpoint first."""
        format = self._format
        is_cut_otherwise = format.partition == "ranks" or format.adapt is not None
        return bool(self._changes) or is_cut_otherwise or (format.nests and bool(save.objects))

    def _dst(self) -> Path:
        return Path(os.path.abspath(self.path))

    def _converted_path(self) -> Path:
        """Where the DCP checkpoint lies that will be converted."""
        dst = self._dst()
        return dst.parent / f".{dst.name}.ckpt-dcp"

    def _job(self) -> Job:
        """The conversion, if there is one."""
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
        """Removes the stage, if there is one."""
        if self._running is not None:
            self._running.end()
            self._running = None


_STAGES: dict[Path, Stage] = {}
"""The stages that this process has begun and not left, by their destinations."""


def _enter(stage: Stage) -> None:
    """Begins a stage; one of this process for the same destination is what a failed save left, and goes."""
    left = _STAGES.pop(stage.dst, None)
    if left is not None:
        left.__exit__(None, None, None)
    stage.__enter__()
    _STAGES[stage.dst] = stage


def _leave(stage: Stage) -> None:
    """Ends a stage, if it has not ended: what is not published is removed."""
    if _STAGES.get(stage.dst) is stage:
        del _STAGES[stage.dst]
        stage.__exit__(None, None, None)


def _token_path(stage_dir: Path, token: str) -> Path:
    """A file by which ranks know that they see the stage of this save, and not a directory of their own."""
    return stage_dir / f"save-{token}"


def _new_id() -> str:
    return str(uuid.uuid4())


def _is_empty_dir(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _whole_plans(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans with those that torch's cache has left out, because they are the same as in the save before.

    Raises:
        UnsupportedError: they are not in the cache.
    """
    if all(plan.usable for plan in plans):
        return plans
    for cached in getattr(SavePlanner, "_cached_global_plan", {}).values():
        if len(cached) == len(plans) and len(SavePlanner._cached_global_plan) == 1:
            return list(cached)
    raise UnsupportedError(
        "several planners have cached plans, and nothing tells which of them this one is",
        hint="save with DefaultSavePlanner(enable_plan_caching=False)",
    )


def _shared(made: Sequence[Part]) -> list[FileImage]:
    """The files that several ranks write to; they are made before anybody writes."""
    n_writers: dict[str, int] = {}
    for part in made:
        for image in part.images:
            n_writers[image.path] = n_writers.get(image.path, 0) + 1
    images = {image.path: image for part in made for image in part.images}
    return [image for path, image in images.items() if n_writers[path] > 1]
