"""Asynchronous saves: the queue that finalizes them in order.

The documented names of the queue's parts are re-exported here. If a writer fails or is killed,
``maybe_finalize_async_calls`` raises on every rank. The finalize functions of that call are then
not called, so its checkpoint never becomes visible. Neither does that of a call that is still in
the queue when the queue or the program ends: this is logged as an error.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from typing import NamedTuple

from core.dist_checkpointing._background.caller import (
    AsyncCaller,
    InThread,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    ThreadAsyncCaller,
)
from core.dist_checkpointing._background.request import (
    AsyncRequest,
    abandon_rest,
    finalize,
    judges_itself,
)
from core.dist_checkpointing._background.staging import POOL
from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.torch_error import torch_error
from core.errors import UsageError

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
]

logger = logging.getLogger(__name__)


class _ActiveAsyncRequest(NamedTuple):
    """A request that was scheduled.

    Args:
        idx: number of the request in the queue.
        async_caller: executor of the request.
        async_request: the request, frozen, without the arguments of its function.
    """

    idx: int
    async_caller: AsyncCaller
    async_request: AsyncRequest


class AsyncCallsQueue:
    """A queue of the calls that are scheduled, but not finalized.

    Args:
        persistent: execute all calls in one persistent process, instead of one process per call;
            saves to object stores run in threads in any case.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.async_calls: deque[_ActiveAsyncRequest] = deque()
        self.call_idx = -1
        self.persistent = persistent
        self.persistent_caller: AsyncCaller | None = None
        # Also called when the interpreter ends.
        weakref.finalize(self, _report_unfinalized, self.async_calls)

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Start a call; on all ranks, in the same order.

        Training waits until ``preload_fn`` has copied the data.

        Returns:
            The number of the call, counted from 0.

        Raises:
            ValueError: the request contradicts itself.
        """
        self.call_idx += 1
        caller: AsyncCaller
        if isinstance(async_request.async_fn, InThread):
            caller = ThreadAsyncCaller()
        elif not self.persistent:
            caller = TemporalAsyncCaller()
        else:
            caller = self.persistent_caller = self.persistent_caller or PersistentAsyncCaller()
        # The finalize functions stay in this process, so they need not be picklable.
        request = async_request.freeze()._replace(call_idx=self.call_idx)
        caller.schedule_async_call(request._replace(finalize_fns=[]))
        # Keep no reference to the arguments: they are tensors that training wants to free.
        without_args = request._replace(async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        self.async_calls.append(_ActiveAsyncRequest(self.call_idx, caller, without_args))
        return self.call_idx

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize the calls that have ended, oldest first; collective.

        Finalization stops at the first call that is still running.

        Args:
            blocking: wait for all calls.
            no_dist: check only this rank's writer. The finalization itself still needs all ranks,
                so this rank then waits for the others.

        Returns:
            The numbers of the calls that were finalized.

        Raises:
            UsageError: ranks finalize different calls.
            CheckpointingException: the writer of a rank failed or was killed, or a finalize
                function failed; on every rank, with the numbers of the ranks. The failure of a
                writer is a CheckpointException of torch, too. The failed call is removed from the
                queue, later ones stay.
            Exception: the writer of a local checkpoint of nvidia-resiliency-ext failed, and no
                other rank has a replica of its files: the exception of the checkpoint manager,
                which has removed the files of that call.
        """
        finalized = []
        while self.async_calls and self.async_calls[0].async_caller.is_current_async_call_done(
            blocking, no_dist
        ):
            finalized.append(self._finalize_next())
        return finalized

    def _finalize_next(self) -> int:
        active = self.async_calls.popleft()

        def raise_failure() -> None:
            if active.async_caller.failure is not None:
                raise active.async_caller.failure

        # If the save failed on any rank, abandon it on all: its finalize functions must not run.
        try:
            # Compare the calls first: ranks that finalize different ones must not go on.
            numbers = comm.all_gather(active.idx)
            if len(set(numbers)) > 1:
                raise UsageError(
                    "ranks are finalizing different asynchronous calls "
                    f"(call number by rank: {', '.join(map(str, numbers))})"
                )
            outcome = comm.attempt(raise_failure)
            if outcome.error is not None:
                failure = torch_error(outcome)
                if not judges_itself(active.async_request):
                    raise failure
                # Replicas on other ranks may make up for the files that were not written.
                logger.error("%s; its checkpoint manager looks for replicas", failure)
        except BaseException:
            abandon_rest(active.async_request)
            raise
        finalize(active.async_request)
        return active.idx

    def get_num_unfinalized_calls(self) -> int:
        """Return the number of scheduled calls that are not finalized."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all calls, then end the processes and give the staging memory back.

        Args:
            abort: end the processes immediately and finalize nothing, on all ranks.

        Raises:
            CheckpointingException: the first error of ``maybe_finalize_async_calls``, after
                everything is closed.
        """
        first_error: Exception | None = None
        # After an error continue with the next call, as all ranks do.
        while self.async_calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except Exception as err:
                first_error = first_error or err
        # Abandon the other calls, if they are to be aborted.
        while self.async_calls:
            active = self.async_calls.popleft()
            active.async_caller.close(abort=True)
            abandon_rest(active.async_request)
        if self.persistent_caller is not None:
            self.persistent_caller.close(abort=abort)
            self.persistent_caller = None
        POOL.clear()
        if first_error is not None:
            raise first_error


def _report_unfinalized(calls: deque[_ActiveAsyncRequest]) -> None:
    """Log an error for the calls that are left in a queue which is not used any more.

    Calls of ``save`` are reported by their ``Publication``, once and with the directory.
    """
    numbers = [
        call.idx
        for call in calls
        if call.async_request.finalize_fns
        and not any(hasattr(function, "abandon") for function in call.async_request.finalize_fns)
    ]
    if numbers:
        logger.error(
            "the finalize functions of asynchronous calls %s were not called; call "
            "maybe_finalize_async_calls(blocking=True) on all ranks before the program exits",
            ", ".join(map(str, numbers)),
        )
