"""torch's writer of DCP files in steps, so that another process can write the bytes.

::

    prepare_write_data          assigns items to files; data of CPU tensors that are views are
    copied
    get_save_function_and_args ──▶ an AsyncRequest: preload_tensors here,
    write_preloaded_data_multiproc anywhere
    retrieve_write_results      positions of the written items, or the error
    finish                      ``.metadata``

``core.dist_checkpointing.strategies.state_dict_saver`` calls the first and the last two. On disk:
files ``<hint>__<rank>_<n>.distcp`` of torch.save streams one after the other, as torch writes them.

The strategies of this package do not need it: they write through the engine. It serves training
scripts with strategies and writers of their own, which derive from it. Source: the documented class
of ``core.dist_checkpointing.strategies.filesystem_async``; megatron-core 0.16.1 for the values
passed between steps; torch 2.13 ``torch/distributed/checkpoint/filesystem.py``.

Not supported: storage addresses of the multi-storage client (``use_msc``), one file per item.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    SerializationFormat,
    _StoragePrefix,
    _write_item,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing.strategies._torch.write_results import WriteResults
from core.errors import UnsupportedError, UsageError, WorkerError

WriteBucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""A file's path, its name, and (streams, tensors): two lists of (item, data)."""

_results_queue = None
"""Always None: results need no process.

megatron-core has one, which scripts that restart in place look up here and end.
"""


class FileSystemWriterAsync(FileSystemWriter):
    """A FileSystemWriter whose writing can be done by another process; one writer per save.

    Args:
        path: directory of the checkpoint.
        args: arguments of torch's FileSystemWriter.
        separation_hint: prefix of keys; their items go to separate files, whose names have the
            prefix, too.
        use_msc: must be False.
        kwargs: keyword arguments of torch's FileSystemWriter; ``thread_count`` is the number of
            files, and of threads.

    Raises:
        UnsupportedError: ``use_msc``, or ``single_file_per_rank=False``.
        UsageError: a separation hint and fewer than two files.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        **kwargs: Any,
    ) -> None:
        if use_msc:
            raise UnsupportedError(
                "the multi-storage client is not supported", hint="save to a file system"
            )
        super().__init__(path, *args, **kwargs)
        if not self.single_file_per_rank:
            raise UnsupportedError(
                "one file per item is not supported", hint="pass single_file_per_rank=True"
            )
        if separation_hint is not None and self.thread_count < 2:
            raise UsageError(
                "a separation hint needs at least two files", hint="pass thread_count=2"
            )
        self.checkpoint_dir = path
        self.use_msc = use_msc
        self.separation_hint = separation_hint
        self.can_run_decentralized_global_plan = True
        self.write_buckets: list[WriteBucket] | None = None
        self.results_queue: WriteResults | None = None

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the directory and return the plan unchanged.

        Args:
            plan: of this rank.
        """
        super().prepare_local_plan(plan)
        return plan

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Return the plan with the prefix of this rank's files, which depends on no other rank.

        Args:
            local_plan: of this rank.
        """
        return replace(local_plan, storage_data=_StoragePrefix(f"__{comm.rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Assign the items to files and take their data, which are in ``write_buckets`` afterwards.

        Args:
            plan: of this rank, with the prefix of its files.
            planner: provides the data.
        """
        # Items with the separation hint get half of the files.
        kinds = [""] if self.separation_hint is None else ["", self.separation_hint]
        n_files = self.thread_count // len(kinds)
        self.write_buckets = []
        for kind in kinds:
            items = [item for item in plan.items if self._kind_of(item) == kind]
            for bucket in filter(None, _split_evenly(items, n_files)):
                name = f"{kind}{plan.storage_data.prefix}{len(self.write_buckets)}{DEFAULT_SUFFIX}"
                data = _resolve_data(bucket, planner)
                self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, data))
        self.results_queue = WriteResults() if self.write_buckets else None

    def _kind_of(self, item: WriteItem) -> str:
        hint = self.separation_hint
        return hint if hint is not None and item.index.fqn.startswith(hint) else ""

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """Return ``async_fn``, ``preload_fn`` and ``async_fn_args`` of an AsyncRequest.

        Returns:
            (None, None, []) if there is nothing to write on this rank.
        """
        if not self.write_buckets:
            return None, None, []
        return (
            partial(self.write_preloaded_data_multiproc, [self.transforms], self.use_msc),
            partial(self.preload_tensors, self.write_buckets, True),
            [comm.rank(), self.write_buckets, self.results_queue],
        )

    @staticmethod
    def preload_tensors(
        write_buckets: list[WriteBucket], non_blocking: bool = True
    ) -> list[WriteBucket]:
        """Return the buckets with tensors in host memory.

        Args:
            write_buckets: the data to be written.
            non_blocking: start all copies before waiting for them.
        """
        moved: list[WriteBucket] = [
            (
                path,
                name,
                (
                    streams,
                    [
                        (item, tensor.to("cpu", non_blocking=non_blocking))
                        for item, tensor in tensors
                    ],
                ),
            )
            for path, name, (streams, tensors) in write_buckets
        ]
        if non_blocking and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return moved

    @staticmethod
    def write_preloaded_data_multiproc(
        transform_list: Sequence[Any],
        use_msc: bool,
        rank: int,
        write_buckets: list[WriteBucket],
        global_results_queue: Any,
    ) -> None:
        """Write all files in parallel, and put the results into the queue.

        The queue gets one value: results by file number, or an exception. The name is the
        documented one, but threads write: they share the memory of the tensors, and spend most of
        their time in system calls.

        Args:
            transform_list: [torch's transforms of streams].
            use_msc: must be False.
            rank: of the training process.
            write_buckets: the data to be written, in host memory.
            global_results_queue: an object with ``put``.

        Raises:
            WorkerError: a file could not be written. The queue has the same error then.
        """
        results: queue.Queue[tuple[int, Any]] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        with ThreadPoolExecutor(max(1, len(write_buckets))) as pool:
            for number, bucket in enumerate(write_buckets):
                pending.put(number)
                pool.submit(
                    FileSystemWriterAsync.write_preloaded_data,
                    *(transform_list, number, bucket, results, pending, True),
                )
        # Report the results of all files, or the first error.
        outcomes = dict(results.get() for _ in write_buckets)
        failure = next(
            (outcome for outcome in outcomes.values() if isinstance(outcome, Exception)), None
        )
        if failure is None:
            global_results_queue.put(outcomes)
            return
        error = WorkerError(f"writing failed: {type(failure).__name__}: {failure}", rank=str(rank))
        global_results_queue.put(error)
        raise error from failure

    @staticmethod
    def write_preloaded_data(
        transform_list: Sequence[Any],
        local_proc_idx: int,
        write_bucket: WriteBucket,
        results_queue: Any,
        count_queue: Any,
        use_fsync: bool,
        **kwargs: Any,
    ) -> None:
        """Write one file, and put its number with the results, or with the exception, into a queue.

        Args:
            transform_list: [torch's transforms of streams].
            local_proc_idx: number of the file.
            write_bucket: the data to be written, in host memory.
            results_queue: an object with ``put``.
            count_queue: a number is taken from it at the end, with or without success.
            use_fsync: wait for the disk.
            kwargs: not used.
        """
        outcome: Any
        try:
            outcome = _write_file(transform_list, write_bucket, use_fsync=use_fsync)
        except Exception as err:
            outcome = err
        results_queue.put((local_proc_idx, outcome))
        count_queue.get()
        count_queue.task_done()

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Run all steps up to the results, for torch's own dcp.save; the returned future is done.

        Args:
            plan: of this rank, with the prefix of its files.
            planner: provides the data.

        Raises:
            WorkerError: a file could not be written.
        """
        self.prepare_write_data(plan, planner)
        results: queue.Queue[dict[int, list[WriteResult]]] = queue.Queue()
        buckets = self.preload_tensors(self.write_buckets or [])
        self.write_preloaded_data_multiproc(
            [self.transforms], self.use_msc, comm.rank(), buckets, results
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([*chain.from_iterable(results.get().values())])
        return done

    def retrieve_write_results(self) -> Any:
        """Return the results of the writing, or its failure in the form that torch uses.

        Call it after the writing function has ended.

        Returns:
            A list of WriteResult, or (exception, its traceback).
        """
        assert self.write_buckets is not None, "prepare_write_data comes first"
        if self.results_queue is None:
            return []
        try:
            results = self.results_queue.get_nowait()
        except queue.Empty:
            return _wrap_exception(
                WorkerError("the writing process left no results", rank=str(comm.rank()))
            )
        if isinstance(results, Exception):
            return _wrap_exception(results)
        # A writer that was killed may have left the results of some files only.
        if len(results) != len(self.write_buckets):
            text = f"there are results of {len(results)} files, expected {len(self.write_buckets)}"
            return _wrap_exception(WorkerError(text, rank=str(comm.rank())))
        return [*chain.from_iterable(results.values())]

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``; on one rank.

        Args:
            metadata: from planning.
            results: of all ranks.
        """
        super().finish(metadata, results)

    @property
    def checkpoint_id(self) -> str:
        """Return the directory of the checkpoint."""
        return str(self.checkpoint_dir)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether an id is a path that torch accepts; URLs are not.

        Args:
            checkpoint_id: a path or something else.
        """
        if "://" in os.fspath(checkpoint_id):
            return False
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))


def _write_file(
    transform_list: Sequence[Any], bucket: WriteBucket, *, use_fsync: bool
) -> list[WriteResult]:
    path, name, (streams, tensors) = bucket
    with Path(path).open("wb") as file:
        results = [
            _write_item(*transform_list, file, data, item, name, SerializationFormat.TORCH_SAVE)
            for item, data in chain(streams, tensors)
        ]
        if use_fsync:
            os.fsync(file.fileno())
    return results


def _resolve_data(items: Sequence[WriteItem], planner: SavePlanner) -> tuple[list[Any], list[Any]]:
    """Return (item, stream) for objects and (item, tensor) for tensors."""
    streams = [
        (item, planner.resolve_data(item)) for item in items if item.type == WriteItemType.BYTE_IO
    ]
    tensors = [
        (item, _copy_view(planner.resolve_data(item)))
        for item in items
        if item.type != WriteItemType.BYTE_IO
    ]
    return streams, tensors


def _copy_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, copied if it is a view on the CPU.

    torch.save would write the whole storage of a view.
    """
    tensor = tensor.detach()
    is_view = tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
    return tensor.clone() if is_view and tensor.device.type == "cpu" else tensor


def _split_evenly(items: Sequence[WriteItem], n: int) -> list[list[WriteItem]]:
    """Split items into ``n`` parts of about the same size, largest items first; deterministic."""
    parts: list[list[WriteItem]] = [[] for _ in range(n)]
    sizes = [0] * n
    for item in sorted(items, key=_bytes_of, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(item)
        sizes[smallest] += _bytes_of(item)
    return parts


def _bytes_of(item: WriteItem) -> int:
    """Return the size of a tensor's item, in bytes; 1 for an object, which has no stream yet."""
    if item.tensor_data is None:
        return 1
    return int(item.tensor_data.chunk.sizes.numel()) * int(
        item.tensor_data.properties.dtype.itemsize
    )
