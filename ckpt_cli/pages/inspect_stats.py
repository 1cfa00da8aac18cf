"""The page of ``ckpt inspect --stats``, and its field of ``--json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from statistics import median
from typing import TYPE_CHECKING

from ckpt_cli.pages.pictures.histogram import LEGEND, histogram_line, histogram_text, scale_of
from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    Table,
    bytes_text,
    dim_cell,
    draw_text,
    n_text,
    table,
    table_width,
)
from ckpt_cli.screen.terminal import Screen, columns_of, escaped
from core.verbs.inspect.stats import FoldedStatistics, fold_statistics

if TYPE_CHECKING:
    from core.engine.catalog.tensor import Tensor
    from core.engine.numbers.statistics import ValueStatistics

_MOST_MEMBERS = 64
"""Maximum number of members of a folded row that have a line each."""
_OUTLIER = 3.0
"""Least ratio of a standard deviation to the median of those of the other layers, or inverse."""
_TITLES = ("", "min", "max", "mean", "std")
_ALIGN = "<>>>><"


def stats_lines(
    screen: Screen,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, ValueStatistics | None],
    *,
    layers: Mapping[str, tuple[ValueStatistics, ...] | None] | None = None,
    is_flat: bool,
    has_members: bool = False,
    sort: str | None,
) -> Iterator[str]:
    """Yield a row for each tensor, or for the equal tensors of all layers, and a line of totals.

    Below each row is its histogram.

    Args:
        statistics: description of each tensor by key; None for one without numbers.
        layers: descriptions of the layers of each tensor, if several are stacked in it.
        is_flat: one row per tensor; otherwise a line below a folded row names the extreme members.
        has_members: below a folded row, also a line with the histogram of each member.
        sort: ``size``, ``name``, or None for the order of ``tensors``.
    """
    # Fold, and sort the folded rows.
    if is_flat:
        folded = [
            FoldedStatistics(key, {key: tensor}, statistics[key]) for key, tensor in tensors.items()
        ]
    else:
        folded = fold_statistics(tensors, statistics, layers)
    if sort is not None:
        folded.sort(key=lambda row: (0 if sort == "name" else -_n_bytes(row), row.label))

    # Names are long: rows below the same layers share a heading, which is no part of the table, and
    # a name that leaves no room for the figures has a line of its own.
    figures = [list(map(dim_cell, _TITLES)), *map(_figure_cells, folded)]
    room = None
    if screen.width is not None:
        room = screen.width - table_width(figures, align=_ALIGN)
    headings: list[list[str]] = [[]]
    heading = ""
    for cells, row in zip(figures[1:], folded, strict=True):
        prefix, bracket, name = (row.stacked_key or row.label).rpartition("].")
        name = ("  " if bracket else "") + escaped(name)
        headings.append([] if prefix in ("", heading) else [f"{escaped(prefix)}]"])
        heading = prefix
        if room is None or columns_of(name) <= room:
            cells[0] = Cell(name)
        else:
            headings[-1].append(name)
    # Below a folded row, its extreme members.
    extremes = [[], *map(_extreme_texts, folded)]
    below = ((), *(_histogram_blocks(row, has_members=has_members) for row in folded))
    for line, titles, texts, histograms in zip(
        table(screen, figures, align=_ALIGN), headings, extremes, below, strict=True
    ):
        for title in titles:
            yield screen.plain(screen.styled(title, *(("bold",) if title.endswith("]") else ())))
        yield line
        for text in _filled(texts, None if screen.width is None else screen.width - 5):
            yield screen.plain("    " + screen.styled(escaped(text), "dim"))
        yield from draw_text(screen, histograms)
    yield from draw_text(screen, ("", *_total_blocks(tensors, statistics, n_rows=len(folded))))


def _histogram_blocks(row: FoldedStatistics, *, has_members: bool) -> Iterator[Block]:
    """Yield the histogram of a row, or one for each of its members, all to one scale.

    Args:
        has_members: a line for each member, marked if its standard deviation is an outlier.
    """
    if row.total is None or row.total.histogram.top is None:
        return
    scale = scale_of(row.total.histogram)
    if len(row.members) == 1 or not has_members:
        yield "    ", *histogram_line(row.total.histogram, row.total.n_zeros, scale)
        return
    # Of very many members, those whose deviations are the most unusual.
    parts = row.parts
    ratios = _ratios_to_median(parts)
    unusual = sorted(parts, key=lambda key: -abs(log2(ratios[key] or 1)))[:_MOST_MEMBERS]
    chosen = {*unusual}
    rows = []
    for key, part in parts.items():
        if key in chosen:
            bars = histogram_text(part.histogram, part.n_zeros, scale)
            largest = max(-(part.least or 0), part.greatest or 0)
            mark = _mark_cell(part, ratios[key])
            figures = [Cell(_figure_text(part.std)), Cell(_figure_text(largest))]
            rows.append([Cell(row.numbers_of(key)), *figures, Cell(bars, ("cyan",)), mark])
    head = ("", "std", "max |x|", " to ".join(scale.limits), "")
    yield Table(rows, align="<>><<", head=head, indent=4, fits=True)
    if len(parts) > len(chosen):
        noun = "more layer" if row.stacked_key else "more tensor"
        n_more = n_text(len(parts) - len(chosen), noun)
        yield "    ", dim_cell(f"… {n_more}, closer to the median std")


def _ratios_to_median(parts: Mapping[str, ValueStatistics]) -> dict[str, float]:
    """Return the ratio of each standard deviation to their median; 1 where there is none."""
    stds = [part.std for part in parts.values() if part.std]
    middle = median(stds) if stds else 0.0
    return {key: part.std / middle if part.std and middle else 1.0 for key, part in parts.items()}


def _mark_cell(part: ValueStatistics, ratio: float) -> Cell:
    """Return the mark of an unusual member; an empty cell for the others."""
    if part.n_nan or part.n_infinite:
        return Cell(f"← {part.n_nan + part.n_infinite:,} NaN or Inf", ("red",))
    if 1 / _OUTLIER < ratio < _OUTLIER:
        return Cell("")
    return Cell(f"← {ratio:.3g} × std", ("yellow",))


def _filled(texts: Sequence[str], width: int | None) -> list[str]:
    """Join texts to as few lines as fit into a width."""
    lines: list[str] = []
    for text in texts:
        if lines and (width is None or columns_of(f"{lines[-1]} · {text}") <= width):
            lines[-1] += f" · {text}"
        else:
            lines.append(text)
    return lines


def _n_bytes(row: FoldedStatistics) -> int:
    """Return the size of all tensors of a row."""
    return sum(tensor.n_bytes for tensor in row.members.values())


def _figure_cells(row: FoldedStatistics) -> list[Cell]:
    """Return the cells of a row, the first of which, for the name, is empty."""
    total = row.total
    if total is None:
        dtype = next(iter(row.members.values())).dtype
        return [Cell(""), *(Cell("–", ("dim",)) for _ in _TITLES[1:]), Cell(dtype)]
    figures = [total.least, total.greatest, total.mean, total.std]
    counts = [
        text
        for text in (
            f"{total.n_nan:,} NaN" if total.n_nan else "",
            f"{total.n_infinite:,} Inf" if total.n_infinite else "",
            n_text(total.n_zeros, "zero") if total.n_zeros else "",
        )
        if text
    ]
    style = ("red",) if total.n_nan or total.n_infinite else ("dim",)
    return [
        Cell(""),
        *(Cell(_figure_text(figure)) for figure in figures),
        Cell(", ".join(counts), style),
    ]


def _figure_text(figure: float | None) -> str:
    """Format a number with three digits; integers of up to seven digits exactly."""
    if figure is None:
        return "–"
    return str(figure) if isinstance(figure, int) and abs(figure) < 10**7 else f"{figure:.3g}"


def _extreme_texts(row: FoldedStatistics) -> list[str]:
    """Return which tensors of a folded row have the extremes; [] for a single tensor."""
    if len(row.members) == 1 or row.least_std is None or row.greatest_std is None:
        return []
    stds = " to ".join(
        f"{std:.4g} ({row.numbers_of(key)})" for key, std in (row.least_std, row.greatest_std)
    )
    texts = [f"std {stds}"]
    if row.least is not None and row.greatest is not None:
        texts.append(f"min in {row.numbers_of(row.least)}")
        texts.append(f"max in {row.numbers_of(row.greatest)}")
    return texts


def _total_blocks(
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, ValueStatistics | None],
    *,
    n_rows: int,
) -> Iterator[Block]:
    """Yield the totals: how much was read, and whether NaN or infinities were in it.

    Args:
        n_rows: number of rows above; fewer than tensors if some are folded.
    """
    read = [tensor for key, tensor in tensors.items() if statistics[key] is not None]
    parts = [part for part in statistics.values() if part is not None]
    n_bad = sum(1 for part in parts if part.n_nan or part.n_infinite)
    n_bytes = sum(tensor.n_bytes for tensor in read)
    verdict: Cell | str = "no NaN or Inf"
    if n_bad:
        rest = "which min, max, mean and std leave out"
        verdict = Cell(f"{n_text(n_bad, 'tensor')} with NaN or Inf, {rest}", ("red",))
    if any(part.histogram.top is not None for part in parts):
        yield dim_cell(LEGEND)
    skipped = len(tensors) - len(read)
    rest = f", {n_text(skipped, 'tensor')} without numbers to read" if skipped else ""
    yield f"{n_text(len(read), 'tensor')}, {bytes_text(n_bytes)}{rest}: ", verdict
    if n_rows < len(tensors):
        folded = f"{n_text(len(tensors), 'tensor')} in {n_text(n_rows, 'row')}"
        yield dim_cell(f"{folded}, folded over layers (--flat: one each)")


def stats_json(part: ValueStatistics | None) -> dict[str, object] | None:
    """Return the statistics of a tensor as an object of ``--json``."""
    if part is None:
        return None
    return {
        "min": part.least,
        "max": part.greatest,
        "mean": part.mean,
        "std": part.std,
        "nan": part.n_nan,
        "inf": part.n_infinite,
        "zeros": part.n_zeros,
        "histogram": {
            "negative": dict(sorted(part.histogram.negative.items())),
            "positive": dict(sorted(part.histogram.positive.items())),
        },
    }
