"""Contributions of runs and boxes of a tensor to its fingerprint (``core.fingerprint.definition``)."""

from __future__ import annotations

from core.arrays.box import Box, Shape, c_strides
from core.fingerprint.definition import LANES, PRIME, Form
from core.fingerprint.kernel import Array, Products, weighed

_PIECE_BYTES = 1 << 20
"""Bytes that are multiplied at once; they stay in the processor's second-level cache."""


class FormSum:
    """Adds up contributions to one tensor's fingerprint; not safe for threads.

    Args:
        form: of the tensor.
        products: from ``core.fingerprint.kernel.kernel``.

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
        """The sum so far."""
        return (0,) * LANES if self._total is None else tuple(int(lane) for lane in self._total)

    def add_run(self, start: int, data: memoryview) -> None:
        """Adds consecutive bytes of the tensor in C order, from byte ``start`` on."""
        raw = _array_of(data)
        self.n_bytes += len(raw)
        row_bytes = self._form.row_bytes
        at = 0
        while at < len(raw):
            row, column = divmod(start + at, row_bytes)
            if column or len(raw) - at < row_bytes:
                n = min(row_bytes - column, len(raw) - at)
                self._add_rows(row, 1, column, raw[at : at + n].reshape(1, n))
            else:
                n_rows = (len(raw) - at) // row_bytes
                n = n_rows * row_bytes
                self._add_rows(row, n_rows, 0, raw[at : at + n].reshape(n_rows, row_bytes))
            at += n

    def add_box(self, shape: Shape, box: Box, itemsize: int, data: memoryview) -> None:
        """Adds a box of the tensor whose elements are given in C order.

        Args:
            shape: of the tensor, in elements.
            box: in elements.
            itemsize: bytes of an element.
            data: its bytes.
        """
        import numpy as np

        start = _run_of(shape, box)
        if start is not None:
            self.add_run(start * itemsize, data)
            return
        raw = _array_of(data)
        self.n_bytes += len(raw)
        n_outer = self._form.n_outer
        rows: Array = np.zeros(1, np.int64)
        for step, first, n in zip(c_strides(shape[:n_outer]), box.offset[:n_outer], box.shape[:n_outer], strict=True):
            rows = (rows[:, None] + step * np.arange(first, first + n, dtype=np.int64)).reshape(-1)
        inner = Box(box.offset[n_outer:], box.shape[n_outer:])
        self._add_inner(rows, shape[n_outer:], inner, itemsize, raw.reshape(len(rows), -1))

    def _add_inner(self, rows: Array, shape: Shape, box: Box, itemsize: int, data: Array) -> None:
        """Adds a box of the axes that are joined to rows, the same of each row; ``data`` is (rows, its bytes)."""
        steps = c_strides(shape)
        first = sum(step * at for step, at in zip(steps, box.offset, strict=True))
        n_span = 1 + sum(step * (n - 1) for step, n in zip(steps, box.shape, strict=True))
        if n_span == box.n_elements:
            self._add(rows, first * itemsize, data)
        elif n_span * itemsize <= _PIECE_BYTES:
            step_rows = max(1, _PIECE_BYTES // (n_span * itemsize))
            for start in range(0, len(rows), step_rows):
                some = slice(start, start + step_rows)
                self._add(rows[some], first * itemsize, _spread(data[some], box.shape, steps, n_span, itemsize))
        else:
            axis = next(axis for axis, n in enumerate(box.shape) if n > 1)
            sizes = (box.shape[axis] // 2, box.shape[axis] - box.shape[axis] // 2)
            at = 0
            for half in box.split(axis, sizes):
                n = half.n_elements * itemsize
                self._add_inner(rows, shape, half, itemsize, data[:, at : at + n])
                at += n

    def _add_rows(self, row: int, n_rows: int, column: int, data: Array) -> None:
        self._add(range(row, row + n_rows), column, data)

    def _add(self, rows: range | Array, column: int, data: Array) -> None:
        """Adds columns of rows: ``data[m, :]`` is the bytes of row ``rows[m]`` from ``column`` on."""
        block_bytes = self._form.block_bytes
        at = 0
        while at < data.shape[1]:
            block, inside = divmod(column + at, block_bytes)
            n_blocks = (data.shape[1] - at) // block_bytes
            if inside or not n_blocks:
                n = min(block_bytes - inside, data.shape[1] - at)
                self._multiply(rows, block, 1, inside, data[:, at : at + n])
            else:
                n = n_blocks * block_bytes
                self._multiply(rows, block, n_blocks, 0, data[:, at : at + n])
            at += n

    def _multiply(self, rows: range | Array, block: int, n_blocks: int, inside: int, data: Array) -> None:
        """Adds ``n_blocks`` whole blocks of each row, or one part of a block from its byte ``inside`` on."""
        width = data.shape[1] // n_blocks
        if n_blocks > 1 and len(rows) > 1 and not data.flags.c_contiguous:
            for row in range(len(rows)):
                self._multiply(rows[row : row + 1], block, n_blocks, inside, data[row : row + 1])
            return
        matrix = data.reshape(len(rows) * n_blocks, width)
        numbers = self._numbers(rows, block, n_blocks)
        step = max(1, _PIECE_BYTES // max(width, 1))
        for start in range(0, len(matrix), step):
            made = weighed(self._products(matrix[start : start + step], inside), numbers[start : start + step])
            self._total = made if self._total is None else (self._total + made) % PRIME

    def _numbers(self, rows: range | Array, block: int, n_blocks: int) -> range | Array:
        """The numbers of ``n_blocks`` blocks of each row, from its block ``block`` on."""
        import numpy as np

        every = self._form.n_blocks
        if isinstance(rows, range) and (n_blocks == every or len(rows) == 1):
            first = rows.start * every + block
            return range(first, first + len(rows) * n_blocks)
        starts = np.asarray(rows, np.int64) * every
        numbers: Array = (starts[:, None] + np.arange(block, block + n_blocks)).reshape(-1)
        return numbers


def _run_of(shape: Shape, box: Box) -> int | None:
    """The first element of a box whose elements follow each other in the tensor, else None; 0 for an empty one."""
    if box.is_empty:
        return 0
    is_cut = False
    for extent, n in zip(reversed(shape), reversed(box.shape), strict=True):
        if is_cut and n != 1:
            return None
        is_cut |= n != extent
    return sum(step * at for step, at in zip(c_strides(shape), box.offset, strict=True))


def _spread(data: Array, shape: Shape, steps: Shape, n_span: int, itemsize: int) -> Array:
    """Elements at the places that they have in a row, with zeros between them.

    Args:
        data: (rows, bytes of a box).
        shape: of the box, in elements.
        steps: of its axes in the row, in elements.
        n_span: elements from the box's first to its last.
    """
    import numpy as np

    made: Array = np.zeros((len(data), n_span, itemsize), np.int8)
    numbers: Array = np.zeros(1, np.int64)
    for step, n in zip(steps, shape, strict=True):
        numbers = (numbers[:, None] + step * np.arange(n, dtype=np.int64)).reshape(-1)
    made[:, numbers] = data.reshape(len(data), -1, itemsize)
    return made.reshape(len(data), -1)


class _Shown:
    """Read-only bytes, shown to numpy as writable: torch warns of others, although nothing is written."""

    def __init__(self, data: Array) -> None:
        self._kept = data
        address = data.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "typestr": "|i1", "shape": data.shape, "data": (address, False)}


def _array_of(data: memoryview) -> Array:
    """The bytes as int8, without a copy."""
    import numpy as np

    made = np.frombuffer(data, np.int8)
    return made if made.flags.writeable or not len(made) else np.asarray(_Shown(made))
