"""Quantize to float8 with scales, and dequantize, on a device, as ``quantize`` defines it.

Quotients and products of float32 follow IEEE 754 on a device as on a processor, as long as the
divisor is a tensor on the device: instead of dividing by a plain number, torch multiplies by its
reciprocal. NaNs get the sign and payload of numpy's product.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from core.arrays.dtypes import itemsize
from core.engine.device.cast import float32_bits, kernel_of, mask_nan
from core.engine.device.lane import Array, Lane, Tensor

if TYPE_CHECKING:
    from core.arrays.box import Shape

_QUIET = 0x0040_0000
"""Bit of float32 that makes a NaN a quiet one."""


class DevicePart:
    """Elements of a matrix to be quantized on a device (a ``core.engine.quantize.part.Part``).

    Args:
        lane: the calling thread's lane to the device.
        data: the stored elements.
        source: dtype of the stored elements.
        dtype: type to which the elements are rounded first; at least 16 bits.
        shape: (rows, columns).
        block: number of columns of a block.
    """

    def __init__(
        self, lane: Lane, data: Any, *, source: str, dtype: str, shape: Shape, block: int
    ) -> None:
        import torch

        self._lane = lane
        self._shape = shape
        self._block = block
        with lane.on_stream():
            bits = _float32_bits(lane, lane.send(data), source)
            # Round to ``dtype`` and widen again: scales and quotients then come from the same
            # values as if the tensor had been cast before.
            if itemsize(dtype) < 4 and dtype != source:
                rounded = kernel_of(lane, "float32", dtype)(bits.view(torch.uint8)).view(
                    torch.uint8
                )
                bits = _float32_bits(lane, rounded, dtype)
            self._values = bits.view(torch.float32).view(shape)

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return self._shape[1]

    def largest(self) -> Array:
        """Return the largest absolute value of each block of columns, as float32."""
        import torch

        with self._lane.on_stream():
            # The last block may have fewer columns; zeros do not change a largest absolute value.
            column_maxima = self._values.abs().amax(dim=0)
            padded = torch.nn.functional.pad(column_maxima, (0, -self.n_columns % self._block))
            return self._lane.fetch(padded.view(-1, self._block).amax(dim=1))

    def over(self, scales: Array) -> Array:
        """Divide the elements by their blocks' scales; return float8_e4m3fn in their shape.

        Args:
            scales: float32; one for each block of columns, or a single one.
        """
        import torch

        with self._lane.on_stream():
            # One scale per column. The last block may have fewer columns than the others.
            divisor = self._lane.send(scales, 1).view(torch.float32)
            if len(scales) > 1:
                divisor = divisor.repeat_interleave(self._block)[: self.n_columns]
            # Saturate at the largest value of float8_e4m3fn, which has no infinity.
            quotients = (self._values / divisor).clamp(-448.0, 448.0).contiguous()
            kernel = kernel_of(self._lane, "float32", "float8_e4m3fn")
            return self._lane.fetch(kernel(quotients.view(-1).view(torch.uint8)).view(self._shape))


def multiply_by_scales(
    lane: Lane, weight: Any, scales: Array, *, dtypes: tuple[str, str], shape: Shape, columns: int
) -> Array:
    """Multiply rows of a float8 tensor by their scales; return the bytes in a wider type.

    Args:
        lane: the calling thread's lane to the device.
        weight: the float8 elements.
        scales: float32; a single one, or in each row one for every ``columns`` columns.
        dtypes: dtype of the weight and dtype of the result.
        shape: (rows, columns) of the elements.
        columns: number of columns that share a scale.
    """
    import torch

    source, target = dtypes
    with lane.on_stream():
        bits = _float32_bits(lane, lane.send(weight), source).view(shape)
        factors = lane.send(scales, 1).view(torch.int32)
        if len(factors) > 1:
            factors = factors.view(shape[0], -1).repeat_interleave(columns, dim=1)[:, : shape[1]]
        product = bits.view(torch.float32) * factors.contiguous().view(torch.float32)

        # A device's NaNs have a sign and payload of their own: replace them by those of numpy's
        # product. That is the first operand that is a NaN, made quiet, or else a constant pattern.
        operand_nan = torch.where(mask_nan(bits), bits | _QUIET, factors | _QUIET)
        nan = torch.where(mask_nan(bits) | mask_nan(factors), operand_nan, _product_nan())
        patterns = torch.where(product.isnan(), nan, product.view(torch.int32)).view(-1)

        if target != "float32":
            patterns = kernel_of(lane, "float32", target)(patterns.view(torch.uint8))
        return lane.fetch(patterns.view(torch.uint8))


def _float32_bits(lane: Lane, data: Tensor, source: str) -> Tensor:
    """Return elements of any float type as patterns of float32 (int32)."""
    if itemsize(source) > 2 or source == "bfloat16":
        return float32_bits(data, source)
    return kernel_of(lane, source, "float32")(data)


@cache
def _product_nan() -> int:
    """Return the pattern (as int32) of numpy's result for infinity times zero."""
    import numpy as np

    # The pattern depends on the processor (x86 sets the sign, Arm does not), so compute it.
    with np.errstate(all="ignore"):
        product: Array = np.full(4, np.inf, np.float32) * np.zeros(4, np.float32)
    return int(product.view(np.int32)[0])
