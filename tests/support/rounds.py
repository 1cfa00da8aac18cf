"""How many values a fuzzed test is tried with."""

from __future__ import annotations

import hypothesis

SHORT, LONG = 20, 100
"""What hypothesis tries of a test that states no number: without and with ``--long``."""


def rounds(n: int) -> int:
    """Return ``n`` with ``--long``, a fifth of it otherwise; for ``settings(max_examples=…)``."""
    return n * hypothesis.settings().max_examples // LONG
