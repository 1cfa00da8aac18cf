"""Cut a box into row bands: boxes that are consecutive in its dense form, in C order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from core.arrays.box import Box, Shape


def cut_rows(shape: Shape, size: int, band_bytes: int) -> tuple[int, int]:
    """Return the axis along which bands are cut, and the number of its rows in a band.

    Args:
        shape: shape of the box, in elements; no axis is empty.
        size: bytes per element.
        band_bytes: maximum size of a band, unless one element is longer.
    """
    axis = 0
    while axis < len(shape) - 1 and prod(shape[axis + 1 :]) * size > band_bytes:
        axis += 1
    return axis, max(1, band_bytes // (prod(shape[axis + 1 :]) * size))


def row_bands(bounds: Box, axis: int, rows: int) -> Iterator[Box]:
    """Yield the row bands of a box.

    Args:
        axis: the axis along which the bands are cut; those before it have one row in a band.
        rows: number of the axis's rows in a band; the last band may have fewer.
    """
    shape = bounds.shape
    if not shape:
        yield bounds
        return
    tail = shape[axis + 1 :]
    for index in product(*(range(n) for n in shape[:axis])):
        for first in range(0, shape[axis], rows):
            start = (*index, first, *(0,) * len(tail))
            extent = (*(1,) * axis, min(rows, shape[axis] - first), *tail)
            yield Box(tuple(a + b for a, b in zip(bounds.offset, start, strict=True)), extent)
