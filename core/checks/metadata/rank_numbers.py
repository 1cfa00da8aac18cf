"""CK507: every rank's file lies in the directory of the rank that wrote it.

A training run keeps its own number in the arguments of each file (``args.rank``). However a run numbers its ranks, the
numbers rise along each axis of the directories' names while the others stay::

    mp_rank_00_000  rank 0      mp_rank_00_001  rank 2        a step along TP, PP or EP: a larger number
    mp_rank_01_000  rank 1      mp_rank_01_001  rank 3

So directories that were exchanged, and files that were copied over another rank's, are told although every tensor has
the right shape. Tools that convert checkpoints leave one number in all files: those say nothing.

Source: Megatron-LM d98e8a64 ``core/parallel_state.py`` ``RankGenerator`` (strides are positive); tests/golden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from core.catalog.facets import RankFacts
from core.checks.check import Check, Code
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.subject import Subject
from core.errors import CheckpointingException
from core.megatron.model.args import fields_of
from core.pickle.inert import as_mapping

SWAPPED = Code(
    "CK507",
    Severity.ERROR,
    "a rank directory holds the file of another rank",
    "give the directories their right names, or copy the checkpoint again",
    Level.HEADERS,
)

CODES = (SWAPPED,)


def in_place(subject: Subject) -> Iterator[Finding]:
    """The numbers in the files against the names of the directories."""
    numbers = _numbers(subject)
    counts = Counter(numbers.values())
    if len(counts) < 2 or numbers.keys() != _folders(subject):
        return
    if max(counts.values()) > 1:
        for folder, number in numbers.items():
            if counts[number] > 1:
                yield _finding(folder, number, "a number that no other has", "the number of another as well")
        return
    due: dict[str, int] = {}
    for line in _lines(numbers):
        for folder, number in zip(line, sorted(numbers[name] for name in line), strict=True):
            if number != numbers[folder]:
                due.setdefault(folder, number)
    for folder, number in due.items():
        yield _finding(folder, numbers[folder], f"rank {number}", f"rank {numbers[folder]}")


def _finding(folder: str, number: int, expected: str, found: str) -> Finding:
    return SWAPPED.finding(
        f"its arguments say that rank {number} wrote it", rank=folder, key="rank", expected=expected, found=found
    )


def _folders(subject: Subject) -> set[str]:
    return {folder for folder, _ in _ranks(subject)}


def _ranks(subject: Subject) -> Collection[tuple[str, object]]:
    """Return (rank directory, content of its file) of every rank."""
    catalog = subject.salvaged.catalog
    facts = None if catalog is None else catalog.facet(RankFacts)
    return () if facts is None else facts.ranks.values()


def _numbers(subject: Subject) -> dict[str, int]:
    """Rank directory → the number of the rank that wrote its file."""
    found: dict[str, int] = {}
    for folder, root in _ranks(subject):
        try:
            number = fields_of((as_mapping(root) or {}).get("args")).get("rank")
        except CheckpointingException:
            continue
        if isinstance(number, int) and not isinstance(number, bool):
            found[folder] = number
    return found


def _lines(folders: Mapping[str, int]) -> Iterator[list[str]]:
    """The directories whose names differ in one number only, in the order of that number."""
    lines: dict[tuple[object, ...], list[tuple[int, str]]] = {}
    for folder in folders:
        parts = folder.split("_")[2:]
        if not all(part.isdecimal() for part in parts):
            return
        for axis, part in enumerate(parts):
            lines.setdefault((axis, *parts[:axis], None, *parts[axis + 1 :]), []).append((int(part), folder))
    for line in lines.values():
        yield [folder for _, folder in sorted(line)]


CHECKS = (Check(in_place, Level.HEADERS, formats=("megatron",)),)
