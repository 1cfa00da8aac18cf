"""Validate a checkpoint: open it, run the checks of a level, and collect their findings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.engine.plan.memory import limit_objects
from core.engine.team.agreement import observe_files, require_agreement
from core.engine.team.protocol import (
    ALONE,
    Figures,
    Team,
    broadcast_result,
    idle_figures,
    sum_figures,
)
from core.errors import CheckpointingException, UsageError, WorkerError, list_some
from core.files.syscalls import default_memory_bytes
from core.opening.iterations import CHECKPOINTS_BELOW, list_other_iterations
from core.opening.locate import Located, locate_checkpoint
from core.opening.open import FILL
from core.pickle.noted import gc_paused
from core.progress import OnProgress, Phase, count_steps
from core.values import (
    Brief,
    bytes_text,
    dataclass,
    list_facts,
    n_text,
    seconds_text,
    shown_briefly,
)
from core.verbs.checks.finding import HOSTILE, Finding, Level, Severity
from core.verbs.checks.registry import checks
from core.verbs.checks.subject import Check, Subject

if TYPE_CHECKING:
    from core.engine.device.device import Device
    from core.megatron.rules.rules import Rules
    from core.verbs.checks.plan_request import PlanRequest


@shown_briefly
@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The result of validating one checkpoint.

    Args:
        path: path of the checkpoint.
        format: name of its format; None if no format recognises it.
        level: amount of data that was read.
        findings: findings, the worst first.
        n_files, n_bytes: number and total size of the regular files.
        n_tensors: number of global tensors in the metadata; 0 if unknown.
        n_ends: number of files whose first bytes were read.
        is_proven: every byte was read, or is that of the manifest by the checksums of a store.
        n_checks: number of checks that ran.
        seconds: wall time.
        notes: notes on the choice of the checkpoint, and on files and checkpoints near it that were
            not checked.
        unchecked: notes on content that was not read at this level, or that no level can check
            because the expected one is unknown.
        against: (label, number of tensors) of the fingerprint comparison; None if not requested.
        figures: work of each rank, if several read the data.
        contains_checkpoints: the path is not a checkpoint, but a directory that contains some.
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
    n_ends: int = 0
    is_proven: bool = False
    notes: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    against: tuple[str, int] | None = None
    figures: tuple[Figures, ...] = ()
    contains_checkpoints: bool = False

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding; None without findings."""
        return max((finding.severity for finding in self.findings), default=None)

    def brief(self) -> Brief:
        """Return what is shown of the result."""
        counts = [
            n_text(n, severity.label)
            for severity in sorted(Severity, reverse=True)
            if (n := sum(finding.severity == severity for finding in self.findings))
        ]
        size = f"{n_text(self.n_files, 'file')}, {bytes_text(self.n_bytes)}"
        facts = [
            ("format", self.format or "not recognized"),
            ("size", f"{size}, {n_text(self.n_tensors, 'tensor')}"),
            ("read", f"{self.level.name.lower()}, in {seconds_text(self.seconds)}"),
            *list_facts(
                "findings",
                (
                    f"{item.code} {item.message}"
                    + (f" ({place})" if (place := item.file or item.key) else "")
                    for item in self.findings
                ),
            ),
            *list_facts("unchecked", self.unchecked),
            *list_facts("note", self.notes),
        ]
        return Brief(f"{', '.join(counts) or 'no findings'} in {self.path}", facts)


def validate(
    path: Path,
    *,
    level: Level = Level.METADATA,
    iteration: int | None = None,
    rules: Path | None = None,
    threads: int | None = None,
    memory_bytes: int = default_memory_bytes(),
    progress: OnProgress | None = None,
    plan_for: PlanRequest | None = None,
    against: Path | None = None,
    missing_chunks: str = FILL,
    team: Team = ALONE,
    device: Device | None = None,
) -> Validation:
    """Check one checkpoint and return the findings.

    The ranks of a team share the reading of data; only the lead runs the checks, and all ranks
    return its result.

    Args:
        path: as for ``core.opening.open.open_checkpoint``.
        level: amount of data to read.
        iteration: iteration of a training root to check.
        rules: TOML file with additional layout rules.
        threads: threads for reading data; None for one per processor.
        memory_bytes: memory limit.
        progress: called with the phase and its amounts on this rank.
        plan_for: also report whether the checkpoint can be loaded at these sizes.
        against: also compare the tensors, by fingerprint, with this manifest or checkpoint.
        missing_chunks: treatment of absent zarr chunks: ``fill``, or ``error`` to report each.
        team: ranks that work together; every rank calls this with the same arguments.
        device: accelerator for per-byte work; None for the CPU.

    Raises:
        CapacityError: an object has too many values for the memory limit.
        UsageError: the path does not exist, it holds another iteration, or the manifest of
            ``against`` has no usable fingerprints.
        CheckpointingException: ``rules`` or ``against`` cannot be read.
        WorkerError: a rank of the team failed, or sees another checkpoint.
    """
    begun = time.monotonic()
    on_open = count_steps(progress, Phase.CHECKING, unit="files")

    # Opening reads file names and metadata only, on every rank.
    def open_subject() -> Subject:
        table: Rules | None = None
        if rules is not None:
            from core.megatron.rules.tables import load_rules

            table = load_rules(rules)
        with limit_objects(memory_bytes):
            location = locate_checkpoint(path, iteration=iteration)
        location.store.on_open = on_open
        subject = Subject(
            path=location.path,
            root=path,
            store=location.store,
            format=location.format,
            level=level,
            own_rules=table,
            iteration=location.iteration,
            passed=location.passed,
            failure=location.failure,
            below=location.below,
            notes=(*location.notes, *_other_iterations(location)),
            threads=threads,
            memory_bytes=memory_bytes,
            progress=progress,
            plan_for=plan_for,
            missing_chunks=missing_chunks,
            team=team,
            device=device,
        )
        # The caller closes the store of a subject, but not that of a rejected one.
        try:
            if not location.is_chosen:
                _require_iteration(subject, iteration)
        except BaseException:
            location.store.close()
            raise
        return subject

    # All ranks must see the same checkpoint before any of them reads data.
    subject = require_agreement(team, open_subject, _observed_state, subject=str(path))
    with closing(subject.store), limit_objects(memory_bytes):
        if against is not None:
            from core.verbs.checks.comparison import read_reference

            subject.against = read_reference(
                against,
                rules=subject.rules,
                threads=threads,
                memory_bytes=memory_bytes,
                progress=progress,
                team=team,
                device=device,
            )
        # A single process reads data during the checks; a team does so before, all ranks together.
        figures = _read_together(subject) if team.size > 1 else ()
        return broadcast_result(team, lambda: _run_checks(subject, begun, figures))


def _other_iterations(location: Located) -> tuple[str, ...]:
    """Return a note on the iterations of a training root that are not checked."""
    others = list_other_iterations(location.passed, location.path)
    names = [path.name for path in reversed(others)]
    count = "one other iteration was" if len(names) == 1 else f"{len(names)} other iterations were"
    return (f"{count} not checked (use --all-iterations): {list_some(names)}",) if names else ()


def _observed_state(subject: Subject) -> object:
    """Return the state that all ranks must agree on: the checkpoint, its format and its files."""
    files = {} if subject.format is None else subject.files
    return (
        str(subject.path),
        subject.iteration,
        subject.format_name,
        observe_files(subject.store, files),
    )


def _read_together(subject: Subject) -> tuple[Figures, ...]:
    """Run the passes over data, which the ranks of a team share; the checks use their results.

    Returns:
        The work of each rank, on the lead.

    Raises:
        WorkerError: a rank failed.
    """

    passes: list[Sequence[Figures]] = [idle_figures(subject.team)]
    if subject.level == Level.DEEP:
        try:
            passes.append(subject.byte_scan.scanned.figures)
        except WorkerError:
            raise
        except CheckpointingException:
            pass  # all ranks fail in the same way, and the checks report the error
    if subject.against is not None:
        from core.verbs.checks.content.fingerprints import read_together

        passes += [subject.against.figures, read_together(subject)]
    return sum_figures(passes)


def _run_checks(subject: Subject, begun: float, figures: tuple[Figures, ...]) -> Validation:
    """Run the checks of the subject's level and return the result.

    Args:
        begun: time at which the validation began, by ``time.monotonic``.
        figures: work of each rank.
    """
    n_checks = 0
    format = subject.format
    with gc_paused(), nullcontext() if format is None else format.reading_once():
        for check in checks(subject.level, subject.format_name):
            _run_check(check, subject)
            n_checks += 1
    # A path that is not a checkpoint may be a complete file system, which is not listed.
    files = {} if format is None else subject.files
    form = subject.canonical
    unread: tuple[str, ...] = ()
    if subject.n_unopened:
        count = "one rank file" if subject.n_unopened == 1 else f"{subject.n_unopened:,} rank files"
        unread = (f"contents of {count} that match a checked file in stage and size (--headers)",)
    reference = subject.against
    return Validation(
        path=str(subject.path),
        format=subject.format_name,
        level=subject.level,
        findings=tuple(sorted(_with_hostile_hints(subject), key=lambda finding: finding.order)),
        n_files=len(files),
        n_bytes=sum(files.values()),
        n_tensors=len(form.catalog.tensors) if form is not None and form.is_global else 0,
        n_checks=n_checks,
        seconds=time.monotonic() - begun,
        n_ends=len(subject.ends.heads),
        is_proven=(subject.level == Level.DEEP and not subject.hollow)
        or (subject.has_stated and _are_files_of_manifest(subject)),
        notes=subject.notes,
        unchecked=(*unread, *_unchecked_model(subject)),
        against=None if reference is None else (reference.label, subject.n_compared),
        figures=figures,
        contains_checkpoints=subject.failure is not None
        and subject.failure.rule == CHECKPOINTS_BELOW,
    )


def _are_files_of_manifest(subject: Subject) -> bool:
    """Return whether an object store states the checksums that the manifest has of all files."""
    from core.verbs.checks.content.store_checksums import are_files_of_manifest

    return are_files_of_manifest(subject)


def _unchecked_model(subject: Subject) -> tuple[str, ...]:
    """Return a note if a model of Hugging Face is of a family that cannot be checked."""
    if subject.format is None or not subject.format.has_hf_config:
        return ()
    from core.verbs.checks.metadata.hf_model import unchecked

    return unchecked(subject)


def _with_hostile_hints(subject: Subject) -> Iterator[Finding]:
    """Yield the findings; those on a hostile file have its hint, not that to fetch it again."""
    hints = {finding.file: finding.hint for finding in subject.findings if finding.code in HOSTILE}
    hints.pop(None, None)
    for finding in subject.findings:
        is_other = finding.file in hints and finding.code not in HOSTILE
        yield replace(finding, hint=hints[finding.file]) if is_other else finding


def _run_check(check: Check, subject: Subject) -> None:
    """Run one check; an error that ends it becomes a finding, so that the others still run."""
    from core.verbs.checks.opening import UNREADABLE, is_covered_by_finding

    # Findings are added one by one: a check sees its own, and those before an error are kept.
    try:
        subject.findings += check.run(subject)
    except CheckpointingException as err:
        if is_covered_by_finding(subject, err):
            return
        finding = UNREADABLE.finding(
            err.message, file=err.file, key=err.key, rank=err.rank, span=err.span, hint=err.hint
        )
        subject.findings.append(finding)


def _require_iteration(subject: Subject, requested: int | None) -> None:
    """Raise unless the checkpoint is the requested iteration, or cannot be opened.

    Raises:
        UsageError: the checkpoint has another iteration, or does not record it.
    """
    if requested is None or subject.iteration == requested or subject.failure is not None:
        return
    iteration = subject.iteration
    if iteration is None and subject.catalog is not None:
        iteration = subject.catalog.iteration
    if iteration != requested:
        actual = (
            "the checkpoint does not record its iteration"
            if iteration is None
            else f"this is iteration {iteration}"
        )
        raise UsageError(
            f"--iteration {requested} was requested, but {actual}",
            file=str(subject.root),
            hint="pass the directory that contains the iterations",
        )


def build_refusal(path: Path, *, level: Level, error: UsageError) -> Validation:
    """Build the result for a path that cannot be checked, among those of other paths."""
    from core.verbs.checks.opening import UNREADABLE

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


def distinct_paths(
    paths: Iterable[Path], *, iteration: int | None = None
) -> dict[Path, UsageError | None]:
    """Drop paths that lead to the same checkpoint as an earlier one.

    Several files of one directory, for example, are one checkpoint.

    Returns:
        path → the error that prevents checking it, such as a missing file; None without an error.
    """
    # real path of a checkpoint → the first path that leads to it
    path_of: dict[str, Path] = {}
    errors: dict[Path, UsageError | None] = {}
    for path in paths:
        try:
            location = locate_checkpoint(path, iteration=iteration)
        except UsageError as err:
            errors[path] = err
            continue
        location.store.close()
        errors.setdefault(path_of.setdefault(str(location.path.resolve()), path), None)
    return errors
