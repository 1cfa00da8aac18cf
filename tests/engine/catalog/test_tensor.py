"""The operations of tensors, each compared with numpy's on the elements that the engine reads."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from core.arrays.box import Box, c_strides, full_box
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import (
    Fragment,
    Tensor,
    concat,
    stack,
    whole_tensor,
)
from core.engine.plan.box_reader import BoxReader
from core.files.store import MemoryStore

SHAPE = (4, 6, 3)
NUMBERS = np.arange(np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)


def stored(
    name: str, numbers: np.ndarray, *, strides: tuple[int, ...] | None = None
) -> StoredArray:
    """Return an array of the file ``numbers``, in which all of NUMBERS lie in C order."""
    start = int(numbers.flat[0]) * 4
    return StoredArray(name, "int32", numbers.shape, Extent("numbers", start, strides))


def undivided() -> Tensor:
    """Return NUMBERS as one stored array."""
    return whole_tensor(stored("w", NUMBERS))


def tiled() -> Tensor:
    """Return NUMBERS in boxes of which each is a stored array, one of them twice."""
    strides = c_strides(SHAPE)
    fragments = []
    for i, j in [*product(range(0, 4, 2), range(0, 6, 2)), (0, 0)]:
        part = NUMBERS[i : i + 2, j : j + 2]
        array = stored(f"w{i}{j}.{len(fragments)}", part, strides=strides)
        fragments.append(Fragment(Box((i, j, 0), part.shape), array, (0, 0, 0)))
    return Tensor("int32", SHAPE, lambda: fragments)


def stacked() -> Tensor:
    """Return NUMBERS[1] as an entry of a stored array that has an axis more."""
    array = stored("w", NUMBERS)
    return Tensor("int32", SHAPE[1:], lambda: [Fragment(Box((0, 0), (6, 3)), array, (1, 0, 0))])


def read(tensor: Tensor) -> np.ndarray:
    """Return the elements of a tensor, read by the engine."""
    store = MemoryStore({"numbers": NUMBERS.tobytes()})
    catalog = Catalog("test", None, {"t": tensor})
    reader = BoxReader(catalog, store).tensor("t")
    data = bytearray(tensor.n_bytes)
    reader.read(full_box(tensor.shape), memoryview(data), memoryview(bytearray(64)))
    return np.frombuffer(data, np.int32).reshape(tensor.shape)


@pytest.mark.parametrize("make", [undivided, tiled])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_narrow_and_select_are_those_of_numpy(make, axis) -> None:
    tensor = make()
    for start in range(SHAPE[axis]):
        entry = tensor.select(axis, start)
        assert np.array_equal(read(entry), NUMBERS.take(start, axis))
        for extent in range(1, SHAPE[axis] - start + 1):
            part = tensor.narrow(axis, start, extent)
            expected = NUMBERS.take(range(start, start + extent), axis)
            assert np.array_equal(read(part), expected)


def test_an_entry_of_an_array_with_more_axes_is_narrowed_and_selected_along_its_own() -> None:
    tensor = stacked()
    assert np.array_equal(read(tensor), NUMBERS[1])
    assert np.array_equal(read(tensor.narrow(1, 1, 2)), NUMBERS[1][:, 1:])
    assert np.array_equal(read(tensor.select(0, 4)), NUMBERS[1][4])
    assert np.array_equal(read(tensor.select(1, 2)), NUMBERS[1][:, 2])


@pytest.mark.parametrize("make", [undivided, tiled])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat_joins_what_narrow_cut(make, axis) -> None:
    tensor = make()
    parts = [tensor.narrow(axis, start, 1) for start in reversed(range(SHAPE[axis]))]
    assert np.array_equal(read(concat(parts, axis)), np.flip(NUMBERS, axis))


@pytest.mark.parametrize("make", [undivided, tiled])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_stack_makes_an_axis_of_what_select_took(make, axis, place) -> None:
    tensor = make()
    entries = [tensor.select(axis, index) for index in range(SHAPE[axis])]
    arrays = [NUMBERS.take(index, axis) for index in range(SHAPE[axis])]
    assert np.array_equal(read(stack(entries, place)), np.stack(arrays, place))


def test_a_vector_is_stacked_along_its_last_axis_at_most() -> None:
    vectors = [undivided().select(0, 0).select(0, row) for row in range(6)]
    assert np.array_equal(read(stack(vectors, 5)), NUMBERS[0].T)


def test_replicas_are_fragments_of_one_tensor() -> None:
    tensor = undivided().with_replicas(tiled())
    assert len(tensor.fragments()) == 8
    assert np.array_equal(read(tensor), NUMBERS)


def test_tensors_are_equal_by_what_they_are_not_by_where_they_lie() -> None:
    assert undivided() == tiled() != Tensor("float32", SHAPE)
    assert hash(undivided()) == hash(tiled())
