"""Validating a checkpoint: opens it as far as it opens, runs the checks of a level, and collects what they find."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core.checks.check import Check
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.metadata.hf_model import unchecked
from core.checks.opening import UNREADABLE, is_explained
from core.checks.registry import checks
from core.checks.subject import Subject
from core.convert.job import DEFAULT_MEMORY_BYTES
from core.device.device import Device
from core.errors import CheckpointingException, UsageError, WorkerError
from core.files.store import LocalStore
from core.formats.dcp.metadata import read_once
from core.megatron.reshard.reshard import load_rules
from core.opening.open import FILL, iteration_dirs, locate_checkpoint
from core.opening.unrecognised import listed
from core.pickle.reader import gc_paused
from core.team.agreement import agreed, sight_of_files
from core.team.figures import added_up, idle
from core.team.protocol import ALONE, Figures, Team, told

if TYPE_CHECKING:
    from core.checks.comparison import Against
    from core.checks.plan_request import Request

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
        notes: which checkpoint was taken, and what lies near it and was not looked at.
        unchecked: what no level looks at, because it is not known how it should be.
        against: what its tensors were compared with, by fingerprint, and how many were; None if that was not asked for.
        figures: of the workers, where several read the data.
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
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    against: tuple[str, int] | None = None
    figures: tuple[Figures, ...] = ()

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
    missing_chunks: str = FILL,
    team: Team = ALONE,
    device: Device | None = None,
) -> Validation:
    """Examines one checkpoint.

    The ranks of a team divide what reads data; the lead alone judges, and all return what it found.

    Args:
        path: as for ``core.opening.open.open_checkpoint``.
        level: how much to read.
        iteration: which iteration of a training root.
        rules: a TOML file with additional layout rules.
        threads, memory_bytes: for the levels that read data; None for as many threads as there are processors.
        progress: told about bytes that were read; of this rank.
        plan_for: also say whether it can be loaded or resharded so.
        against: also compare its tensors, by fingerprint, with this manifest or checkpoint.
        missing_chunks: what zarr chunks are that are not stored, see ``core.opening.open``; ``error`` makes each a
            finding.
        team: that works together; every rank calls this with the same arguments.
        device: on which per-byte work may be done; None for the CPU path.

    Raises:
        UsageError: there is no such path, or it is not that iteration.
        WorkerError: a rank of the team failed, or sees another checkpoint.
    """
    begun = time.monotonic()

    def opened() -> Subject:
        table = load_rules(rules)
        place = locate_checkpoint(path, iteration=iteration)
        subject = Subject(
            path=place.path,
            root=path,
            store=place.store,
            format=place.format,
            level=level,
            rules=table,
            iteration=place.iteration,
            passed=place.passed,
            failure=place.failure,
            below=place.below,
            notes=(*place.notes, *_other_iterations(path, place.path)),
            threads=threads,
            memory_bytes=memory_bytes,
            progress=progress,
            plan_for=plan_for,
            missing_chunks=missing_chunks,
            team=team,
            device=device,
        )
        try:
            if not place.is_chosen:
                _check_iteration(subject, iteration)
        except BaseException:
            place.store.close()
            raise
        return subject

    subject = agreed(team, opened, _sight, what=str(path))
    try:
        if against is not None:
            subject.against = _against(against, subject)
        figures = _read_together(subject) if team.size > 1 else ()
        return told(team, lambda: _judged(subject, begun, figures))
    finally:
        subject.store.close()


def _other_iterations(root: Path, taken: Path) -> tuple[str, ...]:
    """Return a note on the iterations of a training root that are not looked at."""
    if taken == root or not root.is_dir():
        return ()
    passed = {taken, *taken.parents}
    with closing(LocalStore(root)) as store:
        names = [name for _, name in sorted(iteration_dirs(store).items()) if root / name not in passed]
    count = "one other iteration was" if len(names) == 1 else f"{len(names)} other iterations were"
    return (f"{count} not looked at (--all-iterations): {listed(names)}",) if names else ()


def _sight(subject: Subject) -> object:
    """What all ranks must see alike."""
    files = {} if subject.format is None else subject.files
    return (
        str(subject.path),
        subject.iteration,
        subject.format and subject.format.name,
        sight_of_files(subject.store, files),
    )


def _read_together(subject: Subject) -> tuple[Figures, ...]:
    """The passes over data, which the ranks of a team divide, so that the checks find at the lead what they ask for.

    Returns:
        What the workers did, at the lead.

    Raises:
        WorkerError: a rank failed.
    """
    passes: list[Sequence[Figures]] = [idle(subject.team)]
    if subject.level == Level.DEEP:
        try:
            passes.append(subject.deep.scanned.figures)
        except WorkerError:
            raise
        except CheckpointingException:
            pass  # on all ranks alike, and the checks say it
    if subject.against is not None:
        from core.checks.content.fingerprints import read_together

        passes += [subject.against.figures, read_together(subject)]
    return added_up(passes)


def _judged(subject: Subject, begun: float, figures: tuple[Figures, ...]) -> Validation:
    """Runs the checks."""
    n_checks = 0
    format = None if subject.format is None else subject.format.name
    with gc_paused(), read_once():
        for check in checks(subject.level, format):
            _run(check, subject)
            n_checks += 1
    files = {} if format is None else subject.files  # what is no checkpoint may be a whole file system
    other = subject.against
    return Validation(
        path=str(subject.path),
        format=format,
        level=subject.level,
        findings=tuple(sorted(subject.findings, key=lambda finding: finding.order)),
        n_files=len(files),
        n_bytes=sum(files.values()),
        n_tensors=_n_tensors(subject),
        n_checks=n_checks,
        seconds=time.monotonic() - begun,
        notes=subject.notes,
        unchecked=unchecked(subject),
        against=None if other is None else (other.label, subject.n_compared),
        figures=figures,
    )


def _n_tensors(subject: Subject) -> int:
    form = subject.canonical
    return len(form.catalog.tensors) if form is not None and form.is_global else 0


def _against(path: Path, subject: Subject) -> Against:
    from core.checks.comparison import against_of

    return against_of(
        path,
        rules=subject.rules,
        threads=subject.threads,
        memory_bytes=subject.memory_bytes,
        team=subject.team,
        device=subject.device,
    )


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
    found = subject.iteration
    if found is None and subject.catalog is not None:
        found = subject.catalog.iteration
    if found != wanted:
        raise UsageError(
            f"--iteration {wanted} was asked for, but "
            + ("nothing here tells an iteration" if found is None else f"this is iteration {found}"),
            file=str(subject.root),
            hint="point at the directory that holds the iterations",
        )


def refused(path: Path, *, level: Level, error: UsageError) -> Validation:
    """Return the result for a path that cannot be examined, beside others that can."""
    finding = UNREADABLE.finding(error.message, hint=error.hint)
    return Validation(
        path=str(path),
        format=None,
        level=level,
        findings=(finding,),
        n_files=0,
        n_bytes=0,
        n_tensors=0,
        n_checks=0,
        seconds=0.0,
    )


def distinct_paths(paths: Iterable[Path], *, iteration: int | None = None) -> dict[Path, UsageError | None]:
    """Return the paths without those that lead to the same checkpoint as an earlier one, such as the files of one
    directory; each with the error that keeps it from being examined, such as that it does not exist.
    """
    path_of: dict[str, Path] = {}
    errors: dict[Path, UsageError | None] = {}
    for path in paths:
        try:
            place = locate_checkpoint(path, iteration=iteration)
        except UsageError as err:
            errors[path] = err
            continue
        place.store.close()
        errors.setdefault(path_of.setdefault(os.path.realpath(place.path), path), None)
    return errors
