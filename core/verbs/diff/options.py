"""The request of a comparison, from options of ``ckpt diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.engine.numbers.difference import Tolerance
from core.errors import NoEffect, refuse_without_effect
from core.verbs.diff.run import DiffJob


def build_diff_job(
    a: Path,
    b: Path,
    *,
    rtol: float | None,
    atol: float | None,
    nan_differs: bool,
    stat_only: bool,
    read: bool,
    **fields: Any,
) -> DiffJob:
    """Return the job of a comparison.

    Args:
        a, b: the two checkpoints.
        rtol, atol, nan_differs, stat_only, read: as for ``diff``.
        fields: further fields of the job.

    Raises:
        NoEffectError: one of the options has no effect beside the others.
    """
    is_by_value = rtol is not None or atol is not None
    values = {"rtol": rtol, "atol": atol, "nan_differs": nan_differs or None, "read": read or None}
    unread = "--stat-only reads no values"
    refuse_without_effect(
        [name for name, value in values.items() if value is not None],
        (
            NoEffect(("rtol", "atol", "read"), stat_only, unread, "omit it, or omit --stat-only"),
            NoEffect(
                ("nan_differs",),
                not is_by_value,
                "without a tolerance, bytes are compared instead of values",
                "add --rtol or --atol",
            ),
        ),
    )
    rule = Tolerance(rtol or 0.0, atol or 0.0, not nan_differs) if is_by_value else None
    return DiffJob(a=a, b=b, rule=rule, reads=not stat_only, believes=not read, **fields)
