"""Chunk grids of zarr arrays: pure geometry.

A grid divides a tensor into chunks of one shape, beginning at its origin. The chunks at the upper
edges may reach beyond the tensor; they are stored in full nevertheless. A tensor with an axis of
extent 0 has no chunk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from math import isqrt, prod

from core.arrays.box import Box, Shape
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import TargetFragment, held_boxes
from core.errors import UnsupportedError
from core.values import dataclass


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A regular grid of chunks.

    Args:
        shape: shape of the tensor, in elements.
        chunk_shape: shape of every chunk, in elements, each at least 1.
    """

    shape: Shape
    chunk_shape: Shape

    @property
    def counts(self) -> Shape:
        """Number of chunks per axis."""
        return tuple(-(-n // step) for n, step in zip(self.shape, self.chunk_shape, strict=True))

    @property
    def n_chunks(self) -> int:
        """Number of chunks; 1 for rank 0."""
        return prod(self.counts)

    def indices(self) -> Iterator[Shape]:
        """Iterate over the indices of all chunks in C order."""
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
        """Return the number of a chunk in C order; None if the index is beyond the grid."""
        number = 0
        for position, count in zip(index, self.counts, strict=True):
            if not 0 <= position < count:
                return None
            number = number * count + position
        return number

    def box(self, index: Shape) -> Box:
        """Return the region of the tensor that a chunk covers, clipped to the tensor."""
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
    """Return the exact grid formed by the arrays of a target tensor, and the arrays by chunk index.

    Args:
        key: the tensor, for messages.
        shape: shape of the tensor, in elements.
        fragments: fragments of the tensor; several of them may be in the same array.

    Returns:
        For a tensor without elements, the grid of one empty array at the index of zeros.

    Raises:
        UnsupportedError: the arrays are not equal boxes at multiples of their shape.
    """
    irregular = UnsupportedError(
        "the tensor's shards do not form a regular grid of equal boxes, which Zarr requires",
        key=key,
        hint="use --to torch_dist, --to dcp or --to safetensors instead",
    )
    boxes: list[tuple[PlannedArray, Box]] = []
    for array, box in held_boxes(shape, fragments):
        if box is None:
            raise irregular
        boxes.append((array, box))
    # A tensor without elements has no chunk, but an array to be written.
    if 0 in shape and len(boxes) == 1:
        return ChunkGrid(shape, tuple(max(n, 1) for n in shape)), {(0,) * len(shape): boxes[0][0]}
    # zarr stores chunks at the upper edges in full, so the grid must divide the tensor evenly: all
    # boxes, also the last, have the same shape.
    chunk_shapes = {box.shape for _, box in boxes}
    if len(chunk_shapes) != 1 or 0 in (chunk_shape := chunk_shapes.pop()):
        raise irregular
    # Every box must be at a multiple of that shape.
    grid = ChunkGrid(shape, chunk_shape)
    array_at = {
        tuple(start // extent for start, extent in zip(box.offset, chunk_shape, strict=True)): array
        for array, box in boxes
        if not any(start % extent for start, extent in zip(box.offset, chunk_shape, strict=True))
    }
    # A box at another offset, or two boxes of the same chunk, leave a chunk without its array.
    if not len(array_at) == len(boxes) == grid.n_chunks:
        raise irregular
    return grid, array_at


_MAX_TRIED = 1 << 20
"""Maximum number of divisors that ``find_band_shape`` tries for an axis."""


def find_band_shape(shape: Shape, itemsize: int, *, most_bytes: int) -> Shape:
    """Return the shape of the largest equal bands of an array that fit into a size.

    A band is one contiguous run of the array's C order: extents of 1, then a part of one axis, then
    full axes.

    Args:
        shape: shape of the array, in elements, each at least 1.
        itemsize: bytes of an element.
        most_bytes: maximum size of a band, unless one element is larger.

    Returns:
        Extents that divide those of ``shape``.
    """
    step_bytes = prod(shape) * itemsize
    for axis, extent in enumerate(shape):
        step_bytes //= extent  # size of one step along this axis
        n_fitting = most_bytes // step_bytes
        if n_fitting > 0:
            # Bands are equal, so the part of this axis must divide it. The search is bounded, for
            # an axis may claim any length; up to 2^40 elements it is complete.
            n_tried = min(isqrt(extent), n_fitting, _MAX_TRIED)
            small = [n for n in range(1, n_tried + 1) if extent % n == 0]
            divisors = (*small, *(extent // n for n in small))
            largest = max(n for n in divisors if n <= n_fitting)
            return ((1,) * axis) + (largest, *shape[axis + 1 :])
    return (1,) * len(shape)


_INDEX = re.compile(r"(0|[1-9][0-9]{0,17})$")
_LIKE_A_CHUNK = re.compile(r"(c[./])?[0-9]+([./][0-9]+)*$")


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The naming of chunk files, relative to the array's directory.

    Args:
        rank: number of axes of the array.
        separator: ``.`` or ``/``, between the numbers.
        has_prefix: names begin with ``c`` (zarr 3's default encoding). The only chunk of a scalar
            is then named ``c``, otherwise ``0``.
    """

    rank: int
    separator: str
    has_prefix: bool = False

    def name(self, index: Shape) -> str:
        """Return the name of the chunk with this index."""
        if not index:
            return "c" if self.has_prefix else "0"
        numbers = self.separator.join(map(str, index))
        return f"c{self.separator}{numbers}" if self.has_prefix else numbers

    def index(self, name: str) -> Shape | None:
        """Parse the index of a chunk from its name; None for other names."""
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
        """Number of directory levels between the array's directory and a chunk file."""
        if self.separator == ".":
            return 0
        return self.rank if self.has_prefix else max(self.rank - 1, 0)


def is_like_a_chunk(name: str) -> bool:
    """Return whether a name could be that of a chunk of some array."""
    return _LIKE_A_CHUNK.match(name) is not None
