"""The tensors of two checkpoints compared by the ranks of a team: each looks at an equal run of the bytes of both.

::

    ranks   compare their bands ─┬─▶ lead: which tensors differ ─ told ─┬─ sum up their equal bands of those ─▶ lead

The figures are those of one process: sums over a tensor are exact until they are rounded (``core.numbers.tally``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from core.diff.tensor_pass import Advance, Compared, TensorWork, compared_of
from core.numbers.tally import Tally
from core.scan.share import Meter, RankShare
from core.team.protocol import Figures, Team, broadcast_result, gather_results


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has found.

    Args:
        tallies: by key, with the types of A and B.
        n_bytes: that it has read.
        seconds: that it took.
    """

    tallies: dict[str, tuple[tuple[str, str], Tally]]
    n_bytes: int
    seconds: float


class SharedComparison:
    """One rank's part of a comparison.

    Args:
        team: that works together.
        share: of this rank.
        work: makes what compares the bands of the share, and tells about bytes.
        threads: that compare.
    """

    def __init__(
        self, team: Team, share: RankShare, work: Callable[[RankShare, Advance], TensorWork], *, threads: int
    ) -> None:
        self._team = team
        self._share = share
        self._work = work(share, self._advance)
        self._threads = threads
        self._meter = Meter()

    def compared(self) -> tuple[list[Compared], tuple[Figures, ...]]:
        """What is to say about the tensors, in the order of the share, and what the workers did; at the lead.

        Raises:
            CheckpointingException: the first error of a rank.
        """
        first = gather_results(self._team, self._first)
        found: dict[str, tuple[tuple[str, str], Tally]] = {}
        differing = broadcast_result(self._team, lambda: _joined(found, first or []))
        second = gather_results(self._team, lambda: self._second(differing))
        if first is None or second is None:
            return [], ()
        _joined(found, second)
        figures = tuple(
            Figures(rank, self._team.hosts[rank], one.n_bytes + two.n_bytes, 0, one.seconds + two.seconds)
            for rank, (one, two) in enumerate(zip(first, second, strict=True))
        )
        return [compared_of(key, *found[key]) for key in self._share.spans], figures

    def _first(self) -> _Part:
        """Compares the bands of the share."""
        return self._timed(self._share.n_bytes, lambda: self._work.run_share(self._threads))

    def _second(self, differing: Set[str]) -> _Part:
        """Sums up the equal bands of tensors that differ somewhere."""
        return self._timed(self._work.equal_bytes(differing), lambda: self._work.sum_up(differing, self._threads))

    def _timed(self, n_bytes: int, work: Callable[[], dict[str, tuple[tuple[str, str], Tally]]]) -> _Part:
        begun = time.monotonic()
        self._meter = Meter(self._team, n_bytes)
        found = work()
        self._meter.finish()
        return _Part(found, self._meter.n_bytes, time.monotonic() - begun)

    def _advance(self, n_bytes: int) -> None:
        self._meter.advance(n_bytes)


def _joined(found: dict[str, tuple[tuple[str, str], Tally]], parts: Sequence[_Part]) -> set[str]:
    """Adds what the ranks have found; returns the keys of the tensors that differ."""
    for part in parts:
        for key, (dtypes, tally) in part.tallies.items():
            found.setdefault(key, (dtypes, Tally()))[1].join(tally)
    return {key for key, (_, tally) in found.items() if tally.differs}
