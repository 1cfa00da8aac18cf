"""A histogram on one line, by powers of two: negative numbers left, positive ones right.

The column in the middle counts zeros and what is smaller than the powers that are shown; it is
never higher than the highest of the others, so that many zeros do not flatten them. Lines of one
group have one scale, so that a layer whose numbers are larger reaches further out.
"""

from __future__ import annotations

from ckpt_cli.pages.pictures.bars import columns_text
from ckpt_cli.screen.blocks import Cell
from core.engine.numbers.histogram import Histogram
from core.values import dataclass

_POWERS = 12
"""Number of powers of two on each side."""
LEGEND = "histograms: one column per power of two, negatives left, zero in the middle"


@dataclass(frozen=True, slots=True)
class HistogramScale:
    """The columns of the histograms of a group.

    Args:
        top: exponent of the outermost columns.
        is_signed: there are negative numbers; otherwise the positive ones have all columns.
    """

    top: int
    is_signed: bool

    @property
    def limits(self) -> tuple[str, str]:
        """Labels of the left and of the right end."""
        # Beyond 2**1023 there is no float; the exponent is the label then.
        limit = f"{2.0 ** (self.top + 1):.3g}" if self.top < 1023 else f"2^{self.top + 1}"
        return f"-{limit}" if self.is_signed else "0", limit


def scale_of(total: Histogram) -> HistogramScale:
    """Return the scale for the parts of a group.

    Args:
        total: all their elements together, of which some are not zero.
    """
    assert total.top is not None, "zeros have no scale"
    return HistogramScale(total.top, bool(total.negative))


def histogram_line(
    histogram: Histogram, n_zeros: int, scale: HistogramScale
) -> tuple[str, Cell, str]:
    """Return a histogram between the labels of its ends.

    Args:
        n_zeros: number of zeros, which the histogram does not contain.
    """
    low, high = scale.limits
    return f"{low} ", Cell(histogram_text(histogram, n_zeros, scale), ("cyan",)), f" {high}"


def histogram_text(histogram: Histogram, n_zeros: int, scale: HistogramScale) -> str:
    """Return a histogram of one character per column.

    Args:
        n_zeros: number of zeros, which the histogram does not contain.
    """
    n_powers = _POWERS if scale.is_signed else 2 * _POWERS
    powers = range(scale.top - n_powers + 1, scale.top + 1)
    positive = [histogram.positive.get(power, 0) for power in powers]
    negative = [histogram.negative.get(power, 0) for power in reversed(powers)]
    n_all = sum(histogram.positive.values()) + sum(histogram.negative.values())
    n_small = n_zeros + n_all - sum(positive) - sum(negative)
    middle = min(n_small, max(*positive, *negative) or n_small)
    return columns_text([*(negative if scale.is_signed else []), middle, *positive])
