"""A destination before it is written, to be read like any checkpoint.

Its metadata are those that will be there, save for checksums; the bytes of its arrays are zero. So the readers
themselves say which tensor each of its bytes will belong to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

from core.catalog.file_image import FileImage
from core.errors import MissingShardError, TruncatedError


class PlannedStore:
    """The files of a plan; see ``core.files.store.ReadStore``.

    Args:
        images: the files; their literals are made when they are first read.
        prefix: of the paths to show, which are then relative to it.
        entry: the one file, if the destination is one.
    """

    label = "the destination"

    def __init__(self, images: Iterable[FileImage], *, prefix: str = "", entry: str | None = None) -> None:
        self.entry = entry
        self._images = {image.path.removeprefix(prefix): image for image in images if image.path.startswith(prefix)}
        self._literals: dict[str, tuple[list[int], list[bytes]]] = {}
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
        """See ReadStore."""
        return sorted(self._files.get(under, ()))

    def folders(self, under: str = "") -> list[str]:
        """See ReadStore."""
        return sorted(self._folders.get(under, ()))

    def sizes(self, under: str = "") -> Mapping[str, int]:
        """See ReadStore."""
        prefix = f"{under}/" if under else ""
        return {name: self._images[prefix + name].size for name in self.files(under)}

    def exists(self, name: str) -> bool:
        """See ReadStore."""
        return name in self._images

    def size(self, name: str) -> int:
        """See ReadStore."""
        return self._image(name).size

    def read(self, name: str, offset: int, n_bytes: int) -> bytes:
        """See ReadStore."""
        buffer = bytearray(n_bytes)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See ReadStore."""
        stop = offset + len(buffer)
        if stop > self._image(name).size:
            raise TruncatedError(f"the file ends at byte {self.size(name)}", file=name)
        buffer[:] = bytes(len(buffer))
        starts, literals = self._literals_of(name)
        for number in range(max(0, bisect_right(starts, offset) - 1), bisect_right(starts, stop)):
            start, data = starts[number], literals[number]
            first, last = max(start, offset), min(start + len(data), stop)
            if first < last:
                buffer[first - offset : last - offset] = data[first - start : last - start]

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """See ReadStore."""
        return [self.read(name, offset, n_bytes) for offset, n_bytes in spans]

    def read_vector(self, name: str, offset: int, buffers: list[memoryview], n_bytes: int) -> None:
        """See ReadStore."""
        for buffer in buffers:
            self.read_into(name, offset, buffer)
            offset += len(buffer)

    def _image(self, name: str) -> FileImage:
        found = self._images.get(name)
        if found is None:
            raise MissingShardError("the file does not exist", file=name)
        return found

    def _literals_of(self, name: str) -> tuple[list[int], list[bytes]]:
        known = self._literals.get(name)
        if known is None:
            found = sorted(self._image(name).literals(lambda array: 0))
            known = self._literals[name] = ([start for start, _ in found], [data for _, data in found])
        return known
