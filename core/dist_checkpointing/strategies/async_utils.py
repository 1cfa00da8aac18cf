"""What an asynchronous save is made of; the queue that runs it comes with the worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class AsyncRequest(NamedTuple):
    """Work that may be done later: a function with arguments, and what makes its result valid afterwards."""

    async_fn: Callable[..., Any] | None
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012 (documented default)
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Appends a finalize function.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("a frozen AsyncRequest takes no more finalize functions")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Does all of it now."""
        args = list(self.async_fn_args)
        if self.preload_fn is not None:
            args[1] = self.preload_fn()
        if self.async_fn is not None:
            self.async_fn(*args, **self.async_fn_kwargs)
        for finalize in self.finalize_fns:
            finalize()

    def freeze(self) -> AsyncRequest:
        """The same request, to which nothing can be added."""
        return self._replace(is_frozen=True)


class AsyncCallsQueue:
    """Asynchronous calls that are not finalized yet."""

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
