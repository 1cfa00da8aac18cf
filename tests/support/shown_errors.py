"""The form of an error on the screen: what, where, and what to do, each on a line of its own."""

from __future__ import annotations

import re

_FORM = re.compile(
    r"error: [^\n]+\n(  at: [^\n]+\n)?(  hint: [^\n]+\n(        [^\n]+\n)*)?(  more: [^\n]+\n)?"
)


def is_one_error(text: str) -> bool:
    """Return whether standard error holds one error and nothing else."""
    return _FORM.fullmatch(text) is not None
