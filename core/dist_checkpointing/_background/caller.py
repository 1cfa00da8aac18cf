"""Executors of asynchronous requests: a process for each call, a persistent one, or a thread.

Uploads run in a thread of the training process: the client of object stores has threads and
connections that do not survive a fork. An upload mostly waits for the network, so a thread does not
slow training down.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from typing_extensions import override

from core.dist_checkpointing._background.request import (
    AsyncRequest,
    call_now,
    check_request,
    preload_args,
)
from core.dist_checkpointing._background.staging import Handover, pack_value, receive, send
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

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class InThread:
    """A function of an ``AsyncRequest`` that has to run in the training process.

    Args:
        function: the function.
    """

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


class ThreadAsyncCaller(AsyncCaller):
    """A caller that runs a call in a thread, from the copies that ``preload_fn`` returns."""

    def __init__(self) -> None:
        self.failure = None
        self._thread: threading.Thread | None = None

    @override
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        check_request(async_req)
        if async_req.async_fn is not None:
            failure = catch_failure(partial(self._start, async_req.async_fn, async_req))
            # Without one, the thread may have failed already.
            if failure is not None:
                self.failure = with_rank(failure)

    def _start(self, function: Callable[..., Any], request: AsyncRequest) -> None:
        call = partial(function, *preload_args(request), **request.async_fn_kwargs)
        # A daemon: a program that ends without finalizing the call does not wait for it.
        self._thread = threading.Thread(
            target=self._run, args=(call,), name="ckpt-upload", daemon=True
        )
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        self.failure = with_rank(catch_failure(call))

    @override
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        if blocking and self._thread is not None:
            self._thread.join()
        is_busy = self._thread is not None and self._thread.is_alive()
        return not is_busy if no_dist else self.sync_all_async_calls(is_busy)

    @override
    def close(self, abort: bool = False) -> None:
        # A thread cannot be ended: an upload that is abandoned is waited for, too, so that its
        # objects can be deleted.
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@dataclass(slots=True)
class _SentCall:
    """A call that was sent to the persistent process, but not reported as done.

    Args:
        handover: request with its arguments, kept until the process has ended the call; None if
            this rank has nothing to write.
        failure: error of the call, None if it succeeded or has not ended.
        is_over: the call has ended.
    """

    handover: Handover | None = None
    failure: CheckpointingException | None = None
    is_over: bool = False


class _Pipes(NamedTuple):
    """The training process's ends of the pipes, see ``PersistentAsyncCaller.async_loop``."""

    queue: Connection
    preload_q: Connection
    comp_q: Connection


class PersistentAsyncCaller(AsyncCaller):
    """A caller that executes calls one after the other, in one process.

    The first call spawns the process. Functions and arguments must be picklable. Tensors are sent
    through shared memory, with their values at the time of the call. If the process dies, its
    unfinished calls fail, and the next call spawns a new process.

    As for every spawned process, the program's main module must guard its work with
    ``if __name__ == "__main__"``.
    """

    def __init__(self) -> None:
        self.process: Any = None
        self.failure = None
        self._calls: deque[_SentCall] = deque()
        self._pipes: _Pipes | None = None
        self._end: Finalize | None = None

    @override
    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        check_request(async_req)
        call = _SentCall()
        if async_req.async_fn is not None:
            call.failure = with_rank(catch_failure(partial(self._send, call, async_req)))
        call.is_over = call.handover is None or call.failure is not None
        self._calls.append(call)

    def _send(self, call: _SentCall, request: AsyncRequest) -> None:
        """Send a request to the process, after spawning one if there is none."""
        if self.process is not None and not self.process.is_alive():
            self._fail_open_calls()
        if self._pipes is None:
            self._spawn()
        assert self._pipes is not None
        # Send what the process needs; finalize functions may not be picklable.
        loaded = request._replace(
            async_fn_args=preload_args(request), finalize_fns=[], preload_fn=None
        )
        call.handover = pack_value(loaded)
        send(call.handover, self._pipes.preload_q, self.process.pid)
        # The number comes last: the process waits for it, then reads the handover.
        self._pipes.queue.send(request.call_idx)

    def _spawn(self) -> None:
        # File descriptors need a socket, so preload_q is a duplex pipe.
        context = multiprocessing.get_context("spawn")
        queue_end, queue = context.Pipe(duplex=False)
        preload_q, preload_q_end = context.Pipe()
        comp_q, comp_q_end = context.Pipe(duplex=False)
        with queue_end, preload_q_end, comp_q_end:
            loop_args = (
                comm.rank(),
                queue_end,
                preload_q_end,
                comp_q_end,
                logger.getEffectiveLevel(),
            )
            self.process = context.Process(
                target=_run_loop, args=(os.getpid(), is_main_thread(), *loop_args)
            )
            self.process.start()
        self._pipes = _Pipes(queue, preload_q, comp_q)
        # Kill the process at exit, before multiprocessing would wait for it.
        self._end = Finalize(self, self.process.kill, exitpriority=100)

    @override
    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        is_busy = bool(self._calls) and not self._has_ended(self._calls[0], blocking)
        is_done = not is_busy if no_dist else self.sync_all_async_calls(is_busy)
        if is_done:
            self.failure = self._calls.popleft().failure if self._calls else None
        return is_done

    def _has_ended(self, call: _SentCall, blocking: bool) -> bool:
        while not call.is_over:
            assert self._pipes is not None
            comp_q = self._pipes.comp_q
            if not comp_q.poll() and self.process.is_alive():
                if not blocking:
                    return False
                wait([comp_q, self.process.sentinel], POLL_INTERVAL_S)
                continue
            # The process executes calls in order, so the next outcome is that of the first open
            # call.
            first_open = next(open_call for open_call in self._calls if not open_call.is_over)
            try:
                failure = receive_failure(comp_q)
            except EOFError:
                self._fail_open_calls()
            else:
                first_open.handover, first_open.failure, first_open.is_over = None, failure, True
        return True

    def _fail_open_calls(self) -> None:
        """Mark all unfinished calls as failed, because the process died."""
        self.process.kill()  # it may have closed its pipes without ending
        exit_text = describe_exit(self.process)
        self._drop_process()
        for call in self._calls:
            if not call.is_over:
                call.handover, call.failure, call.is_over = None, writer_failure(exit_text), True

    def _drop_process(self) -> None:
        for pipe in self._pipes or ():
            pipe.close()
        if self._end is not None:
            self._end.cancel()
        self.process = self._pipes = self._end = None

    @override
    def close(self, abort: bool = False) -> None:
        if self._calls and not abort:
            self._has_ended(self._calls[-1], True)
        if self.process is None:
            return
        assert self._pipes is not None
        if abort:
            self._fail_open_calls()
        else:
            with suppress(OSError):
                self._pipes.queue.send(None)
            self.process.join()
            self._drop_process()

    @staticmethod
    def async_loop(
        rank: int,
        queue: Connection,
        preload_q: Connection,
        comp_q: Connection,
        log_level: int = logging.INFO,
    ) -> None:
        """Execute calls in the process until it receives None, or the training process has ended.

        Args:
            rank: rank of the training process, for messages.
            queue: receives the number of the next call; None ends the process.
            preload_q: receives the handover of that call.
            comp_q: sends the outcome of each call, see ``send_failure``.
            log_level: level of this module's logger.
        """
        logger.setLevel(log_level)
        with suppress(EOFError), queue, preload_q, comp_q:
            while (number := queue.recv()) is not None:
                logger.debug("rank %d: asynchronous call %d begins", rank, number)
                send_failure(comp_q, catch_failure(lambda: call_now(receive(preload_q))))
                logger.debug("rank %d: asynchronous call %d has ended", rank, number)


def _run_loop(parent_pid: int, dies_with_parent: bool, *args: Any) -> None:
    """Run the loop in the spawned process."""
    become_writer(parent_pid, dies_with_parent=dies_with_parent)
    PersistentAsyncCaller.async_loop(*args)
