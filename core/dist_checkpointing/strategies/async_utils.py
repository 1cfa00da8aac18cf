"""Saves that go on while training does: the queue that ends them in order. What it queues is documented here, too.

A writer that fails or is killed makes ``maybe_finalize_async_calls`` raise on every rank; the finalize functions of its
call are then not called, so its checkpoint never becomes visible.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from core.dist_checkpointing._background.caller import AsyncCaller, TemporalAsyncCaller
from core.dist_checkpointing._background.persistent_caller import PersistentAsyncCaller
from core.dist_checkpointing._background.request import AsyncRequest, abandon_rest, finalize
from core.dist_checkpointing._background.staging import POOL
from core.dist_checkpointing._ranks import comm
from core.errors import CheckpointingException, UsageError

__all__ = ["AsyncCaller", "AsyncCallsQueue", "AsyncRequest", "PersistentAsyncCaller", "TemporalAsyncCaller"]


class _ActiveAsyncRequest(NamedTuple):
    """A request that was scheduled.

    Args:
        idx: its number in the queue.
        async_caller: who executes it.
        async_request: the request, frozen, without the arguments of its function.
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
        if not self.persistent:
            return TemporalAsyncCaller()
        if self.persistent_caller is None:
            self.persistent_caller = PersistentAsyncCaller()
        return self.persistent_caller

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Starts a call; on all ranks, in the same order. Training waits while ``preload_fn`` works.

        Returns:
            The number of the call, counted from 0.
        """
        self.call_idx += 1
        caller = self._caller()
        request = async_request.freeze()._replace(call_idx=self.call_idx)
        caller.schedule_async_call(request._replace(finalize_fns=[]))
        kept = request._replace(async_fn_args=(), async_fn_kwargs={}, preload_fn=None)  # no tensors of training
        self.async_calls.append(_ActiveAsyncRequest(self.call_idx, caller, kept))
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
            abandon_rest(active.async_request)
            raise
        finalize(active.async_request)
        return active.idx

    def get_num_unfinalized_calls(self) -> int:
        """How many calls were scheduled and not yet finalized."""
        return len(self.async_calls)

    def close(self, abort: bool = False) -> None:
        """Finalizes all calls, then ends the processes and gives the staging memory back.

        Args:
            abort: end the processes at once and finalize nothing, on all ranks.

        Raises:
            CheckpointingException: as for ``maybe_finalize_async_calls``, the first of them, after all is closed.
        """
        first: Exception | None = None
        while self.async_calls and not abort:
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except Exception as err:  # on the other ranks it is another one, and they go on
                first = first or err
        while self.async_calls:
            active = self.async_calls.popleft()
            active.async_caller.close(abort=True)
            abandon_rest(active.async_request)
        if self.persistent_caller is not None:
            self.persistent_caller.close(abort=abort)
            self.persistent_caller = None
        POOL.clear()
        if first is not None:
            raise first


def _raise_failure(failure: CheckpointingException | None) -> None:
    if failure is not None:
        raise failure


def _check_same_call(idx: int) -> None:
    """Raises an error on every rank if they are about to finalize different calls."""
    found = comm.all_gather(idx)
    if len(set(found)) > 1:
        raise UsageError(f"the ranks finalize different asynchronous calls: {found} by rank")
