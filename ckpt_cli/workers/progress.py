"""The display of progress on stderr: a bar on a terminal, or lines for a log.

The engine reports what it does (``core.progress``); a thread shows it a few times per second, so
that a report costs no more than storing it. Only the lead of a team shows anything. Bytes of a team
come from its members' heartbeats, everything else from the lead's own reports.

========  ==========================================================================================
 form      shown
========  ==========================================================================================
 bar       one line that is redrawn, and erased at the end; where there is no terminal, as ``log``
 log       one line at the beginning of each phase, and one every 30 seconds
 auto      ``bar`` on a terminal, else ``log`` from the moment on that the work has taken 1.5 s
 none      nothing
========  ==========================================================================================
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING

from ckpt_cli.screen.terminal import Screen, screen_of
from ckpt_cli.workers import current_team as teamwork
from core.engine.team.protocol import is_lead
from core.files.requests.traffic import Traffic, traffic_so_far
from core.progress import OnProgress, Phase, Progress
from core.values import dataclass

if TYPE_CHECKING:
    from typing import TextIO

    from rich.progress import Progress as RichProgress

    from ckpt_cli.workers.work_state import Amounts, WorkState

SECONDS_PER_LINE = 30.0
"""Time between two lines of a log about the same phase."""
_SHORT_S = 1.5
"""With ``auto``, work that takes no longer leaves no line in a log."""
_BAR_AFTER_S = 0.3
"""Work that takes no longer shows no bar, and does not import rich."""
_SECONDS_PER_FRAME = 0.2
_WINDOW_S = 10.0
"""Time over which rates are averaged, in seconds."""
_LEAST_BAR = 20
"""Columns reserved for the phase, the bar and the spaces after them."""


@contextmanager
def show_progress(form: str) -> Iterator[OnProgress | None]:
    """Show the progress that is reported during the block.

    A bar is erased at the end, also when the work fails or is interrupted.

    Args:
        form: one of ``ckpt_cli.options.shared.progress.FORMS``.

    Yields:
        The function to report to; None if nothing is shown.
    """
    team = teamwork.team()
    if form == "none" or not is_lead(team):
        yield None
        return
    # Only a TorchTeam has figures: its members' bytes arrive with heartbeats.
    tracker = PhaseTracker(getattr(team, "progress", None) if team.size > 1 else None)
    stream, screen, stop = sys.stderr, screen_of(sys.stderr), Event()

    def show() -> None:
        with suppress(OSError, ValueError):  # the terminal is gone, but the work goes on
            if screen.width is not None and form != "log":
                _draw_bar(tracker, stop, stream, screen)
            else:
                _write_lines(tracker, stop, stream, quiet_s=_SHORT_S if form == "auto" else 0.0)

    thread = Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield tracker.report
    finally:
        stop.set()
        thread.join(5)


@dataclass(frozen=True, slots=True)
class View:
    """The progress at one moment.

    Args:
        progress: the latest report.
        state: the amounts of all workers, with their rate.
        elapsed_s: duration of the phase so far.
    """

    progress: Progress
    state: WorkState
    elapsed_s: float


class PhaseTracker:
    """The latest report, and what it needs to become text.

    Args:
        figures: returns (bytes done, total bytes) of each member of a team, from the beginning of
            its work on; None for a process that works alone.
    """

    def __init__(self, figures: Callable[[], Amounts] | None = None) -> None:
        self._figures = figures
        self._traffic_before = traffic_so_far()
        self._latest: Progress | None = None
        self._base: Amounts = ()
        self._lock = Lock()
        self._begun_at = 0.0
        self._begun: deque[Phase] = deque()
        self._samples: deque[tuple[float, Amounts]] = deque()

    def report(self, progress: Progress) -> None:
        """Store a report."""
        latest = self._latest
        if latest is None or latest.phase is not progress.phase:
            with self._lock:
                self._begin(progress)
        self._latest = progress

    def _begin(self, progress: Progress) -> None:
        """Begin a phase."""
        # The members' figures include the phases before: these are done, so their totals count.
        if self._figures is not None:
            self._base = list(self._figures())
        self._begun_at = monotonic()
        self._begun.append(progress.phase)
        self._latest = progress

    def traffic(self) -> Traffic:
        """Return the requests to object stores since the work began."""
        return traffic_so_far() - self._traffic_before

    def begun_phases(self) -> list[Phase]:
        """Return the phases that have begun since the last call."""
        return [self._begun.popleft() for _ in range(len(self._begun))]

    def view(self, *, is_new: bool = False) -> View | None:
        """Return the progress now; None before the first report.

        Args:
            is_new: the phase has begun since the last call, so that earlier rates do not count.
        """
        from ckpt_cli.workers.work_state import measure_work

        progress = self._latest
        if progress is None:
            return None
        # Keep the samples of the window, and at least two, to compute rates from.
        if is_new:
            self._samples.clear()
        now, amounts = monotonic(), self._amounts(progress)
        self._samples.append((now, amounts))
        while now - self._samples[0][0] > _WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()
        first_at, before = self._samples[0]
        # Members that have copied all bytes wait for their disks, which nobody reports.
        state = measure_work(amounts, before, now - first_at)
        if self._figures is not None and progress.phase is Phase.COPYING:
            with self._lock:
                if 0 < state.total <= state.done and self._latest is progress:
                    self._begin(Progress(Phase.SYNCING, unit="files"))
        return View(progress, state, now - self._begun_at)

    def _amounts(self, progress: Progress) -> Amounts:
        """Return (done, total) of each worker in the current phase."""
        if self._figures is None or progress.unit != "bytes":
            return [(progress.done, progress.total)]
        return [
            (max(done - earlier, 0), max(total - earlier, 0))
            for (done, total), (_, earlier) in zip(self._figures(), self._base, strict=True)
        ]


def _write_lines(tracker: PhaseTracker, stop: Event, stream: TextIO, *, quiet_s: float) -> None:
    """Write a line for each phase, and for a phase that takes long, until ``stop`` is set.

    Args:
        quiet_s: work that takes no longer leaves no line; of longer work, neither do the phases
            that are over by then.
    """
    if quiet_s:
        if stop.wait(quiet_s):
            return
        phases = tracker.begun_phases()[-1:]
    else:
        phases = tracker.begun_phases()
    from ckpt_cli.workers.work_state import log_line

    next_line_at = 0.0
    while True:
        # Phases that are over already get their name only.
        for phase in phases[:-1]:
            print(phase, file=stream, flush=True)
        view = tracker.view(is_new=bool(phases))
        if view is not None and (phases or monotonic() >= next_line_at):
            progress = view.progress
            text = log_line(
                progress.phase,
                view.state,
                progress.unit,
                elapsed_s=view.elapsed_s,
                traffic=tracker.traffic(),
            )
            print(text, file=stream, flush=True)
            next_line_at = monotonic() + SECONDS_PER_LINE
        is_over = stop.wait(_SECONDS_PER_FRAME)
        phases = tracker.begun_phases()
        if is_over:
            for phase in phases:
                print(phase, file=stream, flush=True)
            return


def _draw_bar(tracker: PhaseTracker, stop: Event, stream: TextIO, screen: Screen) -> None:
    """Draw the progress as a bar until ``stop`` is set; then erase it."""
    from ckpt_cli.workers.work_state import describe_progress

    # Nothing is drawn, and rich is not imported, for work that is short.
    if stop.wait(_BAR_AFTER_S):
        return
    with _bar_on(stream, screen) as bar:
        while True:
            is_new = bool(tracker.begun_phases())
            view = tracker.view(is_new=is_new)
            if view is not None:
                # A total cannot become unknown again, so each phase has a task of its own. A bar
                # without a total moves to and fro.
                progress, state = view.progress, view.state
                if is_new or not bar.task_ids:
                    for task in bar.task_ids:
                        bar.remove_task(task)
                    bar.add_task("", total=None, phase=progress.phase, words="", visible=False)
                words_width = bar.console.width - _LEAST_BAR
                bar.update(
                    bar.task_ids[0],
                    completed=state.done,
                    total=state.total or None,
                    phase=progress.phase,
                    words=describe_progress(
                        state,
                        progress.unit,
                        words_width,
                        elapsed_s=view.elapsed_s,
                        traffic=tracker.traffic(),
                    ),
                    visible=True,
                    refresh=True,
                )
            if stop.wait(_SECONDS_PER_FRAME):
                return


def _bar_on(stream: TextIO, screen: Screen) -> RichProgress:
    """Return a bar with its phase on the left and words on the right."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    console = Console(file=stream, no_color=not screen.has_color, force_terminal=True)
    return RichProgress(
        TextColumn("{task.fields[phase]}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[words]}", markup=False),
        console=console,
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stdout=False,
    )
