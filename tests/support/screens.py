"""The screen of a textual program as plain text, to compare with one that is kept in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.app import App


def screen_text(app: App[int]) -> str:
    """Return what the screen shows, without colours and without spaces at the ends of lines."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    rows = ["".join(segment.text for segment in strip)[:width].rstrip() for strip in lines]
    return "\n".join(rows[:height]).rstrip() + "\n"


def assert_screen(app: App[int], path: Path) -> None:
    """Compare the screen with that in a file; ``WRITE_SCREENS=1`` writes the file."""
    text = screen_text(app)
    if os.environ.get("WRITE_SCREENS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text("utf-8")
