"""The state of the work of one or several workers, and the words for it.

A bar shows phase, share, amounts, rate, remaining time, and the worker that is furthest behind;
a line of a log has the same figures::

    copying ━━━━━━━━━━╸━━━━   68%  92.1 GiB of 135 GiB  3.10 GiB/s  0:16  rank 5 is last, 57%
    copying: 92.1 GiB of 135 GiB (68 %), 3.10 GiB/s, 16 s left, rank 5 is last (57 %)

The figures of other workers come with their heartbeats, so they lag by one interval. The remaining
time is that of the worker that needs the longest at its own rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import bytes_text, n_text, seconds_text
from core.files.requests.traffic import Traffic, traffic_so_far
from core.values import dataclass

if TYPE_CHECKING:
    from core.progress import Phase, Unit

NO_TRAFFIC = Traffic()
Amounts = Sequence[tuple[int, int]]
"""(done, total) of each worker, by rank."""

_NOTABLE_LAG = 0.02
"""A worker is only mentioned if its share of finished work is below the mean by more than this."""


@dataclass(frozen=True, slots=True)
class WorkState:
    """The state of the work in one phase.

    Args:
        done, total: amounts of all workers; a total of 0 is unknown.
        rate: amount per second of all workers; None until known.
        remaining_s: seconds until the last worker is done; None until known.
        last: rank of the worker that is furthest behind the mean; None if they are about even.
        last_share: share of this worker's work that is done, 0 to 1.
    """

    done: int
    total: int
    rate: float | None
    remaining_s: float | None
    last: int | None
    last_share: float

    @property
    def percent(self) -> int:
        """The share of the work that is done, rounded down."""
        return min(100 * self.done // max(self.total, 1), 100)


def measure_work(now: Amounts, before: Amounts, seconds: float) -> WorkState:
    """Return the state of the work.

    Args:
        now: the workers' figures.
        before: the workers' figures ``seconds`` ago.
    """
    done, total = sum(n_done for n_done, _ in now), sum(n_total for _, n_total in now)
    # The rate of all workers, and the time that the slowest one needs. A worker that stands still
    # would need forever, so the remaining time is unknown.
    rate = remaining_s = None
    if seconds > 0:
        moved = [max(new[0] - old[0], 0) for new, old in zip(now, before, strict=True)]
        rate = sum(moved) / seconds
        needed_s = [
            (n_total - n_done) * seconds / n_moved if n_moved else inf
            for (n_done, n_total), n_moved in zip(now, moved, strict=True)
            if n_done < n_total
        ]
        slowest_s = max(needed_s, default=inf)
        remaining_s = None if slowest_s == inf else slowest_s
    # The worker that is furthest behind; workers without any work do not count.
    shares = [(n_done / n_total, rank) for rank, (n_done, n_total) in enumerate(now) if n_total]
    share, last = min(shares, default=(1.0, 0))
    is_notable = len(shares) > 1 and share < done / total - _NOTABLE_LAG
    return WorkState(done, total, rate, remaining_s, last if is_notable else None, share)


def describe_progress(
    state: WorkState,
    unit: Unit,
    width: int,
    *,
    elapsed_s: float = 0.0,
    traffic: Traffic = NO_TRAFFIC,
) -> str:
    """Return what stands right of the bar, in short words or without the last parts if need be.

    Args:
        width: columns available for the text.
        elapsed_s: duration of the phase so far.
        traffic: requests to object stores so far.
    """
    for is_short in (False, True):
        if not state.total:
            parts = [*_amount(state, unit), clock(elapsed_s)]
        else:
            parts = [f"{state.percent:3d}%", *_amount(state, unit, is_short=is_short)]
            if state.rate and unit == "bytes":
                parts.append(f"{bytes_text(int(state.rate))}/s")
                if state.remaining_s is not None:
                    parts.append(clock(state.remaining_s))
            if state.last is not None:
                parts.append(f"rank {state.last} is last, {100 * state.last_share:.0f}%")
        parts += _requests(traffic, is_short=is_short)
        if len("  ".join(parts)) <= width or not traffic.n_requests:
            break
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def log_line(
    phase: Phase,
    state: WorkState,
    unit: Unit,
    *,
    elapsed_s: float = 0.0,
    traffic: Traffic = NO_TRAFFIC,
) -> str:
    """Return the line of a log; it begins with the phase.

    Args:
        elapsed_s: duration of the phase so far.
        traffic: requests to object stores so far.
    """
    parts = _amount(state, unit)
    if not state.total:
        parts += [f"{_time(elapsed_s)} so far"] if elapsed_s >= 1 else []
    elif unit == "bytes":
        parts[0] += f" ({state.percent} %)"
        if state.rate:
            parts.append(f"{bytes_text(int(state.rate))}/s")
            if state.remaining_s is not None:
                parts.append(f"{_time(state.remaining_s)} left")
        if state.last is not None:
            parts.append(f"rank {state.last} is last ({100 * state.last_share:.0f} %)")
    parts += _requests(traffic)
    return f"{phase}: {', '.join(parts)}" if parts else str(phase)


def traffic_text(traffic: Traffic) -> str:
    """Return the number of requests, and how many of them were repeated."""
    repeated = f" ({traffic.n_retries:,} repeated)" if traffic.n_retries else ""
    return f"{n_text(traffic.n_requests, 'request')}{repeated}"


def store_traffic(paths: Iterable[str]) -> Traffic | None:
    """Return the requests of this process; None unless one of the paths is a URL.

    Args:
        paths: checkpoints that this process has read or written.
    """
    return traffic_so_far() if any("://" in path for path in paths) else None


def traffic_fields(paths: Iterable[str]) -> dict[str, object]:
    """Return the field ``store`` of a ``--json`` report; {} unless one of the paths is a URL.

    Args:
        paths: as for ``store_traffic``.
    """
    traffic = store_traffic(paths)
    if traffic is None:
        return {}
    return {
        "store": {
            "requests": traffic.n_requests,
            "retries": traffic.n_retries,
            "bytes": traffic.n_bytes,
        }
    }


def _requests(traffic: Traffic, *, is_short: bool = False) -> list[str]:
    """Return the requests as one text, or none if there are none."""
    if not traffic.n_requests:
        return []
    if not is_short:
        return [traffic_text(traffic)]
    retries = f", {traffic.n_retries:,} retried" if traffic.n_retries else ""
    return [f"{traffic.n_requests:,} req{retries}"]


def clock(seconds: float) -> str:
    """Format a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _amount(state: WorkState, unit: Unit, *, is_short: bool = False) -> list[str]:
    """Return the amounts as one text, or none if nothing is known."""
    if unit == "files":
        if state.total:
            return [f"{state.done:,} of {n_text(state.total, 'file')}"]
        return [n_text(state.done, "file")] if state.done else []
    if not state.total:
        return []
    done, total = bytes_text(state.done), bytes_text(state.total)
    # 92.1/135 GiB
    done_unit, total_unit = done.rpartition(" ")[2], total.rpartition(" ")[2]
    if is_short and done_unit == total_unit:
        return [f"{done.removesuffix(f' {done_unit}')}/{total}"]
    return [f"{done} of {total}"]


def _time(seconds: float) -> str:
    """Format a duration for a log: ``29 s``, ``4 min 10 s``, ``2 h 05 min``."""
    return f"{seconds:.0f} s" if seconds < 10 else seconds_text(seconds)
