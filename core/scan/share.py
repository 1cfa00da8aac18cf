"""How the ranks of a team divide what is read, and what they tell the lead of it.

::

    files     |   a   |         b         | c |      d      |      one after the other, with what is read again apart
    ranks     |     0     |     1     |     2     |   3     |      equal runs; a piece is its who owns its first byte

Everybody knows from the metadata alone who reads what, so nobody asks. A file that lies in several runs is put together
by the lead, from what each rank has of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from core.arrays.box import is_c_contiguous
from core.scan.windows import SEGMENT_BYTES, WINDOW_BYTES
from core.team.protocol import ALONE, Team

if TYPE_CHECKING:
    from core.catalog.stored import StoredArray
    from core.scan.sums import FilePart, Scanned
    from core.team.protocol import Figures

_PIECES = 32
"""A rank reads its share in about as many pieces, so that no share is longer than another by more than 3 %."""
_LEAST_BYTES = 2 * WINDOW_BYTES
"""Of a piece: blocks that two pieces share are read twice."""


@dataclass(frozen=True, slots=True)
class Share:
    """What of the work is whose.

    Args:
        rank, size: of the team.
        total_bytes: of the work of all.
        places: by the name of a file or tensor, (first, behind the last) byte of its work.
    """

    rank: int
    size: int
    total_bytes: int
    places: Mapping[str, tuple[int, int]] = field(repr=False)

    def owner(self, place: int) -> int:
        """The rank whose run a byte lies in."""
        return min(place * self.size // self.total_bytes, self.size - 1) if self.total_bytes else 0

    def owners(self, name: str) -> range:
        """The ranks in whose runs a file or tensor lies."""
        start, stop = self.places[name]
        return range(self.owner(start), self.owner(max(start, stop - 1)) + 1)

    def meets(self, name: str) -> bool:
        """Whether some of the work of a file or tensor may be this rank's."""
        return self.rank in self.owners(name)

    def is_mine(self, name: str, at: int = 0) -> bool:
        """Whether this rank does the piece of that work that begins at its byte ``at``."""
        start, stop = self.places[name]
        return self.owner(max(start, min(start + at, stop - 1))) == self.rank

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's run."""
        first, last = (-(-self.total_bytes * rank // self.size) for rank in (self.rank, self.rank + 1))
        return last - first

    @property
    def piece_bytes(self) -> int:
        """About how much of a file is read at a time."""
        if self.size == 1:
            return SEGMENT_BYTES
        return min(SEGMENT_BYTES, max(_LEAST_BYTES, self.total_bytes // (self.size * _PIECES)))


def share_of(team: Team, files: Mapping[str, int], arrays: Mapping[str, Iterable[StoredArray]]) -> Share:
    """What a rank reads.

    Args:
        files: name → size, in the order in which they are read.
        arrays: by file; of files that are not listed as well.
    """
    names = [*files, *(name for name in arrays if name not in files)]
    return share_in_a_row(
        team, ((name, files.get(name, 0) + sum(map(_apart_bytes, arrays.get(name, ())))) for name in names)
    )


def share_in_a_row(team: Team, sizes: Iterable[tuple[str, int]]) -> Share:
    """What a rank does of work that lies one after the other.

    Args:
        sizes: (name, bytes) of every file or tensor.
    """
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for name, n_bytes in sizes:
        places[name] = at, at + n_bytes
        at += n_bytes
    return Share(team.rank, team.size, at, places)


def _apart_bytes(array: StoredArray) -> int:
    """How many bytes of an array are read beside those of its file, as far as its metadata tell."""
    extent = array.extent
    is_line = extent.strides is None or is_c_contiguous(array.shape, extent.strides)
    return array.n_bytes if extent.encoding is not None or not is_line else 0


@dataclass(frozen=True, slots=True)
class ScanPart:
    """What a rank tells the lead.

    Args:
        figures: how much it did.
        scanned: what is complete; None from the lead itself, which has it.
        files: what it has of files that it shares with others.
        states: of its observers.
        file_states: of its observers of files.
    """

    figures: Figures
    scanned: Scanned | None = None
    files: Mapping[str, FilePart] = field(default_factory=dict)
    states: Sequence[Any] = ()
    file_states: Sequence[Any] = ()


class Meter:
    """Tells the team how far this rank is: in the end exactly as much as was expected of it.

    Args:
        team: that is told.
        n_bytes: this rank's share; pieces of work are not cut at its ends, so what is done is a little more or less.

    Attributes:
        n_bytes: what has been done.
    """

    def __init__(self, team: Team = ALONE, n_bytes: int = 0) -> None:
        self._team = team
        self._left = n_bytes
        self.n_bytes = 0
        self._lock = threading.Lock()
        team.expect(n_bytes)

    def advance(self, n_bytes: int) -> None:
        """Says that so much is done.

        Raises:
            StoppedError: another rank has failed.
        """
        with self._lock:
            self.n_bytes += n_bytes
            told_bytes = min(n_bytes, self._left)
            self._left -= told_bytes
        self._team.advance(told_bytes)

    def finish(self) -> None:
        """Everything is done."""
        self._team.advance(self._left)
        self._left = 0
