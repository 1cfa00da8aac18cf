"""CK901–CK903: the answer to ``--plan-for``, whether the checkpoint can be loaded or resharded as asked.

The answer is ``core.plan_for``'s; without a request nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.checks import Check, Code
from core.finding import Finding, Severity

if TYPE_CHECKING:
    from core.checks.subject import Subject

IMPOSSIBLE = Code(
    "CK901",
    Severity.ERROR,
    "it cannot be loaded or resharded as asked",
    "ask for other sizes; ckpt inspect says what can be done",
)
POSSIBLE = Code("CK902", Severity.NOTE, "how it is loaded or resharded as asked", "run what it says")
PARTLY = Code(
    "CK903",
    Severity.NOTE,
    "what would not be carried to what was asked",
    "see whether the training needs it; the source keeps it",
)

CODES = (IMPOSSIBLE, POSSIBLE, PARTLY)


def planned(subject: Subject) -> Iterator[Finding]:
    """What was asked for is prepared, as far as that goes without moving data."""
    if subject.plan_for is None:
        return
    from core.plan_for import answer  # all of the engine

    yield from answer(subject, subject.plan_for)


CHECKS = (Check(planned),)
