"""Verdicts made by hand, for what writes reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_cli.findings.verdict import Verdict
from core.verbs.checks.check import Finding, Level, Severity
from core.verbs.validate.accepted import Acceptance
from core.verbs.validate.run import Validation

HOSTILE = "a\x1b[2J\n::error::x##[debug]]>&<\"'\u202e\udc80%0A,:[l](http://e){0}"
"""A name that means something to terminals, XML, GitHub's runner and SARIF's viewers."""


def finding(
    code: str = "CK100",
    severity: Severity = Severity.ERROR,
    message: str = "the file ends early",
    **parts: object,
) -> Finding:
    return Finding(code=code, severity=severity, message=message, **parts)  # type: ignore[arg-type]


def verdict(
    findings: Iterable[Finding] = (),
    *,
    path: str = "runs/iter_0000010",
    level: Level = Level.METADATA,
    acceptance: Acceptance | None = None,
    notes: tuple[str, ...] = (),
) -> Verdict:
    listed: Sequence[Finding] = tuple(findings)
    validation = Validation(
        path=path,
        format="dcp",
        level=level,
        findings=tuple(listed),
        n_files=3,
        n_bytes=4096,
        n_tensors=7,
        n_checks=5,
        seconds=0.25,
        notes=notes,
    )
    return Verdict(validation, (acceptance or Acceptance()).judge(listed))
