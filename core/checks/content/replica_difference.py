"""Locate and count the differences of two replicas of a box, by reading both again in bands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.arrays.box import Box
from core.arrays.dtypes import itemsize
from core.calibration.choice import choose_device
from core.catalog.decoded import DecodedStore
from core.device.compare import count_differing
from core.device.device import COMPARE, Device
from core.quantize.source import SourceTensor
from core.scan.separate_arrays import split_into_bands
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape
    from core.catalog.catalog import Catalog
    from core.catalog.tensor import Fragment
    from core.files.store import ReadStore

_BAND_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two replicas.

    Args:
        n_different: number of elements with any different bit.
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
    key: str,
    first: Fragment,
    other: Fragment,
    *,
    device: Device | None = None,
) -> Difference | None:
    """Compare two fragments with the same box; return None if they are equal bit for bit.

    Args:
        key: key of the tensor.
        first, other: two of its fragments.
        device: accelerator that may compare the bytes; None for the CPU.

    Raises:
        CheckpointingException: a fragment cannot be read.
    """
    import numpy as np

    meta = catalog.meta(key)
    size = itemsize(meta.dtype)
    decoded = DecodedStore(store)
    compare_device = choose_device(device, [COMPARE], threads=1)
    sources = [
        SourceTensor(key, meta.dtype, meta.shape, (fragment,)) for fragment in (first, other)
    ]
    # Read row bands of both, so that memory stays small whatever the size of the box.
    n_different = 0
    index: Shape | None = None
    elements = ("", "")
    for start, shape in split_into_bands(first.box.shape, max(1, _BAND_BYTES // size)):
        band = Box(tuple(a + b for a, b in zip(first.box.offset, start, strict=True)), shape)
        contents = [source.read(decoded, band) for source in sources]
        if contents[0] == contents[1]:
            continue
        count = count_differing(
            compare_device, memoryview(contents[0]), memoryview(contents[1]), size
        )
        n_different += count.n
        # Keep the index of the first difference, and the element in both replicas.
        if index is None:
            first_in_band = count.first
            assert first_in_band is not None
            in_band = np.unravel_index(first_in_band, shape) if shape else ()
            index = tuple(a + int(b) for a, b in zip(band.offset, in_band, strict=True))
            span = slice(first_in_band * size, (first_in_band + 1) * size)
            elements = (bytes(contents[0][span]).hex(), bytes(contents[1][span]).hex())
    return None if index is None else Difference(n_different, index, *elements)
