"""Strided copies between buffers, and reads of arrays whose elements are not consecutive.

Consecutive copies need no numpy, and it is not imported for the first few strided ones. Strides are
in bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

from core.arrays.box import Shape
from core.values import dataclass

ReadAt = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes of one file, from an address on."""

GAP_BYTES = 8192
"""Largest gap between elements that is read too, because another system call would cost more."""

_TILE = 1024
"""Transposes are copied in tiles of _TILE × _TILE / 16 elements."""
_N_SLICED = 20_000
"""Runs that are copied one by one before numpy is imported, which takes longer than that."""
_n_sliced = 0
"""Runs copied so. Threads may miss some of each other's, which only puts numpy off."""
_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
"""Bytes of a consecutive run → the numpy type that copies it fastest."""


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """The positions of the elements of a box in a buffer or a file.

    Args:
        start: byte address of the first element.
        strides: bytes per axis.
    """

    start: int
    strides: Shape


def inner_run(shape: Shape, itemsize: int, *layouts: StridedLayout) -> tuple[int, int]:
    """Find the longest run of a box that is consecutive in every layout.

    Returns:
        The number of leading axes to iterate over, and the bytes of the run that the trailing axes
        form.
    """
    n_bytes = itemsize
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] != 1 and any(layout.strides[axis] != n_bytes for layout in layouts):
            return axis + 1, n_bytes
        n_bytes *= shape[axis]
    return 0, n_bytes


def is_dense(shape: Shape, itemsize: int, strides: Shape) -> bool:
    """Return whether the elements of a box follow each other in C order without gaps."""
    return inner_run(shape, itemsize, StridedLayout(0, strides))[0] == 0


def byte_span(shape: Shape, itemsize: int, strides: Shape) -> int:
    """Return the bytes from the first element to the end of the last.

    Args:
        shape: in elements, no extent 0.
        strides: bytes per axis, >= 0.
    """
    return itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def list_addresses(shape: Shape, *layouts: StridedLayout) -> list[tuple[int, ...]]:
    """Return the byte addresses, one per layout, of every index of ``shape`` in C order."""
    all_addresses = [tuple(layout.start for layout in layouts)]
    for axis, n in enumerate(shape):
        if n > 1:
            steps = [layout.strides[axis] for layout in layouts]
            all_addresses = [
                tuple(address + i * step for address, step in zip(addresses, steps, strict=True))
                for addresses in all_addresses
                for i in range(n)
            ]
    return all_addresses


def copy_box(
    data: memoryview,
    source: StridedLayout,
    out: memoryview,
    target: StridedLayout,
    *,
    shape: Shape,
    itemsize: int,
) -> None:
    """Copy the elements of a box from one buffer to another.

    Args:
        data, source: the buffer to read, and the positions of the elements in it.
        out, target: the buffer to write, and the positions of the elements in it.
        shape: shape of the box, in elements.
    """
    n_axes, n_bytes = inner_run(shape, itemsize, source, target)
    if n_axes == 0:
        out[target.start : target.start + n_bytes] = data[source.start : source.start + n_bytes]
        return
    global _n_sliced
    n_runs = prod(shape[:n_axes])
    if "numpy" not in sys.modules and _n_sliced + n_runs <= _N_SLICED:
        _n_sliced += n_runs
        copy_runs(data, source, out, target, shape=shape[:n_axes], n_bytes=n_bytes)
        return
    import numpy as np

    # Each consecutive run of bytes is one element of two numpy arrays.
    unit = _UNITS.get(n_bytes, f"V{n_bytes}")
    axes = [axis for axis in range(n_axes) if shape[axis] != 1]

    def view(buffer: memoryview, layout: StridedLayout) -> Any:
        return np.ndarray(
            [shape[axis] for axis in axes],
            unit,
            buffer,
            layout.start,
            [layout.strides[axis] for axis in axes],
        )

    values, results = view(data, source), view(out, target)
    # The axis along which the source is (nearly) consecutive; expanded axes have stride 0.
    steps = [abs(step) for step in values.strides]
    fastest = min(range(len(steps)), key=lambda axis: steps[axis] or 1 << 62)
    if fastest == len(steps) - 1 or values.size < _TILE * 64:
        np.copyto(results, values)
        return
    # Any other axis than the last makes this a transpose. It is copied tile by tile, so that the
    # rows of both arrays stay in the cache.
    leading: tuple[slice, ...] = (slice(None),) * fastest
    for first_row in range(0, values.shape[fastest], _TILE):
        rows = (*leading, slice(first_row, first_row + _TILE))
        for first_column in range(0, values.shape[-1], _TILE // 16):
            tile = (*rows, ..., slice(first_column, first_column + _TILE // 16))
            np.copyto(results[tile], values[tile])


def copy_runs(
    data: memoryview,
    source: StridedLayout,
    out: memoryview,
    target: StridedLayout,
    *,
    shape: Shape,
    n_bytes: int,
) -> None:
    """Copy the runs of a box from one buffer to another, one by one.

    Args:
        data, source: the buffer to read, and the positions of the runs in it.
        out, target: the buffer to write, and the positions of the runs in it.
        shape: the axes along which the runs lie, in runs.
        n_bytes: bytes of each run.
    """
    if 0 in shape:
        return
    for start, place in list_addresses(shape, source, target):
        out[place : place + n_bytes] = data[start : start + n_bytes]


def read_box(
    read: ReadAt,
    source: StridedLayout,
    out: memoryview,
    target: StridedLayout,
    *,
    shape: Shape,
    itemsize: int,
    raw: memoryview,
) -> None:
    """Read the elements of a box, with any strides, into a buffer.

    Adjacent elements are read together with the gaps between them, as long as the gaps are small.
    As many of these blocks as fit are collected in ``raw``, along one more axis, and then copied to
    their positions at once.

    Args:
        read: reads the file.
        source: positions of the elements in the file; strides are >= 0, and 0 for an expanded axis.
        out, target: the buffer, and the positions of the elements in it.
        shape: shape of the box, in elements.
        raw: scratch space, at least ``itemsize`` bytes.
    """
    # The tile in ``raw``: strides as in the file within a block, and blocks one after the other.
    tile, block_axis, block_bytes = _plan_blocks(shape, source.strides, itemsize, len(raw))
    raw_strides = list(source.strides)
    if block_axis is not None:
        raw_strides[block_axis] = block_bytes
    raw_layout = StridedLayout(0, tuple(raw_strides))
    # Tile by tile, read the blocks into ``raw`` and copy them to their positions.
    for index in product(*(range(0, n, step) for n, step in zip(shape, tile, strict=True))):
        part = tuple(min(step, n - i) for i, step, n in zip(index, tile, shape, strict=True))
        address = source.start + _dot(index, source.strides)
        if block_axis is None:
            read(address, raw[: byte_span(part, itemsize, source.strides)])
        else:
            block = (*part[:block_axis], 1, *part[block_axis + 1 :])
            n_bytes = byte_span(block, itemsize, source.strides)
            for number in range(part[block_axis]):
                start = number * block_bytes
                read(address + number * source.strides[block_axis], raw[start : start + n_bytes])
        part_target = StridedLayout(target.start + _dot(index, target.strides), target.strides)
        copy_box(raw, raw_layout, out, part_target, shape=part, itemsize=itemsize)


def _plan_blocks(
    shape: Shape, strides: Shape, itemsize: int, raw_bytes: int
) -> tuple[list[int], int | None, int]:
    """Choose the tiles, which fit in the scratch space, into which ``read_box`` cuts a box.

    Returns:
        The shape of a tile; the axis along which a tile is read in separate blocks, or None if it
        is one block; and the bytes of a block.
    """
    tile = [1] * len(shape)
    block_bytes = itemsize
    # From the smallest stride on, extend the block until the gaps or the block become too large.
    for axis in sorted((a for a in range(len(shape)) if shape[a] > 1), key=lambda a: strides[a]):
        step = strides[axis]
        # Too large a gap: the tile is several blocks along this axis, read separately.
        if step - block_bytes > GAP_BYTES:
            tile[axis] = max(1, min(shape[axis], raw_bytes // block_bytes))
            return tile, axis, block_bytes
        if step == 0:
            tile[axis] = shape[axis]
        else:
            tile[axis] = min(shape[axis], max(1, (raw_bytes - block_bytes) // step + 1))
        block_bytes += step * (tile[axis] - 1)
        if tile[axis] < shape[axis]:
            break
    return tile, None, block_bytes


def dense_layout(shape: Shape, itemsize: int, start: int = 0) -> StridedLayout:
    """Return the layout of a C-order array that begins at a byte address."""
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return StridedLayout(start, tuple(reversed(strides)))


def _dot(index: Shape, strides: Shape) -> int:
    """Return the byte offset of an element."""
    return sum(i * step for i, step in zip(index, strides, strict=True))
