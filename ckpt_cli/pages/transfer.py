"""The plan of a dry run and the report of a finished one, as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import (
    LISTED,
    Block,
    Cell,
    Facts,
    Table,
    bytes_text,
    dim_cell,
    facts,
    list_facts,
    n_text,
    seconds_text,
    shape_text,
    table,
    table_width,
    title_cell,
)
from ckpt_cli.screen.terminal import Screen, escaped
from ckpt_cli.workers.current_team import default_memory
from ckpt_cli.workers.work_state import store_traffic, traffic_text
from core.engine.team.protocol import summarize_figures

if TYPE_CHECKING:
    from core.engine.plan.plan import Plan
    from core.verbs.convert.explain import LayoutLine
    from core.verbs.convert.prepared import Prepared
    from core.verbs.convert.run import Report
    from core.verbs.forecast.forecast import Forecast


def plan_blocks(
    prepared: Prepared,
    expected: Forecast,
    *,
    rank: int | None,
    rank_files: Sequence[str] | None,
    command: str | None = None,
) -> Iterator[Block]:
    """Yield the plan of a dry run.

    Args:
        expected: free space and time.
        rank: the destination rank of ``--rank``.
        rank_files: the source files that this rank needs; None without ``--rank``.
        command: the command that does what is planned; None if it is not known.
    """
    # The facts: source, destination, and what the job reads, writes and holds in memory.
    yield title_cell(f"would write {prepared.dst}"), " (dry run: nothing was written)"
    yield Facts(plan_facts(prepared, expected))
    # The files of the destination, and the source files that one of its ranks needs.
    yield ""
    yield from file_blocks(prepared.files)
    if rank_files is not None:
        yield ""
        yield title_cell(f"rank {rank} needs {n_text(len(rank_files), 'source file')}")
        yield from (f"  {escaped(name)}" for name in rank_files)
    # However long, the command is not wrapped, so that it can be copied.
    if command is not None and expected.shortage is None:
        yield ""
        yield dim_cell("next"), f"  {escaped(command)}"


def file_blocks(files: Sequence[tuple[str, int]], *, limit: int = LISTED) -> Iterator[Block]:
    """Yield the first files of the destination with their bytes, and the number of the others."""
    rows = [(escaped(path), dim_cell(bytes_text(size))) for path, size in files[:limit]]
    yield Table(rows, align="<>", indent=2)
    if len(files) > limit:
        yield dim_cell(f"  … {n_text(len(files) - limit, 'more file')}")


def plan_facts(prepared: Prepared, expected: Forecast) -> list[tuple[str, Cell | str]]:
    """Return what a job reads, writes and holds in memory, and what it leaves out.

    Args:
        expected: free space and time.
    """
    from ckpt_cli.pages.forecast import forecast_facts

    source, plan = prepared.source, prepared.plan
    replicas = (
        f", {bytes_text(plan.copy_bytes)} of it replicas to compare" if plan.copy_bytes else ""
    )
    read = f"{bytes_text(plan.read_bytes)} (minimum {bytes_text(plan.least_read_bytes)}){replicas}"
    memory = bytes_text(plan.memory_bytes)
    # The default depends on the machine; a limit that the user chose is worth repeating.
    if prepared.job.memory_bytes != default_memory():
        memory += f" of {bytes_text(prepared.job.memory_bytes)} allowed"
    return [
        ("from", f"{escaped(str(source.path))} ({source.format.name})"),
        ("to", f"{prepared.target_format.name}, {n_text(len(prepared.files), 'file')}"),
        ("tensors", f"{prepared.n_tensors:,}"),
        ("read", read),
        ("write", bytes_text(plan.file_bytes)),
        ("memory", memory),
        *forecast_facts(expected, has_force=prepared.job.force),
        *list_facts("renames", [f"{old} → {new}" for old, new in prepared.renamed]),
        *list_facts("not carried", list(map(str, prepared.dropped_reasons)), "yellow"),
        *list_facts("note", prepared.notes, "yellow"),
    ]


def explain_lines(screen: Screen, lines: Sequence[LayoutLine]) -> Iterator[str]:
    """Yield each tensor with its shape, the effect of its rule, and the location of the rule.

    In files and pipes, and if all lines fit the terminal, each tensor takes one line; otherwise the
    rule is wrapped below its tensor.
    """
    # The shape of a shard is only shown if the rule cuts the tensor.
    rows = []
    for line in lines:
        states = f", with {', '.join(line.states)}" if line.states else ""
        shard = "" if line.shard == line.shape else f": {shape_text(line.shard)} each"
        rows.append(
            [
                Cell(escaped(line.names)),
                Cell(shape_text(line.shape)),
                Cell(f"{line.rule}, {line.cut}{shard}{states}", ("cyan",)),
                Cell(escaped(f"{line.where}: {line.source}"), ("dim",)),
            ]
        )
    if screen.width is None or table_width(rows, align="<<<<") <= screen.width:
        yield from table(screen, rows, align="<<<<")
        return
    # Too wide: the names and shapes, with the other two cells below each.
    names = table(screen, [row[:2] for row in rows], align="<<")
    for name, row in zip(names, rows, strict=True):
        yield name
        yield from facts(screen, [("", cell) for cell in row[2:]], indent=2)


def plan_move_blocks(plan: Plan, keys: Sequence[str]) -> Iterator[Block]:
    """Yield the boxes of some tensors before and after, and what moves where.

    Args:
        keys: names of the tensors in the destination; the first few are drawn.
    """
    from ckpt_cli.pages.pictures.shard_moves import move_blocks
    from ckpt_cli.pages.pictures.shards import draw_keys
    from core.verbs.pictures.shards import shard_move

    def draw(key: str) -> Iterator[Block]:
        yield ""
        yield from move_blocks(shard_move(plan, key), hint="; --json lists all")

    yield from draw_keys(keys, draw, hint="--json lists all")


def report_blocks(report: Report, *, is_proposed: bool) -> Iterator[Block]:
    """Yield the report of a finished conversion.

    Args:
        is_proposed: the destination's name was derived from the source's.
    """
    # What was written, and how fast.
    reason = " (no DST given; named after SRC)" if is_proposed else ""
    yield Cell("✓ wrote", ("green", "bold")), " ", title_cell(str(report.dst)), reason
    rate = bytes_text(round(report.bytes_written / report.seconds)) if report.seconds > 0 else "–"
    size = (
        f"{report.format}, {n_text(len(report.files), 'file')}, {bytes_text(report.bytes_written)}"
    )
    pairs: list[tuple[str, Cell | str]] = [
        ("format", size),
        ("tensors", f"{report.n_tensors:,}"),
        ("time", f"{seconds_text(report.seconds)} ({rate}/s)"),
    ]
    # Parts that only some conversions have.
    if report.workers:
        # How evenly the work was divided.
        balance = summarize_figures(report.workers)["balance"]
        times = [worker.seconds for worker in report.workers]
        n_hosts = len({worker.host for worker in report.workers})
        text = (
            f"{len(report.workers)} on {n_text(n_hosts, 'host')}, "
            f"largest share {balance} × the mean, "
            f"{seconds_text(min(times))} to {seconds_text(max(times))} each"
        )
        pairs.append(("workers", text))
    traffic = store_traffic((report.src, report.dst))
    if traffic is not None:
        pairs.append(("store", traffic_text(traffic)))
    if report.bytes_resumed:
        pairs.append(("resumed", f"{bytes_text(report.bytes_resumed)} had already been written"))
    if report.n_copies:
        pairs.append(("replicas", f"{report.n_copies:,} compared, all identical"))
    if report.bytes_verified:
        pairs.append(
            ("verified", f"{bytes_text(report.bytes_verified)} read back, identical to the source")
        )
    if report.n_fingerprints:
        read_back = (
            f", {report.n_read_back:,} of them by reading the result back"
            if report.n_read_back
            else ""
        )
        pairs.append(("fingerprints", f"{report.n_fingerprints:,} in the manifest{read_back}"))
    pairs.append(("manifest", escaped(report.manifest)))
    pairs += list_facts("not carried", list(map(str, report.dropped_reasons)), "yellow")
    pairs += list_facts("note", report.notes, "yellow")
    yield Facts(pairs, indent=2)
    # However long, the line that loads the result is not wrapped, so that it can be copied.
    label_width = max(len(name) for name, _ in pairs) + 2
    yield "  ", dim_cell("next".ljust(label_width)), escaped(report.next)
