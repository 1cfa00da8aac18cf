"""Tests marked ``pairwise``: which of their combinations are left, and that no pair is lost."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairwise import covering_rows


def _pairs(rows: list[dict[str, int]]) -> set[object]:
    return {pair for row in rows for pair in combinations(sorted(row.items()), 2)}


@pytest.mark.parametrize(
    ("sizes", "n_chosen"),
    [((4, 4, 4), 16), ((3, 5, 5), 25), ((2, 2, 2), 4), ((3, 4), 12), ((5,), 5)],
    ids=str,
)
def test_every_pair_of_values_is_in_a_chosen_row(sizes: tuple[int, ...], n_chosen: int) -> None:
    rows = [
        dict(zip("abc", values, strict=False)) for values in product(*(range(n) for n in sizes))
    ]
    chosen = covering_rows(rows)
    assert _pairs([rows[number] for number in chosen]) == _pairs(rows)
    assert n_chosen <= len(chosen) <= 1.4 * n_chosen


def test_rows_that_are_no_product_keep_the_pairs_that_they_have() -> None:
    rows: list[dict[str, int]] = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 1}]
    assert covering_rows(rows) == [0, 1]
    assert covering_rows([*rows, {"a": 0, "b": 0, "c": 0}]) == [0, 1]


@pytest.mark.pairwise
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("c", [[0], [1]], ids=["0", "1"])
def test_of_a_product(a: int, b: int, c: list[int]) -> None:
    assert {a, b, *c} <= {0, 1}


def test_half_of_that_product_is_left_to_long_runs(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if "::test_of_a_product[" in item.nodeid]
    if len(items) < 8:
        pytest.skip("some of it were not collected")
    kept = [item for item in items if item.get_closest_marker("skip") is None]
    assert len(kept) == (8 if request.config.getoption("--long") else 4)
