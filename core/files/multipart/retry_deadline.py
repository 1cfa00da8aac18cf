"""Stop repeating requests to a store that has answered none for a while."""

from __future__ import annotations

from threading import Lock
from time import monotonic
from typing import Any

from core.files.requests.failure import PATIENCE_S


class RetryDeadline:
    """Ends the repetition of a client's requests ``PATIENCE_S`` after the last success of any.

    To a store that throttles, botocore's adaptive mode sends one request in two seconds, for all
    threads together. When it throttles everything, the attempts of 64 parts would take 20 minutes.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._failing_since: float | None = None

    def check(
        self, *, response: Any, caught_exception: Exception | None, operation: Any, **_: object
    ) -> None:
        """Look at how an attempt ended; botocore calls this after each (event ``needs-retry``).

        Args:
            response: the answer, raw and parsed; None if there was none.
            caught_exception: why there was none.
            operation: of the request.

        Raises:
            Exception: that of the attempt: no request has succeeded for a while.
        """
        status = response[0].status_code if response is not None else None
        now = monotonic()
        with self._lock:
            if status is not None and status < 500 and status != 429:
                self._failing_since = None
                return
            if self._failing_since is None:
                self._failing_since = now
            if now - self._failing_since <= PATIENCE_S:
                return
        if caught_exception is not None:
            raise caught_exception
        from botocore.exceptions import ClientError

        raise ClientError(response[1], operation.name)
