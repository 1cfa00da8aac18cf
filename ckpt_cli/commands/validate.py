"""``ckpt validate``: check checkpoints for missing, damaged or inconsistent data.

The exit code is 0 if no error was found and 1 otherwise, in every report format. It is 2 if the
request is invalid, or if one of several paths does not exist (the others are still checked and
reported); other codes only occur if nothing could be checked. A directory that no format recognises
is a finding, so that a job which validates the output of another job fails.

The workers of a team divide the data of one checkpoint at a time; the lead writes the report, and
the exit code is the same for all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.commands.examine import acceptance_of, examine_path, level_of, plan_request
from ckpt_cli.findings.verdict import Verdict, exit_code_of
from ckpt_cli.options.shared.progress import progress_form
from ckpt_cli.options.shared.values import check_file
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.pager import pager_of, print_page
from ckpt_cli.screen.terminal import Screen, escaped, screen_of
from ckpt_cli.workers.current_team import team
from ckpt_cli.workers.progress import show_progress
from core.engine.team.protocol import broadcast_result, is_lead
from core.errors import NoEffect, UsageError, refuse_without_effect
from core.files.remote_path import location_of
from core.pickle.noted import gc_paused
from core.progress import Phase, begin_phase
from core.values import changed_fields
from core.verbs.checks.file_codes import RANK_MISSING
from core.verbs.validate.accepted import baseline_text
from core.verbs.validate.run import build_refusal, distinct_paths

if TYPE_CHECKING:
    from ckpt_cli.options.validate import ValidateOptions

_SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".json": "json",
    ".xml": "junit",
    ".sarif": "sarif",
    ".txt": "text",
}
"""File suffix → format of ``--report``, and of ``-o`` without ``--format``."""


def validate(options: ValidateOptions) -> int:
    """Run ``ckpt validate`` and return the exit code.

    Raises:
        UsageError: the options contradict each other, or the only path does not exist.
    """
    workers = team()
    broadcast_result(workers, lambda: _check_options(options))
    # Two options select another task, whose module is only imported then.
    if options.list_checks:
        from ckpt_cli.pages.checks_table import print_checks

        return (
            print_checks(is_json=options.json or options.format == "json")
            if is_lead(workers)
            else 0
        )
    if options.newest_valid:
        from ckpt_cli.commands.newest_valid import run_newest_valid

        return run_newest_valid(options)
    # The checkpoints, and the errors of paths that do not exist.
    acceptance = broadcast_result(workers, lambda: acceptance_of(options))
    form = progress_form(options.progress, is_quiet=options.quiet)
    with show_progress(form) as progress:
        begin_phase(progress, Phase.OPENING)
        errors = broadcast_result(workers, lambda: _checkpoint_paths(options))
    # Check one checkpoint after the other, then report on all of them. One checkpoint may have 10⁵
    # entries and a finding for each, which the garbage collector need not walk through; with
    # several checkpoints, the garbage of each must be collected.
    verdicts = []
    with gc_paused() if len(errors) == 1 else nullcontext():
        with show_progress(form) as progress:
            for path, error in errors.items():
                if error is not None and len(errors) == 1:
                    raise error
                validation = (
                    examine_path(path, options, progress=progress)
                    if error is None
                    else build_refusal(path, level=level_of(options), error=error)
                )
                verdicts.append(Verdict(validation, acceptance.judge(validation.findings)))
        if options.write_baseline is not None:
            broadcast_result(workers, lambda: _write_baseline(verdicts, options))
            return 0
        broadcast_result(workers, lambda: _report(verdicts, options))
    return UsageError.exit_code if any(errors.values()) else exit_code_of(verdicts)


def _checkpoint_paths(options: ValidateOptions) -> dict[Path, UsageError | None]:
    """Return the distinct checkpoints to check, with an error for each path that is not one."""
    # A root is replaced by its iterations; a path that is not a directory is refused below.
    paths = options.paths or [Path()]
    if options.all_iterations:
        from core.verbs.validate.newest import iteration_paths

        paths = [
            path for root in paths for path in (iteration_paths(root) if root.is_dir() else [root])
        ]
    return distinct_paths(paths, iteration=options.iteration)


def _write_baseline(verdicts: Sequence[Verdict], options: ValidateOptions) -> None:
    """Write all findings to the file of ``--write-baseline``, including accepted ones."""
    from ckpt_cli.screen.output_file import write_output

    assert options.write_baseline is not None
    findings = [finding for verdict in verdicts for finding in verdict.validation.findings]
    write_output(options.write_baseline, [baseline_text(findings).rstrip("\n")])
    if not options.quiet:
        count = n_text(len(findings), "finding")
        print(f"wrote {escaped(str(options.write_baseline))}: {count}", file=sys.stderr)


def _check_options(options: ValidateOptions) -> None:
    """Raise if the options contradict each other or name invalid files.

    Raises:
        UsageError: two options cannot be combined, a value is invalid, or a report or rules file
            cannot be used.
    """
    if options.newest_valid:
        reasons = ("considers all iterations anyway", "only prints a path")
        considered, printed = (f"--newest-valid {reason}" for reason in reasons)
        others = ("output", "report", "write_baseline", "plan_for")
        refuse_without_effect(
            changed_fields(options),
            (
                NoEffect(("all_iterations",), True, considered),
                NoEffect(others, True, printed, "omit either it or --newest-valid"),
            ),
        )
    # Options that cannot be combined.
    checks_all = options.all_iterations or options.newest_valid
    conflicts = (
        (
            options.headers and options.deep,
            "--headers and --deep cannot be combined",
            "use --deep, which includes --headers",
        ),
        (
            options.json and options.format not in (None, "json"),
            f"--json and --format {options.format} cannot be combined",
            "use only one of the two",
        ),
        (
            options.iteration is not None and checks_all,
            "--iteration selects one iteration, but another option checks all of them",
            "omit --iteration, or omit --all-iterations and --newest-valid",
        ),
        (
            options.baseline is not None and options.write_baseline is not None,
            "--baseline and --write-baseline cannot be combined",
            "use only one of the two",
        ),
    )
    for is_conflict, message, hint in conflicts:
        if is_conflict:
            raise UsageError(message, hint=hint)
    # Values and files that must be valid before checks begin that may take hours.
    plan_request(options)
    for path in options.report or ():
        if path.suffix.lower() not in _SUFFIXES:
            raise UsageError(
                f"--report cannot infer a format from the file name {path.name!r}",
                hint=f"use one of the suffixes {', '.join(_SUFFIXES)}, or pass --format and -o",
            )
    for path in (options.output, options.write_baseline, *(options.report or ())):
        if path is not None:
            from ckpt_cli.screen.output_file import check_report_path

            check_report_path(path)
    check_file(options.rules, option="--rules")


def _report(verdicts: Sequence[Verdict], options: ValidateOptions) -> None:
    """Write the report to the files that the options name and to stdout."""
    # Each --report in the format of its suffix.
    for path in options.report or ():
        format = _SUFFIXES[path.suffix.lower()]
        if format == "html":
            from ckpt_cli.html_report.page import write_report
            from ckpt_cli.html_report.validate_report import validate_html

            write_report(path, validate_html(verdicts), is_quiet=options.quiet)
        else:
            from ckpt_cli.screen.output_file import write_output

            write_output(path, _report_lines(format, verdicts, options, Screen()))
    # With -o, the requested format goes to its file, and text to stdout.
    stdout_format = "json" if options.json else options.format
    if options.output is not None:
        from ckpt_cli.screen.output_file import write_output

        format = stdout_format or _SUFFIXES.get(options.output.suffix.lower(), "text")
        write_output(options.output, _report_lines(format, verdicts, options, Screen()))
        stdout_format = "text"
    is_paged = stdout_format in (None, "text") and not options.no_pager
    lines = _report_lines(stdout_format or "text", verdicts, options, screen_of(sys.stdout))
    print_page(lines, pager_of(sys.stdout) if is_paged else None)


def _report_lines(
    format: str, verdicts: Sequence[Verdict], options: ValidateOptions, screen: Screen
) -> Iterator[str]:
    """Return the lines of the report in one of ``FORMATS`` or HTML; import only its module."""
    if format == "json":
        from ckpt_cli.findings.json_report import json_lines

        return json_lines(verdicts, level=level_of(options), is_strict=options.strict)
    if format == "html":
        from ckpt_cli.html_report.validate_report import validate_html

        return iter([validate_html(verdicts).rstrip("\n")])
    if format == "junit":
        from ckpt_cli.findings.junit import junit_lines

        return junit_lines(verdicts)
    if format == "sarif":
        from ckpt_cli.findings.sarif import sarif_lines

        return sarif_lines(verdicts, has_baseline=options.baseline is not None)
    if format == "github":
        from ckpt_cli.findings.github import github_lines

        return github_lines(verdicts)
    from ckpt_cli.findings.text import explain_lines, text_lines

    return chain(
        text_lines(screen, verdicts, limit=options.limit, is_quiet=options.quiet),
        () if options.quiet else _grids_with_missing_ranks(screen, verdicts),
        () if options.quiet else _checkpoints_below(screen, verdicts, limit=options.limit),
        explain_lines(screen, verdicts, is_quiet=options.quiet),
    )


def _grids_with_missing_ranks(screen: Screen, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the grid of the ranks of each checkpoint of which some are missing."""
    for verdict in verdicts:
        if not any(finding.code == RANK_MISSING.code for finding in verdict.validation.findings):
            continue
        from ckpt_cli.pages.pictures.ranks import rank_lines
        from ckpt_cli.pages.pictures.zero_ranks import zero_lines
        from core.verbs.pictures.ranks import read_rank_grid
        from core.verbs.pictures.zero_ranks import read_zero_grid

        # The findings are the result; without a readable rank there is no picture.
        path = verdict.validation.path
        grid = read_rank_grid(path)
        zero_grid = read_zero_grid(path) if grid is None else None
        if grid is None and zero_grid is None:
            continue
        yield ""
        if len(verdicts) > 1:
            yield screen.styled(escaped(path), "bold")
        if grid is not None:
            yield from rank_lines(screen, grid)
        elif zero_grid is not None:
            yield from zero_lines(screen, zero_grid)


def _checkpoints_below(
    screen: Screen, verdicts: Sequence[Verdict], *, limit: int | None
) -> Iterator[str]:
    """Yield the checkpoints in each path that is not a checkpoint itself, with their commands."""
    for verdict in verdicts:
        if verdict.validation.contains_checkpoints:
            from ckpt_cli.findings.text import LIMIT
            from ckpt_cli.pages.inspect_listing import listing_lines
            from core.opening.listing import list_checkpoints

            root = location_of(verdict.validation.path)
            yield ""
            yield from listing_lines(
                screen,
                root,
                list_checkpoints(root),
                limit=LIMIT if limit is None else limit,
                command="ckpt validate",
            )
