"""CK100: what kept the checkpoint from being opened, where no other check says it better."""

from __future__ import annotations

from collections.abc import Iterator

from core.checks import Check, Code
from core.checks.subject import Subject
from core.finding import Finding, Severity

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
    if err is None:
        return
    for finding in subject.findings:
        is_there = (err.file, err.key) == (finding.file, finding.key) or err.file in (None, finding.file)
        if finding.severity == Severity.ERROR and is_there:
            return
    yield UNREADABLE.finding(err.message, file=err.file, key=err.key, rank=err.rank, span=err.span, hint=err.hint)


CHECKS = (Check(readable),)
