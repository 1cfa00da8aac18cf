"""The page of the checkpoint itself, on the right side.

What it needs takes as long to import as textual, so this module is imported when the page is read,
in a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ckpt_cli.pages.damage import damage_lines
from ckpt_cli.pages.inspect_page import header_lines
from ckpt_cli.pages.pictures.ranks import rank_lines
from core.verbs.inspect.summary import Summary, summarize
from core.verbs.pictures.ranks import RankGrid, rank_grid

if TYPE_CHECKING:
    from ckpt_cli.explore.report_screen import Draw
    from ckpt_cli.explore.source import CheckpointSource
    from ckpt_cli.screen.terminal import Screen


def read_overview(source: CheckpointSource) -> Draw:
    """Read the facts about a checkpoint, and return what draws them.

    Raises:
        CheckpointingException: a file cannot be read.
    """
    summary = summarize(source.checkpoint, with_capabilities=False)
    return partial(_overview_lines, source, summary, rank_grid(source.checkpoint))


def _overview_lines(
    source: CheckpointSource, summary: Summary, grid: RankGrid | None, screen: Screen
) -> Iterator[str]:
    """Yield the header of ``ckpt inspect``, what is damaged above it and the ranks below."""
    yield from damage_lines(screen, source.checkpoint.problems)
    yield from header_lines(screen, summary, source.checkpoint)
    if grid is not None:
        yield ""
        yield from rank_lines(screen, grid)
