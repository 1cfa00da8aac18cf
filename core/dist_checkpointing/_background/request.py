"""The request of an asynchronous save, and its execution.

A request is executed in three steps: ``preload_fn`` copies the data to host memory while training
waits, ``async_fn`` writes in another process, and ``finalize_fns`` make the checkpoint visible, in
the training process, after all ranks have written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from core.dist_checkpointing._ranks import comm
from core.dist_checkpointing._ranks.torch_error import torch_error
from core.errors import CheckpointingException


class AsyncRequest(NamedTuple):
    """The functions that carry out one asynchronous save.

    Args:
        async_fn: function that writes. It is called with ``async_fn_args`` and ``async_fn_kwargs``
            in another process, so its changes to memory are lost. None if this rank has nothing to
            write.
        async_fn_args: positional arguments of ``async_fn``.
        finalize_fns: functions without arguments that are called one after the other in the
            training process, on every rank, after ``async_fn`` has ended on all ranks. They may be
            collective. If the save failed, the attribute ``abandon`` of each function that has one
            is called instead.
        async_fn_kwargs: keyword arguments of ``async_fn``.
        preload_fn: function that copies the data to host memory and returns the replacement for
            ``async_fn_args[1]``; training waits for it.
        is_frozen: no more finalize functions can be added.
        call_idx: number of the call in its queue, set when the request is scheduled.
    """

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 - the documented default, never changed
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Append a finalize function.

        Raises:
            RuntimeError: the request is frozen, because it has been scheduled.
        """
        if self.is_frozen:
            raise RuntimeError(
                "cannot add a finalize function: the AsyncRequest is frozen because it has been "
                "scheduled"
            )
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Execute the complete request now, in this process; collective.

        Raises:
            ValueError: ``preload_fn`` is given, but no argument that its result could replace.
            CheckpointingException: a rank failed to write or to finalize; on every rank. A failure
                to write is a CheckpointException of torch, too. A rank whose own work failed with
                another exception raises that.
        """
        check_request(self)
        try:
            outcome = comm.attempt(lambda: call_now(self))
            if isinstance(outcome.error, CheckpointingException):
                raise torch_error(outcome)
            if outcome.error is not None:
                raise outcome.error
        except BaseException:
            abandon_rest(self)
            raise
        finalize(self)

    def freeze(self) -> AsyncRequest:
        """Return a copy of the request to which no finalize functions can be added."""
        return self._replace(is_frozen=True)


def check_request(request: AsyncRequest) -> None:
    """Raise unless a request can be executed.

    Raises:
        ValueError: ``preload_fn`` is given, but no argument that its result could replace.
    """
    n_args = len(request.async_fn_args)
    if request.preload_fn is not None and n_args < 2:
        raise ValueError(
            "preload_fn replaces the second of async_fn_args, but async_fn_args has length "
            f"{n_args}"
        )


def preload_args(request: AsyncRequest) -> tuple[Any, ...]:
    """Call ``preload_fn``, if there is one, and return the arguments for ``async_fn``."""
    args = request.async_fn_args
    if request.preload_fn is None:
        return args
    loaded = request.preload_fn()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the copies may still be running
    return (args[0], loaded, *args[2:])


def call_now(request: AsyncRequest) -> None:
    """Copy the data and write it, in this process."""
    args = preload_args(request)
    if request.async_fn is not None:
        request.async_fn(*args, **request.async_fn_kwargs)


def finalize(request: AsyncRequest) -> None:
    """Call the finalize functions, each on all ranks before the next; collective.

    Ranks may have different numbers of functions: Megatron-LM adds some on its first and last rank
    only. After a failure, the failed function and the remaining ones are abandoned.

    Raises:
        CheckpointingException: a function failed on a rank; on every rank.
    """
    for number in range(max(comm.all_gather(len(request.finalize_fns)))):
        rest = request.finalize_fns[number:]
        try:
            comm.together(rest[0] if rest else lambda: None)
        except BaseException:
            abandon_rest(request._replace(finalize_fns=rest))
            raise


def judges_itself(request: AsyncRequest) -> bool:
    """Return whether the first finalize function finds out whether the save succeeded.

    That of nvidia-resiliency-ext's checkpoint managers (0.4.1) does: it looks for the files of all
    ranks, replicas included. If some are missing, it removes the others and raises.
    """
    module = getattr(request.finalize_fns[0], "__module__", None) if request.finalize_fns else None
    return str(module).startswith("nvidia_resiliency_ext.")


def abandon_rest(request: AsyncRequest) -> None:
    """Call ``abandon`` on the finalize functions that have it, because they will not be called."""
    for function in request.finalize_fns:
        abandon = getattr(function, "abandon", None)
        if abandon is not None:
            abandon()
