"""The geometry of fused tensors, against numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.arrays.box import Box, full_box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Fragment, Tensor
from core.hf.tensors import fuse

Sizes = tuple[int, list[int], int, list[int]]


@st.composite
def _sizes(draw: st.DrawFn) -> Sizes:
    """(groups, rows of each part in a group, columns, rows at which stored pieces are cut)."""
    groups = draw(st.integers(1, 5))
    shares = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    total = groups * sum(shares)
    cuts = draw(st.lists(st.integers(0, total), max_size=4))
    return groups, shares, draw(st.integers(1, 3)), sorted({0, total, *cuts})


def _pieces(key: str, n_rows: int, columns: int, cuts: list[int]) -> list[Fragment]:
    """A tensor stored in row pieces, each with a margin of one row in its array, which has a
    leading axis.
    """
    bounds = sorted({0, n_rows, *(cut for cut in cuts if cut <= n_rows)})
    fragments = []
    for start, stop in pairwise(bounds):
        array = StoredArray(
            f"{key}@{start}", "uint8", (1, stop - start + 2, columns), Extent(key, start)
        )
        fragments.append(Fragment(Box((start, 0), (stop - start, columns)), array, (0, 1, 0)))
    return fragments


def _stored(key: str, numbers: np.ndarray, columns: int, cuts: list[int]) -> Tensor:
    """Return a matrix as a tensor that is stored in row pieces."""
    return Tensor("uint8", numbers.shape, lambda: _pieces(key, len(numbers), columns, cuts))


def _filled(tensor: Tensor, data: dict[str, np.ndarray]) -> np.ndarray:
    """Return the elements of a tensor, each of which is filled once."""
    filled_array = np.zeros(tensor.shape, np.int64)
    count = np.zeros(tensor.shape, int)
    for piece in tensor.fragments():
        assert piece.array is not None
        stored = data[piece.array.extent.file]  # the whole tensor that the array is cut from
        first = piece.array.extent.offset + piece.at[-2] - 1
        region = tuple(slice(o, e) for o, e in zip(piece.box.offset, piece.box.end, strict=True))
        filled_array[region] = stored[first : first + piece.box.shape[0], piece.at[-1] :][
            :, : piece.box.shape[1]
        ]
        count[region] += 1
    assert (count == 1).all()
    return filled_array


@given(_sizes())
def test_parts_are_dealt_out_group_by_group_and_collected_again(sizes: Sizes) -> None:
    groups, shares, columns, cuts = sizes
    extents = [groups * share for share in shares]
    parts = [
        np.arange(extent * columns).reshape(extent, columns) + 1000 * number
        for number, extent in enumerate(extents)
    ]
    wanted = np.concatenate(
        [
            part[group * share : (group + 1) * share]
            for group in range(groups)
            for part, share in zip(parts, shares, strict=True)
        ]
    )
    strips = fuse.interleave_by_group(extents, groups)
    data = {f"part{number}": part for number, part in enumerate(parts)}
    sources = [_stored(name, part, columns, cuts) for name, part in data.items()]
    fused = fuse.fuse_parts(strips, sources, wanted.shape)
    assert np.array_equal(_filled(fused, data), wanted)
    projection = _stored("whole", wanted, columns, cuts)
    for number, part in enumerate(parts):
        taken = fuse.take_apart(strips, number, projection, part.shape)
        assert np.array_equal(_filled(taken, {"whole": wanted}), part)


def test_the_parts_of_one_group_are_one_after_the_other() -> None:
    assert fuse.interleave_by_group([3, 5], 1) == [fuse.Strip(0, 0, 0, 3), fuse.Strip(1, 0, 3, 5)]


def test_rows_that_are_not_those_of_the_groups_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"parts of 4, 3 rows cannot be divided evenly into 2 groups"
    ):
        fuse.interleave_by_group([4, 3], 2)


def entry_of(shape: tuple[int, ...], fragments: list[Fragment], number: int) -> Fragment:
    """Return the only fragment of an entry of a stack."""
    stack = Tensor("uint8", shape, lambda: fragments)
    (fragment,) = Catalog("torch", None, {"s": stack}).entry("s", number).fragments()
    return fragment


def test_an_entry_of_a_stack_has_an_axis_less() -> None:
    array = StoredArray("a", "uint8", (4, 2, 3), Extent("f", 0))
    pieces = [Fragment(full_box((4, 2, 3)), array, (0, 0, 0))]
    entry = entry_of((4, 2, 3), pieces, 2)
    assert (entry.box, entry.at) == (full_box((2, 3)), (2, 0, 0))


def test_an_entry_of_a_stack_may_be_stored_alone() -> None:
    arrays = [
        StoredArray(f"a{number}", "uint8", (2, 3), Extent("f", number)) for number in range(4)
    ]
    pieces = [
        Fragment(Box((number, 0, 0), (1, 2, 3)), array, (0, 0))
        for number, array in enumerate(arrays)
    ]
    entry = entry_of((4, 2, 3), pieces, 3)
    assert (entry.array, entry.at) == (arrays[3], (0, 0))


def test_regions_without_an_array_stay_so() -> None:
    zeros = Tensor("uint8", (4, 3), lambda: [Fragment(full_box((4, 3)), None, ())])
    taken = fuse.take_apart(fuse.interleave_by_group([1, 3], 1), 1, zeros, (3, 3))
    assert taken.fragments() == [Fragment(full_box((3, 3)), None, ())]


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(0, 8), max_size=3),
    st.lists(st.integers(0, 4), max_size=2),
)
def test_the_halves_of_the_columns_are_exchanged_however_the_matrix_is_cut(
    half: int, n_rows: int, columns: list[int], rows: list[int]
) -> None:
    matrix = np.arange(n_rows * 2 * half, dtype="uint8").reshape(n_rows, 2 * half)
    pieces: list[Fragment] = []
    arrays: dict[str, np.ndarray] = {}
    row_bounds = sorted({0, n_rows, *(row for row in rows if row <= n_rows)})
    column_bounds = sorted({0, 2 * half, *(column for column in columns if column <= 2 * half)})
    for top, bottom in pairwise(row_bounds):
        for start, right in pairwise(column_bounds):
            # Each piece has a margin of one column in its array.
            array = StoredArray(
                f"{top},{start}", "uint8", (bottom - top, right - start + 1), Extent("f", 0)
            )
            arrays[array.name] = np.pad(matrix[top:bottom, start:right], ((0, 0), (1, 0)))
            box = Box((top, start), (bottom - top, right - start))
            pieces.append(Fragment(box, array, (0, 1)))
    result = np.full_like(matrix, 255)
    stored = Tensor("uint8", matrix.shape, lambda: pieces)
    for fragment in fuse.swap_halves(stored).fragments():
        assert fragment.array is not None
        (top, start), (n, m), (row, column) = fragment.box.offset, fragment.box.shape, fragment.at
        result[top : top + n, start : start + m] = arrays[fragment.array.name][
            row : row + n, column : column + m
        ]
    assert np.array_equal(result, np.concatenate((matrix[:, half:], matrix[:, :half]), axis=1))
