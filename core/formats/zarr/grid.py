"""Chunk grids of zarr arrays: pure geometry.

A grid cuts a tensor into chunks of one shape, from its origin. The chunks at the upper edges may
reach beyond the tensor; they are stored in full nevertheless. An axis of extent 0 has no chunk.
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
        shape: shape of the tensor, in elements.
        chunk_shape: shape of every chunk, in elements, each more than 0.
    """

    shape: Shape
    chunk_shape: Shape

    @property
    def counts(self) -> Shape:
        """Return the number of chunks per axis."""
        return tuple(-(-n // step) for n, step in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def n_chunks(self) -> int:
        """Return the number of chunks; 1 for rank 0."""
        return prod(self.counts)

    def indices(self) -> Iterator[Shape]:
        """Return every chunk's index, in C order."""
        if 0 in self.shape:
            return iter(())  # product would first list the other axes, which may be absurdly long
        return product(*map(range, self.counts))

    def index_at(self, number: int) -> Shape:
        """Return the index of the chunk with this number in C order."""
        index = []
        for count in reversed(self.counts):
            number, position = divmod(number, count)
            index.append(position)
        return tuple(reversed(index))

    def number_of(self, index: Shape) -> int | None:
        """Return the number of a chunk in C order; None if the index lies beyond the grid."""
        number = 0
        for position, count in zip(index, self.counts, strict=True):
            if not 0 <= position < count:
                return None
            number = number * count + position
        return number

    def box(self, index: Shape) -> Box:
        """Return the region of the tensor in a chunk, cut at the tensor's edges."""
        offset = tuple(
            position * step for position, step in zip(index, self.chunk_shape, strict=True)
        )
        extent = (
            min(step, n - start)
            for step, n, start in zip(self.chunk_shape, self.shape, offset, strict=True)
        )
        return Box(offset, tuple(extent))


def grid_of_pieces(
    key: str, shape: Shape, fragments: Sequence[TargetFragment]
) -> tuple[ChunkGrid, dict[Shape, PlannedArray]]:
    """Return the exact grid that the arrays of a target tensor form, and the array of every chunk's
    index.

    Args:
        key: the tensor, for messages.
        shape: shape of the tensor, in elements.
        fragments: fragments of the tensor; an array may be in several of them.

    Returns:
        For a tensor without elements, the grid of one empty array at the index of zeros.

    Raises:
        UnsupportedError: the arrays are not equal boxes at multiples of their shape.
    """
    pieces: list[tuple[PlannedArray, Box]] = []
    for array, box in held_boxes(shape, fragments):
        if box is None:
            raise _irregular(key)
        pieces.append((array, box))
    # A tensor without elements has no chunk, but an array to be written.
    if 0 in shape and len(pieces) == 1:
        return ChunkGrid(shape, tuple(max(n, 1) for n in shape)), {(0,) * len(shape): pieces[0][0]}
    # All pieces must have one shape, and lie at multiples of it.
    chunk_shapes = {box.shape for _, box in pieces}
    if len(chunk_shapes) != 1 or 0 in (chunk_shape := chunk_shapes.pop()):
        raise _irregular(key)
    grid = ChunkGrid(shape, chunk_shape)
    array_at: dict[Shape, PlannedArray] = {}
    for array, box in pieces:
        if any(start % step for start, step in zip(box.offset, chunk_shape, strict=True)):
            raise _irregular(key)
        array_at[
            tuple(start // step for start, step in zip(box.offset, chunk_shape, strict=True))
        ] = array
    if len(array_at) != len(pieces) or len(array_at) != grid.n_chunks:
        raise _irregular(key)
    return grid, array_at


def _irregular(key: str) -> UnsupportedError:
    return UnsupportedError(
        "the tensor's pieces are not equal boxes of a regular grid, but zarr has no other chunks",
        key=key,
        hint="use --to torch_dist, --to dcp or --to safetensors instead",
    )


def row_bands(shape: Shape, itemsize: int, *, most_bytes: int) -> Shape:
    """Return the shape of equal bands of an array: each is one run of its C order, as large as
    fits.

    Args:
        shape: shape of the array, in elements, each more than 0.
        itemsize: bytes of an element.
        most_bytes: maximum size of a band, unless one element is larger.

    Returns:
        Extents that divide those of ``shape``.
    """
    rest = prod(shape) * itemsize
    extents: list[int] = []
    for axis, extent in enumerate(shape):
        rest //= extent
        n_fitting = most_bytes // rest
        if n_fitting > 0:
            return (*extents, _largest_divisor(extent, n_fitting), *shape[axis + 1 :])
        extents.append(1)
    return tuple(extents)


def _largest_divisor(n: int, most: int) -> int:
    """Return the largest divisor of ``n`` that is at most ``most``, both more than 0."""
    small = [k for k in range(1, isqrt(n) + 1) if n % k == 0]
    return max(k for k in (*small, *(n // k for k in small)) if k <= most)


_INDEX = re.compile(r"(0|[1-9][0-9]{0,17})$")


_LIKE_A_CHUNK = re.compile(r"(c[./])?[0-9]+([./][0-9]+)*$")


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The naming of chunks: an index becomes a name relative to the array's directory.

    Args:
        rank: number of axes of the array.
        separator: ``.`` or ``/``, between the numbers.
        has_prefix: names begin with ``c`` (zarr 3's default encoding); a scalar's one chunk is
            ``c``, else ``0``.
    """

    rank: int
    separator: str
    has_prefix: bool = False

    def name(self, index: Shape) -> str:
        """Return the name of a chunk."""
        if not index:
            return "c" if self.has_prefix else "0"
        numbers = self.separator.join(map(str, index))
        return f"c{self.separator}{numbers}" if self.has_prefix else numbers

    def index(self, name: str) -> Shape | None:
        """Return the index with this name; None for other names."""
        if not self.rank:
            return () if name == self.name(()) else None
        prefix = f"c{self.separator}" if self.has_prefix else ""
        parts = name.removeprefix(prefix).split(self.separator)
        if (
            not name.startswith(prefix)
            or len(parts) != self.rank
            or not all(map(_INDEX.match, parts))
        ):
            return None
        return tuple(map(int, parts))

    @property
    def n_folders(self) -> int:
        """Return the number of directories between the array's and a chunk's file."""
        if self.separator == ".":
            return 0
        return self.rank if self.has_prefix else max(self.rank - 1, 0)


def is_like_a_chunk(name: str) -> bool:
    """Return whether a name could be that of a chunk of some array."""
    return _LIKE_A_CHUNK.match(name) is not None
