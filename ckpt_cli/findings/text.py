"""The report as text: a block per checkpoint, findings by code, similar ones on one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

from ckpt_cli.findings.verdict import Verdict, mark_of
from ckpt_cli.screen.blocks import (
    Cell,
    Facts,
    bytes_text,
    draw_text,
    fact_list,
    n_text,
    seconds_text,
    title_cell,
    wrapped,
)
from ckpt_cli.screen.terminal import Screen, columns_of, escaped
from core.verbs.checks.finding import Finding, Level, Severity, codes

if TYPE_CHECKING:
    from ckpt_cli.findings.grouping import FindingGroup

_WIDTH = 100
"""Maximum width of a place and its message, and of a place, in files and pipes."""
_EXPLAINED = 3
"""Maximum number of codes in the command that explains them."""
LIMIT = 8
"""Default maximum number of places that are shown for a code."""

STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}
_READ = {
    Level.METADATA: "names, sizes and metadata",
    Level.HEADERS: "names, sizes, metadata and container headers",
    Level.DEEP: "every byte",
}
"""Level → what it reads of a checkpoint."""
_COMMAND = re.compile(r"^(?=\s*::)|(?<=##)(?=\[)")
"""Start of a command for GitHub's runner: ``::`` before the text of a line, ``##[`` anywhere in it.

A checkpoint must not inject a command by a name that it contains."""
_UNREAD = {
    Level.METADATA: "container headers (--headers); checksums, NaN, zeros, replicas (--deep)",
    Level.HEADERS: "checksums, NaN, zeros, replicas (--deep)",
}
"""Level → what it does not check, and the option that does."""


def text_lines(
    screen: Screen, verdicts: Sequence[Verdict], *, limit: int | None, is_quiet: bool
) -> Iterator[str]:
    """Yield the report.

    Args:
        limit: maximum number of places of a code; 0 for all, None for ``LIMIT``.
        is_quiet: skip checkpoints without errors.
    """
    for line in _page(screen, verdicts, LIMIT if limit is None else limit, is_quiet=is_quiet):
        yield _COMMAND.sub(r"\\", line)


def _page(
    screen: Screen, verdicts: Sequence[Verdict], limit: int, *, is_quiet: bool
) -> Iterator[str]:
    """Yield a block for each checkpoint and, if there are several, a line that counts them."""
    shown = [verdict for verdict in verdicts if not (is_quiet and verdict.judgement.is_valid)]
    for number, verdict in enumerate(shown):
        if number:
            yield ""
        yield from _verdict_lines(screen, verdict, limit)
    if len(verdicts) > 1 and not is_quiet:
        yield ""
        n_bad = sum(not verdict.judgement.is_valid for verdict in verdicts)
        text, color = (f"{n_bad} with errors", "red") if n_bad else ("none with errors", "green")
        yield screen.plain(f"{n_text(len(verdicts), 'checkpoint')}: {screen.styled(text, color)}")


def explain_lines(screen: Screen, verdicts: Sequence[Verdict], *, is_quiet: bool) -> Iterator[str]:
    """Yield the command that explains the worst codes; nothing if only notes are shown.

    Args:
        is_quiet: checkpoints without errors are not shown.
    """
    shown = [verdict for verdict in verdicts if not (is_quiet and verdict.judgement.is_valid)]
    findings = [finding for verdict in shown for finding in verdict.judgement.counted]
    worst = sorted(findings, key=lambda finding: -finding.severity)
    names = dict.fromkeys(item.code for item in worst if item.severity != Severity.NOTE)
    if names:
        yield ""
        text = f"→ ckpt explain {' '.join([*names][:_EXPLAINED])}"
        yield screen.plain(screen.styled(text, "dim"))


def _verdict_lines(screen: Screen, verdict: Verdict, limit: int) -> Iterator[str]:
    """Yield the block of one checkpoint."""
    # The verdict in one line, and facts about what was read.
    validation, judgement = verdict.validation, verdict.judgement
    mark, color = mark_of(verdict.worst)
    lead = Cell(f"{mark} {verdict.counts_text}", ("bold", color))
    title = (lead, " in ", title_cell(validation.path))
    yield from draw_text(screen, (title, Facts(list(validation_facts(verdict)), indent=2)))
    # The findings by code. A finding may have another severity than its code.
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in judgement.counted:
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    for (severity, code), findings in groups.items():
        yield ""
        yield from _code_lines(screen, code, severity, findings, limit, path=validation.path)


def validation_facts(verdict: Verdict) -> Iterator[tuple[str, Cell | str]]:
    """Yield facts about one validation: what was read and what not, and accepted findings."""
    validation, judgement = verdict.validation, verdict.judgement
    # What was read.
    yield "format", validation.format or Cell("not recognized", ("yellow",))
    if validation.n_files:
        tensors = f", {n_text(validation.n_tensors, 'tensor')}" if validation.n_tensors else ""
        files = n_text(validation.n_files, "file")
        yield "size", f"{files}, {bytes_text(validation.n_bytes)}{tensors}"
    rate = ""
    if validation.level == Level.DEEP and validation.seconds > 0.1:
        rate = f", {bytes_text(round(validation.n_bytes / validation.seconds))}/s"
    ends = ""
    if validation.level == Level.METADATA and validation.n_ends:
        ends = f", both ends of {n_text(validation.n_ends, 'file')}"
    yield "read", f"{_READ[validation.level]}{ends}, in {seconds_text(validation.seconds)}{rate}"
    # What was not read or compared.
    unread = [_UNREAD[validation.level]] if validation.level in _UNREAD else []
    yield from fact_list("unchecked", [*unread, *validation.unchecked], "dim")
    if validation.against is not None:
        label, n = validation.against
        yield (
            "compared",
            f"every byte of {n_text(n, 'tensor')}, by fingerprint, with {escaped(label)}",
        )
    yield from fact_list("note", validation.notes, "yellow")
    # Findings that do not count.
    for name, findings in (("ignored", judgement.ignored), ("known", judgement.known)):
        if findings:
            names = ", ".join(sorted({finding.code for finding in findings}))
            yield name, Cell(f"{n_text(len(findings), 'finding')} ({names})", ("dim",))


def _code_lines(
    screen: Screen, code: str, severity: Severity, findings: list[Finding], limit: int, *, path: str
) -> Iterator[str]:
    """Yield the findings of one code: a title, places with their messages, and hints."""
    from ckpt_cli.findings.grouping import group_similar

    # The title, with the number of findings; wrapped if it is too long for the terminal.
    entry = codes().get(code)
    title = f" {entry.title}" if entry else ""
    label = screen.styled(f"{severity.label} {code}", "bold", STYLES[severity])
    count = screen.styled(f" × {len(findings):,}", "dim") if len(findings) > 1 else ""
    length = columns_of(f"  {severity.label} {code}{title} × {len(findings):,}")
    if screen.width is None or length <= screen.width:
        yield screen.plain(f"  {label}{screen.styled(title, 'bold')}{count}")
    else:
        yield screen.plain(f"  {label}{count}")
        yield from _wrapped(screen, title.strip(), 4, "bold")
    # The places, similar ones together, with the names of further tensors.
    groups = group_similar(findings, path=path)
    shown = groups[:limit] if limit else groups
    for group in shown:
        yield from _place_lines(screen, group)
        yield from _key_lines(screen, group.other_keys, limit)
    if len(groups) > len(shown):
        n_more = sum(len(group.findings) for group in groups[len(shown) :])
        yield screen.plain(screen.styled(f"    … {n_more:,} more; --limit 0 shows all", "dim"))
    # Each hint once.
    for hint in dict.fromkeys(group.first.hint for group in shown if group.first.hint):
        yield from _wrapped(screen, f"→ {hint}", 4, "dim")


def _place_lines(screen: Screen, group: FindingGroup) -> Iterator[str]:
    """Yield the place of a group and its message, on one line if both fit."""
    times = f"{len(group.findings):,} × " if len(group.findings) > 1 else ""
    place = f"{times}{group.place}" if group.place else ""
    message = escaped(group.message)
    # A line begins with four spaces, and has two more between place and message.
    width = _WIDTH if screen.width is None else screen.width
    if place and columns_of(place) + columns_of(message) + 6 <= width:
        yield screen.plain(f"    {screen.styled(escaped(place), 'cyan')}  {message}")
        return
    if place:
        for number, line in enumerate(wrapped(escaped(place), width - 6)):
            yield screen.plain(("      " if number else "    ") + screen.styled(line, "cyan"))
    yield from _wrapped(screen, message, 6 if place else 4)


def _key_lines(screen: Screen, keys: Sequence[str], limit: int) -> Iterator[str]:
    """Yield the names of further tensors that a group concerns; nothing without keys."""
    names = keys[:limit] if limit else keys
    n_more = len(keys) - len(names)
    more = f" and {n_more:,} more (--limit 0 shows all)" if n_more else ""
    if names:
        yield from _wrapped(screen, f"also {', '.join(names)}{more}", 6, "dim")


def _wrapped(screen: Screen, text: str, indent: int, *styles: str) -> Iterator[str]:
    """Yield an indented paragraph; the later lines of a hint are aligned after its arrow."""
    lead = " " * indent
    next_lead = lead + "  " if text.startswith("→ ") else lead
    lines: list[str] = []
    for part in map(escaped, text.split("\n")):
        if screen.width is None or columns_of(part) <= screen.width - indent - 2:
            lines.append(part)
        else:
            width = max(screen.width - indent - 2, 24)
            lines += wrap(part, width, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield screen.plain((lead if number == 0 else next_lead) + screen.styled(line, *styles))
