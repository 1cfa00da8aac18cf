"""Add a number to every element of a small tensor: a norm whose weight Megatron stores minus one.

::

    linear_attn.norm.weight  1.02 0.97 …   ──▶  self_attention.out_norm.weight  0.02 -0.03 …

Megatron's models with ``layernorm_zero_centered_gamma`` add 1 to the weight of every norm. Most
norms of such a model store their weight minus 1 in Hugging Face's files as well; one does not.

The sum is rounded to the tensor's element type, as in Megatron-Bridge. Subtracting 1 is exact for
weights of at least 0.5, and adding it again gives the same bits. A smaller weight loses the bits
that do not fit next to the 1 (``SHIFT_NOTE``).

Source: transformers 5.23.0 ``models/qwen3_next/modeling_qwen3_next.py`` ``Qwen3NextRMSNormGated``;
Megatron-Bridge 067f987d ``models/conversion/param_mapping.py``
``RMSNorm2ZeroCenteredRMSNormMapping``.

Not supported: tensors that do not fit in one unit (norms have a few hundred elements).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import full_box
from core.arrays.cast import find_cast
from core.arrays.dtypes import itemsize, numpy_dtype
from core.engine.catalog.stored import Extent, StoredArray
from core.engine.catalog.tensor import Tensor, compute_whole
from core.engine.quantize.source import SourceTensor, checked
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

SHIFT_NOTE = (
    "Megatron stores this weight minus 1 (layernorm_zero_centered_gamma); values of at least 0.5 "
    "are exact, smaller values are rounded"
)


@dataclass(frozen=True, slots=True)
class Shifted:
    """The encoding of a tensor whose elements are those of another one plus a number.

    Args:
        source: the other tensor.
        shift: the number.
    """

    source: SourceTensor
    shift: int

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return f"weights {self.shift:+d}"

    @property
    def unit_bytes(self) -> int:
        """Size of the only unit: the tensor."""
        return max(1, prod(self.source.shape) * itemsize(self.source.dtype))

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return self.source.arrays

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding needs in addition to the tensor: it as float64."""
        return 9 * prod(self.source.shape) + self.source.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the bytes of the sums.

        Raises:
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError, CorruptError: the
                source cannot be read.
        """
        import numpy as np

        dtype = self.source.dtype
        computed = "float64" if dtype == "float64" else "float32"
        data = memoryview(self.source.read(store, full_box(self.source.shape)))
        if dtype == computed:
            values: Any = np.frombuffer(data, numpy_dtype(dtype))
        else:
            values = np.empty(prod(self.source.shape), numpy_dtype(computed))
            find_cast(dtype, computed)(data, memoryview(values.view(np.uint8)))
        sums = memoryview((values + values.dtype.type(self.shift)).view(np.uint8))
        if dtype == computed:
            return sums
        result = memoryview(bytearray(len(data)))
        find_cast(computed, dtype)(sums, result)
        return result


def shifted(tensor: Tensor, key: str, name: str, shift: int) -> Tensor:
    """Return a tensor whose elements are those of another one plus a number.

    Args:
        tensor: the other tensor.
        key: its name, for errors.
        name: name of the result's array.
        shift: the number.
    """

    def compute() -> StoredArray:
        source = checked(key, tensor)
        extent = Extent(source.file, 0, encoding=Shifted(source, shift))
        return StoredArray(f"{name} of {source.origin}", source.dtype, source.shape, extent)

    return replace(tensor, tiling=compute_whole(compute))
