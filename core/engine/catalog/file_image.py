"""Descriptions of output files before they have data.

A format's ``lay_out`` is pure: it turns a target catalog into descriptions of the files to write,
with the position of every byte. The engine then creates the files and fills the arrays in any
order; literals are all other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from core.arrays.dtypes import itemsize
from core.engine.catalog.stored import PlannedArray
from core.values import dataclass

Literal = tuple[int, bytes]
"""Byte offset in the file, and the bytes."""

CrcOf = Callable[[str], int]
"""Returns the CRC-32 of a finished array by its name; 0 without checksums."""


def no_literals(crc_of: CrcOf) -> Iterable[Literal]:
    """Return no literals, for files that consist of arrays only."""
    return ()


@dataclass(frozen=True, slots=True)
class PlacedArray:
    """An array, dense in C order and little endian, and its byte offset in the file."""

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
        stated_shape: the shape that the file records; None for one axis of ``n`` elements.
    """

    name: str
    dtype: str
    n: int
    parts: Sequence[tuple[int, PlannedArray]]
    stated_shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape that the file records, in elements."""
        return (self.n,) if self.stated_shape is None else self.stated_shape

    @property
    def n_bytes(self) -> int:
        """Size of the complete array, in bytes."""
        return self.n * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class FileImage:
    """The description of an output file before it has data.

    Args:
        path: path relative to the destination.
        size: size of the finished file, in bytes.
        arrays: the arrays that the engine fills, in increasing offset; their ranges are disjoint.
        literals: returns every other byte that is not zero (headers, pickles, indexes). It is
            called after the arrays are written, because containers such as zip record the arrays'
            CRCs. Literals must not overlap the arrays.
        is_metadata: the file is written after all others, and makes the checkpoint recognisable.
    """

    path: str
    size: int
    arrays: Sequence[PlacedArray] = ()
    literals: Callable[[CrcOf], Iterable[Literal]] = no_literals
    is_metadata: bool = False


def literal_file(path: str, data: bytes, *, is_metadata: bool = False) -> FileImage:
    """Describe a file without arrays."""

    def literals(crc_of: CrcOf) -> Iterable[Literal]:
        yield 0, data

    return FileImage(path, len(data), (), literals, is_metadata)
