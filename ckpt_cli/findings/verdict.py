"""The value that reports describe: one checkpoint's validation, and its findings that count."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ckpt_cli.screen.blocks import n_text
from core.values import dataclass
from core.verbs.checks.check import Finding, Level, Severity
from core.verbs.validate.accepted import Judgement
from core.verbs.validate.run import Validation

LEVELS = {Level.METADATA: "metadata", Level.HEADERS: "headers", Level.DEEP: "deep"}
"""Level → its name in reports."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of validating one checkpoint.

    Args:
        validation: the checkpoint, what was read of it, and all findings.
        judgement: the findings, divided into those that count, are ignored, and are known.
    """

    validation: Validation
    judgement: Judgement

    @property
    def worst(self) -> Severity | None:
        """The worst severity of the findings that count; None without any."""
        return max((finding.severity for finding in self.judgement.counted), default=None)

    @property
    def counts_text(self) -> str:
        """Number of findings that count, by severity: ``2 errors, 1 warning``; ``no findings``."""
        counted = [
            (severity, self.judgement.n_of(severity)) for severity in sorted(Severity, reverse=True)
        ]
        return ", ".join(n_text(n, severity.label) for severity, n in counted if n) or "no findings"

    def path_of(self, finding: Finding) -> str:
        """Return the path of a finding's file or, if it concerns none, of the checkpoint.

        The result is relative if the checkpoint's path is relative.
        """
        root = self.validation.path
        name = finding.file
        if name is None or "\0" in name:
            return root
        folder = os.path.dirname(root) if os.path.isfile(root) else root
        path = os.path.join(folder, name)
        # A tracker is next to the checkpoint's directory; the finding contains its path as it is.
        is_outside = os.path.lexists(name) and not os.path.lexists(path)
        return name if is_outside else path


def mark_of(worst: Severity | None) -> tuple[str, str]:
    """Return the mark of a result and its colour: ``✗``, ``!`` or ``✓``."""
    marks = {Severity.ERROR: ("✗", "red"), Severity.WARNING: ("!", "yellow")}
    return marks.get(worst or Severity.NOTE, ("✓", "green"))


def exit_code_of(verdicts: Sequence[Verdict]) -> int:
    """Return 0 if no error counts in any checkpoint, else 1."""
    return 0 if all(verdict.judgement.is_valid for verdict in verdicts) else 1
