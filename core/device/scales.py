"""The arithmetic of float8 with scales on a device; ``core.quantize.to_float8`` and ``core.quantize.from_float8``
define it.

float32's division and product are IEEE's on a device as on a processor, as long as the divisor is a tensor of the
device: torch multiplies by the reciprocal of a plain number. NaNs get the sign and payload that numpy's product has.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from core.arrays.dtypes import itemsize
from core.device.cast import float32_bits, kernel_of
from core.device.lane import Array, Lane, Tensor

if TYPE_CHECKING:
    from core.arrays.box import Shape

_QUIET = 0x0040_0000


class DevicePart:
    """Elements of a matrix that are to be quantised; see ``core.quantize.part.Part``.

    Args:
        lane: the calling thread's.
        data: the stored elements.
        source: their dtype.
        dtype: to which they are rounded first; at least 16 bits.
        shape: (rows, columns).
        block: columns of a block.
    """

    def __init__(self, lane: Lane, data: Any, *, source: str, dtype: str, shape: Shape, block: int) -> None:
        import torch

        self._lane = lane
        self._shape = shape
        self._block = block
        with lane.working():
            bits = _float32_bits(lane, lane.sent(data), source)
            if itemsize(dtype) < 4 and dtype != source:
                rounded = kernel_of(lane, "float32", dtype)(bits.view(torch.uint8)).view(torch.uint8)
                bits = _float32_bits(lane, rounded, dtype)
            self._values = bits.view(torch.float32).view(shape)

    @property
    def n_columns(self) -> int:
        """See Part."""
        return self._shape[1]

    def largest(self) -> Array:
        """See Part."""
        import torch

        with self._lane.working():
            in_columns = self._values.abs().amax(dim=0)
            padded = torch.nn.functional.pad(in_columns, (0, -self.n_columns % self._block))
            return self._lane.fetched(padded.view(-1, self._block).amax(dim=1))

    def over(self, scales: Array) -> Array:
        """See Part."""
        import torch

        with self._lane.working():
            divisor = self._lane.sent(scales, 1).view(torch.float32)
            if len(scales) > 1:
                divisor = divisor.repeat_interleave(self._block)[: self.n_columns]
            made = (self._values / divisor).clamp(-448.0, 448.0).contiguous()
            kernel = kernel_of(self._lane, "float32", "float8_e4m3fn")
            return self._lane.fetched(kernel(made.view(-1).view(torch.uint8)).view(self._shape))


def multiplied(lane: Lane, weight: Any, scales: Array, *, dtypes: tuple[str, str], shape: Shape, columns: int) -> Array:
    """Rows of a float8 tensor times their scales, as bytes of a wider type.

    Args:
        lane: the calling thread's.
        weight: the float8 elements.
        scales: float32; one, or for each row one for every ``columns`` columns.
        dtypes: of the weight and of the result.
        shape: (rows, columns) of the elements.
    """
    import torch

    source, target = dtypes
    with lane.working():
        bits = _float32_bits(lane, lane.sent(weight), source).view(shape)
        factors = lane.sent(scales, 1).view(torch.int32)
        if len(factors) > 1:
            factors = factors.view(shape[0], -1).repeat_interleave(columns, dim=1)[:, : shape[1]]
        made = bits.view(torch.float32) * factors.contiguous().view(torch.float32)
        known = torch.where(_is_nan(bits), bits | _QUIET, factors | _QUIET)
        nan = torch.where(_is_nan(bits) | _is_nan(factors), known, _own_nan())
        made = torch.where(made.isnan(), nan, made.view(torch.int32)).view(-1)
        found = made if target == "float32" else kernel_of(lane, "float32", target)(made.view(torch.uint8))
        return lane.fetched(found.view(torch.uint8))


def _float32_bits(lane: Lane, data: Tensor, source: str) -> Tensor:
    if itemsize(source) > 2 or source == "bfloat16":
        return float32_bits(data, source)
    return kernel_of(lane, source, "float32")(data)


def _is_nan(bits: Tensor) -> Tensor:
    return (bits & 0x7FFF_FFFF) > 0x7F80_0000


@cache
def _own_nan() -> int:
    """The pattern, as a signed integer, of the NaN that numpy's product makes of an infinity and zero."""
    import numpy as np

    with np.errstate(all="ignore"):
        made: Array = np.full(4, np.inf, np.float32) * np.zeros(4, np.float32)
    return int(made.view(np.int32)[0])
