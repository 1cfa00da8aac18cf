"""The report of ``ckpt validate``: findings by severity, with their places on the rank grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_cli.findings.grouping import group_similar
from ckpt_cli.findings.text import validation_facts
from ckpt_cli.findings.verdict import mark_of
from ckpt_cli.html_report.grid import CellFindings
from ckpt_cli.html_report.page import ReportSection, render
from ckpt_cli.html_report.rank_table import rank_name, rank_table, zero_name, zero_table
from ckpt_cli.screen.blocks import Facts, n_text
from core.megatron.model.topology import Rank, Topology, rank_dir
from core.verbs.checks.check import Finding, Severity, codes
from core.verbs.pictures.ranks import RankGrid, read_rank_grid
from core.verbs.pictures.zero_ranks import read_zero_grid

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict

MAX_GROUPS = 400
"""Most groups of findings of one checkpoint; the others are counted."""
MAX_CHECKPOINTS = 40
"""Most checkpoints whose findings are listed; of the others there is a line."""
_MAX_RANK_CHARACTERS = 300_000
"""Most characters of the names of ranks, by which findings are filtered."""


def validate_html(verdicts: Sequence[Verdict]) -> str:
    """Return the report of some checkpoints, the worst first if there are several."""
    verdicts = sorted(verdicts, key=lambda verdict: -int(verdict.worst or 0))
    n_bad = sum(not verdict.judgement.is_valid for verdict in verdicts)
    worst = verdicts[0].worst if verdicts else None
    is_single = len(verdicts) == 1
    views = list(map(_checkpoint_view, verdicts[:MAX_CHECKPOINTS]))
    anchors = [ReportSection("checkpoints", "Checkpoints", [""])]
    if is_single:
        anchors = [ReportSection("summary-1", "Summary", [""])]
        anchors += [ReportSection("ranks-1", "Ranks", [""])] if views[0]["grid"] is not None else []
        anchors += [ReportSection("findings-1", "Findings", [""])]
    several = f"{n_bad:,} with errors" if n_bad else "none with errors"
    return render(
        "validate",
        verdicts[0].validation.path if is_single else n_text(len(verdicts), "checkpoint"),
        f"{mark_of(worst)[0]} {verdicts[0].counts_text if is_single else several}",
        anchors,
        style=worst.label if worst else "good",
        template="validate.html.j2",
        all=[] if is_single else verdicts[:1000],
        checkpoints=views,
    )


def _checkpoint_view(verdict: Verdict) -> dict[str, Any]:
    """Collect what the template shows of one checkpoint."""
    validation, counted = verdict.validation, verdict.judgement.counted
    # The places of the findings on the grid, if there is one.
    # Metadata that could not be read once are not read again; rank files have theirs in each file.
    is_readable = validation.n_tensors > 0 and validation.format == "torch_dist"
    has_grid = is_readable or validation.format == "megatron"
    grid = read_rank_grid(validation.path) if has_grid else None
    zero_grid = read_zero_grid(validation.path) if validation.format == "deepspeed" else None
    names: dict[str, set[str]] = {}
    table = None
    if grid is not None:
        names = _names_of_cells(grid)
        table = rank_table(grid, _findings_of_cells(counted, names))
    elif zero_grid is not None:
        names = {
            file.name: {zero_name(kind, file.rank)}
            for kind, files in zero_grid.kinds.items()
            for file in files
        }
        table = zero_table(zero_grid, _findings_of_cells(counted, names))
    groups = group_similar(counted, path=validation.path)
    room = _MAX_RANK_CHARACTERS
    views = []
    for group in groups[:MAX_GROUPS]:
        cells = {name for finding in group.findings for name in _cells_of(finding, names)}
        ranks = " ".join(f"rank:{cell.replace(' ', '-')};" for cell in cells)
        room -= len(ranks)
        # "rank:*;" passes the filter of every rank.
        views.append((group, codes().get(group.first.code), ranks if room > 0 else "rank:*;"))
    return {
        "verdict": verdict,
        "facts": Facts(list(validation_facts(verdict))),
        "severities": [
            (severity.label, n_text(verdict.judgement.n_of(severity), severity.label))
            for severity in sorted(Severity, reverse=True)
            if verdict.judgement.n_of(severity)
        ],
        "findings": views,
        "n_more": sum(len(group.findings) for group in groups[MAX_GROUPS:]),
        "grid": table,
    }


def _names_of_cells(grid: RankGrid) -> dict[str, set[str]]:
    """Return the names of ranks by what findings call them: files and directories."""
    names: dict[str, set[str]] = {}
    topology = Topology(tp=grid.tp, pp=grid.pp, ep=grid.ep)
    for cell in grid.cells:
        # A missing rank has no files, but findings name its directory.
        directory = rank_dir(topology, Rank(cell.tp, cell.pp, cell.ep))
        folders = {file.rpartition("/")[0] for file in cell.files} - {""}
        rank = rank_name(grid, pp=cell.pp, tp=cell.tp, ep=cell.ep)
        for name in {*cell.files, *folders, directory, rank}:
            names.setdefault(name, set()).add(rank)
    return names


def _cells_of(finding: Finding, names: Mapping[str, set[str]]) -> set[str]:
    """Return the names of the ranks that a finding is about; empty if it names none."""
    for name in (finding.rank, finding.file):
        if name is not None and name in names:
            return names[name]
    return set()


def _findings_of_cells(
    findings: Sequence[Finding], names: Mapping[str, set[str]]
) -> dict[str, CellFindings]:
    """Return the number and the worst severity of the findings of each rank."""
    by_cell: dict[str, list[Severity]] = {}
    for finding in findings:
        for cell in _cells_of(finding, names):
            by_cell.setdefault(cell, []).append(finding.severity)
    return {
        cell: CellFindings(max(severities).label, n_text(len(severities), "finding"))
        for cell, severities in by_cell.items()
    }
