"""Executes the requests of asynchronous saves in one process that is kept."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from core.dist_checkpointing._background.caller import AsyncCaller
from core.dist_checkpointing._background.handover import Handover, packed, receive, send
from core.dist_checkpointing._background.request import AsyncRequest, call_now, check, loaded_args
from core.dist_checkpointing._background.writer_process import (
    LOOK_AGAIN_S,
    be_writer,
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

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """A call of the persistent process, until it is reported as done; one without a handover needs no process."""

    handover: Handover | None = None
    failure: CheckpointingException | None = None
    is_over: bool = False


class _Pipes(NamedTuple):
    """This side's ends, see ``PersistentAsyncCaller.async_loop``."""

    queue: Connection
    preload_q: Connection
    comp_q: Connection


class PersistentAsyncCaller(AsyncCaller):
    """Executes calls one after the other, in one process that is spawned for the first and kept.

    Functions and arguments must be picklable. Tensors get there through shared memory, as they are at the time of the
    call. If the process dies, the calls that it had not done have failed, and the next call gets a new process.

    As for every spawned process, what the program's main module does must stand under ``if __name__ == "__main__"``.
    """

    def __init__(self) -> None:
        self.process: Any = None
        self.failure = None
        self._calls: deque[_Sent] = deque()
        self._pipes: _Pipes | None = None
        self._end: Finalize | None = None

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """See AsyncCaller."""
        check(async_req)
        sent = _Sent()
        if async_req.async_fn is not None:
            sent.failure = of_this_rank(reported(partial(self._send, sent, async_req)))
        sent.is_over = sent.handover is None or sent.failure is not None
        self._calls.append(sent)

    def _send(self, sent: _Sent, request: AsyncRequest) -> None:
        if self.process is not None and not self.process.is_alive():
            self._bury()
        if self._pipes is None:
            self._spawn()
        assert self._pipes is not None
        loaded = request._replace(async_fn_args=loaded_args(request), finalize_fns=[], preload_fn=None)
        sent.handover = packed(loaded)
        send(sent.handover, self._pipes.preload_q, self.process.pid)
        self._pipes.queue.send(request.call_idx)

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        queue_end, queue = context.Pipe(duplex=False)
        preload_q, preload_q_end = context.Pipe()
        comp_q, comp_q_end = context.Pipe(duplex=False)
        with queue_end, preload_q_end, comp_q_end:
            theirs = (comm.rank(), queue_end, preload_q_end, comp_q_end, logger.getEffectiveLevel())
            self.process = context.Process(target=_write_on, args=(os.getpid(), is_main_thread(), *theirs))
            self.process.start()
        self._pipes = _Pipes(queue, preload_q, comp_q)
        self._end = Finalize(self, self.process.kill, exitpriority=100)  # before multiprocessing waits for it at exit

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """See AsyncCaller."""
        is_busy = bool(self._calls) and not self._has_ended(self._calls[0], blocking)
        is_done = not is_busy if no_dist else self.sync_all_async_calls(is_busy)
        if is_done:
            self.failure = self._calls.popleft().failure if self._calls else None
        return is_done

    def _has_ended(self, sent: _Sent, blocking: bool) -> bool:
        while not sent.is_over:
            assert self._pipes is not None
            comp_q = self._pipes.comp_q
            if not comp_q.poll() and self.process.is_alive():
                if not blocking:
                    return False
                wait([comp_q, self.process.sentinel], LOOK_AGAIN_S)
                continue
            first = next(one for one in self._calls if not one.is_over)
            try:
                failure = receive_failure(comp_q)
            except EOFError:
                self._bury()
            else:
                first.handover, first.failure, first.is_over = None, failure, True
        return True

    def _bury(self) -> None:
        """The process died: what it had not done has failed."""
        self.process.kill()  # one that has only closed its pipes
        death = how_it_ended(self.process)
        self._forget()
        for sent in self._calls:
            if not sent.is_over:
                sent.handover, sent.failure, sent.is_over = None, failed(death), True

    def _forget(self) -> None:
        for pipe in self._pipes or ():
            pipe.close()
        if self._end is not None:
            self._end.cancel()
        self.process = self._pipes = self._end = None

    def close(self, abort: bool = False) -> None:
        """See AsyncCaller."""
        if self._calls and not abort:
            self._has_ended(self._calls[-1], True)
        if self.process is None:
            return
        assert self._pipes is not None
        if abort:
            self._bury()
        else:
            with suppress(OSError):
                self._pipes.queue.send(None)
            self.process.join()
            self._forget()

    @staticmethod
    def async_loop(
        rank: int, queue: Connection, preload_q: Connection, comp_q: Connection, log_level: int = logging.INFO
    ) -> None:
        """What the process does until it is told to end, or the rank is gone.

        Args:
            rank: whose calls these are, for messages.
            queue: tells the number of the next call; None ends the process.
            preload_q: brings the handover of that call.
            comp_q: is told how each call ended, see ``send_failure``.
            log_level: of this module's logger.
        """
        logger.setLevel(log_level)
        with suppress(EOFError), queue, preload_q, comp_q:
            while (number := queue.recv()) is not None:
                logger.debug("rank %d: asynchronous call %d begins", rank, number)
                send_failure(comp_q, reported(lambda: call_now(receive(preload_q))))
                logger.debug("rank %d: asynchronous call %d has ended", rank, number)


def _write_on(parent_pid: int, dies_with_parent: bool, *args: Any) -> None:
    """The spawned process."""
    be_writer(parent_pid, dies_with_parent=dies_with_parent)
    PersistentAsyncCaller.async_loop(*args)
