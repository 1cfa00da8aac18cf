"""Locate the arrays of the output files, and prove that each of them is filled exactly once."""

from __future__ import annotations

from array import array as columns
from collections.abc import Iterator, Sequence
from math import prod

from core.arrays.box import Box, Shape, full_box
from core.arrays.coverage import first_hole, first_overlap
from core.engine.catalog.file_image import FileImage
from core.engine.catalog.stored import PlannedArray
from core.engine.catalog.tensor import TargetFragment
from core.errors import CorruptError
from core.files.store import check_name


class Places:
    """Positions of the arrays in the output files, as columns.

    Args:
        images: the files to write; their paths and the names of their arrays are unique.

    Raises:
        CorruptError: an array exceeds its file, overlaps another one, or has two positions.
        UnsafeError: a path leads out of the destination.
    """

    def __init__(self, images: Sequence[FileImage]) -> None:
        self.images = images
        self._paths: list[str] = [image.path for image in images]
        self._number: dict[str, int] = {}
        self._is_numbered = False
        self._image = columns("q")
        self._offset = columns("q")
        self._n_bytes = columns("q")
        paths: set[str] = set()
        for number, image in enumerate(images):
            check_name(image.path)
            if image.path in paths:
                raise CorruptError("two output files have the same path", file=image.path)
            paths.add(image.path)

            # Arrays are in the order of their offsets: each begins at or after the previous one's
            # end.
            end = 0
            for placed in image.arrays:
                name, n_bytes = placed.array.name, placed.array.n_bytes
                if placed.offset < end or placed.offset + n_bytes > image.size:
                    raise CorruptError(
                        f"array {name!r} is placed at bytes {placed.offset}–"
                        f"{placed.offset + n_bytes}, but only bytes {end}–{image.size} are free",
                        file=image.path,
                    )
                if name in self._number:
                    raise CorruptError(
                        f"array {name!r} has two positions in the output files", file=image.path
                    )
                end = placed.offset + n_bytes
                self._number[name] = len(self._offset)
                self._image.append(number)
                self._offset.append(placed.offset)
                self._n_bytes.append(n_bytes)

    @classmethod
    def of_columns(
        cls, paths: Sequence[str], image: columns[int], offset: columns[int], n_bytes: columns[int]
    ) -> Places:
        """Return positions from columns that the lead worker has stored, without file images.

        The arrays' names are their numbers.

        Args:
            paths: paths of the files.
            image, offset, n_bytes: as ``as_columns`` returns them.
        """
        places = cls(())
        places._paths = list(paths)
        places._is_numbered = True
        places._image, places._offset, places._n_bytes = image, offset, n_bytes
        return places

    def as_columns(self) -> tuple[columns[int], columns[int], columns[int]]:
        """Return the file number, the offset and the length in bytes of each array."""
        return self._image, self._offset, self._n_bytes

    def __len__(self) -> int:
        return len(self._offset)

    def number_of(self, name: str) -> int | None:
        """Return an array's number, in the order of files and their arrays, or None."""
        if self._is_numbered:
            return int(name)
        return self._number.get(name)

    def names(self) -> Iterator[str]:
        """Yield the arrays' names, by number."""
        return map(str, range(len(self))) if self._is_numbered else iter(self._number)

    def file_of(self, number: int) -> str:
        """Return the path of the output file that contains an array."""
        return self._paths[self._image[number]]

    def offset_of(self, number: int) -> int:
        """Return the byte offset of an array in its file."""
        return self._offset[number]

    def bytes_of(self, number: int) -> int:
        """Return the length of an array in bytes."""
        return self._n_bytes[number]

    @property
    def n_bytes(self) -> int:
        """Total bytes of all arrays."""
        return sum(self._n_bytes)


class ArrayCoverage:
    """Proof that target fragments tile every array of the output files.

    Fragments of one array may belong to several keys.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._is_done = bytearray(len(places))
        self._parts: dict[int, list[tuple[Box, str]]] = {}
        self._n_filled: dict[int, int] = {}

    def add(self, key: str, fragments: Sequence[TargetFragment]) -> None:
        """Add the target fragments of one key, and check each array that is full now.

        Raises:
            CorruptError: an array is in no file, has another size there, or is written twice.
        """
        for fragment in fragments:
            array = fragment.array
            if array is None:
                continue
            number = self._places.number_of(array.name)
            if number is None:
                raise CorruptError(
                    f"array {array.name!r} is not placed in any output file", key=key
                )
            if self._places.bytes_of(number) != array.n_bytes:
                raise CorruptError(
                    f"array {array.name!r} is {array.n_bytes:,} bytes long, "
                    f"but {self._places.bytes_of(number):,} bytes are reserved in the file",
                    key=key,
                )
            if fragment.box.is_empty:
                continue
            if self._is_done[number]:
                raise CorruptError(
                    f"{described(fragment.box)} would write to array {array.name!r}, which is "
                    "already complete",
                    key=key,
                )

            # Most arrays have one fragment: nothing has to be kept for them.
            shape = region_shape(fragment.box, len(array.shape))
            assert shape is not None  # checked by match_fragments
            if shape == array.shape and number not in self._parts:
                self._is_done[number] = 1
                continue

            # Others keep their fragments until the volumes add up: then the fragments tile the
            # array unless two of them overlap.
            parts = self._parts.setdefault(number, [])
            parts.append((Box(fragment.at, shape), key))
            self._n_filled[number] = self._n_filled.get(number, 0) + prod(shape)
            if self._n_filled[number] >= prod(array.shape):
                _refuse_double_writes(array, parts)
                self._is_done[number] = 1
                del self._parts[number], self._n_filled[number]

    def finish(self) -> None:
        """Raise unless every array is filled; call it after all keys have been added.

        Raises:
            CorruptError: a region of an array is not written.
        """
        number = -1
        for image in self._places.images:
            for placed in image.arrays:
                number += 1
                if self._is_done[number] or 0 in placed.array.shape:
                    continue
                parts = self._parts.get(number, [])
                hole = first_hole(full_box(placed.array.shape), [box for box, _ in parts])
                raise CorruptError(
                    f"{described(hole)} of array {placed.array.name!r} would not be written",
                    file=image.path,
                    key=parts[0][1] if parts else None,
                )


def _refuse_double_writes(array: PlannedArray, parts: list[tuple[Box, str]]) -> None:
    """Raise if fragments of an array overlap.

    Raises:
        CorruptError: two fragments overlap.
    """
    boxes = [box for box, _ in parts]
    overlap = first_overlap(boxes)
    if overlap is not None:
        box = boxes[overlap[0]].intersect(boxes[overlap[1]])
        raise CorruptError(
            f"{described(box)} of array {array.name!r} would be written twice",
            key=parts[overlap[1]][1],
        )


def region_shape(box: Box, rank: int) -> Shape | None:
    """Return the shape of a fragment's region in an array of ``rank`` axes, aligned at the last.

    Returns:
        None if the array has too few axes.
    """
    extra = rank - box.rank
    if extra >= 0:
        return (1,) * extra + box.shape
    return box.shape[-extra:] if all(n == 1 for n in box.shape[:-extra]) else None


def described(box: Box | None) -> str:
    """Format a box for messages: ``[0:4, 8:16]``."""
    if box is None:
        return "the region"
    if box.rank == 0:
        return "the scalar"
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.offset, box.end, strict=True)) + "]"
