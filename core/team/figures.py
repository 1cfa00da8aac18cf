"""What the workers of a team did, over several passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.team.protocol import Figures, Team


def idle(team: Team) -> tuple[Figures, ...]:
    """Of workers that read and wrote nothing."""
    return tuple(Figures(rank, host, 0, 0, 0.0) for rank, host in enumerate(team.hosts))


def added_up(passes: Iterable[Sequence[Figures]]) -> tuple[Figures, ...]:
    """The figures of several passes as if they were one, by rank; empty ones count as nothing."""
    found: dict[int, Figures] = {}
    for figures in passes:
        for one in figures:
            known = found.get(one.rank, Figures(one.rank, one.host, 0, 0, 0.0))
            found[one.rank] = Figures(
                one.rank,
                one.host,
                known.read_bytes + one.read_bytes,
                known.written_bytes + one.written_bytes,
                known.seconds + one.seconds,
            )
    return tuple(found[rank] for rank in sorted(found))
