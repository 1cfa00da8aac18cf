"""The report as JUnit's XML, as GitLab, Jenkins and others show it.

A checkpoint is a test suite, every code that its level can find is a test case, and one with errors is a failure whose
text lists them. Warnings and notes are no failures: they are the output of a case that passes. A code of which all
findings are ignored or known is skipped.

::

    testsuites [name tests failures errors skipped time]
    └── testsuite [name tests failures errors skipped time]
        ├── properties / property [name value]
        ├── testcase [classname name]
        │   ├── skipped [message]  or  failure [message type], text
        │   └── system-out, text
        └── system-out, text: which checkpoint was taken, and what was not looked at

Source: the elements and attributes that the schemas of Jenkins' xUnit plugin, Ant and pytest have in common. There are
no time stamps and host names in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from ckpt_cli.findings.grouping import alike
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.terminal import escaped
from core.checks.check import Code
from core.checks.finding import Finding, Severity
from core.checks.registry import codes

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict

_ASKED = "CK9"
"""Codes that only answer a question; they are cases only where there is an answer."""


def junit_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The document."""
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
        verdict: what was found.
    """

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        judgement = verdict.judgement
        everything = (*judgement.counted, *judgement.ignored, *judgement.known)
        present = {finding.code for finding in everything}
        level = verdict.validation.level
        table = codes()
        names = [c.code for c in table.values() if c.level <= level and not c.code.startswith(_ASKED)]
        self.cases = [self._case(name, table.get(name)) for name in sorted({*names, *present})]
        self.n_failed = sum(kind == "failure" for kind, _ in self.cases)
        self.n_skipped = sum(kind == "skipped" for kind, _ in self.cases)

    def lines(self) -> Iterator[str]:
        """The suite's element."""
        validation = self._verdict.validation
        yield f"  <testsuite {_counts(validation.path, [self], validation.seconds)}>"
        yield "    <properties>"
        for name, value in (
            ("format", validation.format or "not recognised"),
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

    def _case(self, code: str, known: Code | None) -> tuple[str, list[str]]:
        """What the case is (``passed``, ``failure``, ``skipped``) and its element."""
        judgement, path = self._verdict.judgement, self._verdict.validation.path
        counted = [finding for finding in judgement.counted if finding.code == code]
        left_out = sum(finding.code == code for finding in (*judgement.ignored, *judgement.known))
        errors = [finding for finding in counted if finding.severity == Severity.ERROR]
        others = [finding for finding in counted if finding.severity != Severity.ERROR]
        name = f"{code} {known.title}" if known else code
        lines = [f'    <testcase classname="{_text(path)}" name="{_text(name)}">']
        kind = "passed"
        if errors:
            kind = "failure"
            message = _text(errors[0].message if len(errors) == 1 else f"{len(errors)} × {name}")
            lines.append(f'      <failure message="{message}" type="{_text(code)}">{_listed(errors, path)}</failure>')
        elif left_out and not counted:
            kind = "skipped"
            lines.append(f'      <skipped message="{n_text(left_out, "finding")} ignored or known"/>')
        if others:
            lines.append(f"      <system-out>{_listed(others, path)}</system-out>")
        lines.append("    </testcase>")
        return kind, lines if len(lines) > 2 else [f"{lines[0][:-1]}/>"]


def _counts(name: str, suites: Sequence[_Suite], seconds: float) -> str:
    """The attributes of a suite, or of all."""
    n_cases = sum(len(suite.cases) for suite in suites)
    n_failed = sum(suite.n_failed for suite in suites)
    n_skipped = sum(suite.n_skipped for suite in suites)
    return (
        f'name="{_text(name)}" tests="{n_cases}" failures="{n_failed}" errors="0" skipped="{n_skipped}" '
        f'time="{seconds:.3f}"'
    )


def _listed(findings: Sequence[Finding], path: str) -> str:
    """Findings, a paragraph each, as the text of an element."""
    lines = []
    for one in alike(findings, path=path):
        times = f"{len(one.findings)} × " if len(one.findings) > 1 else ""
        place = f"{one.first.severity.label}: {times}{one.where or 'the checkpoint'}"
        lines += [place, f"  {one.what}", *([f"  → {one.first.hint}"] if one.first.hint else [])]
    return _text("\n".join(lines), keeps_lines=True)


def _text(text: str, *, keeps_lines: bool = False) -> str:
    """``text`` for an element or attribute: XML has no way to write most control characters, so they are spelled."""
    parts = text.split("\n") if keeps_lines else [text]
    return escape("\n".join(map(escaped, parts)))
