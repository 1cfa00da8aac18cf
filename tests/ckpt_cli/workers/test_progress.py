"""ckpt_cli.workers.progress: the bar says what it should, and only to a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from ckpt_cli.screen.terminal import Screen
from ckpt_cli.workers.progress import display_on, progress_bar


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_bar_tells_bytes_and_share_in_one_line(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    display = display_on(stream, Screen(width=width))
    display.add_task("", total=4 * 2**30)
    display.update(display.task_ids[0], completed=2**30)
    display.refresh()
    display.start()
    display.stop()
    text = stream.getvalue()
    assert "25%" in text
    assert "1.0/4.0 GiB" in text
    assert "\x1b[3" not in text, "no colours were asked for"


def test_there_is_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar() as progress:
        assert progress is None
    assert stream.getvalue() == ""
