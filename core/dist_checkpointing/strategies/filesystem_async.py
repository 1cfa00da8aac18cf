"""torch's writer of DCP files in steps, so that another process can write the bytes.

::

    prepare_write_data           assign items to files, copy CPU tensors that are views
    get_save_function_and_args   return the parts of an AsyncRequest: preload_tensors for this
                                 process, write_preloaded_data_multiproc for any process
    retrieve_write_results       return the positions of the written items, or the error
    finish                       write ``.metadata``

``core.dist_checkpointing.strategies.state_dict_saver`` calls the first step and the last two. On
disk: files ``<hint>__<rank>_<n>.distcp`` with torch.save streams one after the other, as torch
writes them.

The strategies of this package do not need the writer: they write through the engine. It serves
training scripts whose own strategies and writers derive from it. Source: the documented class of
``core.dist_checkpointing.strategies.filesystem_async``; megatron-core 0.16.1 for the values passed
between steps; torch 2.13 ``torch/distributed/checkpoint/filesystem.py``.

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
from core.files.syscalls import flush
from core.formats.dcp.items import divide_by_size

WriteBucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""Path and name of a file, and its data as (streams, tensors): two lists of (item, data)."""

_results_queue = None
"""Always None: no process is needed for the results.

megatron-core has one; scripts that restart training in place look it up here to end it.
"""


class FileSystemWriterAsync(FileSystemWriter):
    """A FileSystemWriter whose files another process can write; one writer per save.

    Args:
        path: directory of the checkpoint.
        args: arguments of torch's FileSystemWriter.
        separation_hint: prefix of keys; items with these keys go to separate files, whose names
            begin with the prefix, too.
        use_msc: must be False.
        kwargs: keyword arguments of torch's FileSystemWriter; ``thread_count`` is the number of
            files, and of threads.

    Raises:
        UnsupportedError: ``use_msc`` is True, or ``single_file_per_rank`` is False.
        UsageError: a separation hint is given, but ``thread_count`` is less than 2.
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
                "the Multi-Storage Client (use_msc=True) is not supported",
                hint="save to a local directory",
            )
        super().__init__(path, *args, **kwargs)
        if not self.single_file_per_rank:
            raise UnsupportedError(
                "writing one file per item is not supported", hint="pass single_file_per_rank=True"
            )
        if separation_hint is not None and self.thread_count < 2:
            raise UsageError(
                "separation_hint requires at least two files per rank", hint="pass thread_count=2"
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
            plan: this rank's plan.
        """
        super().prepare_local_plan(plan)
        return plan

    def prepare_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        """Add the prefix of this rank's file names to the plan, without asking other ranks.

        Args:
            local_plan: this rank's plan.
        """
        return replace(local_plan, storage_data=_StoragePrefix(f"__{comm.rank()}_"))

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Assign the items to files and store their data in ``write_buckets``.

        Args:
            plan: this rank's plan, with the prefix of its file names.
            planner: provider of the data.
        """
        # Divide the items by size, then each part by the separation hint: items with it go to half
        # of the files.
        hint = self.separation_hint
        prefixes = [""] if hint is None else ["", hint]
        parts = divide_by_size(
            [_item_bytes(item) for item in plan.items], self.thread_count // len(prefixes)
        )
        self.write_buckets = []
        for prefix in prefixes:
            for part in parts:
                items = [
                    plan.items[n]
                    for n in part
                    if hint is None or plan.items[n].index.fqn.startswith(hint) == bool(prefix)
                ]
                if not items:
                    continue
                # Number the files without gaps, over both prefixes.
                number = len(self.write_buckets)
                name = f"{prefix}{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
                data = _resolve_data(items, planner)
                self.write_buckets.append((os.path.join(self.checkpoint_dir, name), name, data))
        self.results_queue = WriteResults() if self.write_buckets else None

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], Any] | None, list[Any]]:
        """Return ``async_fn``, ``preload_fn`` and ``async_fn_args`` of an AsyncRequest.

        Returns:
            (None, None, []) if this rank has nothing to write.
        """
        if not self.write_buckets:
            return None, None, []
        # AsyncRequest replaces the second argument with the result of preload_tensors.
        return (
            partial(self.write_preloaded_data_multiproc, [self.transforms], self.use_msc),
            partial(self.preload_tensors, self.write_buckets, True),
            [comm.rank(), self.write_buckets, self.results_queue],
        )

    @staticmethod
    def preload_tensors(
        write_buckets: list[WriteBucket], non_blocking: bool = True
    ) -> list[WriteBucket]:
        """Copy the tensors of the buckets to host memory.

        Args:
            write_buckets: the data to be written.
            non_blocking: start all copies before waiting for them.
        """
        cpu_buckets: list[WriteBucket] = []
        for path, name, (streams, tensors) in write_buckets:
            cpu_tensors = [
                (item, tensor.to("cpu", non_blocking=non_blocking)) for item, tensor in tensors
            ]
            cpu_buckets.append((path, name, (streams, cpu_tensors)))
        # A non-blocking copy from the GPU may still be running here.
        if non_blocking and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return cpu_buckets

    @staticmethod
    def write_preloaded_data_multiproc(
        transform_list: Sequence[Any],
        use_msc: bool,
        rank: int,
        write_buckets: list[WriteBucket],
        global_results_queue: Any,
    ) -> None:
        """Write all files in parallel, and put the results into the queue.

        The queue receives one value: the results by file number, or an exception.

        Args:
            transform_list: list with one element, torch's transforms of streams.
            use_msc: must be False.
            rank: rank of the training process.
            write_buckets: the data to be written, in host memory.
            global_results_queue: an object with ``put``.

        Raises:
            WorkerError: a file could not be written. The queue receives the same error.
        """
        # Write in threads, whatever the documented name of the function promises: threads share the
        # memory of the tensors, and spend most of their time in system calls.
        results: queue.Queue[tuple[int, Any]] = queue.Queue()
        pending: queue.Queue[int] = queue.Queue()
        # The pool is left only after all threads have ended.
        with ThreadPoolExecutor(max(1, len(write_buckets))) as pool:
            for number, bucket in enumerate(write_buckets):
                pending.put(number)
                pool.submit(
                    FileSystemWriterAsync.write_preloaded_data,
                    transform_list,
                    number,
                    bucket,
                    results,
                    pending,
                    True,
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
        """Write one file, and put (number, results or exception) into a queue.

        Args:
            transform_list: list with one element, torch's transforms of streams.
            local_proc_idx: number of the file.
            write_bucket: the data to be written, in host memory.
            results_queue: an object with ``put``.
            count_queue: queue from which one number is taken at the end, on success or failure.
            use_fsync: wait until the file is on disk.
            kwargs: not used.
        """
        path, name, (streams, tensors) = write_bucket
        outcome: Any
        try:
            with Path(path).open("wb") as file:
                outcome = [
                    _write_item(
                        *transform_list, file, data, item, name, SerializationFormat.TORCH_SAVE
                    )
                    for item, data in chain(streams, tensors)
                ]
                if use_fsync:
                    flush(file.fileno())
        except Exception as err:
            outcome = err
        results_queue.put((local_proc_idx, outcome))
        count_queue.get()
        count_queue.task_done()

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Run all steps up to the results, for torch's own dcp.save.

        Args:
            plan: this rank's plan, with the prefix of its file names.
            planner: provider of the data.

        Returns:
            A completed future with the results.

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
        """Return the results of the write, or its failure in the form that torch uses.

        Call it after the function that writes has ended.

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
                WorkerError("the writer process returned no results", rank=str(comm.rank()))
            )
        if isinstance(results, Exception):
            return _wrap_exception(results)
        # A writer that was killed may have returned the results of some files only.
        if len(results) != len(self.write_buckets):
            n_expected = len(self.write_buckets)
            text = f"the writer returned results for {len(results)} files, expected {n_expected}"
            return _wrap_exception(WorkerError(text, rank=str(comm.rank())))
        return [*chain.from_iterable(results.values())]

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``; on one rank only.

        Args:
            metadata: the result of planning.
            results: the results of the writes, by rank.
        """
        super().finish(metadata, results)

    @property
    def checkpoint_id(self) -> str:
        """The directory of the checkpoint."""
        return str(self.checkpoint_dir)

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Check if an id is a path that torch accepts; URLs are not accepted.

        Args:
            checkpoint_id: a path, or an id of another kind of storage.
        """
        if "://" in os.fspath(checkpoint_id):
            return False
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))


def _resolve_data(items: Sequence[WriteItem], planner: SavePlanner) -> tuple[list[Any], list[Any]]:
    """Fetch the data of items: (item, stream) for objects, (item, tensor) for tensors."""
    streams: list[Any] = []
    tensors: list[Any] = []
    for item in items:
        data: Any = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            streams.append((item, data))
            continue
        # torch.save writes the entire storage of a view, so copy views. Those on a GPU are copied
        # by preload_tensors, without the rest of their storage.
        tensor = data.detach()
        is_view = tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
        tensors.append(
            (item, tensor.clone() if is_view and tensor.device.type == "cpu" else tensor)
        )
    return streams, tensors


def _item_bytes(item: WriteItem) -> int | None:
    """Return the size of a tensor's item, in bytes; None for an object."""
    if item.tensor_data is None:
        return None
    return int(item.tensor_data.chunk.sizes.numel()) * int(
        item.tensor_data.properties.dtype.itemsize
    )
