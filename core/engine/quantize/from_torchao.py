"""Dequantize weights of torchao's classes, as an encoding.

::

    codes   float8 or int8, in the shape of the weight
    scales  float, one for each block; a block is a box of the weight: (1, columns), (1, 32) …
    zeros   int8, one for each block, or None
        value = (code - zero) × scale; a product in float32, rounded once

torchao subtracts and multiplies in the type of the result. For codes of 8 bits, that is the same:
the differences are below 256, which every float type holds, and the product of two 16-bit floats is
exact in float32.

Source: torchao 0.18.0 ``quantization/quant_primitives.py`` (``_dequantize_affine_no_dtype_check``,
``_dequantize_affine_float8``); compared bit for bit with its ``dequantize()`` in
tests/engine/changes.

Not supported: codes that are packed, of more than 8 bits, or that blocks do not divide.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Shape, boxes_of_flat_range
from core.arrays.cast import find_cast
from core.arrays.dtypes import itemsize
from core.engine.quantize.source import SourceTensor, join_arrays
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

_UNIT = 1 << 18
"""Number of weights that are decoded at once."""


@dataclass(frozen=True, slots=True)
class DequantizedTorchao:
    """The encoding of a weight that is computed from the parts of a tensor of torchao.

    Args:
        codes, scales, zeros: the stored tensors; no zeros where they are all 0.
        block: extents of a block along each axis; they divide the shape.
        dtype: element type of the result.
    """

    codes: SourceTensor
    scales: SourceTensor
    zeros: SourceTensor | None
    block: Shape
    dtype: str

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return f"torchao {self.codes.dtype}"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of decoded bytes."""
        return itemsize(self.dtype) * _UNIT

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return join_arrays(self.codes, self.scales, self.zeros)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        return 64 * _UNIT + self.codes.working_bytes + self.scales.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the decoded bytes of a unit.

        Raises:
            CorruptError, ReplicaMismatchError, TruncatedError, MissingShardError, StorageError: a
                tensor cannot be read.
        """
        import numpy as np

        shape = self.codes.shape
        first, last = unit * _UNIT, min((unit + 1) * _UNIT, prod(shape))
        values = _as_float32(store, self.codes, first, last)
        if not len(values):
            return memoryview(b"")

        # Find the block of each element, axis by axis, as an index of the flattened scales.
        positions: Any = np.arange(first, last)
        blocks: Any = np.zeros_like(positions)
        stride = 1
        for extent, width in zip(reversed(shape), reversed(self.block), strict=True):
            blocks += positions % extent // width * stride
            positions //= extent
            stride *= extent // width
        low, high = int(blocks.min()), int(blocks.max()) + 1
        blocks -= low

        # Compute the values, and round them.
        with np.errstate(all="ignore"):
            if self.zeros is not None:
                values -= _as_float32(store, self.zeros, low, high)[blocks]
            values *= _as_float32(store, self.scales, low, high)[blocks]
        if self.dtype == "float32":
            return memoryview(values.view(np.uint8))
        result: Any = np.empty(len(values) * itemsize(self.dtype), np.uint8)
        find_cast("float32", self.dtype)(memoryview(values.view(np.uint8)), memoryview(result))
        return memoryview(result)


def _as_float32(store: ReadStore, tensor: SourceTensor, first: int, last: int) -> Any:
    """Return elements [first, last) of a flattened tensor as an array of float32 of its own."""
    import numpy as np

    data = b"".join(
        tensor.read(store, box) for box in boxes_of_flat_range(tensor.shape, first, last)
    )
    if tensor.dtype == "int8":
        integers: Any = np.frombuffer(data, np.int8)
        return integers.astype(np.float32)
    values: Any = np.empty(last - first, np.float32)
    if tensor.dtype == "float32":
        values.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    else:
        find_cast(tensor.dtype, "float32")(memoryview(data), memoryview(values.view(np.uint8)))
    return values
