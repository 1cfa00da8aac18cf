"""The progress bar: bytes, rate and remaining time, on stderr if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING

from ckpt_cli.screen.terminal import Screen, screen_of
from ckpt_cli.workers import current_team as teamwork
from ckpt_cli.workers.team_progress import team_display
from core.team.protocol import is_lead

if TYPE_CHECKING:
    from typing import TextIO

    from rich.progress import Progress as RichProgress

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""

_SECONDS_PER_FRAME = 0.1


@contextmanager
def progress_bar(*, is_wanted: bool = True) -> Iterator[Progress | None]:
    """Yield a callback that draws the bar.

    Yields None if no bar is wanted, stderr is not a terminal, or a team draws its own display.

    The line is erased at the end, also when the work fails or is interrupted. The callback draws in
    the thread that calls it, one thread at a time. rich is imported at the first call, after the
    work has begun.
    """
    screen = screen_of(sys.stderr)
    team = teamwork.team()
    if not is_wanted or screen.width is None or not is_lead(team):
        yield None
        return
    # Only a TorchTeam has progress: its members' bytes arrive with heartbeats, not by the callback.
    figures = getattr(team, "progress", None)
    if team.size > 1 and figures is not None:
        with team_display(figures, screen):
            yield None
        return
    bar = _Bar(screen)
    try:
        yield bar.update
    finally:
        bar.erase()


class _Bar:
    """A rich progress display that is drawn at most ten times a second."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._next_frame = 0.0
        self._lock = Lock()
        self._display: RichProgress | None = None

    def update(self, done: int, total: int) -> None:
        """Draw the progress; return at once if another thread is drawing."""
        # The last report is always drawn, whenever the next frame is due.
        now = monotonic()
        if (now < self._next_frame and done < total) or not self._lock.acquire(blocking=False):
            return
        try:
            self._next_frame = now + _SECONDS_PER_FRAME
            # The display begins with the first report, which is the first to know the total.
            if self._display is None:
                self._display = display_on(sys.stderr, self._screen)
                self._display.start()
                self._display.add_task("", total=total)
            self._display.update(
                self._display.task_ids[0], completed=done, total=total, refresh=True
            )
        except OSError:  # the terminal is gone, but the work goes on
            self._next_frame = float("inf")
        finally:
            self._lock.release()

    def erase(self) -> None:
        """Erase the line."""
        if self._display is not None:
            self._display.stop()


def display_on(stream: TextIO, screen: Screen) -> RichProgress:
    """Return a display for a stream: bar, percentage, bytes, rate, remaining time."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=Console(
            file=stream, no_color=not screen.has_color, force_terminal=screen.width is not None
        ),
        auto_refresh=False,
        transient=True,
    )
