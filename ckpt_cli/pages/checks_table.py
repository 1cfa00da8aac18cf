"""``ckpt validate --list-checks``: every code, as a table or as JSON.

``--json`` prints one object (fields may be added, none change meaning)::

    {"schema": "ckpt.checks/1",
     "checks": [{"code": str, "severity": "error" | "warning" | "note",
                 "level": "metadata" | "headers" | "deep", "title": str, "hint": str}]}
"""

from __future__ import annotations

import json
import sys

from ckpt_cli.findings.text import STYLES
from ckpt_cli.findings.verdict import LEVELS
from ckpt_cli.screen.blocks import Cell, table
from ckpt_cli.screen.terminal import screen_of
from core.verbs.checks.check import codes


def print_checks(*, is_json: bool) -> int:
    """Print every code of ``ckpt validate`` with its severity, level and title; return 0."""
    if is_json:
        checks = [
            {
                "code": code.code,
                "severity": code.severity.label,
                "level": LEVELS[code.level],
                "title": code.title,
                "hint": code.hint,
            }
            for code in codes().values()
        ]
        print(json.dumps({"schema": "ckpt.checks/1", "checks": checks}))
        return 0
    rows: list[list[Cell | str]] = []
    for code in codes().values():
        severity = Cell(code.severity.label, (STYLES[code.severity],))
        rows.append(
            [Cell(code.code, ("bold",)), severity, Cell(LEVELS[code.level], ("dim",)), code.title]
        )
    for line in table(screen_of(sys.stdout), rows, align="<<<<"):
        print(line)
    return 0
