"""CK607: files that lie beside the weights, and that Python would unpickle or NumPy would load.

Arrays of objects of NumPy, joblib's files and compressed pickles are looked into as far as Python's standard library
goes (``core.formats.torch.other_pickles``), whatever they are called; what they call is found by
``core.checks.metadata.unsafe``. Files that hold the checkpoint itself are for other checks.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject

NOT_LOOKED_INTO = Code(
    "CK607",
    Severity.NOTE,
    "a pickle that is not looked into",
    "load the file only if you know and trust who wrote it",
    Level.DEEP,
)

CODES = (NOT_LOOKED_INTO,)


def not_looked_into(subject: Subject) -> Iterator[Finding]:
    """CK607: what holds a pickle, or may hold one, and is too large or packed in a way that is not handled."""
    for (file, key), looked in subject.other_pickles.items():
        for reason in looked.unread[:1]:
            others = len(looked.unread) - 1
            message = f"not looked into: {reason[:200]}" + (f"; {others} other parts are not either" if others else "")
            yield NOT_LOOKED_INTO.finding(message, file=file, key=key)


CHECKS = (Check(not_looked_into, Level.DEEP),)
