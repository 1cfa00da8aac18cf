"""Wider floats → float8 with scales, as two encodings: one for the numbers, one for the scales.

For every block of 128 × 128 elements (the last ones may be smaller), or for the whole tensor, all in float32::

    w     = float32(stored element), rounded through the tensor's wanted dtype where that is narrower
    scale = max |w| / 448, or 1 where that quotient is 0
    q     = round_to_float8_e4m3fn( min(max(w / scale, -448), 448) ), to nearest even

so that ``q × scale`` is about ``w``; the scale is what DeepSeek calls ``weight_scale_inv``. 448 is the largest float8.
A tensor of more than two axes (stacked layers, experts) is many matrices: blocks lie in its last two axes.

Source: DeepSeek-V3's ``inference/kernel.py`` (``weight_dequant``: value = q × scale, blocks of 128 × 128) and the
``quantization_config`` of its checkpoints.

Not supported: numbers that are not finite (an error), scales rounded to powers of two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Box, c_strides
from core.arrays.dtypes import itemsize
from core.errors import UnsupportedError
from core.quantize.part import LARGEST, Part, part_of
from core.quantize.source import SourceTensor

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore

BLOCK = 128
UNIT_BYTES = 4 << 20
_AT_ONCE = 1 << 19
"""Elements that are treated at a time, if a block's height allows."""


class _Scales:
    """The scales of one tensor that are known already, by stripe (row of blocks); safe for threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.of_stripe: dict[int, Any] = {}


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, or several along leading axes, that is to be quantised.

    Args:
        source: its elements.
        dtype: to which they are rounded first, the tensor's own or that of a cast.
        per_block: one scale for each block; otherwise one for all.
    """

    source: SourceTensor
    dtype: str
    per_block: bool
    _known: _Scales = field(default_factory=_Scales, compare=False, repr=False)

    @property
    def n_rows(self) -> int:
        """Rows of one matrix."""
        return self.source.shape[-2]

    @property
    def n_columns(self) -> int:
        """Columns."""
        return self.source.shape[-1]

    @property
    def _stripes_per_matrix(self) -> int:
        return -(-self.n_rows // BLOCK)

    @property
    def n_stripes(self) -> int:
        """Rows of blocks of all matrices; the last one of each matrix may be lower."""
        return self._stripes_per_matrix * prod(self.source.shape[:-2])

    @property
    def n_blocks(self) -> int:
        """Blocks of a row of blocks."""
        return -(-self.n_columns // BLOCK)

    @property
    def stripes_per_unit(self) -> int:
        """Rows of blocks whose scales make a unit; a unit of the numbers has as many rows as so many full ones."""
        return max(1, UNIT_BYTES // max(1, BLOCK * self.n_columns))

    @property
    def working_bytes(self) -> int:
        """Memory that treating one part takes."""
        n = min(max(_AT_ONCE, BLOCK * BLOCK), BLOCK * self.n_columns)
        border = BLOCK * self.n_columns if len(self.source.shape) > 2 else 0
        return n * (itemsize(self.source.dtype) + 16) + border + self.source.working_bytes

    def height(self, stripe: int) -> int:
        """Rows of a row of blocks."""
        return min(BLOCK, self.n_rows - stripe % self._stripes_per_matrix * BLOCK)

    def stripe_at(self, row: int) -> int:
        """The row of blocks that holds a row; rows are counted through all matrices."""
        matrix, inside = divmod(row, self.n_rows)
        return matrix * self._stripes_per_matrix + inside // BLOCK

    def top(self, stripe: int) -> int:
        """The first row of a row of blocks."""
        matrix, inside = divmod(stripe, self._stripes_per_matrix)
        return matrix * self.n_rows + inside * BLOCK

    def parts(self, store: ReadStore, stripe: int) -> Iterator[tuple[int, Part]]:
        """(first column, elements) of the parts of a row of blocks; parts are whole blocks."""
        matrix, row = divmod(stripe, self._stripes_per_matrix)
        outer = self.source.shape[:-2]
        lead = tuple(matrix // step % n for step, n in zip(c_strides(outer), outer, strict=True))
        width = max(1, _AT_ONCE // (BLOCK * BLOCK)) * BLOCK
        for left in range(0, self.n_columns, width):
            shape = (self.height(stripe), min(width, self.n_columns - left))
            box = Box((*lead, row * BLOCK, left), (*(1,) * len(lead), *shape))
            data = self.source.read(store, box)
            yield (
                left,
                part_of(store, data, source=self.source.dtype, dtype=self.dtype, shape=shape, block=BLOCK),
            )

    def stripe_scales(self, store: ReadStore, stripe: int) -> Any:
        """The scales of a row of blocks; reads them all if they are not known."""
        if not self.per_block:
            return self._one_scale(store)
        known = self._known.of_stripe.get(stripe)
        if known is None:
            import numpy as np

            rows = [_scales_of(self._largest(left, part, stripe)) for left, part in self.parts(store, stripe)]
            known = np.concatenate(rows)
            self._known.of_stripe[stripe] = known
        return known

    def _one_scale(self, store: ReadStore) -> Any:
        with self._known.lock:
            if 0 not in self._known.of_stripe:
                import numpy as np

                most: Any = np.zeros(1, np.float32)
                for stripe in range(self.n_stripes):
                    for left, part in self.parts(store, stripe):
                        most = np.maximum(most, self._largest(left, part, stripe).max(keepdims=True))
                self._known.of_stripe[0] = _scales_of(most)
            return self._known.of_stripe[0]

    def _largest(self, left: int, part: Part, stripe: int) -> Any:
        """Largest absolute value of each block of a part.

        Raises:
            UnsupportedError: one is not finite.
        """
        import numpy as np

        found = part.largest()
        if not np.isfinite(found).all():
            raise UnsupportedError(
                f"a number in row of blocks {stripe} and columns {left}–{left + part.n_columns} is not finite in "
                f"{self.dtype}, so it has no scale",
                key=self.source.key,
                hint="leave the tensor as it is: --quantize 'KEY=none'",
            )
        return found

    def quantized(self, store: ReadStore, stripe: int, out: Any) -> None:
        """The bytes of the float8 elements of a row of blocks, written into ``out``."""
        import numpy as np

        rows = []
        known = self._one_scale(store) if not self.per_block else None
        for left, part in self.parts(store, stripe):
            largest = self._largest(left, part, stripe)  # finite ones only, whatever the scale
            scales = _scales_of(largest) if known is None else known
            rows.append(scales)
            out[:, left : left + part.n_columns] = part.over(scales)
        if known is None and rows:
            self._known.of_stripe[stripe] = np.concatenate(rows)


def _scales_of(largest: Any) -> Any:
    import numpy as np

    scales = largest / np.float32(LARGEST)
    scales[scales == 0] = 1
    return scales


@dataclass(frozen=True, slots=True)
class Quantized:
    """The encoding of the float8 numbers.

    Args:
        weight: the matrix.
    """

    weight: Weight

    @property
    def name(self) -> str:
        """See Encoding."""
        return "float8 blocks" if self.weight.per_block else "float8"

    @property
    def unit_bytes(self) -> int:
        """See Encoding: whole rows."""
        return max(1, self.weight.stripes_per_unit * BLOCK * self.weight.n_columns)

    @property
    def files(self) -> tuple[str, ...]:
        """See Encoding."""
        return self.weight.source.files

    @property
    def working_bytes(self) -> int:
        """See Encoding."""
        return self.weight.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """See Encoding."""
        import numpy as np

        weight = self.weight
        rows = weight.stripes_per_unit * BLOCK
        first, last = unit * rows, min((unit + 1) * rows, prod(weight.source.shape[:-1]))
        out: Any = np.empty((last - first, weight.n_columns), np.uint8)
        for stripe in range(weight.stripe_at(first), weight.stripe_at(last - 1) + 1):
            top, height = weight.top(stripe), weight.height(stripe)
            if first <= top and top + height <= last:
                weight.quantized(store, stripe, out[top - first : top + height - first])
            else:  # a lower row of blocks before it has moved it across the end of a unit
                whole: Any = np.empty((height, weight.n_columns), out.dtype)
                weight.quantized(store, stripe, whole)
                start, stop = max(first, top), min(last, top + height)
                out[start - first : stop - first] = whole[start - top : stop - top]
        return memoryview(out).cast("B")


@dataclass(frozen=True, slots=True)
class Scales:
    """The encoding of the scales.

    Args:
        weight: the matrix.
    """

    weight: Weight

    @property
    def name(self) -> str:
        """See Encoding."""
        return "scales"

    @property
    def unit_bytes(self) -> int:
        """See Encoding: the scales of the rows of blocks that make a unit of the numbers."""
        return 4 * max(1, self.weight.stripes_per_unit * self.weight.n_blocks) if self.weight.per_block else 4

    @property
    def files(self) -> tuple[str, ...]:
        """See Encoding."""
        return self.weight.source.files

    @property
    def working_bytes(self) -> int:
        """See Encoding."""
        return self.weight.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """See Encoding."""
        import numpy as np

        weight = self.weight
        first = unit * weight.stripes_per_unit
        stripes = range(first, min(first + weight.stripes_per_unit, weight.n_stripes)) if weight.per_block else range(1)
        rows: Any = np.concatenate([weight.stripe_scales(store, stripe) for stripe in stripes])
        return memoryview(rows.astype(np.float32).view(np.uint8)).cast("B")
