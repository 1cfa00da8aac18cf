"""Find both ends of every transfer: byte addresses in source files, elements of target arrays.

A fragment and its array may differ in rank; both are aligned at the last axis. Late-bound arrays
are bound here. The results have one stride per axis of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from core.arrays.box import Box, Shape, c_strides
from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import StoredArray
from core.engine.catalog.tensor import Fragment
from core.engine.plan.match import Match
from core.engine.plan.positions import Places
from core.errors import CorruptError
from core.values import dataclass

Bind = Callable[[StoredArray], StoredArray]
"""A function that finds the position of a late-bound or encoded array."""


@dataclass(frozen=True, slots=True)
class RecordCrc:
    """CRC-32 that the source records for a complete array.

    Args:
        file: the source file.
        array: name of the source array.
        n_bytes: bytes of the array.
        crc: the recorded CRC-32.
        start: byte address of the array in its file.
    """

    file: str
    array: str
    n_bytes: int
    crc: int
    start: int


@dataclass(frozen=True, slots=True)
class Source:
    """Addresses of a source fragment's elements.

    Args:
        file: the source file; None for zeros.
        start: byte address of the fragment's first element.
        strides: bytes per axis of the tensor.
        record: the recorded CRC of the array; None unless there is one and the complete array is
            read.
    """

    file: str | None
    start: int
    strides: Shape
    record: RecordCrc | None = None

    def at(self, delta: Sequence[int]) -> int:
        """Return the byte address of the element that is ``delta`` elements after the first."""
        return self.start + sum(d * step for d, step in zip(delta, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Destination:
    """Positions of a target fragment's elements.

    Args:
        array: number of the array in ``Places``.
        start: index of the fragment's first element in the flattened array.
        strides: elements per axis of the tensor.
    """

    array: int
    start: int
    strides: Shape

    def at(self, delta: Sequence[int]) -> int:
        """Return the flat index of the element that is ``delta`` elements after the first."""
        return self.start + sum(d * step for d, step in zip(delta, self.strides, strict=True))


class Ends:
    """Addresses of the pieces and targets of one match, each computed once."""

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
        """Return the source of a primary piece."""
        source = self._sources.get(n_piece)
        if source is None:
            box, fragment = self._match.pieces[n_piece]
            source = self._sources[n_piece] = self.bound(fragment, box)
        return source

    def bound(self, fragment: Fragment, box: Box) -> Source:
        """Return the source of a part of a fragment.

        Raises:
            CorruptError: the array's strides are negative.
        """
        if fragment.array is None:
            return Source(
                None, 0, tuple(n * itemsize(self._match.dtype) for n in c_strides(box.shape))
            )
        array = self._bind(fragment.array)
        source = source_in(self._match.key, array, fragment, box)
        extent = array.extent
        # A CRC of the complete array can only be checked if every element is read.
        if extent.crc is None or self._n_read.get(array.name) != prod(array.shape):
            return source
        record = RecordCrc(extent.file, array.name, array.n_bytes, extent.crc, extent.offset)
        return replace(source, record=record)

    def destination(self, n_target: int) -> Destination:
        """Return the destination of a target fragment."""
        destination = self._destinations.get(n_target)
        if destination is None:
            fragment = self._match.targets[n_target]
            assert fragment.array is not None
            number = self._places.number_of(fragment.array.name)
            assert number is not None
            of_array = c_strides(fragment.array.shape)
            start = sum(i * step for i, step in zip(fragment.at, of_array, strict=True))
            destination = self._destinations[n_target] = Destination(
                number, start, _align_strides(of_array, fragment.box.rank)
            )
        return destination

    def source_of(self, n_piece: int, box: Box) -> Source:
        """Return the source of a box in a piece."""
        piece = self.source(n_piece)
        start = piece.at(delta(box, self._match.pieces[n_piece][0]))
        return Source(piece.file, start, piece.strides, piece.record)

    def destination_of(self, n_target: int, box: Box) -> Destination:
        """Return the destination of a box in a target fragment."""
        target = self.destination(n_target)
        start = target.at(delta(box, self._match.targets[n_target].box))
        return Destination(target.array, start, target.strides)


def source_in(key: str, array: StoredArray, fragment: Fragment, box: Box) -> Source:
    """Return the addresses of a part of a fragment.

    Args:
        key: key of the tensor, for errors.
        array: the fragment's array, located.
        fragment: a fragment of a tensor.
        box: the part of the fragment.

    Raises:
        CorruptError: the array's strides are negative.
    """
    extent = array.extent
    assert not extent.is_late, "located before"

    # Strides of the array, in bytes.
    size = itemsize(array.dtype)
    of_array = [n * size for n in (extent.strides or c_strides(array.shape))]
    if any(step < 0 for step in of_array):
        raise CorruptError(
            f"the array has negative strides: {extent.strides}", key=key, file=extent.file
        )

    # The fragment begins at ``fragment.at`` in the array, and the box inside the fragment.
    strides = _align_strides(of_array, box.rank)
    start = extent.offset + sum(i * step for i, step in zip(fragment.at, of_array, strict=True))
    start += sum(
        (a - b) * step for a, b, step in zip(box.offset, fragment.box.offset, strides, strict=True)
    )
    return Source(extent.file, start, strides)


def _align_strides(strides: Sequence[int], rank: int) -> Shape:
    """Convert the strides of an array's axes to those of a tensor's, aligned at the last axis.

    The stride is 0 where the array has no such axis.
    """
    extra = len(strides) - rank
    return tuple(strides[extra:]) if extra >= 0 else (0,) * -extra + tuple(strides)


def delta(box: Box, origin: Box) -> list[int]:
    """Return by how many elements a box begins after another one, per axis."""
    return [a - b for a, b in zip(box.offset, origin.offset, strict=True)]
