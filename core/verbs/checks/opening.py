"""CK100: the error that prevented opening the checkpoint, unless another check reports it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from core.errors import CheckpointingException, MissingShardError, TruncatedError
from core.verbs.checks.check import Check, Finding, Severity, get_code
from core.verbs.checks.file_codes import NOT_HANDLED
from core.verbs.checks.problems import finding_of
from core.verbs.checks.subject import Subject

UNREADABLE = get_code("CK100")


def find_opening_error(subject: Subject) -> Iterator[Finding]:
    """Report the error that ended the reading of the metadata, unless a finding covers it."""
    err = subject.failure if subject.catalog is None else None
    if err is None or is_covered_by_finding(subject, err):
        return
    # Missing and truncated files have codes of their own.
    is_of_file = err.file is not None and isinstance(err, (TruncatedError, MissingShardError))
    yield finding_of(err, default=UNREADABLE, code=None if is_of_file else UNREADABLE)


def find_endless_containers(subject: Subject) -> Iterator[Finding]:
    """Report containers that contain themselves, which no conversion can write."""
    refused = {} if subject.catalog is None else subject.catalog.refused
    if not refused:
        return
    from core.pickle.nesting import ENDLESS, endless_error

    for key, kind in refused.items():
        if kind == ENDLESS:
            yield finding_of(endless_error(key), default=NOT_HANDLED, file=subject.store.entry)


def is_covered_by_finding(subject: Subject, err: CheckpointingException) -> bool:
    """Return whether an earlier error finding covers an error.

    A finding about the same tensor or file does. If the error names no file, or only the checkpoint
    itself, any error finding does.
    """
    errors = [finding for finding in subject.findings if finding.severity == Severity.ERROR]
    if err.key is not None and any(finding.key == err.key for finding in errors):
        return True
    if err.file is None or Path(err.file) in (subject.path, subject.root, subject.store.root):
        return bool(errors)
    file = _absolute(subject, err.file)
    return any(
        finding.file is not None and _absolute(subject, finding.file) == file for finding in errors
    )


def _absolute(subject: Subject, file: str) -> str:
    """Return the absolute path of a file that an error or a finding names."""
    return os.path.abspath(os.path.join(str(subject.store.root), file))


CHECKS = (Check(find_opening_error), Check(find_endless_containers))
