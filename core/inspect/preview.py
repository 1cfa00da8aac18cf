"""Look at one tensor: which file holds which box, and its first numbers.

The map is made from metadata; for the numbers only the elements asked for are read (plus, for
late-bound items, one small read). Of encoded arrays (compressed chunks) the units that hold them
are decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape, boxes_of_flat_range, c_strides
from core.arrays.dtypes import DTYPES
from core.catalog.catalog import Catalog, Fragment
from core.catalog.decoded import DecodedStore
from core.catalog.stored import Coords, StoredArray, stored_bytes_of
from core.errors import MissingShardError, UnsupportedError

if TYPE_CHECKING:
    from core.files.store import ReadStore

Number = int | float | bool | complex


@dataclass(frozen=True, slots=True)
class BoxLocation:
    """The position of one box of a tensor in a file.

    Args:
        box: region of the tensor, in elements.
        file: path relative to the checkpoint; None if the region is zero by rule and no file stores
            it.
        rank: rank coordinates, in formats that have one file per rank.
        array: name of the stored array that holds the region; None as for ``file``.
        at: index of the region's first element in that array.
        array_shape: shape of that array, in elements.
        offset: byte address of the array's element 0, or of the container item that holds it.
        item_bytes: length of that container item, or None where ``offset`` is exact.
        strides: strides of the array, in elements; None for C order or where only the item records
            them.
        n_bytes: bytes of the region.
        encoding: the codec, where the array's bytes must be decoded; None for plain ones.
        stored_bytes: length of the encoded array in its file, where the metadata record it.
    """

    box: Box
    file: str | None
    rank: Coords
    array: str | None
    at: Shape
    array_shape: Shape
    offset: int | None
    item_bytes: int | None
    strides: Shape | None
    n_bytes: int
    encoding: str | None = None
    stored_bytes: int | None = None


def places_of(catalog: Catalog, key: str) -> list[BoxLocation]:
    """Return where the boxes of one tensor lie, in their order, with replicas as separate entries.

    Raises:
        KeyError: the catalog has no such tensor.
    """
    itemsize = DTYPES[catalog.meta(key).dtype].itemsize
    places = [_place(fragment, itemsize) for fragment in catalog.fragments(key)]
    return sorted(places, key=lambda place: (place.box.offset, place.rank, place.file or ""))


def _place(fragment: Fragment, itemsize: int) -> BoxLocation:
    """Return where the box of one fragment lies."""
    array = fragment.array
    extent = array.extent if array else None
    encoding = extent.encoding if extent else None
    return BoxLocation(
        box=fragment.box,
        file=extent.file if extent else None,
        rank=array.coords if array else (),
        array=array.name if array else None,
        at=fragment.at,
        array_shape=array.shape if array else (),
        offset=extent.offset if extent else None,
        item_bytes=extent.item_bytes if extent else None,
        strides=extent.strides if extent else None,
        n_bytes=fragment.box.n_elements * itemsize,
        encoding=encoding.name if encoding else None,
        stored_bytes=stored_bytes_of(encoding) if encoding else None,
    )


def first_values(store: ReadStore, catalog: Catalog, key: str, n: int) -> list[Number]:
    """Return the first ``n`` elements of a tensor in C order (fewer if it has fewer).

    Args:
        n: at most some ten thousand; every element costs a few microseconds.

    Raises:
        MissingShardError: no stored piece holds an element that is wanted.
        UnsupportedError: the dtype has no numbers that Python can show.
        TruncatedError, StorageError, CorruptError: as the store or an array's encoding raises them.
    """
    meta = catalog.meta(key)
    decode = _decoder_of(meta.dtype)
    itemsize = DTYPES[meta.dtype].itemsize
    values: dict[int, Number] = {}
    wanted = boxes_of_flat_range(meta.shape, 0, min(n, meta.n_elements))
    strides = c_strides(meta.shape)
    decoded = DecodedStore(store)
    for fragment in catalog.fragments(key):
        for box in wanted:
            common = fragment.box.intersect(box)
            if common is None or _flat(common.offset, strides) in values:
                continue
            rows = _rows(decoded, catalog, fragment, common, itemsize)
            for start, data in rows:
                first = _flat(start, strides)
                values.update(enumerate(decode(data), start=first))
    count = sum(box.n_elements for box in wanted)
    missing = next((index for index in range(count) if index not in values), None)
    if missing is not None:
        raise MissingShardError(f"no file holds element {missing} of the tensor", key=key)
    return [values[index] for index in range(count)]


def _rows(
    store: DecodedStore, catalog: Catalog, fragment: Fragment, box: Box, itemsize: int
) -> Iterator[tuple[Shape, bytes]]:
    """Yield (index of the first element, bytes) for every row of ``box`` along the last axis."""
    n = box.shape[-1] if box.shape else 1
    array = fragment.array
    bound = None if array is None else _bound(store, catalog, array)
    for start in _row_starts(box):
        if bound is None:
            yield start, bytes(n * itemsize)
            continue
        extent = bound.extent
        strides = c_strides(bound.shape) if extent.strides is None else extent.strides
        inside = [i - o for i, o in zip(start, fragment.box.offset, strict=True)]
        index = list(fragment.at)
        for axis in range(1, min(len(index), len(inside)) + 1):
            index[-axis] += inside[-axis]
        address = extent.offset + itemsize * sum(i * s for i, s in zip(index, strides, strict=True))
        step = strides[-1] if strides else 1
        if step == 1 or n == 1:
            yield start, store.read(extent.file, address, n * itemsize)
        else:
            pieces = (
                store.read(extent.file, address + i * step * itemsize, itemsize) for i in range(n)
            )
            yield start, b"".join(pieces)


def _bound(store: DecodedStore, catalog: Catalog, array: StoredArray) -> StoredArray:
    """Return an array with its position, decoded if necessary."""
    if array.extent.is_late:
        array = catalog.bind(store, array)
    return store.placed(array)


def _row_starts(box: Box) -> Iterator[Shape]:
    """Yield the index of the first element of every row of ``box``, in C order."""
    if not box.shape:
        yield ()
        return
    outer = box.shape[:-1]
    steps = c_strides(outer)
    n_rows = Box(box.offset[:-1], outer).n_elements
    for number in range(n_rows):
        index = tuple(number // step % extent for step, extent in zip(steps, outer, strict=True))
        yield (*(o + i for o, i in zip(box.offset, index, strict=False)), box.offset[-1])


def _flat(index: Shape, strides: Shape) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


_STRUCT = {
    "float64": "d", "float32": "f", "float16": "e", "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "?",
}  # fmt: skip
_COMPLEX = {"complex128": "d", "complex64": "f", "complex32": "e"}


def _decoder_of(dtype: str) -> Callable[[bytes], Sequence[Number]]:
    """Return a function from little-endian bytes to Python numbers.

    Raises:
        UnsupportedError: Python has no such numbers.
    """
    if dtype in _STRUCT:
        code = _STRUCT[dtype]
        size = struct.calcsize(f"<{code}")
        return lambda data: struct.unpack(f"<{len(data) // size}{code}", data)
    if dtype == "bfloat16":
        return _bfloat16
    if dtype in _COMPLEX:
        code = _COMPLEX[dtype]
        size = struct.calcsize(f"<{code}")

        def pairs(data: bytes) -> list[complex]:
            parts = struct.unpack(f"<{len(data) // size}{code}", data)
            return [
                complex(real, imaginary)
                for real, imaginary in zip(parts[::2], parts[1::2], strict=True)
            ]

        return pairs
    name = DTYPES[dtype].numpy
    if name is None:
        raise UnsupportedError(f"cannot display numbers of dtype {dtype}")

    def small_floats(data: bytes) -> list[Number]:
        import ml_dtypes
        import numpy

        values: list[Number] = (
            numpy.frombuffer(data, dtype=getattr(ml_dtypes, name)).astype("float32").tolist()
        )
        return values

    return small_floats


def _bfloat16(data: bytes) -> Sequence[Number]:
    """Return bfloat16 numbers, each of which is the upper half of a float32."""
    wide = bytearray(2 * len(data))
    wide[2::4] = data[0::2]
    wide[3::4] = data[1::2]
    return struct.unpack(f"<{len(data) // 2}f", wide)
