"""CK100: what kept the checkpoint from being opened, where no other check says it better."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from core.checks.check import Check, Code
from core.checks.file_codes import NOT_HANDLED
from core.checks.finding import Finding, Severity
from core.checks.problems import finding_of
from core.checks.subject import Subject
from core.errors import CheckpointingException, MissingShardError, TruncatedError
from core.pickle.cycles import ENDLESS, endless_error

UNREADABLE = Code(
    "CK100",
    Severity.ERROR,
    "the checkpoint cannot be read",
    "copy the checkpoint again, or use an older one",
)

CODES = (UNREADABLE,)


def readable(subject: Subject) -> Iterator[Finding]:
    """The error that reading the metadata ended with, unless an error was found at the same place."""
    err = subject.failure if subject.catalog is None else None
    if err is None or is_explained(subject, err):
        return
    is_of_file = err.file is not None and isinstance(err, (TruncatedError, MissingShardError))
    yield finding_of(err, default=UNREADABLE, code=None if is_of_file else UNREADABLE)


def ends(subject: Subject) -> Iterator[Finding]:
    """Find containers that contain themselves, which no conversion can follow to their end."""
    for key, kind in subject.catalog.unsupported.items() if subject.catalog is not None else ():
        if kind == ENDLESS:
            yield finding_of(endless_error(key), default=NOT_HANDLED, file=subject.store.entry)


def is_explained(subject: Subject, err: CheckpointingException) -> bool:
    """Whether a finding says what an error says: one about its file or tensor or, if it names no file, any error."""
    errors = [finding for finding in subject.findings if finding.severity == Severity.ERROR]
    if err.key is not None and any(finding.key == err.key for finding in errors):
        return True
    if err.file is None or Path(err.file) in (subject.path, subject.root, subject.store.root):
        return bool(errors)
    named = _absolute(subject, err.file)
    return any(finding.file is not None and _absolute(subject, finding.file) == named for finding in errors)


def _absolute(subject: Subject, file: str) -> str:
    """A file's path; errors name it relative to the checkpoint, or as the user would."""
    return os.path.abspath(os.path.join(subject.store.root, file))


CHECKS = (Check(readable), Check(ends))
