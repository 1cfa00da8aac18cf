"""Bars and columns of block characters, to scale."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉"
_HEIGHTS = " ▁▂▃▄▅▆▇█"


def draw_bar(share: float, width: int) -> str:
    """Return a bar that fills a share of ``width`` columns; at least a thin one above 0.

    Args:
        share: from 0 to 1.
    """
    eighths = max(round(share * width * 8), 1 if share > 0 else 0)
    n_full, rest = divmod(eighths, 8)
    return "█" * n_full + _EIGHTHS[rest].strip()


def columns_text(counts: Sequence[int]) -> str:
    """Return a column for each count, to the scale of the largest; at least a low one above 0."""
    largest = max(counts, default=0) or 1
    return "".join(_HEIGHTS[max(round(8 * count / largest), min(count, 1))] for count in counts)
