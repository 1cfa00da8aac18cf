"""Dequantize 8-bit and 4-bit optimizer states, as an encoding.

::

    codes   uint8 or float8_e4m3fn, one a state; or uint8, two states a byte, high half first
    scales  float32 (⌈states / block⌉,)         a factor for each block of consecutive states; also
            (2, blocks) for two moments stacked along axis 0, each of complete blocks
    table   float32 (256,) or (16,), or None    the number that a code stands for
        value = table[code] × scale, or code × scale without a table; a product in float32

Source: bitsandbytes 0.50.2 ``functional.dequantize_blockwise``; torchao 0.18.0
``optim/subclass_{4bit,8bit,fp8}.py``; compared bit for bit in tests/engine/changes.

Not supported: results other than float32.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from core.arrays.box import Shape, boxes_of_flat_range, full_box
from core.arrays.cast import find_cast
from core.engine.quantize.source import SourceTensor, join_arrays
from core.errors import CorruptError
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.files.store import ReadStore

_UNIT = 1 << 18
"""Number of states that are decoded at once; an even number."""


@dataclass(frozen=True, slots=True)
class DequantizedState:
    """The encoding of an optimizer state that is computed from codes.

    Args:
        codes, scales, table: the stored tensors; no table for float8 codes.
        shape: shape of the state.
        block: number of states with one scale.
    """

    codes: SourceTensor
    scales: SourceTensor
    table: SourceTensor | None
    shape: Shape
    block: int

    @property
    def name(self) -> str:
        """Name of the encoding, for users."""
        return f"{8 // self._per_byte}-bit optimizer state"

    @property
    def _per_byte(self) -> int:
        """Number of states in a byte."""
        return 1 if prod(self.codes.shape) == prod(self.shape) else 2

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of decoded bytes."""
        return 4 * _UNIT

    @property
    def inputs(self) -> tuple[StoredArray, ...]:
        """The arrays from which the tensor is computed."""
        return join_arrays(self.codes, self.scales, self.table)

    @property
    def working_bytes(self) -> int:
        """Maximum memory that decoding a unit needs in addition to its result."""
        return 22 * _UNIT + self.codes.working_bytes + self.scales.working_bytes

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> memoryview:
        """Return the decoded bytes of a unit.

        Raises:
            CorruptError: a code is not in the table, or a tensor cannot be read.
            ReplicaMismatchError, TruncatedError, MissingShardError, StorageError: a tensor cannot
                be read.
        """
        import numpy as np

        # Read the codes of the unit, which are consecutive elements, in a few boxes.
        first, last = unit * _UNIT, min((unit + 1) * _UNIT, prod(self.shape))
        start, stop = first // self._per_byte, -(-last // self._per_byte)
        data = b"".join(
            self.codes.read(store, box)
            for box in boxes_of_flat_range(self.codes.shape, start, stop)
        )

        # Look up the numbers that the codes stand for.
        values: Any = np.empty(last - first, np.float32)
        if self.table is None:
            find_cast(self.codes.dtype, "float32")(
                memoryview(data), memoryview(values.view(np.uint8))
            )
        else:
            codes: Any = np.frombuffer(data, np.uint8)
            if self._per_byte == 2:
                codes = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)[: last - first]
            table: Any = np.frombuffer(
                self.table.read(store, full_box(self.table.shape)), np.float32
            )
            if codes.size and int(codes.max()) >= len(table):
                raise CorruptError(
                    f"code {int(codes.max())} is out of range for the lookup table of "
                    f"{len(table)} values",
                    key=self.codes.key,
                )
            np.take(table, codes, out=values)

        # Multiply each block by its scale; a unit may begin and end within a block.
        if last > first:
            low, high = first // self.block, -(-last // self.block)
            scales: Any = np.frombuffer(
                b"".join(
                    self.scales.read(store, box)
                    for box in boxes_of_flat_range(self.scales.shape, low, high)
                ),
                np.float32,
            )
            with np.errstate(all="ignore"):
                if first % self.block == 0 and (last - first) % self.block == 0:
                    values.reshape(-1, self.block)[:] *= scales[:, None]
                else:
                    values *= scales[np.arange(first, last) // self.block - low]
        return memoryview(values.view(np.uint8))
