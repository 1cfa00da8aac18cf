"""Report the entries of the source that the destination does not hold (``catalog.dropped``).

``dropped_lines`` is the complete list, ``group_by_reason`` sums it up.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.engine.catalog.dropped import Dropped
from core.engine.catalog.key_patterns import fold_labels
from core.values import dataclass

MAX_EXAMPLES = 2
"""Maximum number of entries that ``DroppedReason`` names."""


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


def dropped_lines(dropped: Iterable[Dropped]) -> tuple[str, ...]:
    """Return the complete list as lines, with the numbers of layers and experts folded."""
    return tuple(fold_labels(entries.label_and_ending for entries in dropped))


def group_by_reason(dropped: Iterable[Dropped]) -> tuple[DroppedReason, ...]:
    """Sum up dropped entries, one value for each reason in order of first appearance."""
    groups: dict[str, dict[str, None]] = {}
    for entries in dropped:
        groups.setdefault(entries.reason, {}).update(dict.fromkeys(entries.names))
    return tuple(
        DroppedReason(reason, len(names), tuple(names)[:MAX_EXAMPLES])
        for reason, names in groups.items()
    )
