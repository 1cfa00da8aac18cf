"""Quantize wider floats to float8 with scales, as two encodings: of the numbers and the scales.

For every block of 128 × 128 elements (the last ones may be smaller), or for the whole tensor, all
in float32::

    w     = float32(stored element), rounded to the tensor's target dtype first if that is narrower
    scale = max |w| / 448, or 1 where that quotient is 0
    q     = round_to_float8_e4m3fn( min(max(w / scale, -448), 448) ), to nearest even

so that ``q × scale`` is about ``w``; DeepSeek calls the scale ``weight_scale_inv``. 448 is the
largest finite float8_e4m3fn. A tensor with more than two axes (stacked layers, experts) is a stack
of matrices; blocks span the last two axes.

Source: DeepSeek-V3's ``inference/kernel.py`` (``weight_dequant``: value = q × scale, blocks of 128
× 128) and the ``quantization_config`` of its checkpoints.

Not supported: non-finite numbers (an error), scales rounded to powers of two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Box, c_strides
from core.arrays.dtypes import itemsize
from core.engine.quantize.part import LARGEST, Part, wrap_part
from core.engine.quantize.source import SourceTensor
from core.errors import UnsupportedError
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

BLOCK = 128
UNIT_BYTES = 4 << 20
_AT_ONCE = 1 << 19
"""Number of elements to process at a time, if the height of a block allows."""


class _Scales:
    """The scales of one tensor that have been computed, by stripe (row of blocks); thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_stripe: dict[int, Any] = {}


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix to be quantized, or a stack of several along leading axes.

    Args:
        source: tensor with the elements.
        dtype: element type that they are rounded to first: their own, or that of a cast.
        per_block: one scale per block; otherwise a single scale.
    """

    source: SourceTensor
    dtype: str
    per_block: bool
    _known: _Scales = field(default_factory=_Scales, compare=False, repr=False)

    @property
    def n_rows(self) -> int:
        """Number of rows of one matrix."""
        return self.source.shape[-2]

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return self.source.shape[-1]

    @property
    def _stripes_per_matrix(self) -> int:
        """Number of stripes (rows of blocks) of one matrix."""
        return -(-self.n_rows // BLOCK)

    @property
    def n_stripes(self) -> int:
        """Number of stripes (rows of blocks) of all matrices.

        The last one of each matrix may have fewer rows.
        """
        return self._stripes_per_matrix * prod(self.source.shape[:-2])

    @property
    def n_blocks(self) -> int:
        """Number of blocks in a stripe."""
        return -(-self.n_columns // BLOCK)

    @property
    def stripes_per_unit(self) -> int:
        """Number of stripes whose scales form a unit.

        A unit of numbers has as many rows as this number of full stripes.
        """
        return max(1, UNIT_BYTES // max(1, BLOCK * self.n_columns))

    @property
    def working_bytes(self) -> int:
        """Maximum memory that processing one part needs."""
        n = min(max(_AT_ONCE, BLOCK * BLOCK), BLOCK * self.n_columns)
        border = BLOCK * self.n_columns if len(self.source.shape) > 2 else 0
        return n * (itemsize(self.source.dtype) + 16) + border + self.source.working_bytes

    def height(self, stripe: int) -> int:
        """Return the number of rows of a stripe."""
        return min(BLOCK, self.n_rows - stripe % self._stripes_per_matrix * BLOCK)

    def stripe_at(self, row: int) -> int:
        """Return the stripe that contains a row; rows are counted through all matrices."""
        matrix, inside = divmod(row, self.n_rows)
        return matrix * self._stripes_per_matrix + inside // BLOCK

    def top(self, stripe: int) -> int:
        """Return the first row of a stripe."""
        matrix, inside = divmod(stripe, self._stripes_per_matrix)
        return matrix * self.n_rows + inside * BLOCK

    def parts(self, store: ReadStore, stripe: int) -> Iterator[tuple[int, Part]]:
        """Yield (first column, elements) of the parts of a stripe, which consist of full blocks."""
        matrix, row = divmod(stripe, self._stripes_per_matrix)
        outer = self.source.shape[:-2]
        lead = tuple(matrix // step % n for step, n in zip(c_strides(outer), outer, strict=True))
        width = max(1, _AT_ONCE // (BLOCK * BLOCK)) * BLOCK
        for first_column in range(0, self.n_columns, width):
            shape = (self.height(stripe), min(width, self.n_columns - first_column))
            box = Box((*lead, row * BLOCK, first_column), (*(1,) * len(lead), *shape))
            data = self.source.read(store, box)
            yield (
                first_column,
                wrap_part(
                    store,
                    data,
                    source=self.source.dtype,
                    dtype=self.dtype,
                    shape=shape,
                    block=BLOCK,
                ),
            )

    def stripe_scales(self, store: ReadStore, stripe: int) -> Any:
        """Return the scales of a stripe, computing them if necessary."""
        if not self.per_block:
            return self._one_scale(store)
        scales = self._known.of_stripe.get(stripe)
        if scales is None:
            import numpy as np

            rows = [
                _scales_of(self._largest(first_column, part, stripe))
                for first_column, part in self.parts(store, stripe)
            ]
            scales = np.concatenate(rows)
            self._known.of_stripe[stripe] = scales
        return scales

    def _one_scale(self, store: ReadStore) -> Any:
        """Return the single scale of the tensor; the first call reads all of the tensor."""
        # Several threads ask for it at the same time; only one of them should read the tensor.
        with self._known.lock:
            if 0 not in self._known.of_stripe:
                import numpy as np

                largest: Any = np.zeros(1, np.float32)
                for stripe in range(self.n_stripes):
                    for first_column, part in self.parts(store, stripe):
                        largest_of_part = self._largest(first_column, part, stripe)
                        largest = np.maximum(largest, largest_of_part.max(keepdims=True))
                self._known.of_stripe[0] = _scales_of(largest)
            return self._known.of_stripe[0]

    def _largest(self, first_column: int, part: Part, stripe: int) -> Any:
        """Return the largest absolute value of each block of a part.

        Raises:
            UnsupportedError: an element is not finite.
        """
        import numpy as np

        largest = part.largest()
        if not np.isfinite(largest).all():
            raise UnsupportedError(
                f"a value in block row {stripe}, columns {first_column}–"
                f"{first_column + part.n_columns}, is not finite in {self.dtype}",
                key=self.source.key,
                hint="keep the tensor unquantized with --quantize 'KEY=none'",
            )
        return largest

    def write_float8(self, store: ReadStore, stripe: int, out: Any) -> None:
        """Write the float8 elements of a stripe to ``out``."""
        import numpy as np

        rows = []
        single_scale = self._one_scale(store) if not self.per_block else None
        for first_column, part in self.parts(store, stripe):
            # Needed even with a single scale: it raises for non-finite numbers.
            largest = self._largest(first_column, part, stripe)
            scales = _scales_of(largest) if single_scale is None else single_scale
            rows.append(scales)
            out[:, first_column : first_column + part.n_columns] = part.over(scales)
        # Keep the scales for the tensor that stores them.
        if single_scale is None and rows:
            self._known.of_stripe[stripe] = np.concatenate(rows)


def _scales_of(largest: Any) -> Any:
    """Return the scales for the largest absolute values of blocks."""
    import numpy as np

    scales = largest / np.float32(LARGEST)
    scales[scales == 0] = 1  # also a quotient that underflows; a scale of 0 cannot divide
    return scales


@dataclass(frozen=True, slots=True)
class Quantized:
    """The encoding of the float8 numbers of a weight."""

    weight: Weight

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return "float8 blocks" if self.weight.per_block else "float8"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of float8 numbers; a multiple of the row size."""
        return max(1, self.weight.stripes_per_unit * BLOCK * self.weight.n_columns)

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return self.weight.source.arrays

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        return self.weight.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the bytes of a unit."""
        import numpy as np

        weight = self.weight
        rows = weight.stripes_per_unit * BLOCK
        first, last = unit * rows, min((unit + 1) * rows, prod(weight.source.shape[:-1]))
        out: Any = np.empty((last - first, weight.n_columns), np.uint8)
        # Units have a fixed number of rows, but the last stripe of a matrix may be lower. After it,
        # a stripe may cross the end of a unit: compute it completely, and copy the rows of the
        # unit.
        for stripe in range(weight.stripe_at(first), weight.stripe_at(last - 1) + 1):
            top, height = weight.top(stripe), weight.height(stripe)
            if first <= top and top + height <= last:
                weight.write_float8(store, stripe, out[top - first : top + height - first])
            else:
                complete: Any = np.empty((height, weight.n_columns), out.dtype)
                weight.write_float8(store, stripe, complete)
                start, stop = max(first, top), min(last, top + height)
                out[start - first : stop - first] = complete[start - top : stop - top]
        return memoryview(out).cast("B")


@dataclass(frozen=True, slots=True)
class Scales:
    """The encoding of the scales of a weight."""

    weight: Weight

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return "scales"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of scales: those of the stripes in a unit of numbers."""
        return (
            4 * max(1, self.weight.stripes_per_unit * self.weight.n_blocks)
            if self.weight.per_block
            else 4
        )

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return self.weight.source.arrays

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        return self.weight.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the bytes of a unit."""
        import numpy as np

        weight = self.weight
        first = unit * weight.stripes_per_unit
        stripes = (
            range(first, min(first + weight.stripes_per_unit, weight.n_stripes))
            if weight.per_block
            else range(1)
        )
        rows: Any = np.concatenate([weight.stripe_scales(store, stripe) for stripe in stripes])
        return memoryview(rows.astype(np.float32).view(np.uint8)).cast("B")
