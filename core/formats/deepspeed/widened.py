"""16-bit buffers read as float32, as DeepSpeed's own tools convert them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from core.arrays.dtypes import itemsize
from core.values import dataclass

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray
    from core.files.store import ReadStore

_UNIT_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Widened:
    """An encoding (``core.catalog.stored``): 16-bit floats without gaps, read as float32.

    Args:
        dtype: the stored dtype, ``bfloat16`` or ``float16``.
    """

    dtype: str

    @property
    def name(self) -> str:
        """Name of the encoding, for messages."""
        return f"{self.dtype} as float32"

    @property
    def unit_bytes(self) -> int:
        """Size of a unit, in bytes."""
        return 4 * _UNIT_ELEMENTS

    @property
    def working_bytes(self) -> int:
        """Memory needed for decoding a unit, in bytes."""
        return (itemsize(self.dtype) + 4) * _UNIT_ELEMENTS

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes:
        """Read a unit and return its elements as float32."""
        import numpy as np

        first = unit * _UNIT_ELEMENTS
        n = min(_UNIT_ELEMENTS, array.n_bytes // 4 - first)
        data = store.read(array.extent.file, array.extent.offset + 2 * first, 2 * n)
        if self.dtype == "float16":
            wide = np.frombuffer(data, "<f2").astype("<f4")
        else:
            # bfloat16 is the upper half of a float32; numpy has no such type.
            wide = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        return bytes(wide.data)


def as_float32(array: StoredArray) -> StoredArray:
    """Return a 16-bit floating-point array without gaps as float32, any other array unchanged."""
    extent = array.extent
    if array.dtype not in ("bfloat16", "float16") or extent.strides is not None:
        return array
    return replace(
        array, dtype="float32", extent=replace(extent, encoding=Widened(array.dtype), crc=None)
    )
