"""``ckpt validate --newest-valid ROOT``: find the newest valid iteration in a training root.

Only its path goes to stdout, so that a script can use the output; the reasons for skipping newer
iterations go to stderr. The exit code is 1 if no iteration is valid.

``--json`` prints one object (fields may be added, none change meaning)::

    {"schema": "ckpt.newest/1", "path": str | null, "iteration": int | null, "level": str,
     "skipped": [{"path": str, "why": str}]}

``launch`` (``ckpt_cli.workers.current_team``) is present if several workers checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ckpt_cli.commands.examine import acceptance_of, examine_path, level_of
from ckpt_cli.findings.verdict import LEVELS
from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.terminal import escaped, screen_of
from ckpt_cli.workers.current_team import launch_of, team
from ckpt_cli.workers.progress import show_progress
from core.engine.team.protocol import Figures, broadcast_result, is_lead, sum_figures
from core.errors import UsageError
from core.verbs.validate.newest import Newest
from core.verbs.validate.newest import find_newest_valid as find_newest_valid
from core.verbs.validate.run import Validation

if TYPE_CHECKING:
    from ckpt_cli.options.validate import ValidateOptions

_MOST_RUNS = 8
"""Maximum number of runs that are listed."""


def run_newest_valid(options: ValidateOptions) -> int:
    """Run ``ckpt validate --newest-valid`` and return the exit code.

    Raises:
        UsageError: there is more than one root, or an option that does not apply.
    """
    # Check the options before any iteration is read.
    root = _single_root(options)
    workers = team()
    acceptance = broadcast_result(workers, lambda: acceptance_of(options))
    # All workers check one iteration together; their figures are added up over the iterations.
    figures: list[tuple[Figures, ...]] = []

    def validate_iteration(path: Path) -> tuple[bool, Validation]:
        validation = examine_path(path, options, progress=progress)
        figures.append(validation.figures)
        return acceptance.judge(validation.findings).is_valid, validation

    with show_progress(progress_form(options.progress, is_quiet=options.quiet)) as progress:
        newest = find_newest_valid(root, validate_iteration, team=workers)
    if is_lead(workers):
        _report(newest, root, options, sum_figures(figures))
    return 1 if newest.path is None else 0


def _report(
    newest: Newest, root: Path, options: ValidateOptions, figures: Sequence[Figures]
) -> None:
    """Print the path or the JSON object to stdout, and the skipped iterations to stderr."""
    # The result, for a script.
    if options.json or options.format == "json":
        skipped = [{"path": iteration.path, "why": iteration.why} for iteration in newest.skipped]
        report: dict[str, object] = {"path": newest.path, "iteration": newest.iteration}
        report |= {"level": LEVELS[level_of(options)], "skipped": skipped}
        print(json.dumps({"schema": "ckpt.newest/1"} | report | launch_of(figures)))
    elif newest.path is not None:
        # A script needs the exact path; only a terminal must be protected from control characters.
        print(escaped(newest.path) if sys.stdout.isatty() else newest.path)
    # The reasons, for people.
    label = screen_of(sys.stderr).styled("skipped:", "yellow")
    for iteration in () if options.quiet else newest.skipped:
        print(f"{label} {escaped(iteration.path)}: {escaped(iteration.why)}", file=sys.stderr)
    if newest.path is None:
        noun = "valid iteration" if newest.skipped else "iterations"
        print(f"no {noun} in {escaped(str(root))}", file=sys.stderr)
        if not newest.skipped and not options.quiet:
            for hint in _hints(root):
                print(f"  {hint}", file=sys.stderr)


def _hints(root: Path) -> Iterator[str]:
    """Yield commands for a directory without iterations: for the runs in it, or for itself."""
    from core.files.source_store import open_store
    from core.opening.listing import is_checkpoint, list_checkpoints, runs_below

    with closing(open_store(root)) as store:
        is_single = is_checkpoint(store)
    runs = runs_below(root)
    if runs:
        yield f"it contains {n_text(len(runs), 'run')}, listed by newest iteration:"
        yield from (
            escaped(f"ckpt validate --newest-valid {quote(str(run))}") for run in runs[:_MOST_RUNS]
        )
        if len(runs) > _MOST_RUNS:
            yield f"… {len(runs) - _MOST_RUNS} more (ckpt inspect {escaped(quote(str(root)))})"
    elif is_single:
        path = quote(str(root))
        yield escaped(f"it is a single checkpoint: ckpt validate --headers {path}")
    elif checkpoints := list_checkpoints(root).checkpoints:
        path = quote(str(checkpoints[0].path))
        yield escaped(f"the newest checkpoint in it: ckpt validate --headers {path}")


def _single_root(options: ValidateOptions) -> Path:
    """Return the training root, after checking the options given with it.

    Raises:
        UsageError: there is more than one root, or an option that does not apply.
    """
    paths = options.paths or [Path()]
    if len(paths) != 1:
        raise UsageError(
            "--newest-valid accepts only one training root",
            hint="run the command once for each root",
        )
    if options.format not in (None, "text", "json"):
        raise UsageError(
            f"--newest-valid does not support --format {options.format}",
            hint="use --format text or json",
        )
    return paths[0]
