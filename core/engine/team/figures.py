"""Add up the figures of a team's workers over several passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.engine.team.protocol import Figures, Team


def idle_figures(team: Team) -> tuple[Figures, ...]:
    """Return the figures of workers that read and wrote nothing, by rank."""
    return tuple(Figures(rank, host, 0, 0, 0.0) for rank, host in enumerate(team.hosts))


def sum_figures(passes: Iterable[Sequence[Figures]]) -> tuple[Figures, ...]:
    """Return the figures of several passes as if they were one pass, by rank."""
    totals: dict[int, Figures] = {}
    for figures in passes:
        for worker in figures:
            total = totals.get(worker.rank, Figures(worker.rank, worker.host, 0, 0, 0.0))
            totals[worker.rank] = Figures(
                worker.rank,
                worker.host,
                total.read_bytes + worker.read_bytes,
                total.written_bytes + worker.written_bytes,
                total.seconds + worker.seconds,
            )
    return tuple(totals[rank] for rank in sorted(totals))
