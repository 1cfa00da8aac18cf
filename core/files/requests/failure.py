"""Tell failures of requests that pass from those that do not.

A store that throttles is asked for how long: ``Retry-After``. obstore returns no headers of failed
requests. The question is a request for one byte by a signed URL, whose answer is either that header
or no longer a refusal.

Source: RFC 9110, section 10.2.3: a number of seconds, or a date.
"""

from __future__ import annotations

import random
import re
import time
from datetime import timedelta
from enum import Enum
from typing import Any

from core.values import dataclass

METADATA_SERVICES = (
    "/latest/api/token",
    "/latest/meta-data",
    "//169.254.170.",
    "/computeMetadata/",
    "/metadata/identity/",
)
"""Parts of addresses that give a machine its credentials, asked when there are no others."""
STATUS = re.compile(r"status code: (\d{3})")
"""The status of an answer in obstore's messages."""
CODE = re.compile(r"<Code>(\w+)</Code>")
"""The name of an error in an answer."""
_THROTTLING = ("429", "503")
_PASSING = ("408", "500", "502", "504")
_UNREACHABLE = ("dns error", "Connection refused", "EndpointConnectionError")
_HOPELESS = ("InvalidUri", "InvalidCertificate", "redirect", "builder error", "SSLError")
_BROKEN = (
    "error sending request",
    "timed out",
    "TimedOut",
    "response body error",
    "Interrupted",
    "ConnectionClosedError",
    "ReadTimeoutError",
    "ConnectTimeoutError",
    "ResponseStreamingError",
)
"""Parts of messages of obstore, and names of classes of botocore."""

_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 10.0
MOST_RETRIES = 10
"""How often a request is repeated."""
MOST_RETRIES_UNREACHED = 2
"""How often the first request to a store that cannot be reached is repeated."""
PATIENCE_S = 60.0
"""After this time, a request that fails is not repeated."""


class FailureKind(Enum):
    """The kind of a failed request, which decides whether it is repeated."""

    LASTING = "lasting"
    PASSING = "passing"
    UNREACHABLE = "unreachable"
    THROTTLED = "throttled"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A failed request.

    Args:
        kind: whether it helps to repeat the request.
        retry_after_s: seconds that the store asks to wait; None if it tells none, or the client
            does not tell them.
    """

    kind: FailureKind
    retry_after_s: float | None = None


def describe_failure(err: BaseException) -> RequestFailure:
    """Return what an error of obstore or boto3 says; all other errors are lasting."""
    module = type(err).__module__
    if module.startswith("botocore."):
        response: dict[str, Any] = getattr(err, "response", None) or {}
        facts = response.get("ResponseMetadata", {})
        kind = _kind_of(
            str(facts.get("HTTPStatusCode", "")),
            str(response.get("Error", {}).get("Code", "")),
            type(err).__name__,
        )
        header = facts.get("HTTPHeaders", {}).get("retry-after")
        return RequestFailure(kind, parse_retry_after(header, now=time.time()))
    text = str(err)
    if module != "obstore.exceptions" or any(part in text for part in METADATA_SERVICES):
        return RequestFailure(FailureKind.LASTING)
    status, code = STATUS.search(text), CODE.search(text)
    return RequestFailure(
        _kind_of(status[1] if status else "", code[1] if code else "", text),
    )


def _kind_of(status: str, code: str, text: str) -> FailureKind:
    """Return the kind of a failure.

    Args:
        status, code: HTTP's number and the store's name of the error; "" if nothing was answered.
        text: tells what happened if nothing was answered.
    """
    if status:
        if status in _THROTTLING or code == "SlowDown":
            return FailureKind.THROTTLED
        is_passing = status in _PASSING or code == "RequestTimeout"
        return FailureKind.PASSING if is_passing else FailureKind.LASTING
    if any(part in text for part in _HOPELESS):
        return FailureKind.LASTING
    if any(part in text for part in _UNREACHABLE):
        return FailureKind.UNREACHABLE
    is_broken = any(part in text for part in _BROKEN)
    return FailureKind.PASSING if is_broken else FailureKind.LASTING


def back_off_s(n_failures: int) -> float:
    """Return how long to wait after a number of failures, in seconds.

    The time doubles from failure to failure; half of it is random, so that requests that failed
    together are not repeated together.
    """
    longest: float = min(_FIRST_WAIT_S * 2 ** (n_failures - 1), _LONGEST_WAIT_S)
    return longest * random.uniform(0.5, 1.0)


_TIMEOUT_S = 10.0
_SIGNED_FOR = timedelta(minutes=5)


def ask_retry_after(client: Any, url: str, key: str) -> float | None:
    """Return the seconds that a store asks to wait; None if it does not throttle or tell.

    Args:
        client: obstore's client of the bucket.
        url: address of the object, used where it needs no signature.
        key: name of the object.

    Raises:
        Exception: the question could not be asked; the text may have a signature.
    """
    # Slow to import, and asked by few.
    import urllib.error
    import urllib.request

    if not url.startswith("http"):
        import obstore

        url = obstore.sign(client, "GET", key, _SIGNED_FOR)
    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            return None
    except urllib.error.HTTPError as err:
        return parse_retry_after(err.headers.get("Retry-After"), now=time.time())


def parse_retry_after(text: str | None, *, now: float) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks to wait; None if it has no such time.

    Args:
        now: the time, in seconds since 1970.
    """
    from email.utils import parsedate_to_datetime

    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except ValueError:
        return None
