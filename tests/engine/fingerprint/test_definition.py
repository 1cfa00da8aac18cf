"""The fingerprint scheme: its definition against a slow implementation, its golden values, and what
it notices.
"""

from __future__ import annotations

import random
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.arrays.box import Box, Shape, c_strides
from core.engine.fingerprint.definition import (
    LANES,
    PRIME,
    add_lanes,
    form_of,
    format_lanes,
    parse_lanes,
)
from core.engine.fingerprint.kernel import (
    Products,
    fastest_products,
    products_in_numpy,
    products_in_torch,
)
from core.engine.fingerprint.sums import FormSum
from core.errors import UnsupportedError
from tests.support.rounds import rounds


def splitmix64(count: int) -> int:
    """Output number ``count`` (from 0) of SplitMix64 with seed 0."""
    state = (count + 1) * 0x9E3779B97F4A7C15 % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def factor(table: int, index: int, lane: int) -> int:
    """f(table, index, lane) of the definition."""
    z = splitmix64((4096 * table + index) * 16 + lane)
    return 2 * (z // 2**57) - 127 if table == 0 else 1 + z % (2**31 - 2)


@cache
def plain(shape: Shape, itemsize: int, data: bytes) -> tuple[int, ...]:
    """The fingerprint as its definition says it, a byte at a time; shares no code with the
    toolkit.
    """
    row, axes = itemsize, list(shape)
    while axes and row < 512:
        row *= axes.pop()
    divisors = [n for n in range(1, min(row, 4096) + 1) if row % n == 0]
    block = max(divisors, default=1)
    if row > 4096 and block < 512:
        block = 4096
    n_blocks = -(-row // block)
    lanes = [0] * 16
    for at, byte in enumerate(data):
        value = byte - 256 if byte > 127 else byte
        if not value:
            continue
        number = at // row * n_blocks + at % row // block
        digits = (number % 4096, number // 4096 % 4096, number // 4096**2)
        for lane in range(16):
            weight = 1
            for table, digit in enumerate(digits, 1):
                weight = weight * factor(table, digit, lane)
            lanes[lane] += value * factor(0, at % row % block, lane) * weight
    return tuple(lane % (2**31 - 1) for lane in lanes)


ENGINES = (products_in_numpy, products_in_torch)
SHAPES: tuple[tuple[Shape, int], ...] = (
    ((), 4),
    ((0, 5), 4),
    ((1,), 1),
    ((7,), 2),
    ((600,), 1),
    ((5, 3), 2),
    ((3, 300), 2),
    ((2, 2, 257), 4),
    ((300, 3), 2),
    ((4, 70, 2), 4),
    ((2, 4099), 1),
    ((1, 4608), 1),
    ((2, 1100), 4),
    ((2, 3, 4, 5), 8),
)


def content(shape: Shape, itemsize: int, *, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(prod(shape) * itemsize)


def lanes_of(
    shape: Shape, itemsize: int, data: bytes, products: Products = products_in_numpy
) -> tuple[int, ...]:
    form_sum = FormSum(form_of(shape, itemsize), products)
    form_sum.add_run(0, memoryview(data))
    assert form_sum.n_bytes == len(data)
    return form_sum.lanes


@pytest.mark.each_value
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("shape", "itemsize"), SHAPES)
def test_both_engines_compute_what_the_definition_says(
    shape: Shape, itemsize: int, engine: Products
) -> None:
    data = content(shape, itemsize)
    assert lanes_of(shape, itemsize, data, engine) == plain(shape, itemsize, data)


def test_extreme_bytes_do_not_overflow() -> None:
    for byte in (b"\x80", b"\x7f"):
        data = byte * 4096
        assert (
            lanes_of((1, 4096), 1, data)
            == lanes_of((1, 4096), 1, data, products_in_torch)
            == plain((1, 4096), 1, data)
        )
    large = b"\x80" * (1 << 22)
    assert lanes_of((1 << 22,), 1, large) == lanes_of((1 << 22,), 1, large, products_in_torch)


def test_golden_values() -> None:
    """Whatever is changed in the code, ``fp1`` stays what it is."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # SplitMix64's published first output for seed 0
    assert [factor(0, 0, lane) for lane in range(4)] == GOLDEN_SMALL
    assert [factor(table, 4095, 15) for table in (1, 2, 3)] == GOLDEN_LARGE
    counting = bytes(n % 251 for n in range(6 * 5 * 130 * 2))
    assert format_lanes(lanes_of((6, 5, 130), 2, counting)) == GOLDEN_TEXT
    assert format_lanes(lanes_of((), 4, b"\x00\x00\x80\x3f")) == GOLDEN_SCALAR


GOLDEN_SMALL = [99, -17, -121, 121]
GOLDEN_LARGE = [2037566770, 1135523187, 337064195]
GOLDEN_TEXT = (
    "04ed09061d6e378b16d9a07b1c6ebf185f27a2d839908bdc5710c1b1170e5590"
    "6e57b33b42acee854920f1921983f5796a4a602901b3d8ec1390965a611774de"
)
GOLDEN_SCALAR = (
    "4f60f7cd68f044d3715a11c761c2ad8263fbc58b2a1c19b83ff2d6e175c7d5ef"
    "5b7154ac5badc9de2002ca93485f41d9526f4e0203afc93153d1b7fb72f8a4e9"
)


def test_numbers_of_blocks_far_away_have_their_own_weights() -> None:
    """Blocks beyond 4096 and 4096², which no test tensor reaches, against the plain product of
    three factors.
    """
    form = form_of((1 << 20, 16, 4096), 4)
    for row in (0, 4095, 4096, (1 << 24) - 1):
        form_sum = FormSum(form, products_in_numpy)
        form_sum.add_run(row * form.row_bytes + 4096, memoryview(b"\x01"))
        number = row * 4 + 1
        digits = (number % 4096, number // 4096 % 4096, number // 4096**2)
        assert form_sum.lanes == tuple(
            factor(0, 0, lane)
            * factor(1, digits[0], lane)
            * factor(2, digits[1], lane)
            * factor(3, digits[2], lane)
            % PRIME
            for lane in range(LANES)
        )


@st.composite
def _cut_tensors(draw: st.DrawFn) -> tuple[Shape, int, list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    if draw(st.booleans()):
        shape = (*shape[:1], draw(st.sampled_from((130, 515, 1030, 4100))))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, box.shape[axis]))
        boxes += box.split(axis, (first, box.shape[axis] - first))
    return shape, draw(st.sampled_from((1, 2, 4, 8))), boxes


@given(_cut_tensors())
@settings(max_examples=rounds(150))
def test_boxes_that_tile_a_tensor_add_up_to_it(case: tuple[Shape, int, list[Box]]) -> None:
    shape, itemsize, boxes = case
    data = content(shape, itemsize)
    elements = np.frombuffer(data, f"V{itemsize}").reshape(shape)
    wanted = lanes_of(shape, itemsize, data)
    form = form_of(shape, itemsize)
    parts = []
    together = FormSum(form, products_in_numpy)
    for box in boxes:
        part = elements[
            tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
        ].tobytes()
        alone = FormSum(form, products_in_torch)
        alone.add_box(shape, box, itemsize, memoryview(part))
        together.add_box(shape, box, itemsize, memoryview(part))
        parts.append(alone.lanes)
    assert add_lanes(parts) == together.lanes == wanted


@given(st.data())
@settings(max_examples=rounds(60))
def test_runs_that_end_anywhere_add_up(data: st.DataObject) -> None:
    shape, itemsize = data.draw(st.sampled_from([case for case in SHAPES if prod(case[0])]))
    content_ = content(shape, itemsize)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content_)), max_size=6)))
    form_sum = FormSum(form_of(shape, itemsize), products_in_numpy)
    spans = list(zip((0, *cuts), (*cuts, len(content_)), strict=True))
    for start, stop in data.draw(st.permutations(spans)):
        form_sum.add_run(start, memoryview(content_)[start:stop])
    assert form_sum.lanes == lanes_of(shape, itemsize, content_)


def test_wide_boxes_of_joined_axes_are_spread_in_pieces() -> None:
    shape, box = (300_000, 8), Box((5, 3), (299_000, 2))
    elements = np.arange(prod(shape), dtype=np.uint16).reshape(shape)
    only = np.zeros_like(elements)
    only[5:299_005, 3:5] = elements[5:299_005, 3:5]
    form_sum = FormSum(form_of(shape, 2), products_in_numpy)
    form_sum.add_box(shape, box, 2, memoryview(elements[5:299_005, 3:5].tobytes()))
    assert form_sum.lanes == lanes_of(shape, 2, only.tobytes())


def test_any_flipped_bit_is_seen() -> None:
    for shape, itemsize in (((5, 3), 2), ((2, 257), 4)):
        data = content(shape, itemsize)
        fingerprints = {lanes_of(shape, itemsize, data)}
        for at, bit in product(range(len(data)), range(8)):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            fingerprints.add(lanes_of(shape, itemsize, bytes(changed)))
        assert len(fingerprints) == 1 + 8 * len(data)


@pytest.mark.parametrize("shape", [(12, 300), (6, 4, 5), (3, 8192)])
def test_swapped_and_moved_rows_columns_and_elements_are_seen(shape: Shape) -> None:
    chance = random.Random(3)
    elements = np.frombuffer(content(shape, 2), np.uint16).reshape(shape)
    fingerprints = {lanes_of(shape, 2, elements.tobytes())}
    n_changes = 0
    for axis in range(len(shape)):
        for _ in range(12):
            i, other = chance.sample(range(shape[axis]), 2)
            order = list(range(shape[axis]))
            order[i], order[other] = other, i
            fingerprints.add(lanes_of(shape, 2, elements.take(order, axis).tobytes()))
            n_changes += 1
        fingerprints.add(lanes_of(shape, 2, np.roll(elements, 1, axis).tobytes()))
        n_changes += 1
    flat = elements.reshape(-1)
    for _ in range(200):
        i, other = chance.sample(range(flat.size), 2)
        for moved in (flat[[i, other]][::-1], np.array([0, flat[i]], np.uint16)):
            changed = flat.copy()
            changed[[i, other]] = moved
            fingerprints.add(lanes_of(shape, 2, changed.tobytes()))
            n_changes += 1
    repeats = 2 * 12 * len(shape)  # the same two rows may be drawn twice
    assert n_changes - repeats < len(fingerprints) - 1 <= n_changes


def test_one_value_at_every_place_has_as_many_fingerprints() -> None:
    shape = (64, 130)
    fingerprints = set()
    for at in range(prod(shape)):
        form_sum = FormSum(form_of(shape, 2), products_in_numpy)
        form_sum.add_run(2 * at, memoryview(b"\x80\x3f"))
        fingerprints.add(form_sum.lanes)
    assert len(fingerprints) == prod(shape)


def test_few_values_in_many_places_do_not_collide() -> None:
    """All 2^14 choices of zero and one in 14 elements: sums of small numbers, where collisions
    would show first.
    """
    form = form_of((14,), 1)
    singles = []
    for at in range(14):
        form_sum = FormSum(form, products_in_numpy)
        form_sum.add_run(at, memoryview(b"\x01"))
        singles.append(np.array(form_sum.lanes))
    sums = np.zeros((1, LANES), np.int64)
    for single in singles:
        sums = np.concatenate([sums, (sums + single) % PRIME])
    assert len(np.unique(sums, axis=0)) == 1 << 14
    assert all(
        len(np.unique(sums[:, lane])) < 1 << 14 for lane in range(LANES)
    )  # one lane alone would not do


def test_zeros_add_nothing() -> None:
    data = content((3, 300), 2)
    assert lanes_of((5, 300), 2, data + bytes(1200)) == lanes_of((3, 300), 2, data)
    assert lanes_of((3, 300), 2, bytes(1800)) == (0,) * LANES


def test_read_only_bytes_are_taken_without_a_warning() -> None:
    data = content((4, 4096), 1)
    assert lanes_of((4, 4096), 1, bytes(data), products_in_torch) == lanes_of((4, 4096), 1, data)


def test_texts_are_read_back_and_others_refused() -> None:
    lanes = lanes_of((3, 300), 2, content((3, 300), 2))
    assert parse_lanes(format_lanes(lanes)) == lanes
    for wrong in ("", "f" * 128, "0" * 127, "g" * 128, "+" + "0" * 127):
        with pytest.raises(ValueError, match="not a fingerprint"):
            parse_lanes(wrong)


def test_too_large_a_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="too large"):
        form_of((1 << 40, 4096), 1)


def test_the_kernel_restores_the_threads_of_torch() -> None:
    import torch

    before = torch.get_num_threads()
    with fastest_products(1 << 40) as products:
        data = content((4, 4096), 1)
        assert lanes_of((4, 4096), 1, data, products) == lanes_of((4, 4096), 1, data)
    assert torch.get_num_threads() == before


def test_strides_of_the_definition_are_those_of_c_order() -> None:
    assert c_strides((2, 3, 4)) == (12, 4, 1)
