"""Dequantize float8 or int8 weights with scales to wider floats, as an encoding.

For the element in row r and column c of the last two axes::

    scale = scales[…, r // block_rows, c // block_columns]
    value = round_to_dtype(float32(w[…, r, c]) × float32(scale))

The product is computed in float32 and rounded to nearest even (to infinity above the range), like
torch's ``(w.float() * scale).to(dtype)``. bitsandbytes' int8 has one scale per row, and the product
is multiplied by 1 / 127, also in float32, before it is rounded: ``int8_vectorwise_dequant`` of
bitsandbytes 0.50.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Box, boxes_of_flat_range, full_box
from core.arrays.cast import find_cast
from core.arrays.dtypes import dtype_of, itemsize, numpy_dtype
from core.engine.catalog.decoded import find_device
from core.engine.device.device import DEQUANTIZE, Device
from core.engine.device.lane import lane_of
from core.engine.device.scales import multiply_by_scales
from core.engine.quantize.source import SourceTensor, join_arrays
from core.errors import UnsupportedError
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

UNIT_BYTES = 4 << 20
"""Target size of a unit, decoded."""
_AT_ONCE = 1 << 18
"""Number of elements to multiply at a time."""


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The encoding of a tensor that is computed as a float8 or int8 tensor times its scales.

    Args:
        weight: the float8 or int8 tensor.
        scales: one element, or one per block of the last two axes; with a single axis, one per row.
        block: rows and columns of a block; None for a single scale.
        dtype: element type of the result.
        factor: factor for the products; None for no factor.
        row_format: bitsandbytes' tensor with the order of the numbers, 0 for row by row; or None.
    """

    weight: SourceTensor
    scales: SourceTensor
    block: tuple[int, int] | None
    dtype: str
    factor: float | None = None
    row_format: SourceTensor | None = None

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return f"{self.weight.dtype} × {self.scales.dtype} scales"

    @property
    def _columns(self) -> int:
        """Number of columns; 1 for a scalar."""
        return self.weight.shape[-1] if self.weight.shape else 1

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of decoded bytes; a multiple of the row size."""
        row_bytes = max(1, self._columns * itemsize(self.dtype))
        return row_bytes * max(1, UNIT_BYTES // row_bytes)

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return join_arrays(self.weight, self.scales, self.row_format)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        n = self.unit_bytes // itemsize(self.dtype)
        at_once = max(_AT_ONCE, self._columns)
        return (
            n * itemsize(self.weight.dtype)
            + 16 * at_once
            + self.weight.working_bytes
            + self.scales.working_bytes
        )

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the decoded bytes of a unit.

        Raises:
            UnsupportedError: the numbers are not stored row by row.
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError, CorruptError: a
                tensor cannot be read.
        """
        import numpy as np

        # Older versions of bitsandbytes stored the numbers in the order of a GPU's tiles.
        note = self.row_format
        if note is not None and any(note.read(store, full_box(note.shape))):
            raise UnsupportedError(
                "bitsandbytes' weight_format specifies a layout other than row-major",
                key=note.key,
                hint="save the model again with bitsandbytes 0.45 or later",
            )
        # A unit consists of complete rows, counted through all leading axes.
        n_rows = prod(self.weight.shape[:-1])
        rows = self.unit_bytes // max(1, self._columns * itemsize(self.dtype))
        first, last = unit * rows, min((unit + 1) * rows, n_rows)
        out: Any = np.empty((last - first, self._columns), numpy_dtype(self.dtype))
        multiply = self._multiplier(find_device(store))
        # The rows form a few boxes. Each is read in one go and multiplied part by part, so that the
        # float32 products stay small.
        done = 0
        for box in boxes_of_flat_range(
            self.weight.shape, first * self._columns, last * self._columns
        ):
            weight = memoryview(self.weight.read(store, box))
            at = 0
            for n, scales in self._scales(store, box):
                part = weight[at * self._row_bytes : (at + n) * self._row_bytes]
                multiply(part, scales, out[done : done + n])
                done += n
                at += n
        return memoryview(out.view(np.uint8)).cast("B")

    @property
    def _row_bytes(self) -> int:
        """Size of a row of stored numbers."""
        return self._columns * itemsize(self.weight.dtype)

    def _multiplier(self, device: Device | None) -> Callable[[memoryview, Any, Any], None]:
        """Choose the function that multiplies rows by their scales into an array."""
        import numpy as np

        is_float8 = dtype_of(self.weight.dtype).kind == "float" and itemsize(self.weight.dtype) == 1
        if (
            device is None
            or not device.does(DEQUANTIZE)
            or not is_float8
            or self.factor is not None
        ):
            return self._in_numpy
        lane = lane_of(device)
        block_columns = self.block[1] if self.block is not None else self._columns

        def on_device(weight: memoryview, scales: Any, out: Any) -> None:
            dtypes = self.weight.dtype, self.dtype
            result = multiply_by_scales(
                lane, weight, scales, dtypes=dtypes, shape=out.shape, columns=block_columns
            )
            out.view(np.uint8).reshape(-1)[:] = result

        return on_device

    def _in_numpy(self, weight: memoryview, scales: Any, out: Any) -> None:
        """Multiply rows by their scales on the CPU and write the products to ``out``."""
        import numpy as np

        # Repeat each scale over the columns of its block; the last block may be narrower.
        if self.block is not None and self.block[1] < self._columns:
            scales = np.repeat(scales, self.block[1], axis=1)[:, : self._columns]
        elif self.block is None:
            scales = scales[0]
        numbers: Any = np.empty(out.shape, np.float32)
        if self.weight.dtype == "float32":
            numbers[:] = np.frombuffer(weight, np.float32).reshape(out.shape)
        else:
            find_cast(self.weight.dtype, "float32")(
                weight, memoryview(numbers.reshape(-1).view(np.uint8))
            )
        # Values above the range become infinite, as in torch, without numpy's warning.
        with np.errstate(all="ignore"):
            product = numbers * scales
            out[:] = product if self.factor is None else product * np.float32(self.factor)

    def _scales(self, store: ReadStore, box: Box) -> Iterator[tuple[int, Any]]:
        """Yield (number of rows, their scales) for a box of complete rows, in order.

        The scales are float32: a single one, or for each row one per block.
        """
        import numpy as np

        at_once = max(1, _AT_ONCE // max(1, self._columns))
        kind = numpy_dtype(self.scales.dtype)
        if self.block is None:
            data = self.scales.read(store, full_box(self.scales.shape))
            scale: Any = np.frombuffer(data, kind).astype(np.float32)[:1]
            n_rows = prod(box.shape[:-1])
            yield from (
                (min(at_once, n_rows - first), scale) for first in range(0, n_rows, at_once)
            )
            return
        # Each matrix along the leading axes has its own scales; read those of the blocks of its
        # rows.
        rows, _ = self.block
        n_blocks = 1 if len(self.scales.shape) == 1 else self.scales.shape[-1]
        for lead in product(
            *(range(o, o + n) for o, n in zip(box.offset[:-2], box.shape[:-2], strict=True))
        ):
            start, stop = box.offset[-2], box.offset[-2] + box.shape[-2]
            top = start // rows
            height = -(-stop // rows) - top
            part = Box((*lead, top, 0), (*(1,) * len(lead), height, n_blocks))
            # Scales of rows may have one axis instead of a second one of extent 1.
            if len(self.scales.shape) == 1:
                part = Box((top,), (height,))
            block_scales: Any = (
                np.frombuffer(self.scales.read(store, part), kind)
                .astype(np.float32)
                .reshape(-1, n_blocks)
            )
            for first in range(start, stop, at_once):
                last = min(first + at_once, stop)
                yield last - first, block_scales[np.arange(first, last) // rows - top]
