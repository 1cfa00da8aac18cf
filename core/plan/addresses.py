"""Where the two ends of every transfer lie: byte addresses in source files, elements of target arrays.

Ranks of fragments and arrays are brought together here (both are aligned at the last axis), and late-bound arrays are
bound. From here on everything has one stride per axis of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from core.arrays.box import Box, Shape, c_strides
from core.arrays.dtypes import itemsize
from core.catalog.catalog import Fragment
from core.catalog.stored import StoredArray
from core.errors import CorruptError
from core.plan.match import Match
from core.plan.positions import Places

Bind = Callable[[StoredArray], StoredArray]
"""Finds the place of a late-bound array, see ``Catalog.bind``."""


@dataclass(frozen=True, slots=True)
class RecordCrc:
    """A CRC-32 that the source states for a whole array.

    Args:
        file: the source file.
        array: name of the source array.
        n_bytes: of the array.
        crc: as stated.
        start: byte address of the array in its file.
    """

    file: str
    array: str
    n_bytes: int
    crc: int
    start: int


@dataclass(frozen=True, slots=True)
class Source:
    """Where the elements of a source piece lie.

    Args:
        file: None for zeros.
        start: byte address of the piece's first element.
        strides: bytes per axis of the tensor.
        record: the CRC of the array, if it is stated and the whole array is read.
    """

    file: str | None
    start: int
    strides: Shape
    record: RecordCrc | None = None

    def at(self, delta: Sequence[int]) -> int:
        """Byte address of the element that lies ``delta`` elements from the first."""
        return self.start + sum(d * step for d, step in zip(delta, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the elements of a target fragment go.

    Args:
        array: number of the array in ``Places``.
        start: index of the fragment's first element in the flattened array.
        strides: elements per axis of the tensor.
    """

    array: int
    start: int
    strides: Shape

    def at(self, delta: Sequence[int]) -> int:
        """Flat index of the element that lies ``delta`` elements from the first."""
        return self.start + sum(d * step for d, step in zip(delta, self.strides, strict=True))


class Ends:
    """Addresses of the pieces and targets of one match, found once."""

    def __init__(self, match: Match, places: Places, bind: Bind) -> None:
        self._match = match
        self._places = places
        self._bind = bind
        self._sources: dict[int, Source] = {}
        self._destinations: dict[int, Destination] = {}
        self._n_read: dict[str, int] = {}
        for box, fragment in match.pieces:
            if fragment.array is not None:
                name = fragment.array.name
                self._n_read[name] = self._n_read.get(name, 0) + box.n_elements

    def source(self, n_piece: int) -> Source:
        """The source of a primary piece."""
        found = self._sources.get(n_piece)
        if found is None:
            box, fragment = self._match.pieces[n_piece]
            found = self._sources[n_piece] = self.bound(fragment, box)
        return found

    def bound(self, fragment: Fragment, box: Box) -> Source:
        """The source of a part of a fragment."""
        if fragment.array is None:
            return Source(None, 0, tuple(n * itemsize(self._match.dtype) for n in c_strides(box.shape)))
        array = self._bind(fragment.array)
        found = source_in(array, fragment, box)
        extent = array.extent
        if extent.crc is None or self._n_read.get(array.name) != prod(array.shape):
            return found
        record = RecordCrc(extent.file, array.name, array.n_bytes, extent.crc, extent.offset)
        return replace(found, record=record)

    def destination(self, n_target: int) -> Destination:
        """The destination of a target fragment."""
        found = self._destinations.get(n_target)
        if found is None:
            fragment = self._match.targets[n_target]
            assert fragment.array is not None
            number = self._places.number_of(fragment.array.name)
            assert number is not None
            of_array = c_strides(fragment.array.shape)
            start = sum(i * step for i, step in zip(fragment.at, of_array, strict=True))
            found = self._destinations[n_target] = Destination(number, start, _aligned(of_array, fragment.box.rank))
        return found

    def source_of(self, n_piece: int, box: Box) -> Source:
        """The source of a box in a piece."""
        whole = self.source(n_piece)
        start = whole.at(delta(box, self._match.pieces[n_piece][0]))
        return Source(whole.file, start, whole.strides, whole.record)

    def destination_of(self, n_target: int, box: Box) -> Destination:
        """The destination of a box in a target fragment."""
        whole = self.destination(n_target)
        start = whole.at(delta(box, self._match.targets[n_target].box))
        return Destination(whole.array, start, whole.strides)


def source_in(array: StoredArray, fragment: Fragment, box: Box) -> Source:
    """Where a part of a fragment lies.

    Args:
        array: the fragment's, bound.
        fragment: it.
        box: the part.

    Raises:
        CorruptError: its place is not known, or its strides are negative.
    """
    extent = array.extent
    if extent.is_late:
        raise CorruptError("the array's place in its file was not found", key=fragment.key)
    size = itemsize(array.dtype)
    of_array = [n * size for n in (extent.strides or c_strides(array.shape))]
    if any(step < 0 for step in of_array):
        raise CorruptError(f"strides {extent.strides} are negative", key=fragment.key, file=extent.file)
    strides = _aligned(of_array, box.rank)
    start = extent.offset + sum(i * step for i, step in zip(fragment.at, of_array, strict=True))
    start += sum((a - b) * step for a, b, step in zip(box.offset, fragment.box.offset, strides, strict=True))
    return Source(extent.file, start, strides)


def _aligned(strides: Sequence[int], rank: int) -> Shape:
    """Strides of an array's axes as strides of a tensor's, aligned at the last; 0 where the array has no such axis."""
    extra = len(strides) - rank
    return tuple(strides[extra:]) if extra >= 0 else (0,) * -extra + tuple(strides)


def delta(box: Box, origin: Box) -> list[int]:
    return [a - b for a, b in zip(box.offset, origin.offset, strict=True)]
