"""The report of ``ckpt inspect``: summary, treemap, rank grid, and every tensor with its shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_cli.html_report.names import shown_name
from ckpt_cli.html_report.page import ReportSection, TensorList, render
from ckpt_cli.html_report.rank_table import rank_table
from ckpt_cli.html_report.tensor_table import left_out_text, table_json
from ckpt_cli.html_report.treemap import draw_sizes
from ckpt_cli.pages.damage import damage_blocks
from ckpt_cli.pages.inspect_page import choose_catalog, header_blocks
from ckpt_cli.pages.inspect_stats import stats_json
from ckpt_cli.screen.blocks import bytes_text, n_text
from core.verbs.inspect.summary import bare_key
from core.verbs.pictures.ranks import rank_grid
from core.verbs.pictures.shards import shard_map
from core.verbs.pictures.sizes import sizes_of

if TYPE_CHECKING:
    from core.engine.catalog.tensor import Tensor
    from core.engine.numbers.statistics import ValueStatistics
    from core.opening.open import Checkpoint
    from core.verbs.inspect.summary import Summary
    from core.verbs.pictures.shards import ShardMap

MAX_PROBLEMS = 1000
"""Most problems of a damaged checkpoint that are listed; the others are counted."""
N_BINS = 20
"""Bins of a histogram on each side of zero, one for each power of two."""


def inspect_html(
    checkpoint: Checkpoint,
    summary: Summary,
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, ValueStatistics | None],
    layers: Mapping[str, tuple[ValueStatistics, ...] | None],
) -> str:
    """Return the report of one checkpoint.

    Args:
        tensors: the tensors to list.
        statistics, layers: those that were measured, by key, of tensors and of stacked layers.
    """
    view = summary.view

    def map_of(key: str) -> ShardMap:
        return shard_map(choose_catalog(summary, checkpoint, key), key)

    # The pictures, where the checkpoint has what they show.
    sizes = draw_sizes(sizes_of(view))
    grid = rank_grid(checkpoint)
    table = table_json(
        tensors,
        bare=lambda key: bare_key(key, view),
        map_of=map_of,
        statistics=statistics,
        layers=layers,
        numbers_of=_numbers_of,
    )
    note = (
        "Identical layers share a row. Expand a row to see a tensor's"
        f" {'shards and values' if statistics else 'shards'}.{left_out_text(table)}"
    )
    problems = checkpoint.problems
    sections = [
        ReportSection("problems", "Damage", list(damage_blocks(problems, limit=MAX_PROBLEMS))),
        ReportSection("summary", "Summary", list(header_blocks(summary, checkpoint))),
        ReportSection("sizes", "Where the bytes are", [sizes] if sizes else []),
        ReportSection("ranks", "Ranks", [rank_table(grid)] if grid else []),
        ReportSection("tensors", "Tensors", [TensorList(note)]),
    ]
    total = summary.total
    count = f"{n_text(total.n_tensors, 'tensor')}, {bytes_text(total.n_bytes)}"
    command = {"command": f"ckpt inspect {shown_name(summary.path)} KEY --map"}
    return render(
        "inspect",
        summary.path,
        f"{summary.title} · {count}",
        sections,
        data={"table": table | command},
    )


def _numbers_of(values: ValueStatistics) -> dict[str, object]:
    """Return the statistics that the report shows, by their names, and the histogram.

    ``bins`` is ``[exponent of the largest values, zeros, negative counts, positive counts]``; the
    counts begin with the largest exponent, and the last one is that of everything smaller.
    """
    numbers = stats_json(values) or {}
    names = {"nan": "NaN", "inf": "Inf"}
    result: dict[str, object] = {
        names.get(name, name): number
        for name, number in numbers.items()
        if isinstance(number, int | float)
    }
    top = values.histogram.top
    if top is not None:
        sides = (values.histogram.negative, values.histogram.positive)
        result["bins"] = [top, values.n_zeros, *(_counts_from(side, top) for side in sides)]
    return result


def _counts_from(side: Mapping[int, int], top: int) -> list[int]:
    """Return the counts of the largest exponents, and of everything smaller together."""
    exponents = range(top, top - N_BINS, -1)
    smaller = sum(n for exponent, n in side.items() if exponent <= top - N_BINS)
    return [*(side.get(exponent, 0) for exponent in exponents), smaller]
