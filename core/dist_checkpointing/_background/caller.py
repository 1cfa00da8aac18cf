"""Executes the requests of asynchronous saves: what such a caller is, and the one that forks a process a call."""

from __future__ import annotations

import multiprocessing
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from core.dist_checkpointing._background.request import AsyncRequest, check, loaded_args
from core.dist_checkpointing._background.writer_process import (
    LOOK_AGAIN_S,
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
from core.dist_checkpointing._ranks import comm
from core.errors import CheckpointingException


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
        self._kept: object = None
        self._is_over = True

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """See AsyncCaller."""
        check(async_req)
        if async_req.async_fn is not None:
            self.failure = of_this_rank(reported(partial(self._start, async_req.async_fn, async_req)))

    def _start(self, function: Callable[..., Any], request: AsyncRequest) -> None:
        call = partial(function, *loaded_args(request), **request.async_fn_kwargs)
        context = multiprocessing.get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_write_once, args=(sender, call, os.getpid(), is_main_thread()))
        with sender, collection_paused():
            process.start()
        self.process, self._is_over = process, False
        self._kept = call  # the process reads memory that would be used again

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
            wait([self._receiver, self.process.sentinel], LOOK_AGAIN_S)
        self._is_over = True
        try:
            self.failure = receive_failure(self._receiver)
        except EOFError:
            self.failure = failed(how_it_ended(self.process))
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
        self._is_over, self._kept = True, None


def _write_once(sender: Connection, call: Callable[[], object], parent_pid: int, dies_with_parent: bool) -> None:
    """The forked process."""
    be_writer(parent_pid, dies_with_parent=dies_with_parent)
    with sender:
        send_failure(sender, reported(call))
