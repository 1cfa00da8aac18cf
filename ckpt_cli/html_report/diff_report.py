"""The report of ``ckpt diff``: a heat map of layers and modules, and the worst tensors first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.html_report.heat_table import heat_tables
from ckpt_cli.html_report.page import named_facts, render
from ckpt_cli.pages.diff_page import COLUMNS, count_rows, diff_facts, verdict_line
from ckpt_cli.screen.blocks import Cell, fact_list, shape_text
from ckpt_cli.screen.terminal import Screen
from core.verbs.pictures.heat import heat_maps

if TYPE_CHECKING:
    from core.verbs.diff.result import Diff, TensorDiff

MAX_TENSORS = 1000
"""Most differing tensors that are listed; the others are counted."""
MAX_ENTRIES = 300
"""Most differing entries that are no tensors."""


def diff_html(result: Diff) -> str:
    """Return the report of a comparison."""
    differing = [
        tensor for tensor in result.tensors if not tensor.is_same or tensor.kind == "close"
    ]
    heats = heat_tables(heat_maps(result.tensors))
    sections = [("summary", "Summary")]
    sections += [("heat", "Heat map")] if heats else []
    sections += [("worst", "Worst tensors")] if differing else []
    sections += [("entries", "Other entries")] if result.entries else []
    paths = [str(side.source.path) for side in (result.a, result.b)]
    counts = [
        [cell.text if isinstance(cell, Cell) else cell for cell in row]
        for row in count_rows(result)
    ]
    context = {
        "title": "diff",
        "subject": f"{paths[0]} ↔ {paths[1]}",
        "headline": verdict_line(Screen(), result),
        "is_same": result.same,
        "sections": sections,
        "facts": named_facts([*fact_list("note", result.warnings, "yellow"), *diff_facts(result)]),
        "counts": counts,
        "heats": heats,
        "tensors": [_tensor_row(tensor) for tensor in differing[:MAX_TENSORS]],
        "n_more": max(len(differing) - MAX_TENSORS, 0),
        "entries": result.entries[:MAX_ENTRIES],
        "n_more_entries": max(len(result.entries) - MAX_ENTRIES, 0),
    }
    return render("diff.html.j2", context, data={})


def _tensor_row(tensor: TensorDiff) -> dict[str, str]:
    """Return what the table shows of one tensor that differs."""
    a, b, values = tensor.a, tensor.b, tensor.values
    shapes = dict.fromkeys(shape_text(tensor.shape) for tensor in (a, b) if tensor is not None)
    dtypes = dict.fromkeys(tensor.dtype for tensor in (a, b) if tensor is not None)
    row = {
        "key": tensor.key,
        "kind": COLUMNS[tensor.kind],
        "shape": " → ".join(shapes),
        "dtype": " → ".join(dtypes),
        "relative": "",
        "greatest": "",
        "share": "",
    }
    if values is not None:
        row["relative"] = "" if values.relative is None else f"{values.relative:.3g}"
        row["greatest"] = "" if values.max_abs is None else f"{values.max_abs:.3g}"
        row["share"] = f"{100 * values.share:.3g} %"
        row["kind"] += f", {values.n_nan:,} NaN" if values.n_nan else ""
    return row
