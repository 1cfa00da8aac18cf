"""Few of many combinations, in which every value, or every pair of values, still occurs.

A test of a product is marked ``each_value`` or ``pairwise`` (``tests/conftest.py``); where the
axes are inside the values of one parameter, ``covering_cases`` marks the others ``long``. Of a long
table that several tests go through, ``every_third`` leaves each of them other rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def covering_rows(rows: Sequence[Mapping[str, Hashable]], *, n_together: int = 2) -> list[int]:
    """Return the numbers of rows that together hold every group of values that some row holds.

    Greedy: the next row is the one that adds the most groups, the first of them if several do. Of
    a full product of three axes, about as many rows are left as the two longest axes have pairs.
    With ``n_together=1``, as many are left as the longest axis has values; those of the shorter
    ones take turns.

    Args:
        rows: the combinations; each has the same names. A row of fewer names than a group is a
            group of its own.
        n_together: how many values make a group: 2 for pairs, 1 for each value.
    """
    groups = [
        set(combinations(sorted(row.items(), key=lambda item: item[0]), min(n_together, len(row))))
        for row in rows
    ]
    missing = set().union(*groups)
    n_chosen: Counter[tuple[str, Hashable]] = Counter()
    chosen = []
    while missing:
        n_added = [len(group & missing) for group in groups]
        most = max(n_added)
        best = [number for number, n in enumerate(n_added) if n == most]
        if n_together == 1:
            best.sort(key=lambda number: sum(n_chosen[item] for item in rows[number].items()))
        number = best[0]
        chosen.append(number)
        n_chosen.update(rows[number].items())
        missing -= groups[number]
    return sorted(chosen)


def covering_cases(
    cases: Iterable[Any], axes: Callable[..., Mapping[str, Hashable]], *, n_together: int = 1
) -> list[ParameterSet]:
    """Return the cases for ``parametrize``, marked ``long`` save those that cover every value.

    Example: of each family the first model by default, the others with ``--long``::

        @pytest.mark.parametrize(
            "model", covering_cases(MODELS, lambda model: {"family": model.family})
        )

    Args:
        cases: each the value of one parameter, or a ``pytest.param``, whose marks and id stay; one
            that is marked ``long`` covers nothing.
        axes: takes a case's values and returns what it holds of every axis.
        n_together: 1 to cover every value, 2 to cover every pair of values.
    """
    marked = _parameter_sets(cases)
    short = _short(marked)
    rows = [axes(*marked[number].values) for number in short]
    covering = {short[number] for number in covering_rows(rows, n_together=n_together)}
    for number in set(short) - covering:
        marked[number] = _long(marked[number])
    return marked


def every_third(cases: Iterable[Any], *, start: int = 0) -> list[ParameterSet]:
    """Return the cases for ``parametrize``, marked ``long`` save every third of those that are not.

    For tests of a long table, each row of which another test tries: with other starts, they take
    other rows.

    Args:
        cases: as of ``covering_cases``.
        start: 0, 1 or 2; the first case that is not marked.
    """
    marked = _parameter_sets(cases)
    short = _short(marked)
    for number in set(short) - set(short[start::3]):
        marked[number] = _long(marked[number])
    return marked


def _parameter_sets(cases: Iterable[Any]) -> list[ParameterSet]:
    return [case if isinstance(case, ParameterSet) else ParameterSet.param(case) for case in cases]


def _short(cases: Sequence[ParameterSet]) -> list[int]:
    """Return the numbers of the cases that are not marked ``long``."""
    return [
        number
        for number, case in enumerate(cases)
        if all(getattr(mark, "name", "") != "long" for mark in case.marks)
    ]


def _long(case: ParameterSet) -> ParameterSet:
    return case._replace(marks=[*case.marks, pytest.mark.long])
