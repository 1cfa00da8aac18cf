"""Where the arrays of file images lie, and the proof that something fills every one of them exactly once."""

from __future__ import annotations

from array import array as columns
from collections.abc import Iterator, Sequence
from math import prod

from core.arrays.box import Box, Shape, full_box
from core.arrays.coverage import first_hole, first_overlap
from core.catalog.catalog import TargetFragment
from core.catalog.file_image import FileImage
from core.catalog.stored import PlannedArray
from core.errors import CorruptError
from core.files.store import check_name


class Places:
    """Where the arrays of the file images lie, as columns.

    Args:
        images: the file images; their paths and the names of their arrays are unique.

    Raises:
        CorruptError: an array lies outside its file, touches another one, or is placed twice.
        UnsafeError: a path leaves the destination.
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
                raise CorruptError("two file images have one path", file=image.path)
            paths.add(image.path)
            self._place(number, image)

    def _place(self, number: int, image: FileImage) -> None:
        end = 0
        for placed in image.arrays:
            name, n_bytes = placed.array.name, placed.array.n_bytes
            if placed.offset < end or placed.offset + n_bytes > image.size:
                raise CorruptError(
                    f"array {name!r} is placed at bytes {placed.offset}–{placed.offset + n_bytes}, "
                    f"but bytes {end}–{image.size} are free",
                    file=image.path,
                )
            if name in self._number:
                raise CorruptError(f"array {name!r} is placed twice", file=image.path)
            end = placed.offset + n_bytes
            self._number[name] = len(self._offset)
            self._image.append(number)
            self._offset.append(placed.offset)
            self._n_bytes.append(n_bytes)

    @classmethod
    def of_columns(
        cls, paths: Sequence[str], image: columns[int], offset: columns[int], n_bytes: columns[int]
    ) -> Places:
        """Places of which a lead has told: without images, and every array's name is its number.

        Args:
            paths: of the files.
            image, offset, n_bytes: see ``as_columns``.
        """
        places = cls(())
        places._paths = list(paths)
        places._is_numbered = True
        places._image, places._offset, places._n_bytes = image, offset, n_bytes
        return places

    def as_columns(self) -> tuple[columns[int], columns[int], columns[int]]:
        """Of each array: the number of its file, its offset there and its length in bytes."""
        return self._image, self._offset, self._n_bytes

    def __len__(self) -> int:
        return len(self._offset)

    def number_of(self, name: str) -> int | None:
        """The array's number, in the order of the images and of their arrays; None if it is not placed."""
        if self._is_numbered:
            return int(name)
        return self._number.get(name)

    def names(self) -> Iterator[str]:
        """The arrays' names, by number."""
        return map(str, range(len(self))) if self._is_numbered else iter(self._number)

    def file_of(self, number: int) -> str:
        """Path of the file image that holds an array."""
        return self._paths[self._image[number]]

    def offset_of(self, number: int) -> int:
        """Byte offset of an array in its file."""
        return self._offset[number]

    def bytes_of(self, number: int) -> int:
        """Length of an array in bytes."""
        return self._n_bytes[number]

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self._n_bytes)


class ArrayCoverage:
    """Shows that target fragments tile every placed array; fragments of one array may belong to several keys."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._is_done = bytearray(len(places))
        self._parts: dict[int, list[tuple[Box, str]]] = {}
        self._n_filled: dict[int, int] = {}

    def add(self, fragments: Sequence[TargetFragment]) -> None:
        """Takes the target fragments of one key; an array is proven as soon as its volume is reached."""
        for fragment in fragments:
            array = fragment.array
            if array is None:
                continue
            number = self._places.number_of(array.name)
            if number is None:
                raise CorruptError(f"array {array.name!r} is placed in no file", key=fragment.key)
            if self._places.bytes_of(number) != array.n_bytes:
                raise CorruptError(f"array {array.name!r} is placed with another size", key=fragment.key)
            if fragment.box.is_empty:
                continue
            if self._is_done[number]:
                raise CorruptError(
                    f"array {array.name!r} is written twice, by {described(fragment.box)}", key=fragment.key
                )
            shape = region_shape(fragment.box, len(array.shape))
            assert shape is not None
            if shape == array.shape and number not in self._parts:
                self._is_done[number] = 1
                continue
            parts = self._parts.setdefault(number, [])
            parts.append((Box(fragment.at, shape), fragment.key))
            self._n_filled[number] = self._n_filled.get(number, 0) + prod(shape)
            if self._n_filled[number] >= prod(array.shape):
                _refuse_double_writes(array, parts)
                self._is_done[number] = 1
                del self._parts[number], self._n_filled[number]

    def finish(self) -> None:
        """Proves that nothing is left, once every key has been added."""
        number = -1
        for image in self._places.images:
            for placed in image.arrays:
                number += 1
                if self._is_done[number] or 0 in placed.array.shape:
                    continue
                parts = self._parts.get(number, [])
                hole = first_hole(full_box(placed.array.shape), [box for box, _ in parts])
                raise CorruptError(
                    f"nothing fills {described(hole)} of array {placed.array.name!r}",
                    file=image.path,
                    key=parts[0][1] if parts else None,
                )


def _refuse_double_writes(array: PlannedArray, parts: list[tuple[Box, str]]) -> None:
    boxes = [box for box, _ in parts]
    twice = first_overlap(boxes)
    if twice is not None:
        box = boxes[twice[0]].intersect(boxes[twice[1]])
        raise CorruptError(f"{described(box)} of array {array.name!r} is written twice", key=parts[twice[1]][1])


def region_shape(box: Box, rank: int) -> Shape | None:
    """Shape of a fragment's region in an array of ``rank`` axes, aligned at the last; None if that cannot be."""
    extra = rank - box.rank
    if extra >= 0:
        return (1,) * extra + box.shape
    return box.shape[-extra:] if all(n == 1 for n in box.shape[:-extra]) else None


def described(box: Box | None) -> str:
    """A box for messages: ``[0:4, 8:16]``."""
    if box is None:
        return "the region"
    if box.rank == 0:
        return "the scalar"
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(box.offset, box.end, strict=True)) + "]"
