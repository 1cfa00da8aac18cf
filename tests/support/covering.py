"""Few of many combinations, in which every pair of values still occurs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering_rows(rows: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Return the numbers of rows that together hold every pair of values that some row holds.

    Greedy: the next row is the one that adds the most pairs, the first of them if several do. Of
    a full product of three axes, about as many rows are left as the two longest axes have pairs.

    Args:
        rows: the combinations; each has the same names. A row of one name is a pair of its own.
    """
    pairs = [
        set(combinations(sorted(row.items(), key=lambda item: item[0]), 2)) or set(row.items())
        for row in rows
    ]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        number = max(range(len(rows)), key=lambda index: (len(pairs[index] & missing), -index))
        chosen.append(number)
        missing -= pairs[number]
    return sorted(chosen)
