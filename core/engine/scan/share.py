"""Divide the bytes to read among the ranks of a team, and define the results they send to the lead.

::

    files     |   a   |         b         | c |      d      |      one after the other
    ranks     |     0     |     1     |     2     |   3     |      equal runs of bytes

The work of a file is its bytes, followed by the bytes of arrays that are read separately. A work
item belongs to the rank whose run contains its first byte. Every rank derives this from the
metadata alone, without communication. The results of a file that several ranks read are joined by
the lead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from core.arrays.box import is_c_contiguous
from core.engine.scan.windows import SEGMENT_BYTES, WINDOW_BYTES
from core.engine.team.protocol import ALONE, Team
from core.values import dataclass

if TYPE_CHECKING:
    from core.engine.catalog.stored import StoredArray
    from core.engine.scan.sums import FilePart, ScanResult
    from core.engine.team.protocol import Figures

_PIECES = 32
"""Approximate number of items per rank; shares then differ by at most 3 %."""
_LEAST_BYTES = 2 * WINDOW_BYTES
"""Minimum bytes of an item: blocks that two items share are read twice."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """Division of work among the ranks, as one of them sees it.

    Args:
        rank, size: number of this rank, and of all ranks.
        total_bytes: bytes of all work.
        spans: [start, stop) of the work of each file or tensor, by name.
    """

    rank: int
    size: int
    total_bytes: int
    spans: Mapping[str, tuple[int, int]] = field(repr=False)

    def owner(self, position: int) -> int:
        """Return the rank whose run contains a byte of all work."""
        return (
            min(position * self.size // self.total_bytes, self.size - 1) if self.total_bytes else 0
        )

    def owners(self, name: str) -> range:
        """Return the ranks whose runs contain parts of a file or tensor."""
        start, stop = self.spans[name]
        return range(self.owner(start), self.owner(max(start, stop - 1)) + 1)

    def meets(self, name: str) -> bool:
        """Return whether this rank's run contains a part of a file or tensor."""
        return self.rank in self.owners(name)

    def is_own(self, name: str, offset: int = 0) -> bool:
        """Return whether this rank does the work item that begins at ``offset``.

        The offset counts from the beginning of the work on the file or tensor of that name.
        """
        start, stop = self.spans[name]
        return self.owner(max(start, min(start + offset, stop - 1))) == self.rank

    @property
    def n_bytes(self) -> int:
        """Length of this rank's run, in bytes."""
        first, last = (
            -(-self.total_bytes * rank // self.size) for rank in (self.rank, self.rank + 1)
        )
        return last - first

    @property
    def piece_bytes(self) -> int:
        """Approximate number of bytes of a file in a work item."""
        if self.size == 1:
            return SEGMENT_BYTES
        return min(SEGMENT_BYTES, max(_LEAST_BYTES, self.total_bytes // (self.size * _PIECES)))


def divide_files(
    team: Team, files: Mapping[str, int], arrays: Mapping[str, Iterable[StoredArray]]
) -> RankShare:
    """Divide files, and the arrays that are read separately, among the ranks.

    Args:
        files: sizes in bytes by name, in the order in which the files are read.
        arrays: arrays by file, also of files that are not listed.
    """
    names = [*files, *(name for name in arrays if name not in files)]
    return divide_in_order(
        team,
        (
            (name, files.get(name, 0) + sum(map(_separate_bytes, arrays.get(name, ()))))
            for name in names
        ),
    )


def divide_in_order(team: Team, sizes: Iterable[tuple[str, int]]) -> RankShare:
    """Divide work that is done in this order into equal runs, one for each rank.

    Args:
        sizes: name and bytes of every file or tensor.
    """
    spans: dict[str, tuple[int, int]] = {}
    total_bytes = 0
    for name, n_bytes in sizes:
        spans[name] = total_bytes, total_bytes + n_bytes
        total_bytes += n_bytes
    return RankShare(team.rank, team.size, total_bytes, spans)


def _separate_bytes(array: StoredArray) -> int:
    """Return the bytes of an array that are read separately, according to its metadata."""
    extent = array.extent
    is_run = extent.strides is None or is_c_contiguous(array.shape, extent.strides)
    return array.n_bytes if extent.encoding is not None or not is_run else 0


@dataclass(frozen=True, slots=True)
class ScanPart:
    """Results that a rank sends to the lead.

    Args:
        figures: amount of work that the rank did.
        scanned: results that are complete; None from the lead itself, which has them.
        files: sums of files that the rank shares with others, by name.
        states: states of the rank's observers.
        file_states: states of the rank's file observers.
    """

    figures: Figures
    scanned: ScanResult | None = None
    files: Mapping[str, FilePart] = field(default_factory=dict)
    states: Sequence[Any] = ()
    file_states: Sequence[Any] = ()


class Meter:
    """Reports the progress of this rank to the team: in the end exactly as many bytes as announced.

    Args:
        team: receives the reports.
        n_bytes: this rank's share. Work items are not cut at its ends, so that the actual number of
            bytes is slightly larger or smaller.

    Attributes:
        n_bytes: bytes that have been read.
    """

    def __init__(self, team: Team = ALONE, n_bytes: int = 0) -> None:
        self._team = team
        self._unreported_bytes = n_bytes
        self.n_bytes = 0
        self._lock = threading.Lock()
        team.expect(n_bytes)

    def advance(self, n_bytes: int) -> None:
        """Report some bytes as done.

        Raises:
            StoppedError: another rank has failed.
        """
        # Never more than was announced, so that the team's progress ends at exactly 100 %.
        with self._lock:
            self.n_bytes += n_bytes
            reported_bytes = min(n_bytes, self._unreported_bytes)
            self._unreported_bytes -= reported_bytes
        self._team.advance(reported_bytes)

    def finish(self) -> None:
        """Report the remainder of the share as done."""
        self._team.advance(self._unreported_bytes)
        self._unreported_bytes = 0
