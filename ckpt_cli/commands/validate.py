"""``ckpt validate``: says whether checkpoints are whole.

The exit code is 0 if no error was found, and 1 otherwise, whatever the format of the report; 2 where the request makes
no sense, and where one of several paths does not exist, after the report on the others; others only where nothing could
be looked at. A directory that no format recognises is a finding, so that a job which validates what another has written
fails.

The workers of a team divide the data of one checkpoint after the other; the lead writes the report, and the exit code
is the same for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.commands.examine import acceptance_of, examine, level_of, plan_request
from ckpt_cli.findings.verdict import Verdict, exit_code_of
from ckpt_cli.options.values import check_rules
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.output_file import check_place, write_lines
from ckpt_cli.screen.terminal import Screen, escaped, screen_of
from ckpt_cli.workers.current_team import team
from core.errors import UsageError
from core.pickle.reader import gc_paused
from core.team.protocol import is_lead, told
from core.validate.accepted import baseline_text
from core.validate.run import distinct_paths, refused

if TYPE_CHECKING:
    from ckpt_cli.options.validate import ValidateOptions

_SUFFIXES = {".json": "json", ".xml": "junit", ".sarif": "sarif", ".txt": "text"}
"""What ``--report`` writes, and ``-o`` where ``--format`` does not say it."""


def validate(options: ValidateOptions) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: the options contradict one another, or a path does not exist.
    """
    us = team()
    told(us, lambda: _check(options))
    if options.list_checks:
        from ckpt_cli.pages.checks_table import print_checks

        return print_checks(is_json=options.json or options.format == "json") if is_lead(us) else 0
    if options.newest_valid:
        from ckpt_cli.commands.newest_valid import newest_valid

        return newest_valid(options)
    acceptance = told(us, lambda: acceptance_of(options))
    verdicts = []
    errors = told(us, lambda: _paths(options))
    # One checkpoint may have 10⁵ entries and a finding for each; of several, what each leaves must be collected.
    with gc_paused() if len(errors) == 1 else nullcontext():
        for path, error in errors.items():
            if error is not None and len(errors) == 1:
                raise error
            validation = (
                examine(path, options) if error is None else refused(path, level=level_of(options), error=error)
            )
            verdicts.append(Verdict(validation, acceptance.judge(validation.findings)))
        if options.write_baseline is not None:
            told(us, lambda: _write_baseline(verdicts, options))
            return 0
        told(us, lambda: _report(verdicts, options))
    return UsageError.exit_code if any(errors.values()) else exit_code_of(verdicts)


def _paths(options: ValidateOptions) -> dict[Path, UsageError | None]:
    """Return the checkpoints to look at, each once, and the errors of paths that lead to none."""
    paths = options.paths or [Path()]
    if options.all_iterations:
        from core.validate.newest import iteration_paths

        paths = [path for root in paths for path in (iteration_paths(root) if root.is_dir() else [root])]
    return distinct_paths(paths, iteration=options.iteration)


def _write_baseline(verdicts: Sequence[Verdict], options: ValidateOptions) -> None:
    assert options.write_baseline is not None
    everything = [finding for verdict in verdicts for finding in verdict.validation.findings]
    write_lines(options.write_baseline, [baseline_text(everything).rstrip("\n")])
    if not options.quiet:
        count = n_text(len(everything), "finding")
        print(f"wrote {escaped(str(options.write_baseline))}: {count}", file=sys.stderr)


def _check(options: ValidateOptions) -> None:
    """Refuses what makes no sense together, before anything is read.

    Raises:
        UsageError: see there.
    """
    if options.headers and options.deep:
        raise UsageError("--headers and --deep exclude each other", hint="--deep does what --headers does")
    if options.json and options.format not in (None, "json"):
        raise UsageError(f"--json and --format {options.format} exclude each other", hint="give one")
    if options.iteration is not None and (options.all_iterations or options.newest_valid):
        raise UsageError("--iteration chooses one iteration", hint="leave it out, or the option that looks at all")
    if options.newest_valid and options.all_iterations:
        raise UsageError("--newest-valid looks at all iterations anyway", hint="leave --all-iterations out")
    if options.baseline is not None and options.write_baseline is not None:
        raise UsageError("--baseline and --write-baseline exclude each other", hint="give one")
    plan_request(options)
    for path in options.report or ():
        if path.suffix.lower() not in _SUFFIXES:
            raise UsageError(
                f"--report: which format? {path.name!r} ends in none of: {', '.join(_SUFFIXES)}",
                hint="name it so, or use --format and -o",
            )
    for path in (options.output, options.write_baseline, *(options.report or ())):
        if path is not None:
            check_place(path)
    check_rules(options.rules)


def _report(verdicts: Sequence[Verdict], options: ValidateOptions) -> None:
    """Writes the report, or the reports, where they are wanted."""
    for path in options.report or ():
        write_lines(path, _lines(_SUFFIXES[path.suffix.lower()], verdicts, options, Screen()))
    asked = "json" if options.json else options.format
    if options.output is not None:
        format = asked or _SUFFIXES.get(options.output.suffix.lower(), "text")
        write_lines(options.output, _lines(format, verdicts, options, Screen()))
        asked = "text"
    screen = screen_of(sys.stdout)
    for line in _lines(asked or "text", verdicts, options, screen):
        print(line)


def _lines(format: str, verdicts: Sequence[Verdict], options: ValidateOptions, screen: Screen) -> Iterable[str]:
    """The report in one of the formats."""
    return _WRITERS[format](verdicts, options, screen)


def _text(verdicts: Sequence[Verdict], options: ValidateOptions, screen: Screen) -> Iterator[str]:
    from ckpt_cli.findings.text import text_lines

    return text_lines(screen, verdicts, limit=options.limit, is_quiet=options.quiet)


def _json(verdicts: Sequence[Verdict], options: ValidateOptions, screen: Screen) -> Iterator[str]:
    from ckpt_cli.findings.json_report import json_lines

    return json_lines(verdicts, level=level_of(options), is_strict=options.strict)


def _junit(verdicts: Sequence[Verdict], options: ValidateOptions, screen: Screen) -> Iterator[str]:
    from ckpt_cli.findings.junit import junit_lines

    return junit_lines(verdicts)


def _sarif(verdicts: Sequence[Verdict], options: ValidateOptions, screen: Screen) -> Iterator[str]:
    from ckpt_cli.findings.sarif import sarif_lines

    return sarif_lines(verdicts, has_baseline=options.baseline is not None)


def _github(verdicts: Sequence[Verdict], options: ValidateOptions, screen: Screen) -> Iterator[str]:
    from ckpt_cli.findings.github import github_lines

    return github_lines(verdicts)


_WRITERS: dict[str, Callable[[Sequence[Verdict], ValidateOptions, Screen], Iterator[str]]] = {
    "text": _text,
    "json": _json,
    "junit": _junit,
    "sarif": _sarif,
    "github": _github,
}
