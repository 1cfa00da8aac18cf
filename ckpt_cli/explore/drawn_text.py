"""Bring pages with escape sequences for colours into textual, without reading markup in them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from ckpt_cli.screen.blocks import Block, draw_text
from ckpt_cli.screen.terminal import Screen, escaped, shortened

_LONGEST_LABEL = 120


def text_of_blocks(blocks: Iterable[Block], width: int) -> Text:
    """Return a page, whose names are escaped, as one text.

    Args:
        width: columns of the pane; textual drops the colours if they are not wanted.
    """
    screen = Screen(width=max(width, 20), has_color=True)
    return Text("\n").join(Text.from_ansi(line) for line in draw_text(screen, blocks))


def label_of(name: str, *, width: int = _LONGEST_LABEL) -> Text:
    """Return a name out of a checkpoint as a label, escaped and shortened in the middle."""
    if len(name) > 4 * width:
        name = f"{name[: 2 * width]}…{name[-2 * width :]}"
    return Text(shortened(escaped(name), width) or '""', no_wrap=True)
