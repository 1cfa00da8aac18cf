"""Which combinations of a product run by default, and that no value and no pair is lost."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import covering_cases, covering_rows, every_third


def _groups(rows: list[dict[str, int]], n_together: int) -> set[object]:
    return {
        group
        for row in rows
        for group in combinations(sorted(row.items()), min(n_together, len(row)))
    }


@pytest.mark.parametrize(
    ("sizes", "n_values", "n_pairs"),
    [
        ((4, 4, 4), 4, 16),
        ((3, 5, 5), 5, 25),
        ((2, 2, 2), 2, 4),
        ((3, 4), 4, 12),
        ((5,), 5, 5),
    ],
    ids=str,
)
def test_every_value_and_every_pair_is_in_a_chosen_row(
    sizes: tuple[int, ...], n_values: int, n_pairs: int
) -> None:
    rows = [
        dict(zip("abc", values, strict=False)) for values in product(*(range(n) for n in sizes))
    ]
    for n_together, n_expected in ((1, n_values), (2, n_pairs)):
        chosen = [rows[number] for number in covering_rows(rows, n_together=n_together)]
        assert _groups(chosen, n_together) == _groups(rows, n_together)
        assert n_expected <= len(chosen) <= 1.4 * n_expected


def test_values_of_a_short_axis_take_turns() -> None:
    rows = [{"a": a, "b": b} for a in range(2) for b in range(6)]
    chosen = covering_rows(rows, n_together=1)
    assert sorted(rows[number]["b"] for number in chosen) == list(range(6))
    assert sum(rows[number]["a"] for number in chosen) == 3


def test_rows_that_are_no_product_keep_the_pairs_that_they_have() -> None:
    rows: list[dict[str, int]] = [{"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0, "c": 1}]
    assert covering_rows(rows) == [0, 1]
    assert covering_rows([*rows, {"a": 0, "b": 0, "c": 0}]) == [0, 1]


def test_the_first_case_of_each_kind_is_short_unless_it_is_long_already() -> None:
    cases = [pytest.param(11, marks=pytest.mark.long), 12, 13, 21, pytest.param(22, id="b")]
    marked = covering_cases(cases, lambda number: {"tens": number // 10})
    assert [case.values for case in marked] == [(11,), (12,), (13,), (21,), (22,)]
    assert [bool(case.marks) for case in marked] == [True, False, True, False, True]
    assert marked[4].id == "b"


def test_every_third_of_those_that_are_short_stays_short() -> None:
    cases = [0, pytest.param(1, marks=pytest.mark.long), 2, 3, 4, 5]
    marked = every_third(cases, start=1)
    assert [case.values for case in marked if not case.marks] == [(2,), (5,)]
    assert [len(case.marks) for case in marked] == [1, 1, 0, 1, 1, 0]


@pytest.mark.pairwise
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("c", [[0], [1]], ids=["0", "1"])
def test_of_pairs(a: int, b: int, c: list[int]) -> None:
    assert {a, b, *c} <= {0, 1}


@pytest.mark.each_value
@pytest.mark.parametrize("a", [0, 1, True])
@pytest.mark.parametrize("b", [0, 1])
def test_of_values(a: int, b: int) -> None:
    assert {a, b} <= {0, 1}


@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.long)])
def test_of_long_ones(a: int) -> None:
    assert a in (0, 1)


@pytest.mark.first(2)
@pytest.mark.parametrize("a", [0, pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_of_first_ones(a: int) -> None:
    assert a in (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("name", "n_short", "n_all"),
    [("pairs", 4, 8), ("values", 3, 6), ("long_ones", 1, 2), ("first_ones", 2, 4)],
)
def test_the_others_are_left_to_long_runs(
    name: str, n_short: int, n_all: int, request: pytest.FixtureRequest
) -> None:
    items = [item for item in request.session.items if f"::test_of_{name}[" in item.nodeid]
    if not items:
        pytest.skip("they were not collected")
    assert len(items) == (n_all if request.config.getoption("--long") else n_short)
