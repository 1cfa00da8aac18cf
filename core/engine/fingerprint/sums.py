"""Add runs and boxes of a tensor to its fingerprint (``core.engine.fingerprint.definition``)."""

from __future__ import annotations

from core.arrays.box import Box, Shape, c_strides
from core.engine.fingerprint.definition import LANES, PRIME, Form
from core.engine.fingerprint.kernel import Array, Products, weigh_blocks

_PIECE_BYTES = 1 << 20
"""Bytes multiplied at once; they stay in the processor's second-level cache."""


class FormSum:
    """Sum of contributions to one tensor's fingerprint; not safe for threads.

    Args:
        form: division of the tensor into rows and blocks.
        products: from ``core.engine.fingerprint.kernel.fastest_products``.

    Attributes:
        n_bytes: bytes that have been added.
    """

    def __init__(self, form: Form, products: Products) -> None:
        self._form = form
        self._products = products
        self._total: Array | None = None
        self.n_bytes = 0

    @property
    def lanes(self) -> tuple[int, ...]:
        """Sum so far, as 16 numbers."""
        return (0,) * LANES if self._total is None else tuple(int(lane) for lane in self._total)

    def add_run(self, start: int, data: memoryview) -> None:
        """Add consecutive bytes of the tensor in C order, from byte ``start`` on."""
        raw = _array_of(data)
        self.n_bytes += len(raw)
        row_bytes = self._form.row_bytes
        done = 0
        while done < len(raw):
            # A partial row at either end is added alone, the complete rows between them at once.
            row, column = divmod(start + done, row_bytes)
            if column or len(raw) - done < row_bytes:
                n = min(row_bytes - column, len(raw) - done)
                self._add(range(row, row + 1), column, raw[done : done + n].reshape(1, n))
            else:
                n_rows = (len(raw) - done) // row_bytes
                n = n_rows * row_bytes
                rows = raw[done : done + n].reshape(n_rows, row_bytes)
                self._add(range(row, row + n_rows), 0, rows)
            done += n

    def add_box(self, shape: Shape, box: Box, itemsize: int, data: memoryview) -> None:
        """Add a box of the tensor.

        Args:
            shape: shape of the tensor, in elements.
            box: the box, in elements.
            itemsize: bytes of an element.
            data: the bytes of the box's elements, in C order.
        """
        start = _start_of_run(shape, box)
        if start is not None:
            self.add_run(start * itemsize, data)
            return

        # The outer axes of the box determine the numbers of its rows.
        raw = _array_of(data)
        self.n_bytes += len(raw)
        n_outer = self._form.n_outer
        outer = Box(box.offset[:n_outer], box.shape[:n_outer])
        rows = _flat_indices(c_strides(shape[:n_outer]), outer)

        # The inner axes are the same box in each of these rows.
        inner = Box(box.offset[n_outer:], box.shape[n_outer:])
        self._add_inner(rows, shape[n_outer:], inner, itemsize, raw.reshape(len(rows), -1))

    def _add_inner(self, rows: Array, shape: Shape, box: Box, itemsize: int, data: Array) -> None:
        """Add the same box of the inner axes for each of several rows.

        Args:
            rows: numbers of the rows.
            shape: the inner axes, which are joined to rows, in elements.
            box: box of the inner axes.
            itemsize: bytes of an element.
            data: (rows, bytes of the box).
        """
        import numpy as np

        steps = c_strides(shape)
        first = sum(step * offset for step, offset in zip(steps, box.offset, strict=True))
        n_span = 1 + sum(step * (n - 1) for step, n in zip(steps, box.shape, strict=True))
        # The box is one run of the row.
        if n_span == box.n_elements:
            self._add(rows, first * itemsize, data)

        # Its elements are close together: fill the gaps with zeros, which add nothing.
        elif n_span * itemsize <= _PIECE_BYTES:
            positions = _flat_indices(steps, Box((0,) * box.rank, box.shape))
            step_rows = max(1, _PIECE_BYTES // (n_span * itemsize))
            for start in range(0, len(rows), step_rows):
                part = data[start : start + step_rows]
                runs: Array = np.zeros((len(part), n_span, itemsize), np.int8)
                runs[:, positions] = part.reshape(len(part), -1, itemsize)
                part_rows = rows[start : start + step_rows]
                self._add(part_rows, first * itemsize, runs.reshape(len(part), -1))

        # They are far apart: halve the box until its runs are short enough.
        else:
            axis = next(axis for axis, n in enumerate(box.shape) if n > 1)
            sizes = (box.shape[axis] // 2, box.shape[axis] - box.shape[axis] // 2)
            done = 0
            for half in box.split(axis, sizes):
                n = half.n_elements * itemsize
                self._add_inner(rows, shape, half, itemsize, data[:, done : done + n])
                done += n

    def _add(self, rows: range | Array, column: int, data: Array) -> None:
        """Add columns of rows: ``data[m, :]`` are bytes of row ``rows[m]``, from ``column`` on."""
        block_bytes = self._form.block_bytes
        done = 0
        while done < data.shape[1]:
            # A partial block at either end is added alone, the complete blocks between at once.
            block, inside = divmod(column + done, block_bytes)
            n_blocks = (data.shape[1] - done) // block_bytes
            if inside or not n_blocks:
                n = min(block_bytes - inside, data.shape[1] - done)
                self._multiply(rows, block, 1, inside, data[:, done : done + n])
            else:
                n = n_blocks * block_bytes
                self._multiply(rows, block, n_blocks, 0, data[:, done : done + n])
            done += n

    def _multiply(
        self, rows: range | Array, block: int, n_blocks: int, inside: int, data: Array
    ) -> None:
        """Add complete blocks of each row, or the part of one block from byte ``inside`` on."""
        width = data.shape[1] // n_blocks
        # Reshaping a matrix with gaps would copy it; a single row has no gaps.
        if n_blocks > 1 and len(rows) > 1 and not data.flags.c_contiguous:
            for row in range(len(rows)):
                self._multiply(rows[row : row + 1], block, n_blocks, inside, data[row : row + 1])
            return

        # One row of the matrix is one block.
        matrix = data.reshape(len(rows) * n_blocks, width)
        numbers = self._numbers(rows, block, n_blocks)
        step = max(1, _PIECE_BYTES // max(width, 1))
        for start in range(0, len(matrix), step):
            sums = self._products(matrix[start : start + step], inside)
            weighted = weigh_blocks(sums, numbers[start : start + step])
            self._total = weighted if self._total is None else (self._total + weighted) % PRIME

    def _numbers(self, rows: range | Array, block: int, n_blocks: int) -> range | Array:
        """Return the numbers of ``n_blocks`` blocks of each row, from its block ``block`` on."""
        import numpy as np

        # A range is weighed faster than an array of numbers.
        blocks_per_row = self._form.n_blocks
        if isinstance(rows, range) and (n_blocks == blocks_per_row or len(rows) == 1):
            first = rows.start * blocks_per_row + block
            return range(first, first + len(rows) * n_blocks)
        starts = np.asarray(rows, np.int64) * blocks_per_row
        numbers: Array = (starts[:, None] + np.arange(block, block + n_blocks)).reshape(-1)
        return numbers


def _start_of_run(shape: Shape, box: Box) -> int | None:
    """Return the flat index of a box's first element, if its elements are consecutive.

    Returns:
        The index in the tensor; 0 for an empty box, None if the elements are not consecutive.
    """
    if box.is_empty:
        return 0
    # From the last axis on: after one that is not complete, all others must have length 1.
    is_cut = False
    for extent, n in zip(reversed(shape), reversed(box.shape), strict=True):
        if is_cut and n != 1:
            return None
        is_cut |= n != extent
    return sum(step * offset for step, offset in zip(c_strides(shape), box.offset, strict=True))


def _flat_indices(strides: Shape, box: Box) -> Array:
    """Return the flat indices of a box's elements, in C order.

    Args:
        strides: strides of the array that contains the box, in elements.
        box: the box, in elements.
    """
    import numpy as np

    indices: Array = np.zeros(1, np.int64)
    for step, first, n in zip(strides, box.offset, box.shape, strict=True):
        indices = (indices[:, None] + step * np.arange(first, first + n, dtype=np.int64)).reshape(
            -1
        )
    return indices


class _WritableBytes:
    """Read-only bytes that numpy treats as writable.

    torch warns about read-only arrays, although nothing is written.
    """

    def __init__(self, data: Array) -> None:
        self._kept = data  # keeps the memory alive as long as this view
        address = data.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|i1",
            "shape": data.shape,
            "data": (address, False),
        }


def _array_of(data: memoryview) -> Array:
    """Return the bytes as an int8 array, without a copy."""
    import numpy as np

    array = np.frombuffer(data, np.int8)
    return array if array.flags.writeable or not len(array) else np.asarray(_WritableBytes(array))
