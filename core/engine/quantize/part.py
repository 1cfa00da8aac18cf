"""Compute the largest values and the float8 numbers of part of a matrix.

numpy computes them on the CPU; ``core.engine.device.scales`` does the same on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from core.arrays.cast import find_cast
from core.arrays.dtypes import itemsize, numpy_dtype
from core.engine.catalog.decoded import find_device
from core.engine.device.device import QUANTIZE
from core.engine.device.lane import lane_of
from core.engine.device.scales import DevicePart

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore

LARGEST = 448.0
"""The largest finite float8_e4m3fn."""


class Part(Protocol):
    """Rows and columns of a matrix; the columns form full blocks, except possibly the last one."""

    @property
    def n_columns(self) -> int:
        """Number of columns."""

    def largest(self) -> Any:
        """Return the largest absolute value of each block of columns, as float32.

        Not finite for a block with an element that is not.
        """

    def over(self, scales: Any) -> Any:
        """Divide by the scales of the blocks, or by a single scale, and return float8_e4m3fn bytes.

        Call it only once: it may overwrite the elements.
        """


def wrap_part(
    store: ReadStore, data: Any, *, source: str, dtype: str, shape: Shape, block: int
) -> Part:
    """Wrap stored elements as a part, on the store's device if the device quantizes.

    Args:
        data: bytes of the elements.
        source: element type of ``data``.
        dtype: element type that they are rounded to first.
        shape: (rows, columns).
        block: number of columns in a block.
    """
    # The device's kernel reads 16 and 32 bits only.
    device = find_device(store)
    if device is None or not device.does(QUANTIZE) or min(itemsize(source), itemsize(dtype)) < 2:
        return _NumpyPart(data, source=source, dtype=dtype, shape=shape, block=block)
    return DevicePart(lane_of(device), data, source=source, dtype=dtype, shape=shape, block=block)


class _NumpyPart:
    """A part in memory; ``wrap_part`` explains the arguments."""

    def __init__(self, data: Any, *, source: str, dtype: str, shape: Shape, block: int) -> None:
        import numpy as np

        self._block = block
        stored: Any = np.frombuffer(data, numpy_dtype(source))
        with np.errstate(all="ignore"):
            values = stored.astype(np.float32).reshape(shape)
            # A cast that comes first is rounded like one without quantization.
            if itemsize(dtype) < 4 and dtype != source:
                values = values.astype(numpy_dtype(dtype)).astype(np.float32)
        self._values = values

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return int(self._values.shape[1])

    def largest(self) -> Any:
        """Return the largest absolute value of each block of columns."""
        import numpy as np

        in_columns = np.abs(self._values).max(axis=0)
        return np.maximum.reduceat(in_columns, np.arange(0, self.n_columns, self._block))

    def over(self, scales: Any) -> Any:
        """Divide by the scales and return float8_e4m3fn bytes; overwrites the values."""
        import numpy as np

        values = self._values
        divisor = np.repeat(scales, self._block)[: self.n_columns] if len(scales) > 1 else scales
        with np.errstate(all="ignore"):
            np.divide(values, divisor, out=values)
        # float8_e4m3fn has no infinity: rounding in the division may exceed its range.
        np.clip(values, np.float32(-LARGEST), np.float32(LARGEST), out=values)
        out: Any = np.empty(values.shape, np.uint8)
        find_cast("float32", "float8_e4m3fn")(
            memoryview(values.reshape(-1).view(np.uint8)), memoryview(out.reshape(-1))
        )
        return out
