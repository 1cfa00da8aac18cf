"""What is to be done for one asynchronous save, and how that is done.

A request is executed in three steps: ``preload_fn`` copies to host memory while training waits, ``async_fn`` writes in
another process, ``finalize_fns`` make the checkpoint visible, in the training process, once all ranks have written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from core.dist_checkpointing._ranks import comm


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
        check(self)
        try:
            comm.together(lambda: call_now(self))
        except BaseException:
            abandon_rest(self)
            raise
        finalize(self)

    def freeze(self) -> AsyncRequest:
        """The same request, to which no finalize function can be added any more."""
        return self._replace(is_frozen=True)


def check(request: AsyncRequest) -> None:
    """Returns if a request can be executed.

    Raises:
        ValueError: there is a ``preload_fn``, but no argument that its result could take the place of.
    """
    n_args = len(request.async_fn_args)
    if request.preload_fn is not None and n_args < 2:
        raise ValueError(f"preload_fn replaces the second argument of async_fn, but there are {n_args} arguments")


def loaded_args(request: AsyncRequest) -> tuple[Any, ...]:
    """The arguments of ``async_fn``, copied to host memory if there is a function for that."""
    args = request.async_fn_args
    if request.preload_fn is None:
        return args
    loaded = request.preload_fn()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # the copies may have been started only
    return (args[0], loaded, *args[2:])


def call_now(request: AsyncRequest) -> None:
    """Copies and writes."""
    args = loaded_args(request)
    if request.async_fn is not None:
        request.async_fn(*args, **request.async_fn_kwargs)


def finalize(request: AsyncRequest) -> None:
    """Calls the finalize functions, each on all ranks before the next; after a failure the rest are abandoned."""
    for number, function in enumerate(request.finalize_fns):
        try:
            comm.together(function)
        except BaseException:
            abandon_rest(request._replace(finalize_fns=request.finalize_fns[number:]))
            raise


def abandon_rest(request: AsyncRequest) -> None:
    """Tells the finalize functions that want to know it that they will not be called."""
    for function in request.finalize_fns:
        abandon = getattr(function, "abandon", None)
        if abandon is not None:
            abandon()
