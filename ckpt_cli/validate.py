"""``ckpt validate``: says whether checkpoints are whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.terminal import escaped, screen_of
from core.checks import Level
from core.finding import Severity
from core.validate import validate as examined

if TYPE_CHECKING:
    from ckpt_cli.validate_options import ValidateOptions


def validate(options: ValidateOptions) -> int:
    """Examines the checkpoints; returns the exit code."""
    level = Level.DEEP if options.deep else Level.HEADERS if options.headers else Level.METADATA
    code = 0
    for path in options.paths or [Path()]:
        found = examined(path, level=level, iteration=options.iteration, rules=options.rules)
        screen = screen_of(sys.stdout)
        print(screen.plain(f"{escaped(found.path)}: {len(found.findings)} findings"))
        for finding in found.findings:
            print(screen.plain(f"  {finding.code} {finding.severity.label}: {escaped(finding.message)}"))
        if found.worst == Severity.ERROR:
            code = 1
    return code
