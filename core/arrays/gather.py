"""Strided copies between buffers, and reads of arrays whose elements do not follow each other.

numpy is imported here, when the first strided copy is made; plain moves never need it. Strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

from core.arrays.box import Shape

ReadAt = Callable[[int, memoryview], None]
"""Fills a buffer from a byte address of one file."""

GAP_BYTES = 8192
"""A gap that costs less to read than another system call."""

_TILE = 1024
_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a box lie in a buffer or a file.

    Args:
        start: byte address of the first element.
        strides: bytes per axis.
    """

    start: int
    strides: Shape


def inner_run(shape: Shape, itemsize: int, *layouts: Layout) -> tuple[int, int]:
    """The longest piece that is consecutive in every layout.

    Returns:
        Number of leading axes that must be walked, and bytes of the piece that the others form.
    """
    n_bytes = itemsize
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] != 1 and any(layout.strides[axis] != n_bytes for layout in layouts):
            return axis + 1, n_bytes
        n_bytes *= shape[axis]
    return 0, n_bytes


def is_dense(shape: Shape, itemsize: int, strides: Shape) -> bool:
    """Whether a box's elements follow each other in C order."""
    return inner_run(shape, itemsize, Layout(0, strides))[0] == 0


def span(shape: Shape, itemsize: int, strides: Shape) -> int:
    """Bytes from the first element to the end of the last one; strides are not negative."""
    return itemsize + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def starts(shape: Shape, *layouts: Layout) -> list[tuple[int, ...]]:
    """For every index of ``shape`` in C order: its byte address in each layout."""
    found = [tuple(layout.start for layout in layouts)]
    for axis, n in enumerate(shape):
        if n > 1:
            steps = [layout.strides[axis] for layout in layouts]
            found = [
                tuple(address + i * step for address, step in zip(addresses, steps, strict=True))
                for addresses in found
                for i in range(n)
            ]
    return found


def copy_box(data: memoryview, source: Layout, out: memoryview, target: Layout, *, shape: Shape, itemsize: int) -> None:
    """Copies the elements of a box from one buffer to another."""
    import numpy as np

    n_axes, n_bytes = inner_run(shape, itemsize, source, target)
    if n_axes == 0:
        out[target.start : target.start + n_bytes] = data[source.start : source.start + n_bytes]
        return
    unit = _UNITS.get(n_bytes, f"V{n_bytes}")
    kept = [axis for axis in range(n_axes) if shape[axis] != 1]

    def view(buffer: memoryview, layout: Layout) -> Any:
        return np.ndarray(
            [shape[axis] for axis in kept],
            unit,
            buffer,
            layout.start,
            [layout.strides[axis] for axis in kept],
        )

    _copy_tiled(view(data, source), view(out, target))


def _copy_tiled(values: Any, out: Any) -> None:
    """``out[...] = values``; transposes go tile by tile, so that both sides stay in the cache."""
    import numpy as np

    steps = [abs(step) for step in values.strides]
    fastest = min(range(len(steps)), key=lambda axis: steps[axis] or 1 << 62)
    if fastest == len(steps) - 1 or values.size < _TILE * 64:
        np.copyto(out, values)
        return
    lead: tuple[slice, ...] = (slice(None),) * fastest
    for i in range(0, values.shape[fastest], _TILE):
        rows = (*lead, slice(i, i + _TILE))
        for j in range(0, values.shape[-1], _TILE // 16):
            tile = (*rows, ..., slice(j, j + _TILE // 16))
            np.copyto(out[tile], values[tile])


def read_box(
    read: ReadAt, source: Layout, out: memoryview, target: Layout, *, shape: Shape, itemsize: int, raw: memoryview
) -> None:
    """Reads the elements of a box, in any strides, into a buffer.

    Neighbouring elements are read together with the gaps between them as long as the gaps are small. Such blocks are
    collected in ``raw`` along one more axis, as many as fit, and then copied to their places at once.

    Args:
        read: reads the file.
        source: where the box lies in the file; strides are not negative, 0 for an expanded axis.
        out, target: where its elements go.
        raw: scratch space, at least ``itemsize`` bytes.
    """
    together, spread, block_bytes = _blocks(shape, source.strides, itemsize, len(raw))
    within = list(source.strides)
    if spread is not None:
        within[spread] = block_bytes
    in_raw = Layout(0, tuple(within))
    for index in product(*(range(0, n, step) for n, step in zip(shape, together, strict=True))):
        part = tuple(min(step, n - i) for i, step, n in zip(index, together, shape, strict=True))
        address = source.start + _dot(index, source.strides)
        block = part if spread is None else (*part[:spread], 1, *part[spread + 1 :])
        n_bytes = span(block, itemsize, source.strides)
        for number in range(1 if spread is None else part[spread]):
            at = number * block_bytes
            read(address + (0 if spread is None else number * source.strides[spread]), raw[at : at + n_bytes])
        to = Layout(target.start + _dot(index, target.strides), target.strides)
        copy_box(raw, in_raw, out, to, shape=part, itemsize=itemsize)


def _blocks(shape: Shape, strides: Shape, itemsize: int, raw_bytes: int) -> tuple[list[int], int | None, int]:
    """How ``read_box`` reads: extents treated at once, the axis whose indices are separate blocks, bytes of a block."""
    together = [1] * len(shape)
    block_bytes = itemsize
    for axis in sorted((a for a in range(len(shape)) if shape[a] > 1), key=lambda a: strides[a]):
        step = strides[axis]
        if step - block_bytes > GAP_BYTES:
            together[axis] = max(1, min(shape[axis], raw_bytes // block_bytes))
            return together, axis, block_bytes
        together[axis] = shape[axis] if step == 0 else min(shape[axis], max(1, (raw_bytes - block_bytes) // step + 1))
        block_bytes += step * (together[axis] - 1)
        if together[axis] < shape[axis]:
            break
    return together, None, block_bytes


def dense(shape: Shape, itemsize: int, start: int = 0) -> Layout:
    """The layout of a C-order array."""
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return Layout(start, tuple(reversed(strides)))


def _dot(index: Shape, strides: Shape) -> int:
    return sum(i * step for i, step in zip(index, strides, strict=True))
