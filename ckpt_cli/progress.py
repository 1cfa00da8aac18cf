"""The progress bar: bytes, rate and time left, on stderr, and only if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from time import monotonic

from ckpt_cli.render import bytes_text, seconds_text
from ckpt_cli.terminal import Screen, columns_of, screen_of

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""

_SECONDS_PER_FRAME = 0.1
_SECONDS_OF_RATE = 4.0


@contextmanager
def progress_bar(*, is_wanted: bool = True) -> Iterator[Progress | None]:
    """A callback that draws the bar; None where there is to be none.

    The line is erased at the end, also when the work fails or is interrupted. The bar is drawn by the threads that
    report, one at a time; it has no thread of its own and never hides the cursor.
    """
    screen = screen_of(sys.stderr)
    if not is_wanted or screen.width is None:
        yield None
        return
    bar = _Bar(screen)
    try:
        yield bar.update
    finally:
        bar.erase()


class _Bar:
    """One line that is drawn over itself."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._started = monotonic()
        self._next_frame = self._started
        self._samples: list[tuple[float, int]] = [(self._started, 0)]
        self._lock = Lock()

    def update(self, done: int, total: int) -> None:
        """Draws the state, at most ten times a second; returns at once if another thread is drawing."""
        now = monotonic()
        if (now < self._next_frame and done < total) or not self._lock.acquire(blocking=False):
            return
        try:
            self._draw(now, done, total)
        finally:
            self._lock.release()

    def _draw(self, now: float, done: int, total: int) -> None:
        self._next_frame = now + _SECONDS_PER_FRAME
        self._samples.append((now, done))
        while now - self._samples[0][0] > _SECONDS_OF_RATE and len(self._samples) > 2:
            self._samples.pop(0)
        then, before = self._samples[0]
        rate = (done - before) / (now - then) if now > then else 0.0
        _draw_line(bar_text(self._screen_now(), done, total, rate))

    def erase(self) -> None:
        """Leaves an empty line."""
        _draw_line("")

    def _screen_now(self) -> Screen:
        """The screen with the width it has now: windows are resized during long copies."""
        now = screen_of(sys.stderr)
        return now if now.width is not None else self._screen


def _draw_line(text: str) -> None:
    """Replaces the line; a terminal that is gone is no reason to stop the work."""
    with suppress(OSError):
        sys.stderr.write("\r\x1b[2K" + text)
        sys.stderr.flush()


def bar_text(screen: Screen, done: int, total: int, rate: float) -> str:
    """One frame.

    Args:
        done, total: bytes.
        rate: bytes per second; 0 if it is not known yet.
    """
    share = done / total if total else 1.0
    left = f"{seconds_text((total - done) / rate)} left" if rate > 0 and done < total else ""
    speed = f"{bytes_text(round(rate))}/s" if rate > 0 else ""
    figures = f" {int(share * 100):3d} %  {bytes_text(done)} of {bytes_text(total)}  {speed:>12}  {left}".rstrip()
    width = (screen.width or 80) - 1
    room = min(width - columns_of(figures), 40)
    if room < 8:
        return screen.plain(figures[:width].strip())
    full = int(share * room)
    return screen.plain(
        screen.styled("━" * full, "green")
        + screen.styled(("━" if screen.has_color else "─") * (room - full), "dim")
        + figures
    )
