"""Chunk grids and chunk names: pure geometry."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import Box
from core.arrays.coverage import first_hole, first_overlap
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import Fragment, TargetFragment
from core.errors import UnsupportedError
from core.formats.zarr.grid import (
    ChunkGrid,
    ChunkNames,
    find_band_shape,
    grid_of_pieces,
    is_like_a_chunk,
)
from core.formats.zarr.shards import are_bands

AXES = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=4)


@given(AXES)
def test_chunks_tile_the_tensor(axes: list[tuple[int, int]]) -> None:
    grid = ChunkGrid(tuple(n for n, _ in axes), tuple(step for _, step in axes))
    indices = list(grid.indices())
    assert len(indices) == grid.n_chunks
    assert [grid.number_of(index) for index in indices] == list(range(len(indices)))
    assert [grid.index_at(number) for number in range(len(indices))] == indices
    boxes = [grid.box(index) for index in indices]
    assert first_overlap(boxes) is None
    assert first_hole(Box((0,) * len(axes), grid.shape), boxes) is None or 0 in grid.shape


@pytest.mark.parametrize("index", [(2, 0), (0, 3), (-1, 0)])
def test_an_index_beyond_the_grid_has_no_number(index: tuple[int, ...]) -> None:
    assert ChunkGrid((4, 6), (2, 2)).number_of(index) is None


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 500))
def test_bands_divide_the_array_and_are_as_large_as_fits(
    extents: list[int], itemsize: int, most: int
) -> None:
    shape = tuple(extents)
    band = find_band_shape(shape, itemsize, most_bytes=most)
    assert len(band) == len(shape)
    assert all(n % part == 0 for n, part in zip(shape, band, strict=True))
    assert are_bands(shape, band)
    assert prod(band) * itemsize <= max(most, itemsize)


def test_bands_of_long_axes_are_found_at_once() -> None:
    assert find_band_shape((1 << 40,), 1, most_bytes=1 << 24) == (1 << 24,)
    assert find_band_shape((2, 1 << 30), 2, most_bytes=1 << 24) == (1, 1 << 23)


def fragments(boxes: list[Box]) -> list[TargetFragment]:
    origin = (0,) * len(boxes[0].shape)
    return [
        Fragment(box, PlannedArray(f"w@{n}", "float32", box.shape), origin)
        for n, box in enumerate(boxes)
    ]


def test_equal_pieces_are_a_grid_in_any_order() -> None:
    boxes = [Box((2 * i, 3 * j), (2, 3)) for i, j in product(range(2), range(3))]
    grid, arrays = grid_of_pieces("w", (4, 9), fragments(boxes[::-1]))
    assert grid == ChunkGrid((4, 9), (2, 3))
    assert {index: array.name for index, array in arrays.items()} == {
        (i, j): f"w@{5 - 3 * i - j}" for i, j in product(range(2), range(3))
    }


def test_an_array_in_several_fragments_is_one_chunk() -> None:
    array = PlannedArray("w", "float32", (4, 3))
    parts = [Fragment(Box((row, 0), (2, 3)), array, (row, 0)) for row in (0, 2)]
    grid, arrays = grid_of_pieces("w", (4, 3), parts)
    assert (grid.chunk_shape, arrays) == ((4, 3), {(0, 0): array})


def test_arrays_with_fewer_axes_are_chunks_of_extent_one() -> None:
    parts = [
        Fragment(Box((n, 0), (1, 3)), PlannedArray(f"w{n}", "float32", (3,)), (0,))
        for n in range(2)
    ]
    grid, arrays = grid_of_pieces("w", (2, 3), parts)
    assert grid.chunk_shape == (1, 3)
    assert [arrays[n, 0].name for n in range(2)] == ["w0", "w1"]


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0,), (3,)), Box((3,), (4,))],
        [Box((0,), (4,)), Box((4,), (3,))],
        [Box((0,), (3,))],
        [Box((1,), (3,)), Box((4,), (3,))],
    ],
)
def test_unequal_or_missing_pieces_are_refused(boxes: list[Box]) -> None:
    with pytest.raises(UnsupportedError, match="regular grid") as caught:
        grid_of_pieces("w", (7,), fragments(boxes))
    assert caught.value.key == "w"


@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("has_prefix", [False, True])
@given(index=st.lists(st.integers(0, 10**12), max_size=5))
def test_names_and_indices_are_each_others_inverse(
    separator: str, has_prefix: bool, index: list[int]
) -> None:
    names = ChunkNames(len(index), separator, has_prefix)
    name = names.name(tuple(index))
    assert names.index(name) == tuple(index)
    assert name.count("/") == names.n_folders


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0",
        "0.0.0",
        "00.0",
        "0.-1",
        "0.1x",
        "a.b",
        "c.0.0",
        "0/0",
        "١.0",
        ".zarray",
        "0." + "9" * 30,
    ],
)
def test_other_names_are_no_chunks(name: str) -> None:
    assert ChunkNames(2, ".").index(name) is None


def test_names_of_scalars() -> None:
    assert ChunkNames(0, ".").name(()) == "0"
    assert ChunkNames(0, "/", has_prefix=True).name(()) == "c"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("0", True),
        ("0.1", True),
        ("c/0", True),
        ("c.3.4", True),
        (".zattrs", False),
        ("0.0.lock", False),
    ],
)
def test_what_could_be_a_chunk_is_told_from_other_files(name: str, is_one: bool) -> None:
    assert is_like_a_chunk(name) == is_one
