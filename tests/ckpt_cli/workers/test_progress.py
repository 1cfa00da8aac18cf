"""ckpt_cli.workers.progress: what a bar and a log show, and when."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_cli.workers import current_team as teamwork
from ckpt_cli.workers import progress as shown
from ckpt_cli.workers.progress import PhaseTracker, show_progress
from core.engine.team.protocol import ALONE
from core.progress import OnProgress, Phase, Progress, begin_phase, count_steps

GIB = 2**30


class Terminal(io.StringIO):
    """A stream that says that it is a terminal, and tells when it is written to."""

    def __init__(self, expected: str = "") -> None:
        super().__init__()
        self._expected = expected
        self.is_written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._expected in self.getvalue():
            self.is_written.set()
        return written


class Log(Terminal):
    """The same for a stream that is no terminal."""

    def isatty(self) -> bool:
        return False


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes long."""
    monkeypatch.setattr(shown, "_SHORT_S", 0.01)
    monkeypatch.setattr(shown, "_BAR_AFTER_S", 0.01)


def work(progress: OnProgress | None) -> Iterator[Phase]:
    """A job that stops in each of its phases."""
    begin_phase(progress, Phase.PLANNING)
    yield Phase.PLANNING
    step = count_steps(progress, Phase.COPYING, 4 * GIB)
    if step is not None:
        step(GIB)
    yield Phase.COPYING
    count_steps(progress, Phase.SYNCING, 3, unit="files")
    yield Phase.SYNCING


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.usefixtures("no_patience")
def test_a_bar_names_phase_share_and_bytes_and_is_erased(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal("25%")
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress("auto") as progress:
        job = work(progress)
        next(job), next(job)
        assert stream.is_written.wait(60)
    text = stream.getvalue()
    assert "copying" in text
    assert "1.00 GiB of 4.00 GiB" in text or width < 80
    assert "\x1b[3" not in text, "no colours were asked for"
    assert text.count("\n") <= 1
    assert text.endswith("\x1b[2K"), "the line is erased"


def test_a_log_has_a_line_for_every_phase_even_of_short_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Log()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress("log") as progress:
        list(work(progress))
    assert [line.partition(":")[0] for line in stream.getvalue().splitlines()] == [
        "planning",
        "copying",
        "syncing",
    ]


@pytest.mark.parametrize("form", ["auto", "none"])
def test_short_work_leaves_no_line_in_a_log(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    stream = Log()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(shown, "_SHORT_S", 60)
    with show_progress(form) as progress:
        list(work(progress))
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("no_patience")
def test_long_work_is_told_from_the_phase_on_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Log("copying")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(shown, "_SHORT_S", 0.5)
    with show_progress("auto") as progress:
        job = work(progress)
        next(job), next(job)
        assert stream.is_written.wait(60)
        next(job)
    lines = stream.getvalue().splitlines()
    assert lines == ["copying: 1.00 GiB of 4.00 GiB (25 %)", "syncing"]


def test_a_phase_that_takes_long_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Log("syncing: 2 of 3 files")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(shown, "SECONDS_PER_LINE", 0.0)
    with show_progress("log") as progress:
        step = count_steps(progress, Phase.SYNCING, 3, unit="files")
        assert step is not None
        step(2)
        assert stream.is_written.wait(60)


def test_a_bar_without_a_terminal_is_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Log()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress("bar") as progress:
        list(work(progress))
    assert "copying" in stream.getvalue() and "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("form", ["bar", "log"])
def test_a_terminal_that_is_gone_does_not_end_the_work(
    monkeypatch: pytest.MonkeyPatch, form: str, no_patience: None
) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            self.is_written.set()
            raise OSError(5, "input/output error")

    stream = Gone()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_progress(form) as progress:
        job = work(progress)
        next(job), next(job)
        assert stream.is_written.wait(60)
        next(job)


class FakeTeam:
    """The lead of a team of two, whose figures are set."""

    rank, size = 0, 2
    hosts = ("a", "a")
    runtime_bytes = 0

    def __init__(self) -> None:
        self.figures = [(0, 0), (0, 0)]

    def progress(self) -> list[tuple[int, int]]:
        return list(self.figures)


def test_the_bytes_of_a_team_are_those_of_all_members_in_this_phase() -> None:
    team = FakeTeam()
    tracker = PhaseTracker(team.progress)
    tracker.report(Progress(Phase.COPYING))
    team.figures = [(50, 100), (30, 100)]
    view = tracker.view()
    assert view is not None and (view.state.done, view.state.total) == (80, 200)
    # A member's last beat lags: what it has done in the phase before does not count here.
    tracker.report(Progress(Phase.VERIFYING))
    team.figures = [(100, 200), (90, 200)]
    view = tracker.view(is_new=True)
    assert view is not None and (view.state.done, view.state.total) == (0, 200)
    tracker.report(Progress(Phase.SYNCING, 1, 3, "files"))
    view = tracker.view(is_new=True)
    assert view is not None and (view.state.done, view.state.total) == (1, 3)


def test_a_team_that_has_copied_everything_syncs() -> None:
    team = FakeTeam()
    tracker = PhaseTracker(team.progress)
    tracker.report(Progress(Phase.COPYING))
    team.figures = [(100, 100), (100, 100)]
    tracker.view()
    assert tracker.begun_phases() == [Phase.COPYING, Phase.SYNCING]


def test_only_the_lead_of_a_team_shows_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    team = FakeTeam()
    monkeypatch.setattr(team, "rank", 1, raising=False)
    teamwork.join(team)  # type: ignore[arg-type]
    try:
        with show_progress("log") as progress:
            assert progress is None
    finally:
        teamwork.join(ALONE)


def test_rich_is_not_imported_for_a_log(repo_dir: Path) -> None:
    program = (
        "import sys\n"
        "from ckpt_cli.workers.progress import show_progress\n"
        "with show_progress('log'): pass\n"
        "assert 'rich' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=repo_dir, check=True)
