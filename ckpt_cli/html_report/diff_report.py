"""The report of ``ckpt diff``: a heat map of layers and modules, and the worst tensors first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_cli.html_report.heat_table import heat_blocks
from ckpt_cli.html_report.page import ReportSection, render
from ckpt_cli.pages.diff_page import (
    COLUMNS,
    count_table,
    diff_facts,
    entry_rows,
    layer_blocks,
    verdict_line,
)
from ckpt_cli.pages.diff_rows import VALUES_HEAD, Row, values_row
from ckpt_cli.screen.blocks import (
    Block,
    Cell,
    Facts,
    Table,
    dim_cell,
    fact_list,
    line_text,
    n_text,
    shape_text,
)
from core.verbs.pictures.heat import heat_maps

if TYPE_CHECKING:
    from core.verbs.diff.result import Diff, TensorDiff

MAX_TENSORS = 1000
"""Most differing tensors that are listed; the others are counted."""
_MOST_LAYERS = 128
"""Most layers that are ranked; the heat map has no more."""
MAX_ENTRIES = 300
"""Most differing entries that are no tensors."""


def diff_html(result: Diff) -> str:
    """Return the report of a comparison."""
    facts = Facts([*fact_list("note", result.warnings, "yellow"), *diff_facts(result)])
    tables = [count_table(result), *layer_blocks(result, limit=_MOST_LAYERS)]
    sections = [
        ReportSection("summary", "Summary", [facts, *tables]),
        ReportSection("heat", "Heat map", heat_blocks(heat_maps(result.tensors))),
        ReportSection("worst", "Worst tensors first", list(_tensor_blocks(result))),
        ReportSection("entries", "Other entries that differ", list(_entry_blocks(result))),
    ]
    return render(
        "diff",
        f"{result.a.source.path} ↔ {result.b.source.path}",
        line_text(verdict_line(result)),
        sections,
        style="good" if result.same else "error",
    )


def _tensor_blocks(result: Diff) -> Iterator[Block]:
    """Yield the table of the tensors that differ; nothing if none does."""
    differing = [
        tensor for tensor in result.tensors if not tensor.is_same or tensor.kind == "close"
    ]
    if not differing:
        return
    head = ("tensor", "result", *VALUES_HEAD[1:], "dtype", "shape")
    rows = list(map(_tensor_row, differing[:MAX_TENSORS]))
    yield Table(rows, align="<<>>>><<<", head=head, filter="name or kind")
    if len(differing) > MAX_TENSORS:
        count = n_text(len(differing) - MAX_TENSORS, "more tensor")
        yield dim_cell(f"and {count}: --json lists all")


def _tensor_row(tensor: TensorDiff) -> list[Cell | str]:
    """Return the cells of a tensor that differs."""
    sides = [side for side in (tensor.a, tensor.b) if side is not None]
    shapes = dict.fromkeys(shape_text(side.shape) for side in sides)
    dtypes = dict.fromkeys(side.dtype for side in sides)
    figures: list[Cell | str] = [""] * len(VALUES_HEAD[1:])
    if tensor.values is not None:
        figures = values_row(Row("", tensor, (tensor,)))
    return [tensor.key, COLUMNS[tensor.kind], *figures, " → ".join(dtypes), " → ".join(shapes)]


def _entry_blocks(result: Diff) -> Iterator[Block]:
    """Yield the table of the entries that differ and are no tensors; nothing without any."""
    rows = entry_rows(result)
    if rows:
        yield Table(rows[:MAX_ENTRIES], align="<<", head=("entry", "A → B"))
    if len(rows) > MAX_ENTRIES:
        count = n_text(len(rows) - MAX_ENTRIES, "more entry", "more entries")
        yield dim_cell(f"and {count}: --json lists all")
