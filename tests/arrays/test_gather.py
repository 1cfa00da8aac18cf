"""Strided copies: the same bytes with numpy and without it."""

from __future__ import annotations

import sys
from itertools import permutations, product

import numpy as np
import pytest

from core.arrays.gather import StridedLayout, copy_box, copy_runs, dense_layout, inner_run

SHAPES = [(5,), (3, 4), (4, 1, 3), (2, 3, 4), (3, 0, 2)]
assert "numpy" in sys.modules, "copy_box copies with numpy"


@pytest.mark.parametrize(("shape", "itemsize"), [*product(SHAPES, [1, 2, 3, 8])])
def test_runs_are_copied_one_by_one_as_numpy_copies_them(
    shape: tuple[int, ...], itemsize: int
) -> None:
    n_bytes = 2 * itemsize * max(int(np.prod(shape)), 1) + 64
    data = memoryview(np.random.default_rng(0).bytes(n_bytes))
    for order in permutations(range(len(shape))):
        strides = dense_layout(tuple(shape[axis] for axis in order), itemsize).strides
        transposed = tuple(strides[order.index(axis)] for axis in range(len(shape)))
        source = StridedLayout(7, tuple(2 * step for step in transposed))
        target = dense_layout(shape, itemsize, 5)
        outs = [bytearray(n_bytes), bytearray(n_bytes)]
        copy_box(data, source, memoryview(outs[0]), target, shape=shape, itemsize=itemsize)
        n_axes, length = inner_run(shape, itemsize, source, target)
        copy_runs(data, source, memoryview(outs[1]), target, shape=shape[:n_axes], n_bytes=length)
        assert outs[0] == outs[1]
        assert any(outs[0]) == (0 not in shape)
