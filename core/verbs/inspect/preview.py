"""Show one tensor: the file position of each of its boxes, and its first values.

The positions come from metadata. For the values, only the requested elements are read (plus, for
late-bound items, one small read); of encoded arrays (compressed chunks), the units that contain
them are decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from core.arrays.box import Box, Shape, boxes_of_flat_range, c_strides
from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.stored import Coords, stored_bytes_of
from core.engine.catalog.tensor import Fragment
from core.errors import MissingShardError, UnsupportedError
from core.values import dataclass

if TYPE_CHECKING:
    from core.files.store import ReadStore

Number = int | float | bool | complex


@dataclass(frozen=True, slots=True)
class BoxLocation:
    """The position of one box of a tensor in a file.

    Args:
        box: region of the tensor, in elements.
        file: path relative to the checkpoint; None if the region is zero by rule and not stored.
        rank: rank coordinates, in formats that have one file per rank.
        array: name of the stored array that holds the region; None as for ``file``.
        at: index of the region's first element in that array.
        array_shape: shape of that array, in elements.
        offset: byte offset of the array's element 0, or of the container item that holds it.
        item_bytes: size of that container item; None if ``offset`` is exact.
        strides: strides of the array, in elements; None for C order, or if only the item records
            them.
        n_bytes: size of the region, in bytes.
        encoding: name of the codec; None for plain bytes.
        stored_bytes: size of the encoded array in its file; None if it is not recorded.
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
    """Return the file positions of a tensor's boxes, sorted; replicas are separate entries.

    Raises:
        KeyError: the catalog has no such tensor.
    """
    itemsize = DTYPES[catalog.tensor(key).dtype].itemsize
    locations = [_locate(fragment, itemsize) for fragment in catalog.fragments(key)]
    return sorted(
        locations, key=lambda location: (location.box.offset, location.rank, location.file or "")
    )


def _locate(fragment: Fragment, itemsize: int) -> BoxLocation:
    """Return the file position of one fragment."""
    array = fragment.array
    n_bytes = fragment.box.n_elements * itemsize
    if array is None:
        return BoxLocation(
            box=fragment.box,
            file=None,
            rank=(),
            array=None,
            at=fragment.at,
            array_shape=(),
            offset=None,
            item_bytes=None,
            strides=None,
            n_bytes=n_bytes,
        )
    extent, encoding = array.extent, array.extent.encoding
    return BoxLocation(
        box=fragment.box,
        file=extent.file,
        rank=array.coords,
        array=array.name,
        at=fragment.at,
        array_shape=array.shape,
        offset=extent.offset,
        item_bytes=None if extent.item is None else extent.item.n_bytes,
        strides=extent.strides,
        n_bytes=n_bytes,
        encoding=encoding.name if encoding else None,
        stored_bytes=stored_bytes_of(encoding) if encoding else None,
    )


def first_values(store: ReadStore, catalog: Catalog, key: str, n: int) -> list[Number]:
    """Return the first ``n`` elements of a tensor in C order (fewer if it has fewer).

    Args:
        n: number of elements, at most some ten thousand: each costs a few microseconds.

    Raises:
        KeyError: the catalog has no such tensor.
        MissingShardError: no file holds one of the elements.
        UnsupportedError: Python cannot display numbers of the dtype.
        TruncatedError, StorageError, CorruptError: a file cannot be read or decoded.
    """
    tensor = catalog.tensor(key)
    decode = _decoder_of(tensor.dtype)
    itemsize = DTYPES[tensor.dtype].itemsize
    values: dict[int, Number] = {}
    wanted = boxes_of_flat_range(tensor.shape, 0, min(n, tensor.n_elements))
    strides = c_strides(tensor.shape)
    decoded = DecodedStore(store)
    # Read each element once: a box whose first element is known is a replica.
    for fragment in catalog.fragments(key):
        for box in wanted:
            common = fragment.box.intersect(box)
            if common is None or _flat(common.offset, strides) in values:
                continue
            for start, data in _read_rows(decoded, catalog, fragment, common, itemsize):
                first = _flat(start, strides)
                values.update(enumerate(decode(data), start=first))
    # All elements must be known, or the values would be shown at wrong indices.
    count = sum(box.n_elements for box in wanted)
    missing = next((index for index in range(count) if index not in values), None)
    if missing is not None:
        raise MissingShardError(f"no file contains element {missing} of the tensor", key=key)
    return [values[index] for index in range(count)]


def _read_rows(
    store: DecodedStore, catalog: Catalog, fragment: Fragment, box: Box, itemsize: int
) -> Iterator[tuple[Shape, bytes]]:
    """Yield (index of the first element, bytes) for every row of ``box`` along the last axis.

    Args:
        fragment: a fragment that contains the box.
        box: region of the tensor to read, in elements.
        itemsize: size of an element, in bytes.
    """
    n = box.shape[-1] if box.shape else 1
    array = fragment.array
    # A region that is not stored is zero.
    if array is None:
        for start in _row_starts(box):
            yield start, bytes(n * itemsize)
        return
    # Get the exact position of the array's bytes, decoding them if necessary.
    array = store.placed(array.locate(store))
    extent = array.extent
    strides = c_strides(array.shape) if extent.strides is None else extent.strides
    for start in _row_starts(box):
        # The array may have fewer or more axes than the tensor; the last ones correspond.
        inside = [i - o for i, o in zip(start, fragment.box.offset, strict=True)]
        index = list(fragment.at)
        for axis in range(1, min(len(index), len(inside)) + 1):
            index[-axis] += inside[-axis]
        address = extent.offset + itemsize * _flat(tuple(index), strides)
        if n == 1 or strides[-1] == 1:
            yield start, store.read(extent.file, address, n * itemsize)
            continue
        # The elements of a row of a transposed array are far apart in the file.
        step_bytes = strides[-1] * itemsize
        elements = (store.read(extent.file, address + i * step_bytes, itemsize) for i in range(n))
        yield start, b"".join(elements)


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
    """Return the flat index of an element, in elements."""
    return sum(i * s for i, s in zip(index, strides, strict=True))


_STRUCT = {
    "float64": "d", "float32": "f", "float16": "e",
    "int64": "q", "int32": "i", "int16": "h", "int8": "b",
    "uint64": "Q", "uint32": "I", "uint16": "H", "uint8": "B", "bool": "?",
}  # fmt: skip
_COMPLEX = {"complex128": "d", "complex64": "f", "complex32": "e"}


def _decoder_of(dtype: str) -> Callable[[bytes], Sequence[Number]]:
    """Return a function that converts little-endian bytes to Python numbers.

    Raises:
        UnsupportedError: neither Python nor ml_dtypes has such numbers.
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
    # float8 and smaller types, which only ml_dtypes can decode.
    name = DTYPES[dtype].numpy
    if name is None:
        raise UnsupportedError(f"cannot display {dtype} values")

    def small_floats(data: bytes) -> list[Number]:
        import ml_dtypes
        import numpy

        values: list[Number] = (
            numpy.frombuffer(data, dtype=getattr(ml_dtypes, name)).astype("float32").tolist()
        )
        return values

    return small_floats


def _bfloat16(data: bytes) -> Sequence[Number]:
    """Decode bfloat16 numbers, each of which is the upper half of a float32."""
    wide = bytearray(2 * len(data))
    wide[2::4] = data[0::2]
    wide[3::4] = data[1::2]
    return struct.unpack(f"<{len(data) // 2}f", wide)
