"""File images: output files before they have data.

``lay_out`` of a format is pure: it turns a target catalog into file images, in which the position of every byte is
fixed. The engine then creates the files and fills the arrays in any order; literals are everything else.
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
"""CRC-32 of a finished array, by its name; 0 if checksums are switched off."""


def no_literals(crc_of: CrcOf) -> Iterable[Literal]:
    """The literals of a file that has none."""
    return ()


@value(frozen=True, slots=True)
class PlacedArray:
    """An array and its byte offset in a file image; its bytes there are dense C order, little endian."""

    offset: int
    array: PlannedArray


@dataclass(frozen=True, slots=True)
class JoinedArray:
    """A dense array in a file that consists of several others, with zeros where none of them is.

    Args:
        name: unique in the file.
        dtype: canonical dtype name, of all parts.
        n: elements.
        parts: (first element, array), in increasing order, disjoint.
        stated_shape: the shape as which it is saved; None for one axis.
    """

    name: str
    dtype: str
    n: int
    parts: Sequence[tuple[int, PlannedArray]]
    stated_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """As of any array."""
        return (self.n,) if self.stated_shape is None else self.stated_shape

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole."""
        return self.n * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class FileImage:
    """An output file before it has data.

    Args:
        path: relative to the destination.
        size: bytes of the finished file.
        arrays: what the engine fills, in increasing offset; ranges are disjoint.
        literals: every other byte that is not zero (headers, pickles, indexes), generated when the arrays are done,
            because containers such as zip state the arrays' CRCs. Must not overlap the arrays.
        is_metadata: written after all others; makes the checkpoint recognisable.
    """

    path: str
    size: int
    arrays: Sequence[PlacedArray] = ()
    literals: Callable[[CrcOf], Iterable[Literal]] = no_literals
    is_metadata: bool = False


def literal_file(path: str, data: bytes, *, is_metadata: bool = False) -> FileImage:
    """The image of a file without arrays."""

    def literals(crc_of: CrcOf) -> Iterable[Literal]:
        yield 0, data

    return FileImage(path, len(data), (), literals, is_metadata)
