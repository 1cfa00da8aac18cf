"""The report of a dry run: the plan, each tensor before and after, what moves between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_cli.html_report.moves_table import moves_table
from ckpt_cli.html_report.names import shown_name
from ckpt_cli.html_report.page import ReportSection, TensorList, render
from ckpt_cli.html_report.tensor_table import left_out_text, table_json
from ckpt_cli.html_report.treemap import draw_sizes
from ckpt_cli.pages.transfer import file_blocks, plan_facts
from ckpt_cli.screen.blocks import Facts, bytes_text, n_text
from core.verbs.pictures.shards import rank_moves, shard_move
from core.verbs.pictures.sizes import sizes_of

if TYPE_CHECKING:
    from core.verbs.convert.prepared import Prepared
    from core.verbs.forecast.forecast import Forecast
    from core.verbs.pictures.shards import ShardMove

MAX_FILES = 200
"""Most files of the destination that are listed; the others are counted."""


def plan_html(prepared: Prepared, expected: Forecast, *, verb: str) -> str:
    """Return the report of what a job would do.

    Args:
        expected: free space and time.
        verb: name of the command, ``convert`` or ``reshard``.
    """
    plan = prepared.plan

    def move_of(key: str) -> ShardMove:
        return shard_move(plan, key)

    # The pictures: bytes by module in the destination, the matrix, and the tensors.
    sizes = draw_sizes(sizes_of(prepared.form))
    matrix = moves_table(rank_moves(plan))
    tensors = {
        key: plan.target.tensors[key]
        for key in plan.keys()  # noqa: SIM118
        if key in plan.target.tensors
    }
    table = table_json(tensors, move_of=move_of)
    note = (
        "Identical layers share a row. Expand a row to see a tensor's shards in the source and in"
        f" the destination, side by side.{left_out_text(table)}"
    )
    sections = [
        ReportSection("summary", "Plan", [Facts(plan_facts(prepared, expected))]),
        ReportSection("moves", "Bytes that move between ranks", [matrix] if matrix else []),
        ReportSection("tensors", "Tensors, before and after", [TensorList(note)]),
        ReportSection("sizes", "Where the bytes are", [sizes] if sizes else []),
        ReportSection("files", "Files", list(file_blocks(prepared.files, limit=MAX_FILES))),
    ]
    source = shown_name(str(prepared.source.path))
    command = {"command": f"ckpt {verb} {source} … --explain --map KEY"}
    shortage = expected.shortage
    return render(
        f"{verb} (dry run)",
        f"{prepared.source.path} → {prepared.dst}",
        shortage.message
        if shortage is not None
        else f"would read {bytes_text(plan.read_bytes)} and write {bytes_text(plan.file_bytes)}"
        f" in {n_text(len(prepared.files), 'file')}; nothing was written",
        sections,
        style="" if shortage is None else "error",
        data={"table": table | command},
    )
