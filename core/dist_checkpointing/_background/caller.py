"""Execution of asynchronous requests: the interface, and a caller that forks a process per call."""

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
    """An executor of requests in another process, which knows when all ranks are done."""

    failure: CheckpointingException | None = None
    """Failure, on this rank, of the call that was last reported as done; None if it succeeded."""

    @abstractmethod
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Start a request; called on all ranks.

        Returns as soon as the request's arguments may be changed again. An error on this rank only,
        such as a lack of memory, becomes the failure of the call.

        Raises:
            ValueError: the request contradicts itself.
        """

    @abstractmethod
    def is_current_async_call_done(self, blocking: bool, no_dist: bool) -> bool:
        """Return whether the oldest unreported call has ended on all ranks, successfully or not.

        Args:
            blocking: wait for it.
            no_dist: check this rank's writer only; otherwise all ranks must call this.
        """

    def sync_all_async_calls(self, is_alive: int) -> bool:
        """Return whether no rank is busy any more; collective.

        Args:
            is_alive: 1 if this rank is still busy, else 0.
        """
        return not comm.any_of_all(bool(is_alive))

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End the process, after its work is done or, with ``abort``, immediately."""


class TemporalAsyncCaller(AsyncCaller):
    """A caller that executes one call, in a process forked for it.

    The fork sees the memory of the training process at the time of the fork, so later changes to
    CPU tensors among the arguments do not matter. Tensors of an accelerator cannot be read there:
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
        with sender, pause_collection():
            process.start()
        self.process, self._is_over = process, False
        self._kept = call  # the process still reads this memory, which must not be reused

    @override
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
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
                self._has_ended(True)
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
