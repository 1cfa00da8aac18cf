"""The file names of a zarr array's chunks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.box import Shape

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
