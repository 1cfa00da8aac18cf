"""The progress of several workers on one line.

The line shows bytes, rate, remaining time, and the worker that is furthest behind::

    ━━━━━━━━━━━━━━━╸━━━━━━   68%  92.1 GiB of 135 GiB  3.10 GiB/s  0:16  rank 5 is last, 57%

Only the lead draws, on its stderr, and only if that is a terminal. The others' figures come with
their heartbeats, so they lag by one interval. The remaining time is that of the worker that needs
the longest at its own rate.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import bytes_text

if TYPE_CHECKING:
    from ckpt_cli.screen.terminal import Screen

Amounts = Sequence[tuple[int, int]]
"""(bytes done, total bytes) of each worker, by rank."""

_WINDOW_S = 10.0
"""Time over which rates are averaged, in seconds."""
_SECONDS_PER_FRAME = 0.25
_LEAST_BAR = 12
"""Columns reserved for the bar and the space after it."""
_NOTABLE_LAG = 0.02
"""A worker is only mentioned if its share of finished work is below the mean by more than this."""


@dataclass(frozen=True, slots=True)
class TeamState:
    """The progress of a team.

    Args:
        done, total: bytes of all workers.
        rate: bytes per second of all workers; None until known.
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


def state_of(now: Amounts, before: Amounts, seconds: float) -> TeamState:
    """Return the progress of a team.

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
    return TeamState(done, total, rate, remaining_s, last if is_notable else None, share)


def text_of(state: TeamState, width: int) -> str:
    """Return the progress in words, without the bar.

    The last parts are omitted if they do not fit.

    Args:
        width: columns available for the words.
    """
    parts = [
        f"{100 * state.done // max(state.total, 1):3d}%",
        f"{bytes_text(state.done)} of {bytes_text(state.total)}",
    ]
    if state.rate:
        parts.append(f"{bytes_text(int(state.rate))}/s")
    if state.remaining_s is not None:
        parts.append(clock(state.remaining_s))
    if state.last is not None:
        parts.append(f"rank {state.last} is last, {100 * state.last_share:.0f}%")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Format a duration as ``m:ss`` or ``h:mm:ss``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


@contextmanager
def team_display(progress: Callable[[], Amounts], screen: Screen) -> Iterator[None]:
    """Draw the progress of a team on stderr until the block ends; then erase the line.

    A thread draws. It begins, and imports rich, after the work is planned and the total is known.

    Args:
        progress: returns the current figures; called from a thread.
        screen: the capabilities of stderr.
    """
    stop = Event()

    def draw() -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, but the work goes on
            _draw(progress, screen, stop)

    thread = Thread(target=draw, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)


def _draw(progress: Callable[[], Amounts], screen: Screen, stop: Event) -> None:
    """Draw the progress of a team until ``stop`` is set."""
    # Wait for the plan: until then the totals are 0.
    while not any(total for _, total in progress()):
        if stop.wait(_SECONDS_PER_FRAME):
            return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stderr, no_color=not screen.has_color, force_terminal=True)
    columns = BarColumn(bar_width=None), TextColumn("{task.fields[words]}", markup=False)
    samples: deque[tuple[float, Amounts]] = deque()
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, expand=True
    ) as display:
        words_width = console.width - _LEAST_BAR
        task = display.add_task("", total=None, words="")
        while True:
            # Keep the samples of the window, and at least two, to compute rates from.
            now = monotonic()
            figures = list(progress())
            samples.append((now, figures))
            while now - samples[0][0] > _WINDOW_S and len(samples) > 2:
                samples.popleft()
            # Redraw from the difference between the newest sample and the oldest one.
            state = state_of(figures, samples[0][1], now - samples[0][0])
            display.update(
                task,
                completed=state.done,
                total=state.total,
                words=text_of(state, words_width),
                refresh=True,
            )
            if stop.wait(_SECONDS_PER_FRAME):
                return
