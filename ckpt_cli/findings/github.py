"""The report as GitHub's workflow commands: annotations at files, and a line for people.

::

    ::error file=PATH,title=CK101 a file is missing::what is wrong%0Awhat to do

Similar findings share one annotation, since GitHub shows only ten of a kind per step.

Source: GitHub, "Workflow commands for GitHub Actions"; the runner splits a command at ``::``, its
properties at ``,`` and ``:``, and decodes ``%25``, ``%0D``, ``%0A``, in properties also ``%3A`` and
``%2C``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.findings.grouping import group_similar
from ckpt_cli.screen.blocks import n_text
from ckpt_cli.screen.terminal import escaped
from core.verbs.checks.check import Severity, codes

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict

_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def github_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield the commands of each checkpoint, followed by a line of text about it."""
    for verdict in verdicts:
        # An annotation for each group of similar findings: place, message and hint on lines.
        for group in group_similar(verdict.judgement.counted, path=verdict.validation.path):
            first = group.first
            code = codes().get(first.code)
            title = f"{first.code} {code.title}" if code else first.code
            times = f" × {len(group.findings)}" if len(group.findings) > 1 else ""
            text = [group.place, group.message, f"→ {first.hint}" if first.hint else ""]
            data = "%0A".join(_data(part) for part in text if part)
            properties = (
                f"file={_property(verdict.path_of(first))},title={_property(title + times)}"
            )
            yield f"::{_COMMANDS[first.severity]} {properties}::{data}"
        # Notes about the checkpoint, and a line that is no command, for the log.
        path = verdict.validation.path
        for note in verdict.validation.notes:
            yield f"::notice file={_property(path)},title=ckpt validate::{_data(note)}"
        mark = "✓" if verdict.judgement.is_valid else "✗"
        size = n_text(verdict.validation.n_files, "file")
        yield f"{mark} {verdict.counts_text} in {_inert(path)} ({size})"


def _inert(text: str) -> str:
    """Return the text with ``##[`` broken up: the runner finds old commands anywhere in a line."""
    return escaped(text).replace("##[", "##\\[")


def _data(text: str) -> str:
    """Escape the text after a command's ``::``."""
    return _inert(text).replace("%", "%25")


def _property(text: str) -> str:
    """Escape the value of a command's property."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
