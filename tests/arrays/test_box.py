"""core.arrays.box: geometry by brute force over element sets."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import (
    Box,
    boxes_of_flat_range,
    c_strides,
    flat_offset,
    full_box,
    is_c_contiguous,
)

_axes = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=0, max_size=3)


def _box(axes: list[tuple[int, int]]) -> Box:
    return Box(tuple(o for o, _ in axes), tuple(n for _, n in axes))


def _elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    first = draw(_axes)
    second = draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, 4)),
            min_size=len(first),
            max_size=len(first),
        )
    )
    return _box(first), _box(second)


@given(_pairs())
def test_intersection_holds_exactly_the_common_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert (set() if common is None else _elements(common)) == _elements(a) & _elements(b)


@given(_pairs())
def test_subtraction_gives_disjoint_boxes_of_the_other_elements(pair: tuple[Box, Box]) -> None:
    a, b = pair
    pieces = a.subtract(b)
    assert all(not piece.is_empty for piece in pieces)
    assert len(pieces) <= max(1, 2 * a.rank)
    together = [element for piece in pieces for element in _elements(piece)]
    assert len(together) == len(set(together))
    assert set(together) == _elements(a) - _elements(b)


@given(_pairs())
def test_containment_agrees_with_element_sets(pair: tuple[Box, Box]) -> None:
    a, b = pair
    if not b.is_empty:
        assert a.contains(b) == (_elements(b) <= _elements(a))


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple), st.data())
def test_flat_range_boxes_hold_exactly_that_range(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    boxes = boxes_of_flat_range(shape, start, stop)
    flat = [
        sum(i * s for i, s in zip(element, c_strides(shape), strict=True))
        for box in boxes
        for element in sorted(_elements(box))
    ]
    assert flat == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_flat_range_outside_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="is not inside"):
        boxes_of_flat_range((2, 3), 4, 7)


def test_boxes_of_different_rank_are_never_mixed() -> None:
    with pytest.raises(ValueError, match="rank"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))
    with pytest.raises(ValueError, match="rank"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        Box((-1,), (1,))


def test_split_follows_the_sizes_and_refuses_a_wrong_sum() -> None:
    assert Box((4, 0), (6, 2)).split(0, [1, 5]) == [Box((4, 0), (1, 2)), Box((5, 0), (5, 2))]
    with pytest.raises(ValueError, match="add up"):
        full_box((3,)).split(0, [1, 1])


@given(st.lists(st.integers(0, 3), max_size=3).map(tuple))
def test_c_strides_are_contiguous(shape: tuple[int, ...]) -> None:
    assert is_c_contiguous(shape, c_strides(shape))


def test_transposed_and_padded_strides_are_not_contiguous() -> None:
    assert not is_c_contiguous((4, 6), (1, 4))
    assert not is_c_contiguous((4, 6), (8, 1))
    assert is_c_contiguous((1, 6), (99, 1))
    assert is_c_contiguous((4, 0), (7, 7))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (2, 3, 5)])
def test_a_box_begins_where_the_range_that_it_was_cut_from_does(shape: tuple[int, ...]):
    for start in range(prod(shape)):
        assert flat_offset(boxes_of_flat_range(shape, start, prod(shape))[0], shape) == start
