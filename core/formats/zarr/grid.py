"""Chunk grids of zarr arrays: pure geometry.

A grid cuts a tensor into chunks of one shape, from its origin. The chunks at the upper edges may reach beyond the
tensor; they are stored in full all the same. An axis of extent 0 has no chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, prod

from core.arrays.box import Box, Shape
from core.catalog.catalog import TargetFragment, held_boxes
from core.catalog.stored import PlannedArray
from core.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A regular grid.

    Args:
        shape: of the tensor, in elements.
        chunk_shape: of every chunk, in elements, each more than 0.
    """

    shape: Shape
    chunk_shape: Shape

    @property
    def counts(self) -> Shape:
        """Chunks per axis."""
        return tuple(-(-n // step) for n, step in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def n_chunks(self) -> int:
        """Number of chunks; 1 for rank 0."""
        return prod(self.counts)

    def indices(self) -> Iterator[Shape]:
        """Every chunk's index, in C order."""
        if 0 in self.shape:
            return iter(())  # product would first list the other axes, which may be absurdly long
        return product(*map(range, self.counts))

    def index_at(self, number: int) -> Shape:
        """The index of a chunk by its place in that order."""
        index = []
        for count in reversed(self.counts):
            number, at = divmod(number, count)
            index.append(at)
        return tuple(reversed(index))

    def number_of(self, index: Shape) -> int | None:
        """Place of a chunk in that order; None if the index lies beyond the grid."""
        number = 0
        for at, count in zip(index, self.counts, strict=True):
            if not 0 <= at < count:
                return None
            number = number * count + at
        return number

    def box(self, index: Shape) -> Box:
        """The tensor's region that a chunk holds, cut at the tensor's edges."""
        offset = tuple(at * step for at, step in zip(index, self.chunk_shape, strict=True))
        extent = (min(step, n - start) for step, n, start in zip(self.chunk_shape, self.shape, offset, strict=True))
        return Box(offset, tuple(extent))


def grid_of_pieces(
    key: str, shape: Shape, fragments: Sequence[TargetFragment]
) -> tuple[ChunkGrid, dict[Shape, PlannedArray]]:
    """The exact grid that the arrays of a target tensor form, and the array of every chunk's index.

    Args:
        key: the tensor, for messages.
        shape: of the tensor.
        fragments: of the tensor; an array may be in several of them.

    Returns:
        A tensor without elements has the grid of one empty array, under the index of zeros.

    Raises:
        UnsupportedError: the arrays are no equal boxes at multiples of their shape.
    """
    pieces: list[tuple[PlannedArray, Box]] = []
    for array, box in held_boxes(shape, fragments):
        if box is None:
            raise _irregular(key)
        pieces.append((array, box))
    if 0 in shape and len(pieces) == 1:
        return ChunkGrid(shape, tuple(max(n, 1) for n in shape)), {(0,) * len(shape): pieces[0][0]}
    chunk_shapes = {box.shape for _, box in pieces}
    if len(chunk_shapes) != 1 or 0 in (chunk_shape := chunk_shapes.pop()):
        raise _irregular(key)
    grid = ChunkGrid(shape, chunk_shape)
    found: dict[Shape, PlannedArray] = {}
    for array, box in pieces:
        if any(start % step for start, step in zip(box.offset, chunk_shape, strict=True)):
            raise _irregular(key)
        found[tuple(start // step for start, step in zip(box.offset, chunk_shape, strict=True))] = array
    if len(found) != len(pieces) or len(found) != grid.n_chunks:
        raise _irregular(key)
    return grid, found


def _irregular(key: str) -> UnsupportedError:
    return UnsupportedError(
        "the tensor's pieces are no equal boxes of a regular grid, and zarr knows no other chunks",
        key=key,
        hint="write --to torch_dist, --to dcp or --to safetensors instead",
    )


def row_bands(shape: Shape, itemsize: int, *, most_bytes: int) -> Shape:
    """Shape of equal bands of an array: each is one run of its C order, as large as fits.

    Args:
        shape: of the array, in elements, each more than 0.
        itemsize: bytes of an element.
        most_bytes: of a band, unless one element is larger.

    Returns:
        Extents that divide those of ``shape``.
    """
    rest = prod(shape) * itemsize
    found: list[int] = []
    for axis, extent in enumerate(shape):
        rest //= extent
        fitting = most_bytes // rest
        if fitting > 0:
            return (*found, _largest_divisor(extent, fitting), *shape[axis + 1 :])
        found.append(1)
    return tuple(found)


def _largest_divisor(n: int, most: int) -> int:
    """The largest divisor of ``n`` that is at most ``most``, both more than 0."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return max(k for k in (*small, *(n // k for k in small)) if k <= most)


_INDEX = re.compile(r"(0|[1-9][0-9]{0,17})$")


_LIKE_A_CHUNK = re.compile(r"(c[./])?[0-9]+([./][0-9]+)*$")


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """How an index becomes a name, relative to the array's directory.

    Args:
        rank: axes of the array.
        separator: ``.`` or ``/``, between the numbers.
        has_prefix: names begin with ``c`` (zarr 3's default encoding); a scalar's one chunk is ``c``, else ``0``.
    """

    rank: int
    separator: str
    has_prefix: bool = False

    def name(self, index: Shape) -> str:
        """The name of a chunk."""
        if not index:
            return "c" if self.has_prefix else "0"
        numbers = self.separator.join(map(str, index))
        return f"c{self.separator}{numbers}" if self.has_prefix else numbers

    def index(self, name: str) -> Shape | None:
        """The index that has this name; None for other names."""
        if not self.rank:
            return () if name == self.name(()) else None
        prefix = f"c{self.separator}" if self.has_prefix else ""
        parts = name.removeprefix(prefix).split(self.separator)
        if not name.startswith(prefix) or len(parts) != self.rank or not all(map(_INDEX.match, parts)):
            return None
        return tuple(map(int, parts))

    @property
    def n_folders(self) -> int:
        """Directories between the array's and a chunk's file."""
        if self.separator == ".":
            return 0
        return self.rank if self.has_prefix else max(self.rank - 1, 0)


def is_like_a_chunk(name: str) -> bool:
    """Whether a name could be that of a chunk of some array."""
    return _LIKE_A_CHUNK.match(name) is not None
