"""Arrays that are stored in a file, arrays without a position yet, and encodings of their bytes.

Compressed chunks, streams of a codec, values inside a database's nodes, and tensors that are
computed from others (``core.engine.changes.quantize``) are *encoded*: ``Extent.encoding`` is a
value that produces their dense bytes. The engine reads such an array as if it were a file of its
own (``core.engine.catalog.decoded``), one *unit* at a time, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Protocol, TypeAlias

from core.arrays.box import Box, Shape, c_strides, is_c_contiguous
from core.arrays.dtypes import itemsize
from core.errors import CorruptError, UnsupportedError
from core.values import dataclass

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from core.files.store import ReadStore
else:
    from typing import TypeVar


class Encoding(Protocol):
    """A codec with its parameters: a frozen value that compares by its fields.

    The dense bytes of an array (C order, little endian, ``StoredArray.n_bytes`` long) are cut into
    units of ``unit_bytes``; the last unit may be shorter. A codec without random access has one
    unit, the complete array.

    An encoding that computes an array from others lists these in an attribute ``inputs``
    (``find_inputs``). An encoding that verifies a checksum has an attribute ``has_checksum`` that
    is true.
    """

    @property
    def name(self) -> str:
        """Name of the codec, for people: ``zstd``, ``blosc``, ``fp8 blocks``."""

    @property
    def unit_bytes(self) -> int:
        """Dense bytes of one unit; more than 0."""

    @property
    def working_bytes(self) -> int:
        """Maximum memory for decoding one unit, without the unit itself, in bytes."""

    def decode(self, store: ReadStore, array: StoredArray, unit: int) -> bytes | memoryview:
        """Return the dense bytes of one unit; called from several threads.

        Args:
            store: the source's files.
            array: the encoded array; its extent contains the file and, if the encoding needs it,
                the byte address.
            unit: number of the unit, from 0.

        Raises:
            CorruptError, TruncatedError, MissingShardError, UnsupportedError: the unit cannot be
                decoded; the error names the file.
        """


def stored_bytes_of(encoding: Encoding) -> int | None:
    """Return the length of the encoded bytes in the extent's file, from its offset, for people.

    Returns:
        None if the encoding has no field ``stored_bytes``: values inside a node of a database,
        computed tensors.
    """
    n_bytes = getattr(encoding, "stored_bytes", None)
    return n_bytes if isinstance(n_bytes, int) else None


def inputs_of(encoding: Encoding | None) -> Sequence[StoredArray]:
    """Return the arrays from which an encoding computes; none if it decodes the extent's bytes."""
    inputs: Sequence[StoredArray] = getattr(encoding, "inputs", ())
    return inputs


def find_inputs(array: StoredArray) -> Iterator[StoredArray]:
    """Yield the arrays in files that an array is computed from; itself if it is one of them."""
    inputs = inputs_of(array.extent.encoding)
    if not inputs:
        yield array
    for source in inputs:
        yield from find_inputs(source)


def files_read(encoding: Encoding | None) -> list[str]:
    """Return the files that computing an array reads, sorted; none if it is decoded."""
    arrays = chain.from_iterable(map(find_inputs, inputs_of(encoding)))
    return sorted({array.extent.file for array in arrays})


def has_checksum(encoding: Encoding) -> bool:
    """Return whether decoding verifies a checksum of all stored or all decoded bytes."""
    return bool(getattr(encoding, "has_checksum", False))


class ContainerItem(Protocol):
    """A part of a file that holds an array, and records itself where its elements begin."""

    @property
    def n_bytes(self) -> int:
        """Length of the item."""

    def locate(self, store: ReadStore, array: StoredArray) -> StoredArray:
        """Return the array with its byte address and strides, which one small read finds.

        Raises:
            CorruptError: the item is damaged, or its tensor differs from ``array``.
            TruncatedError, UnsupportedError, UnsafeError: as the format defines.
        """


@dataclass(frozen=True, slots=True)
class Extent:
    """The position and encoding of a stored array's elements.

    Args:
        file: path relative to the store, ``/`` between components.
        offset: byte address of element 0 or, if ``item`` is not None, of the container item that
            holds the array.
        strides: in elements per axis; None means C order without gaps.
        item: that container item; the extent is then late-bound and ``strides`` is None.
        encoding: the codec of the bytes, or None for plain little-endian elements in the file.
        crc: CRC-32 of the record that begins at element 0 and is exactly this array, if the
            container records one.
        part_of: for a late-bound array that is a part of the item's tensor: the shape of that
            tensor, and the number of its elements before the array, in C order; None if the array
            is the complete tensor.
        axes: for each axis of a late-bound or encoded array, the number of that axis in the item's
            tensor or in the decoded array; None for an axis of extent 1 which that one lacks. None
            if the axes are the same.
    """

    file: str
    offset: int
    strides: Shape | None = None
    item: ContainerItem | None = None
    encoding: Encoding | None = None
    crc: int | None = None
    part_of: tuple[Shape, int] | None = None
    axes: tuple[int | None, ...] | None = None

    @property
    def is_late(self) -> bool:
        """True if ``StoredArray.locate`` must still find the byte address."""
        return self.item is not None


Coords = tuple[tuple[str, int], ...]
"""Rank coordinates such as ``(("tp", 1), ("pp", 0))``."""


def coords_text(coords: Coords) -> str:
    """Format rank coordinates, for people: ``tp1 pp0``; "" without coordinates."""
    return " ".join(f"{name}{number}" for name, number in coords)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """A dense array in a file of a checkpoint.

    Args:
        name: identity of the array in the files, for checksums and messages; unique within the
            checkpoint. It is no key: it stays when the tensor gets another one.
        dtype: canonical dtype name.
        shape: in elements.
        extent: position and encoding of the array.
        coords: rank coordinates in formats that store one file per rank, else ().
    """

    name: str
    dtype: str
    shape: Shape
    extent: Extent
    coords: Coords = ()

    @property
    def n_bytes(self) -> int:
        """Size of the dense array, in bytes."""
        return prod(self.shape) * itemsize(self.dtype)

    def locate(self, store: ReadStore) -> StoredArray:
        """Return the array with its byte address; a late-bound one reads it from its item.

        Raises:
            CorruptError, TruncatedError, UnsupportedError, UnsafeError: see ``ContainerItem``.
        """
        item = self.extent.item
        return self if item is None else item.locate(store, self)


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """A dense array to write, which a format's ``lay_out`` has yet to place.

    Args:
        name, dtype, shape, coords: as in StoredArray.
    """

    name: str
    dtype: str
    shape: Shape
    coords: Coords = ()

    @property
    def n_bytes(self) -> int:
        """Size of the dense array, in bytes."""
        return prod(self.shape) * itemsize(self.dtype)

    def at(self, extent: Extent) -> StoredArray:
        """Place the array at an extent."""
        return StoredArray(self.name, self.dtype, self.shape, extent, self.coords)


AnyArray: TypeAlias = StoredArray | PlannedArray
"""An array for code that uses only its name, dtype and shape."""

if TYPE_CHECKING:
    ArrayT = TypeVar("ArrayT", bound=AnyArray, default=StoredArray)
    ArrayT_co = TypeVar("ArrayT_co", bound=AnyArray, default=StoredArray, covariant=True)
else:
    # A default needs Python 3.13, or typing_extensions, which the sandboxed child must not import.
    ArrayT = TypeVar("ArrayT")
    ArrayT_co = TypeVar("ArrayT_co", covariant=True)


def array_name(key: str, box: Box) -> str:
    """Name a stored array that holds one of several boxes of a tensor."""
    return f"{key}@{','.join(map(str, box.offset))}"


def n_stored_bytes(array: StoredArray) -> int:
    """Return the number of bytes that a stored array spans in its file.

    Returns:
        0 for an encoded array, whose span only its encoding knows.
    """
    extent = array.extent
    if extent.item is not None:
        return extent.item.n_bytes
    if extent.encoding is not None:
        return 0
    if extent.strides is None or 0 in array.shape:
        return array.n_bytes
    # With strides, from the first element to the end of the last.
    last = sum((n - 1) * step for n, step in zip(array.shape, extent.strides, strict=True))
    return (last + 1) * itemsize(array.dtype)


def renamed(arrays: Mapping[str, StoredArray], new_of: Mapping[str, str]) -> dict[str, StoredArray]:
    """Return arrays under new keys, which are also their names; what was one array remains one."""
    array_of: dict[int, StoredArray] = {}
    for key, array in arrays.items():
        if id(array) not in array_of:
            array_of[id(array)] = replace(array, name=new_of[key])
    return {new_of[key]: array_of[id(array)] for key, array in arrays.items()}


def with_axes(array: StoredArray, axes: Sequence[int | None]) -> StoredArray:
    """Return a view of an array with its axes in another order; no data moves.

    Args:
        array: any array; its position may be late-bound, and its bytes encoded.
        axes: for each axis of the view, the number of that axis in ``array``; None for a new axis
            of extent 1. Each axis of ``array`` occurs once.
    """
    shape = tuple(1 if axis is None else array.shape[axis] for axis in axes)
    extent = array.extent
    if extent.is_late or extent.encoding is not None:
        # The strides become known when the array is bound or decoded.
        earlier = extent.axes or range(len(array.shape))
        combined = tuple(None if axis is None else earlier[axis] for axis in axes)
        is_same = combined == tuple(range(len(combined)))
        extent = replace(extent, axes=None if is_same else combined)
    else:
        strides = strides_with_axes(extent.strides or c_strides(array.shape), axes)
        # A CRC holds only for elements in the order of the file.
        if is_c_contiguous(shape, strides):
            extent = replace(extent, strides=None)
        else:
            extent = replace(extent, strides=strides, crc=None)
    order = ",".join("+" if axis is None else str(axis) for axis in axes)
    return replace(array, name=f"{array.name}^{order}", shape=shape, extent=extent)


def without_axes(array: StoredArray) -> StoredArray:
    """Return a late-bound or encoded array with the axes of its item or of its decoded bytes."""
    axes = array.extent.axes
    if axes is None:
        return array
    extents = {axis: n for axis, n in zip(axes, array.shape, strict=True) if axis is not None}
    shape = tuple(extents[axis] for axis in range(len(extents)))
    return replace(array, shape=shape, extent=replace(array.extent, axes=None))


def strides_with_axes(strides: Shape, axes: Sequence[int | None]) -> Shape:
    """Return the strides of the axes that ``with_axes`` describes; 0 for a new axis."""
    return tuple(0 if axis is None else strides[axis] for axis in axes)


def narrow_array(array: StoredArray, start: int, shape: Shape) -> StoredArray:
    """Return a run of an array's elements, in C order, as an array with its own shape.

    Args:
        array: an array without encoding, whose position is known or late-bound.
        start: number of elements before the run.
        shape: shape of the part, in elements.

    Raises:
        UnsupportedError: the array is compressed or strided.
        CorruptError: the array ends before the part does.
    """
    extent = array.extent
    stop = start + prod(shape)
    if start < 0 or stop > prod(array.shape):
        raise CorruptError(
            f"elements {start:,}–{stop:,} are out of range: the array has {prod(array.shape):,} "
            "elements",
            key=array.name,
            file=extent.file,
        )
    is_dense = extent.strides is None or extent.strides == c_strides(array.shape)
    if extent.encoding is not None or extent.axes is not None or not is_dense:
        raise UnsupportedError("cannot read part of a compressed or strided array", key=array.name)
    name = f"{array.name}[{start}:{stop}]"
    # The byte address of a late-bound array is not known yet, so the part is recorded in elements,
    # relative to the tensor of the item even if the array is itself a part.
    if extent.is_late:
        base, before = extent.part_of or (array.shape, 0)
        return replace(
            array, name=name, shape=shape, extent=replace(extent, part_of=(base, before + start))
        )
    offset = extent.offset + start * itemsize(array.dtype)
    return StoredArray(name, array.dtype, shape, Extent(extent.file, offset), array.coords)
