"""Codes CK101–CK199, for files and containers, used by ``core.verbs.checks.containers``."""

from __future__ import annotations

from core.verbs.checks.check import get_code

MISSING = get_code("CK101")
UNREADABLE_FILE = get_code("CK105")
EXTRA = get_code("CK106")
NOT_ITS_KIND = get_code("CK108")
NOT_HANDLED = get_code("CK109")
UNSAFE = get_code("CK110")
MALFORMED = get_code("CK111")

RANK_MISSING = get_code("CK160")
