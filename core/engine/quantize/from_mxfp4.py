"""Dequantize MXFP4 experts, as an encoding.

::

    X_blocks  uint8 (experts, columns, groups, 16)    two numbers of 4 bits per byte, low first
    X_scales  uint8 (experts, columns, groups)        exponent of 2 for a group of 32, plus 127
        value = number × 2 ^ (scale - 127)
    X         (experts, 32 × groups, columns)         transposed

The 16 numbers are those of float4_e2m1. Products are exact in bfloat16 and float32 unless they
exceed the range of the exponent, where they become infinite or are rounded to nearest even, as
``torch.ldexp`` in transformers 5.23.0 ``integrations/mxfp4.py`` does.

Source: ``convert_moe_packed_tensors`` there; compared bit for bit in tests/engine/changes.

Not supported: units smaller than the matrix of one expert.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Box
from core.arrays.cast import find_cast
from core.arrays.dtypes import itemsize, numpy_dtype
from core.engine.quantize.source import SourceTensor, join_arrays
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the numbers and of their scales."""
GROUP = 32
"""Number of values with one scale."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""float4_e2m1 numbers without their sign, the highest bit."""
_BIAS = 127


@dataclass(frozen=True, slots=True)
class DequantizedMxfp4:
    """The encoding of the matrix of one expert that is computed from MXFP4 numbers.

    Args:
        blocks, scales: the tensors of all experts.
        expert: number of the expert.
        dtype: element type of the result.
    """

    blocks: SourceTensor
    scales: SourceTensor
    expert: int
    dtype: str

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return "MXFP4"

    @property
    def _n_elements(self) -> int:
        """Number of elements of the matrix."""
        return 2 * prod(self.blocks.shape[1:])

    @property
    def unit_bytes(self) -> int:
        """Size of the only unit: the matrix."""
        return max(1, self._n_elements * itemsize(self.dtype))

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return join_arrays(self.blocks, self.scales)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding needs in addition to the matrix."""
        return 9 * self._n_elements + self.blocks.working_bytes + self.scales.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the bytes of the matrix.

        Raises:
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError, CorruptError: a
                tensor cannot be read.
        """
        import numpy as np

        def read(tensor: SourceTensor) -> Any:
            rest = tensor.shape[1:]
            box = Box((self.expert, *(0,) * len(rest)), (1, *rest))
            return np.frombuffer(tensor.read(store, box), np.uint8).reshape(rest)

        # Look up the numbers of both halves of each byte, and multiply each group by its scale.
        pairs, exponents = read(self.blocks), read(self.scales).astype(np.int32) - _BIAS
        table = np.array([*_VALUES, *(-value for value in _VALUES)], np.float32)
        numbers: Any = np.empty((*pairs.shape, 2), np.float32)
        numbers[..., 0] = table[pairs & 15]
        numbers[..., 1] = table[pairs >> 4]
        with np.errstate(all="ignore"):
            np.ldexp(numbers, exponents[..., None, None], out=numbers)
        # Transpose, and round to the type of the result.
        matrix: Any = np.ascontiguousarray(numbers.reshape(pairs.shape[0], -1).T)
        out: Any = np.empty(matrix.shape, numpy_dtype(self.dtype))
        if self.dtype == "float32":
            out[:] = matrix
        else:
            find_cast("float32", self.dtype)(
                memoryview(matrix.reshape(-1).view(np.uint8)),
                memoryview(out.reshape(-1).view(np.uint8)),
            )
        return memoryview(out.reshape(-1).view(np.uint8))
