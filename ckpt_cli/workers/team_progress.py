"""The progress of several workers in one line: bytes, rate, time left, and the worker that is furthest behind.

::

    ━━━━━━━━━━━━━━━╸━━━━━━   68%  92.1 GiB of 135 GiB  3.10 GiB/s  0:16  rank 5 is last, 57%

Only the lead draws, on its stderr, and only if that is a terminal. The others' figures come with their beats, so they
lag by a beat. The time left is that of the worker that needs longest at its own rate.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import bytes_text

if TYPE_CHECKING:
    from ckpt_cli.screen.terminal import Screen

Amounts = Sequence[tuple[int, int]]
"""(bytes done, bytes to do) of each worker, by rank."""

_WINDOW_S = 10.0
"""Rates are means over so many seconds."""
_SECONDS_PER_FRAME = 0.25
_LEAST_BAR = 12
"""Columns for the bar, with the space after it."""
_NOTABLE_LAG = 0.02
"""A worker that is less than this share behind the mean is not worth a word."""


@dataclass(frozen=True, slots=True)
class TeamState:
    """How far a team is.

    Args:
        done, total: bytes of all workers.
        rate: of all, in bytes a second; None until it can be told.
        left_s: seconds until the last worker is done; None until that can be told.
        last: rank of the worker that is furthest behind the mean; None if they are about even.
        last_share: the share of its work that this one has done.
    """

    done: int
    total: int
    rate: float | None
    left_s: float | None
    last: int | None
    last_share: float


def state_of(now: Amounts, before: Amounts, seconds: float) -> TeamState:
    """The state of a team.

    Args:
        now: the figures.
        before: those of ``seconds`` ago.
    """
    done, total = sum(one for one, _ in now), sum(one for _, one in now)
    rate = left_s = None
    if seconds > 0:
        moved = [max(this[0] - that[0], 0) for this, that in zip(now, before, strict=True)]
        rate = sum(moved) / seconds
        needs = [
            (to_do - did) * seconds / speed if speed else None
            for (did, to_do), speed in zip(now, moved, strict=True)
            if did < to_do
        ]
        known = [one for one in needs if one is not None]
        left_s = max(known) if len(known) == len(needs) and needs else None
    shares = [(did / to_do, rank) for rank, (did, to_do) in enumerate(now) if to_do]
    share, last = min(shares, default=(1.0, 0))
    is_notable = len(shares) > 1 and share < done / total - _NOTABLE_LAG
    return TeamState(done, total, rate, left_s, last if is_notable else None, share)


def text_of(state: TeamState, width: int) -> str:
    """The state in words, without the bar; the last parts are left out where they do not fit.

    Args:
        width: columns that the words may take.
    """
    parts = [f"{100 * state.done // max(state.total, 1):3d}%", f"{bytes_text(state.done)} of {bytes_text(state.total)}"]
    if state.rate:
        parts.append(f"{bytes_text(int(state.rate))}/s")
    if state.left_s is not None:
        parts.append(clock(state.left_s))
    if state.last is not None:
        parts.append(f"rank {state.last} is last, {100 * state.last_share:.0f}%")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@contextmanager
def team_display(progress: Callable[[], Amounts], screen: Screen) -> Iterator[None]:
    """Draws the progress of a team on stderr until the block ends; then the line is erased.

    The thread that draws begins with the first bytes, when the plan is made: until then nothing is imported beside it.

    Args:
        progress: the figures as they are known now; called from a thread.
        screen: of stderr.
    """
    stop = Event()

    def draw() -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone is no reason to stop the work
            _draw(progress, screen, stop)

    thread = Thread(target=draw, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(5)


def _draw(progress: Callable[[], Amounts], screen: Screen, stop: Event) -> None:
    samples: deque[tuple[float, Amounts]] = deque()
    while not any(total for _, total in progress()):
        if stop.wait(_SECONDS_PER_FRAME):
            return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stderr, no_color=not screen.has_color, force_terminal=True)
    columns = BarColumn(bar_width=None), TextColumn("{task.fields[words]}", markup=False)
    with Progress(*columns, console=console, auto_refresh=False, transient=True, expand=True) as display:
        room = console.width - _LEAST_BAR
        task = display.add_task("", total=None, words="")
        while True:
            now = monotonic()
            figures = list(progress())
            samples.append((now, figures))
            while now - samples[0][0] > _WINDOW_S and len(samples) > 2:
                samples.popleft()
            state = state_of(figures, samples[0][1], now - samples[0][0])
            display.update(task, completed=state.done, total=state.total, words=text_of(state, room), refresh=True)
            if stop.wait(_SECONDS_PER_FRAME):
                return
