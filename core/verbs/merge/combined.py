"""Weighted sums and moving averages of tensors, as an encoding.

For the tensors x₀ … xₙ₋₁ of n checkpoints, element by element, every operation rounded to float32
(to float64 if a tensor is float64), from left to right::

    sum             (w₀·x₀ + w₁·x₁ + … + wₙ₋₁·xₙ₋₁) / divisor
    moving average  m = x₀;  then for each further x:  m = d·m + (1 − d)·x

Factors are rounded to the same type first, and a factor or divisor of 1 changes nothing. So an
average is ``(a.float() + b.float() + c.float()) / 3`` in torch, a weighted sum
``0.5 * a.float() + 0.3 * b.float() + …``, and a moving average
``m.mul_(d).add_(x.float() * (1 - d))``, bit for bit. The result is rounded once more, to the dtype
of the destination: by the copy (``core.arrays.cast``), or here where ``Combined.dtype`` is narrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Box, boxes_of_flat_range
from core.arrays.cast import find_cast
from core.arrays.dtypes import itemsize, numpy_dtype
from core.engine.quantize.source import SourceTensor, join_arrays
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

UNIT_ELEMENTS = 1 << 20
"""Number of elements of a unit; consecutive ones in C order."""
SUM, MOVING = "sum", "moving average"


@dataclass(frozen=True, slots=True)
class Combined:
    """The encoding of a tensor that is a combination of tensors of the same shape.

    Args:
        tensors: the tensors, in order.
        kind: ``SUM`` or ``MOVING``.
        factors: of ``SUM``, the factor of each tensor; of ``MOVING``, only the decay.
        divisor: divisor of the sum.
        dtype: type of the result; operations are in float64 for float64, else in float32.
    """

    tensors: tuple[SourceTensor, ...]
    kind: str
    factors: tuple[float, ...]
    divisor: float
    dtype: str

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return f"{self.kind} of {len(self.tensors)}"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of decoded bytes."""
        return UNIT_ELEMENTS * itemsize(self.dtype)

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return join_arrays(*self.tensors)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        computed = computing_type(self.dtype)
        return reading_bytes(self.tensors, computed) + UNIT_ELEMENTS * itemsize(computed)

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the decoded bytes of a unit.

        Raises:
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError, CorruptError: a
                tensor cannot be read.
        """
        import numpy as np

        computed = computing_type(self.dtype)
        number = np.dtype(computed).type
        out: Any = np.empty(n_in_unit(array, unit), numpy_dtype(computed))
        for box, part in boxes_of_unit(array, unit):
            total = out[part]
            for n, tensor in enumerate(self.tensors):
                values = read_numbers(store, tensor, box, computed)
                # Overflow gives infinity, as in torch, without numpy's warning.
                with np.errstate(all="ignore"):
                    if self.kind == MOVING:
                        decay = self.factors[0]
                        if n:
                            np.multiply(total, number(decay), out=total)
                            np.multiply(values, number(1 - decay), out=values)
                    elif self.factors[n] != 1:
                        np.multiply(values, number(self.factors[n]), out=values)
                    if n:
                        np.add(total, values, out=total)
                    else:
                        total[:] = values
            if self.divisor != 1:
                with np.errstate(all="ignore"):
                    np.divide(total, number(self.divisor), out=total)
        return rounded(out, self.dtype)


def computing_type(dtype: str) -> str:
    """Return the type in which a result of a dtype is computed."""
    return "float64" if dtype == "float64" else "float32"


def rounded(values: Any, dtype: str) -> memoryview:
    """Return the bytes of computed numbers in a dtype.

    Args:
        values: a dense numpy array of ``computing_type(dtype)``.
        dtype: type of the result.
    """
    import numpy as np

    data = memoryview(values.reshape(-1).view(np.uint8))
    computed = computing_type(dtype)
    if dtype == computed:
        return data
    result = memoryview(bytearray(values.size * itemsize(dtype)))
    find_cast(computed, dtype)(data, result)
    return result


def reading_bytes(tensors: Sequence[SourceTensor], dtype: str) -> int:
    """Return the maximum memory for reading a unit of one tensor after the other, as numbers."""
    return max(
        UNIT_ELEMENTS * (itemsize(tensor.dtype) + 2 * itemsize(dtype)) + tensor.working_bytes
        for tensor in tensors
    )


def n_in_unit(array: StoredArray, unit: int) -> int:
    """Return the number of elements of a unit; the last one may have fewer."""
    return min(UNIT_ELEMENTS, prod(array.shape) - unit * UNIT_ELEMENTS)


def boxes_of_unit(array: StoredArray, unit: int) -> Iterator[tuple[Box, slice]]:
    """Yield the boxes that form a unit, in C order, with their places among its elements."""
    start = unit * UNIT_ELEMENTS
    done = 0
    for box in boxes_of_flat_range(array.shape, start, start + n_in_unit(array, unit)):
        yield box, slice(done, done + box.n_elements)
        done += box.n_elements


def read_numbers(store: ReadStore, tensor: SourceTensor, box: Box, dtype: str) -> Any:
    """Read a box of a tensor as a flat numpy array of a wider float type."""
    import numpy as np

    data = tensor.read(store, box)
    if tensor.dtype == dtype:
        return np.frombuffer(data, numpy_dtype(dtype))
    values: Any = np.empty(box.n_elements, numpy_dtype(dtype))
    find_cast(tensor.dtype, dtype)(memoryview(data), memoryview(values.view(np.uint8)))
    return values
