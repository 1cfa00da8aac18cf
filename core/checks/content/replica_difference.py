"""Where two copies of a box differ, and by how much: both are read again, band by band."""

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
    """How two copies differ.

    Args:
        n_different: elements of which any bit differs.
        index: of the first one, in the tensor.
        first, other: its bytes in the two copies, as they lie in the file, in hexadecimal digits.
    """

    n_different: int
    index: Shape
    first: str
    other: str


def first_difference(
    store: ReadStore, catalog: Catalog, one: Fragment, other: Fragment, *, device: Device | None = None
) -> Difference | None:
    """How two fragments with one box differ; None if they are equal bit for bit.

    Args:
        device: on which they may be compared.

    Raises:
        CheckpointingException: one of them cannot be read.
    """
    import numpy as np

    meta = catalog.meta(one.key)
    size = itemsize(meta.dtype)
    decoded = DecodedStore(store)
    able = choose_device(device, [COMPARE], threads=1)
    sources = [SourceTensor(meta.key, meta.dtype, meta.shape, (piece,), catalog.bind) for piece in (one, other)]
    n_different = 0
    found: tuple[Shape, bytes, bytes] | None = None
    for start, shape in split_into_bands(one.box.shape, max(1, _BAND_BYTES // size)):
        band = Box(tuple(a + b for a, b in zip(one.box.offset, start, strict=True)), shape)
        first, second = (source.read(decoded, band) for source in sources)
        if first == second:
            continue
        differs = count_differing(able, memoryview(first), memoryview(second), size)
        n_different += differs.n
        if found is None:
            at = differs.first
            assert at is not None
            index = tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()
            found = (
                tuple(a + b for a, b in zip(band.offset, index, strict=True)),
                bytes(first[at * size : (at + 1) * size]),
                bytes(second[at * size : (at + 1) * size]),
            )
    if found is None:
        return None
    return Difference(n_different, found[0], found[1].hex(), found[2].hex())
