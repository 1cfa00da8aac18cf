"""Entries of the source that the destination does not hold, and their reasons.

The steps of a conversion describe each such entry as a line, ``entry (reason)``; entries that share
a reason are one ``DroppedEntries``. ``group_by_reason`` sums them up for a report.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from core.catalog.files_beside import NOT_CARRIED
from core.catalog.key_patterns import folded

MAX_EXAMPLES = 2
"""Maximum number of entries that ``DroppedReason`` names."""


@dataclass(frozen=True, slots=True)
class DroppedEntries:
    """Entries that are not carried over for one reason.

    Args:
        names: names of the entries: keys, or paths of files.
        reason: why the destination does not hold them.
        line: the line about them in the complete list.
    """

    names: tuple[str, ...]
    reason: str
    line: str


@dataclass(frozen=True, slots=True)
class DroppedReason:
    """A reason for not carrying entries over.

    Args:
        reason: why the destination does not hold the entries.
        n_entries: number of entries.
        examples: names of the first ``MAX_EXAMPLES`` entries.
    """

    reason: str
    n_entries: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.examples)
        if self.n_entries > len(self.examples):
            names = f"{self.n_entries:,} entries such as {names}"
        return f"{names} ({self.reason})" if self.reason else names


def parse_dropped(lines: Iterable[str]) -> tuple[DroppedEntries, ...]:
    """Parse the lines of ``Catalog.dropped``: ``entry (reason)``, or a list of carried files."""
    result = []
    for line in lines:
        label, _, paths = line.partition(": ")
        if label == NOT_CARRIED:
            result.append(DroppedEntries(tuple(paths.split(", ")), label, line))
            continue
        name, mark, reason = line.partition(" (")
        result.append(DroppedEntries((name,), reason.removesuffix(")") if mark else "", line))
    return tuple(result)


def unread_entries(names: Iterable[str]) -> DroppedEntries:
    """Describe files of the source directory that no reader opened."""
    paths = tuple(names)
    reason = "other files of the directory"
    return DroppedEntries(paths, reason, f"{reason}: {', '.join(paths)}")


def dropped_lines(dropped: Iterable[DroppedEntries]) -> tuple[str, ...]:
    """Return the complete list as lines, with the numbers of layers and experts folded."""
    return tuple(folded((entries.line for entries in dropped), end=" ("))


def group_by_reason(dropped: Iterable[DroppedEntries]) -> tuple[DroppedReason, ...]:
    """Sum up dropped entries, one value for each reason in order of first appearance."""
    groups: dict[str, dict[str, None]] = {}
    for entries in dropped:
        groups.setdefault(entries.reason, {}).update(dict.fromkeys(entries.names))
    return tuple(
        DroppedReason(reason, len(names), tuple(names)[:MAX_EXAMPLES])
        for reason, names in groups.items()
    )
