"""CK507: check that every rank file is in the directory of the rank that wrote it.

``core.megatron.extras.rank_numbers`` says how the number of a file's rank proves it.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.catalog.facets import RankFacts
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.megatron.extras.rank_numbers import MISPLACED_HINT, describe_misplaced, find_misplaced

SWAPPED = Code(
    "CK507",
    Severity.ERROR,
    "a rank directory holds the file of another rank",
    MISPLACED_HINT,
    Level.HEADERS,
)

CODES = (SWAPPED,)


def check_rank_numbers(subject: Subject) -> Iterator[Finding]:
    """Compare the rank numbers in the files with the names of the directories."""
    catalog = subject.salvaged.catalog
    facts = None if catalog is None else catalog.facet(RankFacts)
    if facts is None:
        return
    for misplaced in find_misplaced(facts.ranks.values()):
        is_copy = misplaced.expected is None
        yield SWAPPED.finding(
            describe_misplaced(misplaced.number),
            rank=misplaced.folder,
            key="args.rank",
            expected="a number of its own" if is_copy else f"rank {misplaced.expected}",
            found="the number of another rank" if is_copy else f"rank {misplaced.number}",
        )


CHECKS = (Check(check_rank_numbers, Level.HEADERS, formats=("megatron",)),)
