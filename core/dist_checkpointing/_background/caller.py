"""Executors of asynchronous requests: their interface, and one that forks a process per call."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from typing_extensions import override

from core.dist_checkpointing._background.request import AsyncRequest, check_request, preload_args
from core.dist_checkpointing._background.writer_process import (
    POLL_INTERVAL_S,
    become_writer,
    catch_failure,
    describe_exit,
    is_main_thread,
    pause_collection,
    receive_failure,
    send_failure,
    with_rank,
    writer_failure,
)
from core.dist_checkpointing._ranks import comm
from core.errors import CheckpointingException


class AsyncCaller(ABC):
    """An executor of requests in another process, which detects when all ranks are done."""

    failure: CheckpointingException | None = None
    """Failure, on this rank, of the call that was last reported as done; None if it succeeded."""

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start a request; called on all ranks.

        Training may change the request's arguments after the method returns. An error on this rank
        alone, such as a lack of memory, becomes the failure of the call.

        Raises:
            ValueError: ``preload_fn`` is given, but no argument that its result could replace.
        """

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool, no_dist: bool) -> bool:
        """Check if the oldest unreported call has ended on all ranks, successfully or not.

        Args:
            blocking: wait for the call to end.
            no_dist: check only this rank's writer; otherwise all ranks must call this method.
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Check if no rank is busy; collective.

        Args:
            is_alive: 1 if this rank is still busy, else 0.
        """
        return not comm.any_of_all(bool(is_alive))

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the process.

        Args:
            abort: end it immediately, instead of waiting for its work.
        """


class TemporalAsyncCaller(AsyncCaller):
    """A caller that forks a process for a call.

    The process sees the memory of the training process at the time of the fork, so later changes to
    CPU tensors among the arguments do not matter. It cannot read tensors on an accelerator:
    ``preload_fn`` copies them.
    """

    def __init__(self) -> None:
        self.process: Any = None
        self.failure = None
        self._receiver: Connection | None = None
        self._kept: object = None
        self._is_over = True

    @override
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        check_request(async_req)
        if async_req.async_fn is not None:
            self.failure = with_rank(
                catch_failure(partial(self._start, async_req.async_fn, async_req))
            )

    def _start(self, function: Callable[..., Any], request: AsyncRequest) -> None:
        call = partial(function, *preload_args(request), **request.async_fn_kwargs)
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_write_once, args=(sender, call, os.getpid(), is_main_thread())
        )
        # This process closes its copy of the sending end, so that the end of the writer is noticed.
        with sender, pause_collection():
            process.start()
        self.process, self._is_over = process, False
        # The writer still reads the staging memory of the arguments, which must not be reused.
        self._kept = call

    @override
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        is_busy = not self._is_over and not self._has_ended(blocking)
        is_done = not is_busy if no_dist else self.sync_all_async_calls(is_busy)
        if is_done:
            self.close()
        return is_done

    def _has_ended(self, blocking: bool) -> bool:
        assert self._receiver is not None
        # Wait for the outcome of the call or for the end of a process that was killed.
        while not self._receiver.poll():
            if not self.process.is_alive():
                break
            if not blocking:
                return False
            wait([self._receiver, self.process.sentinel], POLL_INTERVAL_S)
        self._is_over = True
        try:
            self.failure = receive_failure(self._receiver)
        except EOFError:
            self.failure = writer_failure(describe_exit(self.process))
        return True

    @override
    def close(self, abort: bool = False) -> None:
        if self.process is not None:
            if abort:
                self.process.kill()
            elif not self._is_over:
                self._has_ended(True)  # receives the outcome, which could block the writer
            self.process.join()
            self.process.close()
            self.process = None
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._is_over, self._kept = True, None


def _write_once(
    sender: Connection, call: Callable[[], object], parent_pid: int, dies_with_parent: bool
) -> None:
    """Run the call in the forked process and send its outcome."""
    become_writer(parent_pid, dies_with_parent=dies_with_parent)
    with sender:
        send_failure(sender, catch_failure(call))
