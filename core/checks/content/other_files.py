"""CK607: other files next to the weights that Python would unpickle or NumPy would load.

NumPy's object arrays, joblib files and compressed pickles are inspected as far as Python's standard
library allows (``core.formats.torch.other_pickles``), whatever their names;
``core.checks.metadata.unsafe`` judges what they call. Files that hold the checkpoint itself are for
other checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject

NOT_INSPECTED = Code(
    "CK607",
    Severity.NOTE,
    "a pickle that was not inspected",
    "load the file only if you know and trust who wrote it",
    Level.DEEP,
)

CODES = (NOT_INSPECTED,)


def report_uninspected(subject: Subject) -> Iterator[Finding]:
    """Report files with a pickle that is too large, or packed in an unsupported way (CK607)."""
    for (file, key), content in subject.other_pickles.items():
        for reason in content.unread[:1]:
            n_more = len(content.unread) - 1
            message = f"not inspected: {reason[:200]}" + (
                f"; nor were {n_more} other parts" if n_more else ""
            )
            yield NOT_INSPECTED.finding(message, file=file, key=key)


CHECKS = (Check(report_uninspected, Level.DEEP),)
