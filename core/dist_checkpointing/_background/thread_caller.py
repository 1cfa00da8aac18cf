"""An executor of asynchronous requests in a thread of the training process, for uploads.

The client of object stores has threads and connections that do not survive a fork. An upload mostly
waits for the network, so a thread of the training process does not slow training down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from core.dist_checkpointing._background.caller import AsyncCaller
from core.dist_checkpointing._background.request import AsyncRequest, check_request, preload_args
from core.dist_checkpointing._background.writer_process import catch_failure, with_rank


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
