"""The report of ``ckpt diff``: a heat map of layers and modules, and the worst tensors first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckpt_cli.html_report.heat_table import heat_tables
from ckpt_cli.html_report.page import Section, render
from ckpt_cli.pages.diff_page import COLUMNS, count_table, diff_facts, verdict_line
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
MAX_ENTRIES = 300
"""Most differing entries that are no tensors."""


def diff_html(result: Diff) -> str:
    """Return the report of a comparison."""
    facts = Facts([*fact_list("note", result.warnings, "yellow"), *diff_facts(result)])
    heats = heat_tables(heat_maps(result.tensors))
    legend = "Relative difference |A−B| / |A| of each layer and module; = is equal."
    sections = [
        Section("summary", "Summary", [facts, count_table(result)]),
        Section("heat", "Heat map", [legend, *heats] if heats else []),
        Section("worst", "Worst tensors first", list(_tensor_blocks(result))),
        Section("entries", "Other entries that differ", list(_entry_blocks(result))),
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
    head = ("tensor", "result", "relative", "max |A−B|", "differing", "dtype", "shape")
    rows = list(map(_tensor_row, differing[:MAX_TENSORS]))
    yield Table(rows, align="<<>>><<", head=head, filter="name or kind")
    if len(differing) > MAX_TENSORS:
        count = n_text(len(differing) - MAX_TENSORS, "more tensor")
        yield dim_cell(f"and {count}: --json lists all")


def _tensor_row(tensor: TensorDiff) -> list[Cell | str]:
    """Return the cells of a tensor that differs."""
    a, b, values = tensor.a, tensor.b, tensor.values
    shapes = dict.fromkeys(shape_text(meta.shape) for meta in (a, b) if meta is not None)
    dtypes = dict.fromkeys(meta.dtype for meta in (a, b) if meta is not None)
    kind = COLUMNS[tensor.kind]
    figures: list[Cell | str] = ["", "", ""]
    if values is not None:
        kind += f", {values.n_nan:,} NaN" if values.n_nan else ""
        figures = [
            "" if values.relative is None else f"{values.relative:.3g}",
            "" if values.max_abs is None else f"{values.max_abs:.3g}",
            f"{100 * values.share:.3g} %",
        ]
    return [tensor.key, kind, *figures, " → ".join(dtypes), " → ".join(shapes)]


def _entry_blocks(result: Diff) -> Iterator[Block]:
    """Yield the table of the entries that differ and are no tensors; nothing without any."""
    entries = result.entries
    if entries:
        rows = [(entry.path, entry.a or "missing", entry.b or "missing") for entry in entries]
        yield Table(rows[:MAX_ENTRIES], align="<<<", head=("entry", "A", "B"))
    if len(entries) > MAX_ENTRIES:
        count = n_text(len(entries) - MAX_ENTRIES, "more entry", "more entries")
        yield dim_cell(f"and {count}: --json lists all")
