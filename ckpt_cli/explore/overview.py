"""The page of the checkpoint itself, on the right side.

What it needs takes as long to import as textual, so this module is imported when the page is read,
in a worker.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ckpt_cli.pages.damage import damage_blocks
from ckpt_cli.pages.inspect_page import header_blocks
from ckpt_cli.pages.pictures.ranks import rank_lines
from ckpt_cli.screen.blocks import Block, title_cell
from core.verbs.inspect.summary import summarize
from core.verbs.pictures.ranks import rank_grid

if TYPE_CHECKING:
    from ckpt_cli.explore.source import CheckpointSource


def read_overview(source: CheckpointSource) -> list[Block]:
    """Read the header of ``ckpt inspect``, what is damaged above it and the ranks below.

    Raises:
        CheckpointingException: a file cannot be read.
    """
    checkpoint = source.checkpoint
    summary = summarize(checkpoint, with_capabilities=False)
    grid = rank_grid(checkpoint)
    return [
        *damage_blocks(checkpoint.problems),
        title_cell(summary.path),
        *header_blocks(summary, checkpoint),
        *(() if grid is None else ("", partial(rank_lines, grid=grid))),
    ]
