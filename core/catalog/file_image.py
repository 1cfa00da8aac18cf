"""Describe output files before they have data.

``lay_out`` of a format is pure: it turns a target catalog into file images, in which the position
of every byte is fixed. The engine then creates the files and fills the arrays in any order;
literals are everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from core.arrays.dtypes import itemsize
from core.arrays.fast_value import value
from core.catalog.stored import PlannedArray

Literal = tuple[int, bytes]
"""Byte offset in the file, and the bytes."""

CrcOf = Callable[[str], int]
"""A function that returns the CRC-32 of a finished array by name; 0 without checksums."""


def no_literals(crc_of: CrcOf) -> Iterable[Literal]:
    """Return no literals, for files that have none."""
    return ()


@value(frozen=True, slots=True)
class PlacedArray:
    """An array and its byte offset in a file image, dense in C order and little endian."""

    offset: int
    array: PlannedArray


@dataclass(frozen=True, slots=True)
class JoinedArray:
    """A dense array in a file that consists of several others, with zeros in between.

    Args:
        name: unique in the file.
        dtype: canonical dtype name of all parts.
        n: number of elements.
        parts: (first element, array), in increasing order, disjoint.
        stated_shape: the shape with which it is saved; None for one axis.
    """

    name: str
    dtype: str
    n: int
    parts: Sequence[tuple[int, PlannedArray]]
    stated_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape, in elements."""
        return (self.n,) if self.stated_shape is None else self.stated_shape

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the whole array."""
        return self.n * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class FileImage:
    """An output file before it has data.

    Args:
        path: path relative to the destination.
        size: bytes of the finished file.
        arrays: what the engine fills, in increasing offset; ranges are disjoint.
        literals: returns every other byte that is not zero (headers, pickles, indexes) once the
        arrays are done, because containers such as zip record the arrays' CRCs. They must not
        overlap the arrays.
        is_metadata: the file is written after all others, and makes the checkpoint recognisable.
    """

    path: str
    size: int
    arrays: Sequence[PlacedArray] = ()
    literals: Callable[[CrcOf], Iterable[Literal]] = no_literals
    is_metadata: bool = False


def literal_file(path: str, data: bytes, *, is_metadata: bool = False) -> FileImage:
    """Return the image of a file without arrays."""

    def literals(crc_of: CrcOf) -> Iterable[Literal]:
        yield 0, data

    return FileImage(path, len(data), (), literals, is_metadata)
