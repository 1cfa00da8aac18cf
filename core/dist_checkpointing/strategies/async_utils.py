"""Saves that go on while training does: requests, processes that execute them, the queue that ends them in order.

A request is executed in three steps: ``preload_fn`` copies to host memory while training waits, ``async_fn`` writes in
another process, ``finalize_fns`` make the checkpoint visible, in the training process, once all ranks have written.
A writer that fails or is killed makes ``maybe_finalize_async_calls`` raise on every rank; the finalize functions of its
call are then not called, so its checkpoint never becomes visible.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from core.dist_checkpointing import comm
from core.dist_checkpointing.writer_process import (
    be_writer,
    collection_paused,
    failed,
    how_it_ended,
    is_main_thread,
    of_this_rank,
    receive_failure,
    reported,
    send_failure,
)
from core.errors import CheckpointingException, UsageError

_LOOK_AGAIN_S = 0.5
"""How often a blocking wait asks whether the process lives, for when its pipes are kept open by a fork of the rank."""

logger = logging.getLogger(__name__)


class AsyncRequest(NamedTuple):
    """What is to be done for one asynchronous save.

    Args:
        async_fn: does the writing; called with ``async_fn_args`` and ``async_fn_kwargs`` in another process, so what
            it changes in memory is lost. None if there is nothing to write on this rank.
        async_fn_args: its positional arguments.
        finalize_fns: functions without arguments that are called one after the other in the training process, on every
            rank, after ``async_fn`` has ended on all ranks. They may be collective. One that has an attribute
            ``abandon`` has that called in its place if the save failed.
        async_fn_kwargs: its keyword arguments.
        preload_fn: copies what is to be written to host memory and returns what takes the place of
            ``async_fn_args[1]``; training waits for it.
        is_frozen: whether finalize functions can still be added.
        call_idx: number of the call in its queue, given when it is scheduled.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - the documented default; nothing here changes it
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Appends a finalize function.

        Raises:
            RuntimeError: the request is frozen, because it has been scheduled.
        """
        if self.is_frozen:
            raise RuntimeError("a frozen AsyncRequest takes no more finalize functions: it has been scheduled")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Does all of it now, in this process. Collective.

        Raises:
            CheckpointingException: on every rank, when one of them failed to write or to finalize; a rank whose own
                work failed raises what that raised.
        """
        _check(self)
        try:
            comm.together(lambda: _call(self))
        except BaseException:
            _abandon(self)
            raise
        _finalize(self)

    def freeze(self) -> AsyncRequest:
        """The same request, to which no finalize function can be added any more."""
        return self._replace(is_frozen=True)


class AsyncCaller(ABC):
    """Executes requests in another process, and knows when that is done on all ranks."""

    failure: CheckpointingException | None = None
    """How the call that was last reported as done failed on this rank; None if it did not."""

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Starts ``async_req``; called on all ranks. Returns as soon as the arguments may be changed again.

        What goes wrong on this rank only, such as a lack of memory, counts as a failure of the call.

        Raises:
            ValueError: the request contradicts itself.
        """

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool, no_dist: bool) -> bool:
        """Whether the oldest call that was not yet reported as done has ended on all ranks, well or not.

        Args:
            blocking: wait for it.
            no_dist: look at this rank's writer only; otherwise all ranks must call this.
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Whether no rank is still busy, of all ranks that call this.

        Args:
            is_alive: whether this rank is, 0 or 1.
        """
        return not comm.any_of_all(bool(is_alive))

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Ends the process, after its work is done or, with ``abort``, at once."""


class TemporalAsyncCaller(AsyncCaller):
    """Executes one call, in a process forked for it.

    The fork sees the memory of the training process as it is now, so CPU tensors among the arguments are written as
    they are now, whatever happens to them later. Tensors of an accelerator cannot be read there: ``preload_fn`` copies
    them.
    """

    def __init__(self) -> None:
        self.process: Any = None
        self.failure = None
        self._receiver: Connection | None = None
        self._is_over = True

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """See AsyncCaller."""
        _check(async_req)
        if async_req.async_fn is not None:
            self.failure = of_this_rank(reported(partial(self._start, async_req.async_fn, async_req)))

    def _start(self, function: Callable[..., Any], request: AsyncRequest) -> None:
        call = partial(function, *_loaded_args(request), **request.async_fn_kwargs)
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_write_once, args=(sender, call, os.getpid(), is_main_thread()))
        with sender, collection_paused():
            process.start()
        self.process, self._is_over = process, False

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """See AsyncCaller."""
        is_busy = not self._is_over and not self._has_ended(blocking)
        is_done = not is_busy if no_dist else self.sync_all_async_calls(is_busy)
        if is_done:
            self.close()
        return is_done

    def _has_ended(self, blocking: bool) -> bool:
        assert self._receiver is not None
        while not self._receiver.poll():
            if not self.process.is_alive():
                break
            if not blocking:
                return False
            wait([self._receiver, self.process.sentinel], _LOOK_AGAIN_S)
        self._is_over = True
        try:
            self.failure = receive_failure(self._receiver) if self._receiver.poll() else _death_of(self.process)
        except EOFError:
            self.failure = _death_of(self.process)
        return True

    def close(self, abort: bool = False) -> None:
        """See AsyncCaller."""
        if self.process is not None:
            if abort:
                self.process.kill()
            elif not self._is_over:
                self._has_ended(True)
            self.process.join()
            self.process.close()
            self.process = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._is_over = True


class _ActiveAsyncRequest(NamedTuple):
    """A request that was scheduled.

    Args:
        idx: its number in the queue.
        async_caller: who executes it.
        async_request: the request, frozen.
    """

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest


class AsyncCallsQueue:
    """Calls that were scheduled and not yet finalized, in order.

    Args:
        persistent: execute all calls in one process that is kept, instead of one process a call.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.async_calls: deque[_ActiveAsyncRequest] = deque()
        self.call_idx = -1
        self.persistent = persistent
        self.persistent_caller: AsyncCaller | None = None

    def _caller(self) -> AsyncCaller:
        return TemporalAsyncCaller()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Starts a call; on all ranks, in the same order. Training waits while ``preload_fn`` works.

        Returns:
            The number of the call, counted from 0.
        """
        self.call_idx += 1
        caller = self._caller()
        request = async_request.freeze()._replace(call_idx=self.call_idx)
        caller.schedule_async_call(request._replace(finalize_fns=[]))
        self.async_calls.append(_ActiveAsyncRequest(self.call_idx, caller, request))
        return self.call_idx

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalizes the calls that have ended, oldest first, up to one that has not. Collective.

        Args:
            blocking: wait for all calls.
            no_dist: ask only this rank's writer whether a call has ended. The finalization itself needs all ranks
                nevertheless, so a rank then waits there for the others.

        Returns:
            The numbers of the calls that were finalized now.

        Raises:
            CheckpointingException: on every rank, when the writer of a rank failed or was killed, or a finalize
                function failed; it names the ranks. That call is gone from the queue, later ones are still there.
        """
        finalized = []
        while self.async_calls and self.async_calls[0].async_caller.is_current_async_call_done(blocking, no_dist):
            finalized.append(self._finalize_next())
        return finalized

    def _finalize_next(self) -> int:
        active = self.async_calls.popleft()
        try:
            _check_same_call(active.idx)
            comm.together(partial(_raise_failure, active.async_caller.failure))
        except BaseException:
            _abandon(active.async_request)
            raise
        _finalize(active.async_request)
        return active.idx

    def get_num_unfinalized_calls(self) -> int:
        """How many calls were scheduled and not yet finalized."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalizes all calls, then ends the processes.

        Args:
            abort: end the processes at once and finalize nothing, on all ranks.

        Raises:
            CheckpointingException: as for ``maybe_finalize_async_calls``, the first of them, after all is closed.
        """
        first: CheckpointingException | None = None
        while self.async_calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except CheckpointingException as err:
                first = first or err
        while self.async_calls:
            active = self.async_calls.popleft()
            active.async_caller.close(abort=True)
            _abandon(active.async_request)
        if self.persistent_caller is not None:
            self.persistent_caller.close(abort=abort)
            self.persistent_caller = None
        if first is not None:
            raise first


def _check(request: AsyncRequest) -> None:
    n_args = len(request.async_fn_args)
    if request.preload_fn is not None and n_args < 2:
        raise ValueError(f"preload_fn replaces the second argument of async_fn, but there are {n_args} arguments")


def _loaded_args(request: AsyncRequest) -> tuple[Any, ...]:
    """The arguments of ``async_fn``, copied to host memory if there is a function for that."""
    args = request.async_fn_args
    if request.preload_fn is None:
        return args
    loaded = request.preload_fn()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the copies may have been started only
    return (args[0], loaded, *args[2:])


def _call(request: AsyncRequest) -> None:
    args = _loaded_args(request)
    if request.async_fn is not None:
        request.async_fn(*args, **request.async_fn_kwargs)


def _finalize(request: AsyncRequest) -> None:
    """Calls the finalize functions, each on all ranks before the next; after a failure the rest are abandoned."""
    for number, function in enumerate(request.finalize_fns):
        try:
            comm.together(function)
        except BaseException:
            _abandon(request._replace(finalize_fns=request.finalize_fns[number:]))
            raise


def _abandon(request: AsyncRequest) -> None:
    for function in request.finalize_fns:
        abandon = getattr(function, "abandon", None)
        if abandon is not None:
            abandon()


def _raise_failure(failure: CheckpointingException | None) -> None:
    if failure is not None:
        raise failure


def _check_same_call(idx: int) -> None:
    """Raises an error on every rank if they are about to finalize different calls."""
    found = comm.all_gather(idx)
    if len(set(found)) > 1:
        raise UsageError(f"the ranks finalize different asynchronous calls: {found} by rank")


def _death_of(process: Any) -> CheckpointingException:
    process.join()
    return failed(how_it_ended(process.exitcode))


def _write_once(sender: Connection, call: Callable[[], object], parent_pid: int, dies_with_parent: bool) -> None:
    """The forked process."""
    be_writer(parent_pid, dies_with_parent=dies_with_parent)
    with sender:
        send_failure(sender, reported(call))
