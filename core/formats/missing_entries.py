"""Entries that an index or a header lists without data, and what is done about them.

Such an entry is an error, unless the user has said that it may be left out (``--drop-missing``).
Readers pass each to ``report_missing``, so that one place decides for all formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from core.errors import CheckpointingException, Report, raising

DROP_MISSING = "if nothing needs the entry, convert without it by adding --drop-missing"

_left_out: ContextVar[dict[str, None] | None] = ContextVar("left_out", default=None)


@contextmanager
def leaving_out_missing() -> Iterator[dict[str, None]]:
    """Leave out entries without data that are read in this block; yield their keys."""
    keys: dict[str, None] = {}
    token = _left_out.set(keys)
    try:
        yield keys
    finally:
        _left_out.reset(token)


def report_missing(err: CheckpointingException, report: Report = raising) -> None:
    """Report an entry without data, or leave it out within ``leaving_out_missing``.

    Args:
        err: names the entry by its key.
        report: receives the error, with ``--drop-missing`` in its hint.
    """
    assert err.key is not None
    keys = _left_out.get()
    if keys is not None:
        keys[err.key] = None
        return
    err.hint = DROP_MISSING if err.hint is None else f"{err.hint}; {DROP_MISSING}"
    report(err)
