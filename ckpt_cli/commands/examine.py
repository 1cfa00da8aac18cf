"""Examine one checkpoint with the options of ``ckpt validate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.workers.current_team import default_memory, device, team, worker_threads
from core.files.syscalls import allowed_cores
from core.opening.open import FILL
from core.verbs.checks.check import Level, codes
from core.verbs.validate.accepted import Acceptance, parse_patterns, read_baseline
from core.verbs.validate.run import Validation
from core.verbs.validate.run import validate as check_checkpoint

if TYPE_CHECKING:
    from ckpt_cli.options.validate import ValidateOptions
    from core.progress import OnProgress
    from core.verbs.checks.plan_request import PlanRequest


def level_of(options: ValidateOptions) -> Level:
    """Return the level that the options request."""
    if options.deep:
        return Level.DEEP
    # A job resumes from the newest valid iteration, so a sample of its files is not enough.
    return Level.HEADERS if options.headers or options.newest_valid else Level.METADATA


def acceptance_of(options: ValidateOptions) -> Acceptance:
    """Return the findings that the options accept: by pattern, and those of the baseline.

    Raises:
        UsageError: a pattern or the baseline is invalid.
    """
    return Acceptance(
        ignored=parse_patterns(options.ignore or (), known=codes() if options.ignore else ()),
        known=None if options.baseline is None else read_baseline(options.baseline),
        is_strict=options.strict,
    )


def examine_path(
    path: Path, options: ValidateOptions, *, progress: OnProgress | None = None
) -> Validation:
    """Check one checkpoint.

    Raises:
        UsageError: an option is invalid, or the path does not exist.
    """
    return check_checkpoint(
        path,
        level=level_of(options),
        iteration=options.iteration,
        rules=options.rules,
        threads=options.threads or worker_threads() or min(len(allowed_cores()), 64),
        memory_bytes=options.memory or default_memory(),
        progress=progress,
        plan_for=plan_request(options),
        against=options.against,
        missing_chunks=options.missing_chunks or FILL,
        team=team(),
        device=device(),
    )


def plan_request(options: ValidateOptions) -> PlanRequest | None:
    """Parse ``--plan-for``; return None if the option is not given.

    Raises:
        UsageError: the text names an unknown size or format.
    """
    if options.plan_for is None:
        return None
    from core.verbs.checks.plan_request import parse_plan_request

    memory_bytes = options.memory or default_memory()
    return parse_plan_request(options.plan_for, rules=options.rules, memory_bytes=memory_bytes)
