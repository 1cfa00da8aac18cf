"""The plan of a dry run and the report of a finished one, as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.screen.blocks import Cell, bytes_text, facts, n_text, seconds_text, shape_text, table
from ckpt_cli.screen.terminal import Screen, columns_of, escaped
from core.team.protocol import summary_of

if TYPE_CHECKING:
    from core.convert.explain import LayoutLine
    from core.convert.prepare import Prepared
    from core.convert.run import Report
    from core.plan.plan import Plan
    from core.team.protocol import Figures

LISTED = 12
"""So many entries of a list are shown; ``--json`` has them all."""


def plan_lines(
    screen: Screen, prepared: Prepared, *, rank: int | None, rank_files: Sequence[str] | None
) -> Iterator[str]:
    """What would be done."""
    yield screen.styled(f"would write {escaped(str(prepared.dst))}", "bold")
    source = prepared.source
    plan = prepared.plan
    size = f"{n_text(len(prepared.files), 'file')}, {bytes_text(plan.file_bytes)}"
    yield from facts(
        screen,
        [
            ("from", f"{escaped(str(source.path))} ({source.format.name})"),
            ("to", f"{prepared.target_format.name}, {size}"),
            ("tensors", f"{prepared.n_tensors:,}"),
            ("reads", bytes_text(plan.read_bytes) + _replicas(plan)),
            ("at least", f"{bytes_text(plan.least_read_bytes)} to read, {bytes_text(plan.file_bytes)} to write"),
            ("memory", f"{bytes_text(plan.memory_bytes)} of the {bytes_text(prepared.job.memory_bytes)} allowed"),
            *_listed("renames", [f"{old} → {new}" for old, new in prepared.renamed]),
            *_listed("not carried", prepared.dropped, style="yellow"),
            *_listed("note", prepared.notes, style="yellow"),
        ],
    )
    yield ""
    rows = [[Cell(escaped(path)), Cell(bytes_text(size), ("dim",))] for path, size in prepared.files[:LISTED]]
    yield from table(screen, rows, align="<>", indent=2)
    if len(prepared.files) > LISTED:
        yield screen.plain(screen.styled(f"  … {n_text(len(prepared.files) - LISTED, 'more file')}", "dim"))
    if rank_files is not None:
        yield ""
        yield screen.styled(f"rank {rank} needs {n_text(len(rank_files), 'file')} of the source", "bold")
        for name in rank_files:
            yield f"  {escaped(name)}"


def _replicas(plan: Plan) -> str:
    """How much of what is read is only compared."""
    return f", {bytes_text(plan.copy_bytes)} of it replicas to compare" if plan.copy_bytes else ""


def explain_lines(screen: Screen, lines: Sequence[LayoutLine]) -> Iterator[str]:
    """Each tensor with its shape, what its rule does, and which row the rule is.

    One line for each where they fit, and in files and pipes; else the rule is wrapped below its tensor.
    """
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
    if screen.width is None or all(columns_of(text) <= screen.width for text in table(Screen(), rows, align="<<<<")):
        yield from table(screen, rows, align="<<<<")
        return
    names = table(screen, [row[:2] for row in rows], align="<<")
    for name, row in zip(names, rows, strict=True):
        yield name
        yield from facts(screen, [("", cell) for cell in row[2:]], indent=2)


def report_lines(screen: Screen, report: Report, *, is_proposed: bool) -> Iterator[str]:
    """What was done."""
    done = screen.styled("✓ wrote", "green", "bold")
    name = " (a name beside SRC, as no DST was given)" if is_proposed else ""
    yield screen.plain(f"{done} {screen.styled(escaped(str(report.dst)), 'bold')}{name}")
    rate = bytes_text(round(report.bytes_written / report.seconds)) if report.seconds > 0 else "–"
    size = f"{report.format}, {n_text(len(report.files), 'file')}, {bytes_text(report.bytes_written)}"
    pairs: list[tuple[str, Cell | str]] = [
        ("format", size),
        ("tensors", f"{report.n_tensors:,}"),
        ("time", f"{seconds_text(report.seconds)} ({rate}/s)"),
    ]
    if report.workers:
        pairs.append(("workers", _workers(report.workers)))
    if report.bytes_resumed:
        pairs.append(("resumed", f"{bytes_text(report.bytes_resumed)} were written already"))
    if report.n_copies:
        pairs.append(("replicas", f"{report.n_copies:,} compared, all equal"))
    if report.bytes_verified:
        pairs.append(("verified", f"{bytes_text(report.bytes_verified)} read again, equal to the source"))
    if report.n_fingerprints:
        again = f", for {report.n_read_back:,} the result was read again" if report.n_read_back else ""
        pairs.append(("fingerprints", f"{report.n_fingerprints:,} in the manifest{again}"))
    pairs.append(("manifest", escaped(report.manifest)))
    pairs += _listed("not carried", report.dropped, style="yellow")
    pairs += _listed("note", report.notes, style="yellow")
    yield from facts(screen, pairs, indent=2)


def _workers(workers: Sequence[Figures]) -> str:
    """How many there were, and how alike their shares."""
    found = summary_of(workers)
    times = [worker.seconds for worker in workers]
    return (
        f"{len(workers)} on {n_text(len({worker.host for worker in workers}), 'host')}, "
        f"largest share {found['balance']} × the mean, {seconds_text(min(times))} to {seconds_text(max(times))} each"
    )


def _listed(name: str, items: Sequence[str], *, style: str | None = None) -> list[tuple[str, Cell | str]]:
    """The items below one another, the first beside ``name``; the rest counted."""
    styles = (style,) if style else ()
    rows: list[tuple[str, Cell | str]] = [
        ("" if number else name, Cell(escaped(item), styles)) for number, item in enumerate(items[:LISTED])
    ]
    if len(items) > LISTED:
        rows.append(("", Cell(f"… {len(items) - LISTED} more (--json lists all)", ("dim",))))
    return rows
