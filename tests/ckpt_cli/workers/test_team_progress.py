"""ckpt_cli.workers.team_progress: what the display of several workers says."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from ckpt_cli.screen.terminal import Screen
from ckpt_cli.workers.team_progress import clock, state_of, team_display, text_of

GIB = 2**30


def test_rates_are_of_all_and_the_time_left_is_of_the_slowest() -> None:
    now, before = [(6 * GIB, 10 * GIB), (2 * GIB, 10 * GIB)], [(2 * GIB, 10 * GIB), (0, 10 * GIB)]
    state = state_of(now, before, 4.0)
    assert (state.done, state.total, state.rate, state.remaining_s) == (
        8 * GIB,
        20 * GIB,
        1.5 * GIB,
        16.0,
    )
    assert (state.last, state.last_share) == (1, 0.2)
    assert (
        text_of(state, 100) == " 40%  8.00 GiB of 20.0 GiB  1.50 GiB/s  0:16  rank 1 is last, 20%"
    )


def test_workers_that_are_about_even_need_no_word() -> None:
    assert state_of([(50, 100), (49, 100)], [(0, 100), (0, 100)], 1.0).last is None
    assert state_of([(0, 0), (30, 100)], [(0, 0), (0, 100)], 1.0).last is None, (
        "one has nothing to do"
    )


def test_what_cannot_be_told_yet_is_left_out() -> None:
    state = state_of([(0, 100), (10, 100)], [(0, 100), (0, 100)], 2.0)
    assert state.remaining_s is None, "rank 0 has not moved"
    assert text_of(state_of([(0, 100)], [(0, 100)], 0.0), 100) == "  0%  0 B of 100 B"
    assert text_of(state_of([(100, 100)], [(0, 100)], 2.0), 100) == "100%  100 B of 100 B  50 B/s"


def test_the_last_parts_go_where_the_terminal_is_narrow() -> None:
    state = state_of([(6 * GIB, 10 * GIB), (2 * GIB, 10 * GIB)], [(0, 10 * GIB)] * 2, 4.0)
    texts = [text_of(state, width) for width in (70, 48, 40, 30, 5)]
    assert [len(text.split("  ")) for text in texts] == [5, 4, 3, 2, 1]


def test_times_are_written_as_clocks() -> None:
    assert [clock(seconds) for seconds in (0.2, 61, 3600, 7325)] == [
        "0:00",
        "1:01",
        "1:00:00",
        "2:02:05",
    ]


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_display_is_one_line_that_is_erased(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    asked = []

    def progress() -> list[tuple[int, int]]:
        asked.append(1)
        return [(0, 0)] * 2 if len(asked) < 2 else [(GIB, 4 * GIB), (0, 4 * GIB)]

    drawn = threading.Event()
    with team_display(
        lambda: (drawn.set(), progress())[1] if len(asked) > 3 else progress(), Screen(width=width)
    ):
        assert drawn.wait(60)
    text = stream.getvalue()
    assert " 12%  1.00 GiB of 8.00 GiB"[: width - 13] in text
    assert "\x1b[3" not in text, "no colours were asked for"
    assert text.count("\n") <= 1
    assert text.endswith("\x1b[2K"), "the line is erased"
