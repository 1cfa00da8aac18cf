"""``ckpt validate --newest-valid ROOT``: the path of the newest iteration that is whole, and nothing else, on stdout.

Why newer ones were skipped stands on stderr. ``--json`` prints ``{"schema": "ckpt.newest/1", "path": str | null,
"iteration": int | null, "level": str, "skipped": [{"path": str, "why": str}]}``, and ``launch``
(``ckpt_cli.workers.current_team``) where several workers did it. The exit code is 1 if there is none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.commands.examine import acceptance_of, examine, level_of
from ckpt_cli.findings.verdict import LEVELS
from ckpt_cli.screen.terminal import escaped, screen_of
from ckpt_cli.workers.current_team import launch_of, team
from core.errors import UsageError
from core.team.figures import added_up
from core.team.protocol import Figures, is_lead, told
from core.validate.newest import Newest
from core.validate.newest import newest_valid as found_newest
from core.validate.run import Validation

if TYPE_CHECKING:
    from ckpt_cli.options.validate import ValidateOptions


def newest_valid(options: ValidateOptions) -> int:
    """Runs it; returns the exit code.

    Raises:
        UsageError: more than one root, or an option that means nothing here.
    """
    root = _only_root(options)
    us = team()
    acceptance = told(us, lambda: acceptance_of(options))
    figures: list[tuple[Figures, ...]] = []

    def is_whole(path: Path) -> tuple[bool, Validation]:
        validation = examine(path, options)
        figures.append(validation.figures)
        return acceptance.judge(validation.findings).is_valid, validation

    newest = found_newest(root, is_whole, team=us)
    if is_lead(us):
        _report(newest, root, options, added_up(figures))
    return 1 if newest.path is None else 0


def _report(newest: Newest, root: Path, options: ValidateOptions, figures: Sequence[Figures]) -> None:
    if options.json or options.format == "json":
        skipped = [{"path": one.path, "why": one.why} for one in newest.skipped]
        answer: dict[str, object] = {"path": newest.path, "iteration": newest.iteration}
        answer |= {"level": LEVELS[level_of(options)], "skipped": skipped}
        print(json.dumps({"schema": "ckpt.newest/1"} | answer | launch_of(figures)))
    elif newest.path is not None:
        print(escaped(newest.path) if sys.stdout.isatty() else newest.path)
    label = screen_of(sys.stderr).styled("skipped:", "yellow")
    for one in () if options.quiet else newest.skipped:
        print(f"{label} {escaped(one.path)}: {escaped(one.why)}", file=sys.stderr)
    if newest.path is None:
        what = "no iteration is whole in" if newest.skipped else "there are no iterations in"
        print(f"{what} {escaped(str(root))}", file=sys.stderr)


def _only_root(options: ValidateOptions) -> Path:
    paths = options.paths or [Path()]
    if len(paths) != 1:
        raise UsageError("--newest-valid takes one training root", hint="run it once for each")
    named = (
        ("--output", options.output),
        ("--report", options.report),
        ("--write-baseline", options.write_baseline),
        ("--plan-for", options.plan_for),
    )
    for name, value in named:
        if value:
            raise UsageError(f"--newest-valid prints a path; {name} does not go with it", hint="leave one out")
    if options.format not in (None, "text", "json"):
        raise UsageError(f"--newest-valid is no report as {options.format}", hint="leave --format out")
    return paths[0]
