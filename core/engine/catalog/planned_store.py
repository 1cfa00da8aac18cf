"""A store that reads a destination before it is written, like any checkpoint.

The metadata are those that will be written, except for checksums; the bytes of the arrays are zero.
So the readers of the formats determine which tensor each byte will belong to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from core.engine.catalog.file_image import FileImage
from core.errors import MissingShardError, TruncatedError
from core.files.store import ReadStore


class PlannedStore(ReadStore):
    """The files of a plan, to be read.

    Args:
        images: the files to write; the literals of a file are computed when it is first read.
        prefix: prefix of the paths to serve, which are then relative to it.
        entry: the file, if the destination is a single file.
    """

    label = "the destination"
    entry: str | None = None

    def __init__(
        self, images: Iterable[FileImage], *, prefix: str = "", entry: str | None = None
    ) -> None:
        self.entry = entry
        self._images = {
            image.path.removeprefix(prefix): image
            for image in images
            if image.path.startswith(prefix)
        }
        self._literals: dict[str, tuple[list[int], list[bytes]]] = {}
        """Path → offsets of the literals, ascending, and their bytes."""
        # The names of files and folders by the folder that contains them.
        self._files: dict[str, list[str]] = {}
        self._folders: dict[str, set[str]] = {}
        for path in self._images:
            folder, _, name = path.rpartition("/")
            self._files.setdefault(folder, []).append(name)
            while folder:
                above, _, name = folder.rpartition("/")
                self._folders.setdefault(above, set()).add(name)
                folder = above

    def files(self, under: str = "") -> list[str]:
        """Return the names of the files in a folder."""
        return sorted(self._files.get(under, ()))

    def folders(self, under: str = "") -> list[str]:
        """Return the names of the folders in a folder."""
        return sorted(self._folders.get(under, ()))

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """Return the sizes of the files in a folder, in bytes."""
        prefix = f"{under}/" if under else ""
        return {name: self._images[prefix + name].size for name in self.files(under)}

    def exists(self, name: str) -> bool:
        """Return whether a file is planned."""
        return name in self._images

    def size(self, name: str) -> int:
        """Return the size of a file, in bytes."""
        return self._image(name).size

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """Return bytes of a file; those of its arrays are zero."""
        buffer = bytearray(n_bytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Read bytes of a file into a buffer; those of its arrays are zero.

        Raises:
            MissingShardError: the file is not planned.
            TruncatedError: the file ends before the buffer is full.
        """
        stop = offset + len(buffer)
        if stop > self._image(name).size:
            raise TruncatedError(f"the file ends at byte {self.size(name):,}", file=name)
        buffer[:] = bytes(len(buffer))
        # The literals that overlap the span, the one that begins before it included.
        starts, literals = self._literals_of(name)
        for number in range(max(0, bisect_right(starts, offset) - 1), bisect_right(starts, stop)):
            start, data = starts[number], literals[number]
            first, last = max(start, offset), min(start + len(data), stop)
            if first < last:
                buffer[first - offset : last - offset] = data[first - start : last - start]

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of several spans of a file."""
        return [self.read(name, offset, n_bytes) for offset, n_bytes in spans]

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """Read consecutive bytes of a file into several buffers."""
        for buffer in buffers:
            self.read_into(name, offset, buffer)
            offset += len(buffer)

    def _image(self, name: str) -> FileImage:
        """Return the description of a file.

        Raises:
            MissingShardError: the file is not planned.
        """
        image = self._images.get(name)
        if image is None:
            raise MissingShardError("the file does not exist", file=name)
        return image

    def _literals_of(self, name: str) -> tuple[list[int], list[bytes]]:
        """Return the offsets and the bytes of a file's literals, with checksums of 0."""
        columns = self._literals.get(name)
        if columns is None:
            literals = sorted(self._image(name).literals(lambda array: 0))
            columns = self._literals[name] = (
                [start for start, _ in literals],
                [data for _, data in literals],
            )
        return columns
