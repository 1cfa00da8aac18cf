"""A part of a matrix that is to be quantised: its numbers, and what is computed of them.

On the CPU path this is numpy; ``core.device.scales`` does the same on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from core.arrays.cast import cast_of
from core.arrays.dtypes import itemsize
from core.catalog.decoded import device_of
from core.device.device import QUANTIZE
from core.device.lane import lane_of
from core.device.scales import DevicePart
from core.quantize.source import number_type

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.files.store import ReadStore

LARGEST = 448.0


class Part(Protocol):
    """Some rows and columns; the columns are whole blocks, save the last one."""

    @property
    def n_columns(self) -> int:
        """Columns."""

    def largest(self) -> Any:
        """The largest absolute value of each block of columns, as float32; not finite if one is not."""

    def over(self, scales: Any) -> Any:
        """The numbers by the scales of their blocks (or by the one scale), as bytes of float8_e4m3fn; called once."""


def part_of(store: ReadStore, data: Any, *, source: str, dtype: str, shape: Shape, block: int) -> Part:
    """The part that some stored elements are, on the device of the store if it quantises.

    Args:
        data: the elements.
        source: their dtype.
        dtype: to which they are rounded first.
        shape: (rows, columns).
        block: columns of a block.
    """
    device = device_of(store)
    if device is None or not device.does(QUANTIZE) or min(itemsize(source), itemsize(dtype)) < 2:
        return _NumpyPart(data, source=source, dtype=dtype, shape=shape, block=block)
    return DevicePart(lane_of(device), data, source=source, dtype=dtype, shape=shape, block=block)


class _NumpyPart:
    """See ``Part``; the arguments are those of ``part_of``."""

    def __init__(self, data: Any, *, source: str, dtype: str, shape: Shape, block: int) -> None:
        import numpy as np

        self._block = block
        found: Any = np.frombuffer(data, number_type(source))
        with np.errstate(all="ignore"):
            values = found.astype(np.float32).reshape(shape)
            if itemsize(dtype) < 4 and dtype != source:
                values = values.astype(number_type(dtype)).astype(np.float32)
        self._values = values

    @property
    def n_columns(self) -> int:
        """See Part."""
        return int(self._values.shape[1])

    def largest(self) -> Any:
        """See Part."""
        import numpy as np

        in_columns = np.abs(self._values).max(axis=0)
        return np.maximum.reduceat(in_columns, np.arange(0, self.n_columns, self._block))

    def over(self, scales: Any) -> Any:
        """See Part."""
        import numpy as np

        values = self._values
        divisor = np.repeat(scales, self._block)[: self.n_columns] if len(scales) > 1 else scales
        with np.errstate(all="ignore"):
            np.divide(values, divisor, out=values)
        np.clip(values, np.float32(-LARGEST), np.float32(LARGEST), out=values)
        out: Any = np.empty(values.shape, np.uint8)
        cast_of("float32", "float8_e4m3fn")(memoryview(values.reshape(-1).view(np.uint8)), memoryview(out.reshape(-1)))
        return out
