"""Compare the tensors of two checkpoints with a team of ranks, dividing the bytes equally.

::

    every rank   compare its bands                             ──▶ tallies
    lead         join the tallies, and broadcast the keys of tensors that differ
    every rank   sum up the equal bands of these tensors       ──▶ sums
    lead         add the sums

The results equal those of one process: sums over a tensor are exact until they are rounded
(``core.engine.numbers.tally``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set

from core.engine.numbers.tally import Tally
from core.engine.scan.share import Meter, RankShare
from core.engine.team.protocol import Figures, Team, broadcast_result, gather_results
from core.values import dataclass
from core.verbs.diff.tensor_pass import Advance, ComparedTensor, TensorWork, compared_of

_Tallied = tuple[tuple[str, str], Tally]
"""The dtypes of a tensor in A and B, and the tally of its bands."""


@dataclass(frozen=True, slots=True)
class _RankTallies:
    """The tallies of one rank.

    Args:
        tallies: key → (dtypes in A and B, tally).
        n_bytes: bytes that the rank read.
        seconds: wall time of the rank.
    """

    tallies: dict[str, _Tallied]
    n_bytes: int
    seconds: float


class SharedComparison:
    """One rank's part of a comparison.

    Args:
        team: the ranks that work together.
        share: this rank's share of the bytes.
        work: prepares the comparison of a share, which reports bytes to the callback.
        threads: number of comparing threads.
    """

    def __init__(
        self,
        team: Team,
        share: RankShare,
        work: Callable[[RankShare, Advance], TensorWork],
        *,
        threads: int,
    ) -> None:
        self._team = team
        self._share = share
        self._work = work(share, self._advance)
        self._threads = threads
        self._meter = Meter()

    def compare(self) -> tuple[list[ComparedTensor], tuple[Figures, ...]]:
        """Compare with all ranks.

        Returns:
            On the lead the tensors in the order of the share, and bytes and time of each rank;
            nothing on other ranks.

        Raises:
            CheckpointingException: the first error of a rank.
        """
        # Every rank compares its bands, and the lead finds which tensors differ.
        first = gather_results(self._team, self._compare_bands)
        tallies = _joined({}, first or [])
        differing = broadcast_result(
            self._team, lambda: {key for key, (_, tally) in tallies.items() if tally.differs}
        )
        # Sums over those tensors need their equal bands as well. A rank cannot know earlier which
        # ones: the difference may be in a band of another rank.
        second = gather_results(self._team, lambda: self._sum_up_bands(differing))
        if first is None or second is None:
            return [], ()
        tallies = _joined(tallies, second)
        figures = tuple(
            Figures(rank, self._team.hosts[rank], a.n_bytes + b.n_bytes, 0, a.seconds + b.seconds)
            for rank, (a, b) in enumerate(zip(first, second, strict=True))
        )
        return [compared_of(key, *tallies[key]) for key in self._share.spans], figures

    def _compare_bands(self) -> _RankTallies:
        """Compare the bands of the share."""
        return self._timed(self._share.n_bytes, lambda: self._work.run_share(self._threads))

    def _sum_up_bands(self, differing: Set[str]) -> _RankTallies:
        """Sum up the equal bands of tensors that differ somewhere."""
        return self._timed(
            self._work.equal_bytes(differing), lambda: self._work.sum_up(differing, self._threads)
        )

    def _timed(self, n_bytes: int, work: Callable[[], dict[str, _Tallied]]) -> _RankTallies:
        """Run a part of the work, and measure its bytes and time."""
        begun = time.monotonic()
        self._meter = Meter(self._team, n_bytes)
        tallies = work()
        self._meter.finish()
        return _RankTallies(tallies, self._meter.n_bytes, time.monotonic() - begun)

    def _advance(self, n_bytes: int) -> None:
        self._meter.advance(n_bytes)


def _joined(tallies: Mapping[str, _Tallied], parts: Sequence[_RankTallies]) -> dict[str, _Tallied]:
    """Join tallies with those of the ranks."""
    result = dict(tallies)
    for part in parts:
        for key, (dtypes, tally) in part.tallies.items():
            result.setdefault(key, (dtypes, Tally()))[1].join(tally)
    return result
