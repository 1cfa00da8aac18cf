"""The report as JUnit XML, which GitLab, Jenkins and others show.

A checkpoint is a test suite, and every code that can occur at its level is a test case. A case with
errors is a failure whose text lists them. Warnings and notes are not failures: they are the output
of a case that passes. A code whose findings are all ignored or known is skipped.

::

    testsuites [name tests failures errors skipped time]
    └── testsuite [name tests failures errors skipped time]
        ├── properties / property [name value]
        ├── testcase [classname name]
        │   ├── skipped [message]  or  failure [message type], text
        │   └── system-out, text
        └── system-out, text: notes about the checkpoint

Source: the elements and attributes that the schemas of Jenkins' xUnit plugin, Ant and pytest have
in common. Time stamps and host names are omitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ckpt_cli.findings.grouping import group_similar
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.terminal import escaped
from core.verbs.checks.finding import Code, Finding, Severity, codes

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict

_PLAN_CODES = "CK9"
"""Codes of ``--plan-for``, which are test cases only if they have findings."""


def junit_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the XML document."""
    suites = [_Suite(verdict) for verdict in verdicts]
    seconds = sum(verdict.validation.seconds for verdict in verdicts)
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f"<testsuites {_counts('ckpt validate', suites, seconds)}>"
    for suite in suites:
        yield from suite.lines()
    yield "</testsuites>"


class _Suite:
    """The test cases of one checkpoint.

    Args:
        verdict: the result of its validation.

    Attributes:
        cases: (``passed``, ``failure`` or ``skipped``; lines of the element) of each case.
        n_failed, n_skipped: number of cases with this outcome.
    """

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        # A case for each code that could have been found, and for each that was.
        judgement = verdict.judgement
        findings = (*judgement.counted, *judgement.ignored, *judgement.known)
        level = verdict.validation.level
        table = codes()
        checked = [
            code.code
            for code in table.values()
            if code.level <= level and not code.code.startswith(_PLAN_CODES)
        ]
        names = sorted({*checked, *(finding.code for finding in findings)})
        self.cases = [self._case(name, table.get(name)) for name in names]
        self.n_failed = sum(kind == "failure" for kind, _ in self.cases)
        self.n_skipped = sum(kind == "skipped" for kind, _ in self.cases)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the suite's element."""
        validation = self._verdict.validation
        yield f"  <testsuite {_counts(validation.path, [self], validation.seconds)}>"
        yield "    <properties>"
        for name, value in (
            ("format", validation.format or "not recognized"),
            ("level", validation.level.name.lower()),
            ("files", validation.n_files),
            ("bytes", validation.n_bytes),
            ("tensors", validation.n_tensors),
        ):
            yield f'      <property name="{name}" value="{_text(str(value))}"/>'
        yield "    </properties>"
        for _, lines in self.cases:
            yield from lines
        if validation.notes:
            notes = "\n".join(f"note: {note}" for note in validation.notes)
            yield f"    <system-out>{_text(notes, keeps_lines=True)}</system-out>"
        yield "  </testsuite>"

    def _case(self, name: str, code: Code | None) -> tuple[str, list[str]]:
        """Return the outcome of a code's case and the lines of its element.

        Args:
            name: the code.
            code: its description; None if this version of ckpt does not have it.
        """
        # The findings with this code. Only errors count as failures.
        judgement, path = self._verdict.judgement, self._verdict.validation.path
        counted = [finding for finding in judgement.counted if finding.code == name]
        n_accepted = sum(finding.code == name for finding in (*judgement.ignored, *judgement.known))
        errors = [finding for finding in counted if finding.severity == Severity.ERROR]
        warnings = [finding for finding in counted if finding.severity != Severity.ERROR]
        title = f"{name} {code.title}" if code else name
        lines = [f'    <testcase classname="{_text(path)}" name="{_text(title)}">']
        # At most one failure or skipped element, then the output.
        outcome = "passed"
        if errors:
            outcome = "failure"
            message = _text(errors[0].message if len(errors) == 1 else f"{len(errors)} × {title}")
            text = _findings_text(errors, path)
            lines.append(
                f'      <failure message="{message}" type="{_text(name)}">{text}</failure>'
            )
        elif n_accepted and not counted:
            outcome = "skipped"
            lines.append(
                f'      <skipped message="{n_text(n_accepted, "finding")} ignored or known"/>'
            )
        if warnings:
            lines.append(f"      <system-out>{_findings_text(warnings, path)}</system-out>")
        # An element without content is written as one tag.
        lines.append("    </testcase>")
        return outcome, lines if len(lines) > 2 else [f"{lines[0][:-1]}/>"]


def _counts(name: str, suites: Sequence[_Suite], seconds: float) -> str:
    """Return the attributes that count the cases of one or more suites."""
    n_cases = sum(len(suite.cases) for suite in suites)
    n_failed = sum(suite.n_failed for suite in suites)
    n_skipped = sum(suite.n_skipped for suite in suites)
    return (
        f'name="{_text(name)}" tests="{n_cases}" failures="{n_failed}" errors="0" '
        f'skipped="{n_skipped}" time="{seconds:.3f}"'
    )


def _findings_text(findings: Sequence[Finding], path: str) -> str:
    """Return the findings as the text of an element, with a paragraph for each group."""
    lines = []
    for group in group_similar(findings, path=path):
        times = f"{len(group.findings)} × " if len(group.findings) > 1 else ""
        place = f"{group.first.severity.label}: {times}{group.place or 'the checkpoint'}"
        lines += [
            place,
            f"  {group.message}",
            *([f"  → {group.first.hint}"] if group.first.hint else []),
        ]
    return _text("\n".join(lines), keeps_lines=True)


def _text(text: str, *, keeps_lines: bool = False) -> str:
    """Escape text for an element or attribute.

    Control characters, most of which XML cannot express, are spelled out; line feeds stay with
    ``keeps_lines``.
    """
    parts = text.split("\n") if keeps_lines else [text]
    return escape("\n".join(map(escaped, parts)))
