"""Find where two replicas of a box differ, and by how much, by reading both again band by band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.calibration.choice import choose_device
from core.catalog.decoded import DecodedStore
from core.device.compare import count_differing
from core.device.device import COMPARE, Device
from core.quantize.source import SourceTensor
from core.scan.separate_arrays import split_into_bands

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.catalog import Catalog, Fragment
    from core.files.store import ReadStore

_BAND_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """How two replicas differ.

    Args:
        n_different: elements of which any bit differs.
        index: index of the first such element, in the tensor.
        first, other: bytes of that element in the two replicas, in hexadecimal digits.
    """

    n_different: int
    index: Shape
    first: str
    other: str


def first_difference(
    store: ReadStore,
    catalog: Catalog,
    first: Fragment,
    other: Fragment,
    *,
    device: Device | None = None,
) -> Difference | None:
    """Compare two fragments with the same box; return None if they are equal bit for bit.

    Args:
        device: accelerator that may compare them; None for the CPU.

    Raises:
        CheckpointingException: one of them cannot be read.
    """
    import numpy as np

    meta = catalog.meta(first.key)
    size = itemsize(meta.dtype)
    decoded = DecodedStore(store)
    compare_device = choose_device(device, [COMPARE], threads=1)
    sources = [
        SourceTensor(meta.key, meta.dtype, meta.shape, (piece,), catalog.bind)
        for piece in (first, other)
    ]
    n_different = 0
    index: Shape | None = None
    elements = ("", "")
    for start, shape in split_into_bands(first.box.shape, max(1, _BAND_BYTES // size)):
        band = Box(tuple(a + b for a, b in zip(first.box.offset, start, strict=True)), shape)
        contents = [source.read(decoded, band) for source in sources]
        if contents[0] == contents[1]:
            continue
        differs = count_differing(
            compare_device, memoryview(contents[0]), memoryview(contents[1]), size
        )
        n_different += differs.n
        if index is None:
            # Keep where the first difference is, and both elements.
            at = differs.first
            assert at is not None
            in_band = tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()
            index = tuple(a + b for a, b in zip(band.offset, in_band, strict=True))
            span = slice(at * size, (at + 1) * size)
            elements = (bytes(contents[0][span]).hex(), bytes(contents[1][span]).hex())
    return None if index is None else Difference(n_different, index, *elements)
