"""Ask a store that throttles for how long: ``Retry-After``.

obstore returns no headers of failed requests. The question is a request for one byte by a signed
URL, whose answer is either that header or no longer a refusal.

Source: RFC 9110, section 10.2.3: a number of seconds, or a date.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

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
