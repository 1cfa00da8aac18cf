"""LoRA adapters folded into the weights that they adapt, as an encoding.

For a weight W of shape (out, in), and an adapter of rank r with A of shape (r, in) and B of shape
(out, r)::

    product = B A              in float64, one rank after the other, then rounded to float32
    delta   = scaling·product  in float32; for embeddings rounded to the dtype of W
    result  = W + delta        in float32 (float64 if W is float64), rounded to the dtype of W

With fan_in_fan_out, and for embeddings, W is stored as (in, out), and the product is transposed.

This is what peft's ``merge_and_unload()`` computes for an adapter in float32, the type in which
peft loads float16 and bfloat16 adapters too (``autocast_adapter_dtype``): ``weight.data += B @ A *
scaling`` adds in float32 and rounds once, except for embeddings, where delta is rounded first.
Only the order of the additions inside ``B @ A``, in float32, depends on the machine there; here it
does not, so that all workers compute the same bytes.
Not matched: ``safe_merge=True``, which rounds delta to the dtype of W before it adds it.

Source: peft 0.21.2 ``tuners/lora/layer.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from core.arrays.box import Box, full_box
from core.arrays.dtypes import itemsize, numpy_dtype
from core.engine.quantize.source import SourceTensor, join_arrays
from core.values import dataclass
from core.verbs.merge.combined import UNIT_ELEMENTS, computing_type, read_numbers, rounded

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

_AT_ONCE = 1 << 15
"""Number of elements to multiply at a time, so that temporary arrays stay in the cache."""


@dataclass(frozen=True, slots=True)
class Folded:
    """The encoding of a weight with an adapter folded in.

    Args:
        weight: the weight, two axes.
        a, b: the adapter's matrices, (r, in) and (out, r).
        scaling: factor of the product.
        is_transposed: the weight is stored as (in, out).
        rounds_delta: the change is rounded to ``dtype`` before it is added.
        dtype: type of the result.
    """

    weight: SourceTensor
    a: SourceTensor
    b: SourceTensor
    scaling: float
    is_transposed: bool
    rounds_delta: bool
    dtype: str

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return "weight + LoRA"

    @property
    def _rows_per_unit(self) -> int:
        return max(1, UNIT_ELEMENTS // max(1, self.weight.shape[1]))

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of decoded bytes: complete rows of the weight."""
        return self._rows_per_unit * max(1, self.weight.shape[1]) * itemsize(self.dtype)

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return join_arrays(self.weight, self.a, self.b)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        rank, (_, n_columns) = self.a.shape[0], self.weight.shape
        n_unit = self.unit_bytes // itemsize(self.dtype)
        matrices = rank * (n_columns + self._rows_per_unit)
        at_once = max(_AT_ONCE, n_columns)
        return (
            n_unit * (itemsize(self.weight.dtype) + 16)
            + matrices * (itemsize(self.a.dtype) + 16)
            + 24 * at_once
            + sum(tensor.working_bytes for tensor in (self.weight, self.a, self.b))
        )

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the decoded bytes of a unit.

        Raises:
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError, CorruptError: a
                tensor cannot be read.
        """
        import numpy as np

        # Read the rows of the weight, and the part of the adapter that applies to them.
        n_rows, n_columns = self.weight.shape
        first = unit * self._rows_per_unit
        n = min(self._rows_per_unit, n_rows - first)
        computed = computing_type(self.dtype)
        box = Box((first, 0), (n, n_columns))
        out: Any = read_numbers(store, self.weight, box, computed).reshape(n, n_columns)
        b_rows, a_rows = self._factors(store, first, n)

        # Add the product, a few rows at a time, one rank after the other.
        at_once = max(1, _AT_ONCE // max(1, n_columns))
        part: Any = np.empty((at_once, n_columns), np.float64)
        for start in range(0, n, at_once):
            stop = min(start + at_once, n)
            total: Any = np.zeros((stop - start, n_columns), np.float64)
            with np.errstate(all="ignore"):
                for k in range(len(a_rows)):
                    np.multiply(b_rows[start:stop, k, None], a_rows[k], out=part[: stop - start])
                    np.add(total, part[: stop - start], out=total)
                delta = total.astype(np.float32) * np.float32(self.scaling)
                if self.rounds_delta:
                    delta = delta.astype(numpy_dtype(self.dtype)).astype(out.dtype)
                out[start:stop] += delta
        return rounded(out, self.dtype)

    def _factors(self, store: ReadStore, first: int, n: int) -> tuple[Any, Any]:
        """Return the matrices whose product is the change of some rows, in float64.

        Args:
            first, n: the rows of the weight as it is stored.

        Returns:
            (n, r) and (r, columns of the weight).
        """
        rank = self.a.shape[0]
        if self.is_transposed:
            # The change is the transpose of B A: its rows are columns of A.
            rows = read_numbers(store, self.a, Box((0, first), (rank, n)), "float64")
            columns = read_numbers(store, self.b, full_box(self.b.shape), "float64")
            return rows.reshape(rank, n).T, columns.reshape(-1, rank).T
        rows = read_numbers(store, self.b, Box((first, 0), (n, rank)), "float64")
        columns = read_numbers(store, self.a, full_box(self.a.shape), "float64")
        return rows.reshape(n, rank), columns.reshape(rank, -1)
