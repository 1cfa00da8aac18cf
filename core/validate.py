"""Validating a checkpoint: opens it as far as it opens, runs the checks of a level, and collects what they find."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.checks import Check, Level, checks
from core.checks.opening import UNREADABLE, is_explained
from core.checks.subject import Subject
from core.errors import CheckpointingException, UsageError
from core.finding import Finding, Severity
from core.job import DEFAULT_MEMORY_BYTES
from core.layout import load_rules
from core.open import located

if TYPE_CHECKING:
    from core.against import Against
    from core.layout import Rules
    from core.plan_for import Request

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What was found.

    Args:
        path: the checkpoint.
        format: name of its format; None if no format recognises it.
        level: how much was read.
        findings: the worst first.
        n_files, n_bytes: regular files of the checkpoint, and their bytes.
        n_tensors: global tensors that its metadata names; 0 where they are not known.
        n_checks: checks that ran.
        seconds: wall time.
        against: what its tensors were compared with, by fingerprint, and how many were; None if that was not asked for.
    """

    path: str
    format: str | None
    level: Level
    findings: tuple[Finding, ...]
    n_files: int
    n_bytes: int
    n_tensors: int
    n_checks: int
    seconds: float
    against: tuple[str, int] | None = None

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding; None without any."""
        return max((finding.severity for finding in self.findings), default=None)


def validate(
    path: Path,
    *,
    level: Level = Level.METADATA,
    iteration: int | None = None,
    rules: Path | None = None,
    threads: int | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
    plan_for: Request | None = None,
    against: Path | None = None,
) -> Validation:
    """Examines one checkpoint.

    Args:
        path: as for ``core.open.open_checkpoint``.
        level: how much to read.
        iteration: which iteration of a training root.
        rules: a TOML file with additional layout rules.
        threads, memory_bytes: for the levels that read data; None for as many threads as there are processors.
        progress: told about bytes that were read.
        plan_for: also say whether it can be loaded or resharded so.
        against: also compare its tensors, by fingerprint, with this manifest or checkpoint.

    Raises:
        UsageError: there is no such path, or it is not that iteration.
    """
    begun = time.monotonic()
    table = load_rules(rules)
    other = None if against is None else _against(against, table, threads=threads, memory_bytes=memory_bytes)
    place = located(path, iteration=iteration)
    subject = Subject(
        path=place.path,
        root=path,
        store=place.store,
        format=place.format,
        level=level,
        rules=table,
        iteration=place.iteration,
        failure=place.failure,
        threads=threads,
        memory_bytes=memory_bytes,
        progress=progress,
        plan_for=plan_for,
        against=other,
    )
    n_checks = 0
    try:
        _check_iteration(subject, iteration)
        for check in checks(level, None if place.format is None else place.format.name):
            _run(check, subject)
            n_checks += 1
        files = {} if place.format is None else subject.files  # what is no checkpoint may be a whole file system
        return Validation(
            path=str(place.path),
            format=None if place.format is None else place.format.name,
            level=level,
            findings=tuple(sorted(subject.findings, key=lambda finding: finding.order)),
            n_files=len(files),
            n_bytes=sum(files.values()),
            n_tensors=_n_tensors(subject),
            n_checks=n_checks,
            seconds=time.monotonic() - begun,
            against=None if other is None else (other.label, subject.n_compared),
        )
    finally:
        place.store.close()


def _n_tensors(subject: Subject) -> int:
    form = subject.canonical
    return len(form.catalog.tensors) if form is not None and form.is_global else 0


def _against(path: Path, rules: Rules, *, threads: int | None, memory_bytes: int) -> Against:
    from core.against import against_of

    return against_of(path, rules=rules, threads=threads, memory_bytes=memory_bytes)


def _run(check: Check, subject: Subject) -> None:
    """Runs one check; what it could not read is a finding too, and the others go on."""
    try:
        subject.findings += check.run(subject)
    except CheckpointingException as err:
        if is_explained(subject, err):
            return
        found = UNREADABLE.finding(err.message, file=err.file, key=err.key, rank=err.rank, span=err.span, hint=err.hint)
        subject.findings.append(found)


def _check_iteration(subject: Subject, wanted: int | None) -> None:
    """Refuses another iteration than the one asked for, where nothing is wrong with the root.

    Raises:
        UsageError: see there.
    """
    if wanted is None or subject.iteration == wanted or subject.failure is not None:
        return
    found: object = subject.iteration
    if found is None and subject.catalog is not None:
        found = subject.catalog.attrs.get("iteration")
    if found != wanted:
        raise UsageError(
            f"--iteration {wanted} was asked for, but "
            + ("nothing here tells an iteration" if found is None else f"this is iteration {found}"),
            file=str(subject.root),
            hint="point at the directory that holds the iterations",
        )


def distinct_paths(paths: Iterable[Path], *, iteration: int | None = None) -> list[Path]:
    """The paths without those that lead to the same checkpoint as an earlier one, such as the files of one directory.

    Raises:
        UsageError: there is no such path.
    """
    found: dict[str, Path] = {}
    for path in paths:
        place = located(path, iteration=iteration)
        place.store.close()
        found.setdefault(os.path.realpath(place.path), path)
    return list(found.values())
