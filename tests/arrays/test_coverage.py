"""Overlaps and holes, against comparing everything with everything."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import Box, full_box
from core.arrays.coverage import BoxIndex, first_hole, first_overlap, is_tiled


def boxes(rank: int, *, most: int = 7) -> st.SearchStrategy[list[Box]]:
    numbers = st.tuples(*[st.integers(0, 6)] * rank)
    extents = st.tuples(*[st.integers(1, 4)] * rank)
    return st.lists(st.builds(Box, numbers, extents), min_size=1, max_size=most)


sets_of_boxes = st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank, most=1)))


@given(sets_of_boxes)
def test_an_overlap_is_found_exactly_if_two_boxes_meet(drawn: tuple[list[Box], list[Box]]) -> None:
    some, _ = drawn
    brute = [
        (i, j) for j in range(len(some)) for i in range(j) if some[i].intersect(some[j]) is not None
    ]
    answer = first_overlap(some)
    assert (answer in brute) if brute else answer is None


@given(sets_of_boxes)
def test_the_index_finds_what_comparing_all_would_find(drawn: tuple[list[Box], list[Box]]) -> None:
    some, (query,) = drawn
    wanted = [
        (number, common)
        for number, box in enumerate(some)
        if (common := box.intersect(query)) is not None
    ]
    assert sorted(BoxIndex(some).meeting(query), key=lambda hit: hit[0]) == wanted


@given(sets_of_boxes)
def test_a_hole_lies_in_the_region_and_in_no_box(drawn: tuple[list[Box], list[Box]]) -> None:
    some, (region,) = drawn
    hole = first_hole(region, some)
    if hole is None:
        covered = sum(len(first_parts) for first_parts in [_elements(region, some)])
        assert covered == region.n_elements
    else:
        assert region.contains(hole) and not hole.is_empty
        assert all(hole.intersect(box) is None for box in some)


def _elements(region: Box, some: list[Box]) -> set[tuple[int, ...]]:
    elements = set()
    for box in some:
        common = box.intersect(region)
        if common is not None:
            for number in range(common.n_elements):
                index = []
                for extent, offset in zip(
                    reversed(common.shape), reversed(common.offset), strict=True
                ):
                    index.append(offset + number % extent)
                    number //= extent
                elements.add(tuple(index))
    return elements


def test_a_large_shuffled_grid_is_proven_without_comparing_all_pairs() -> None:
    grid = [Box((i * 3, j * 5), (3, 5)) for i in range(120) for j in range(120)]
    random.Random(1).shuffle(grid)
    region = full_box((360, 600))
    assert is_tiled(region, grid)
    missing = grid.pop()
    assert not is_tiled(region, grid)
    assert first_hole(region, grid) == missing
    assert not is_tiled(region, [*grid, grid[0]])
    index = BoxIndex(grid)
    assert all([number for number, _ in index.meeting(box)] == [n] for n, box in enumerate(grid))
