"""The report as GitHub's workflow commands: annotations at files, and a line for people.

::

    ::error file=PATH,title=CK101 a file is missing::what is wrong%0Awhat to do

Findings that are alike are one annotation, since GitHub shows ten of a kind for a step.

Source: GitHub, "Workflow commands for GitHub Actions"; the runner splits a command at ``::``, its properties at ``,``
and ``:``, and decodes ``%25``, ``%0D``, ``%0A``, in properties also ``%3A`` and ``%2C``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.findings.grouping import alike
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.terminal import escaped
from core.checks.finding import Severity
from core.checks.registry import codes

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def github_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """The commands, and after those of each checkpoint a line about it."""
    for verdict in verdicts:
        for one in alike(verdict.judgement.counted, path=verdict.validation.path):
            known = codes().get(one.first.code)
            title = f"{one.first.code} {known.title}" if known else one.first.code
            times = f" × {len(one.findings)}" if len(one.findings) > 1 else ""
            text = [one.where, one.what, f"→ {one.first.hint}" if one.first.hint else ""]
            data = "%0A".join(_data(part) for part in text if part)
            place = f"file={_property(verdict.path_of(one.first))},title={_property(title + times)}"
            yield f"::{_COMMANDS[one.first.severity]} {place}::{data}"
        for note in verdict.validation.notes:
            yield f"::notice file={_property(verdict.validation.path)},title=ckpt validate::{_data(note)}"
        mark = "✓" if verdict.judgement.is_valid else "✗"
        size = n_text(verdict.validation.n_files, "file")
        yield f"{mark} {verdict.counts_text} in {_inert(verdict.validation.path)} ({size})"


def _inert(text: str) -> str:
    """``text`` without what the runner takes for a command anywhere in a line."""
    return escaped(text).replace("##[", "##\\[")


def _data(text: str) -> str:
    return _inert(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
