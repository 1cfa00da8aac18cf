"""Write the bytes around arrays as early as possible, so that parts of objects become complete."""

from __future__ import annotations

import threading
from array import array as columns
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from core.publish.manifest.of_copy import FileRanges

if TYPE_CHECKING:
    from core.engine.catalog.file_image import FileImage, Literal
    from core.engine.plan.positions import Places
    from core.files.store import TargetStore


class EarlyLiterals:
    """The literals of all files of a copy; safe for threads.

    A literal may contain the checksums of arrays, such as the headers of a zip file. It is written
    as soon as these arrays and all that the literals before it need have been written. Everything
    that is neither array nor literal is declared as zero.

    Args:
        images: the files, created in ``store`` already.
        places: file positions of the arrays, numbered in the order of the images.
        store: receives the literals.
    """

    def __init__(self, images: Sequence[FileImage], places: Places, store: TargetStore) -> None:
        self._places = places
        self._crcs = columns("I", bytes(4 * len(places)))
        # Empty arrays are never reported as written.
        self._is_done = bytearray(places.bytes_of(n) == 0 for n in range(len(places)))
        self._numbers = {image.path: number for number, image in enumerate(images)}
        self._files = [_FileLiterals(image, self, store) for image in images]
        for file in self._files:
            file.declare_gaps()
            file.advance()

    def array_done(self, number: int, crc: int) -> None:
        """Take note of a complete array and its CRC-32, and write what it makes possible."""
        self._crcs[number] = crc
        self._is_done[number] = 1
        self._files[self._numbers[self._places.file_of(number)]].advance()

    @property
    def written(self) -> list[FileRanges]:
        """The literals of each file that have been written."""
        return [file.ranges for file in self._files]

    def number_of(self, name: str) -> int:
        """Return the number of an array."""
        number = self._places.number_of(name)
        assert number is not None, "literals contain checksums of arrays in their file only"
        return number

    def crc_of(self, name: str) -> int:
        """Return the CRC-32 of an array, which is complete."""
        return self._crcs[self.number_of(name)]

    def are_done(self, numbers: Sequence[int]) -> bool:
        """Return True if some arrays are complete."""
        return all(self._is_done[number] for number in numbers)


class _FileLiterals:
    """The literals of one file: those that were written, and what the next one waits for."""

    def __init__(self, image: FileImage, literals: EarlyLiterals, store: TargetStore) -> None:
        self._image = image
        self._literals = literals
        self._store = store
        self._lock = threading.Lock()
        self.ranges = FileRanges()
        # Make every literal once without checksums, to learn its place and the arrays it needs.
        self._needed = columns("q")
        self._ends = columns("q")  # literal n needs _needed[_ends[n - 1] : _ends[n]]
        self._spans: list[tuple[int, int]] = []

        def note(name: str) -> int:
            self._needed.append(literals.number_of(name))
            return 0

        for offset, data in image.literals(note):
            self._ends.append(len(self._needed))
            self._spans.append((offset, len(data)))
        self._next = 0
        self._remaining: Iterator[Literal] = iter(image.literals(literals.crc_of))

    def declare_gaps(self) -> None:
        """Declare all bytes as zero that belong neither to an array nor to a literal."""
        spans = [(placed.offset, placed.array.n_bytes) for placed in self._image.arrays]
        end = 0
        for offset, n_bytes in sorted((*spans, *self._spans, (self._image.size, 0))):
            if offset > end:
                self._store.zero(self._image.path, end, offset - end)
            end = max(end, offset + n_bytes)
        self._spans.clear()

    def advance(self) -> None:
        """Write the literals whose arrays are complete, up to the first whose are not."""
        with self._lock:
            while self._next < len(self._ends):
                begin = self._ends[self._next - 1] if self._next else 0
                needed = self._needed[begin : self._ends[self._next]]
                if not self._literals.are_done(needed):
                    return
                offset, data = next(self._remaining)
                self._next += 1
                if data:
                    self._store.write(self._image.path, offset, data)
                    self.ranges.add(offset, data)
