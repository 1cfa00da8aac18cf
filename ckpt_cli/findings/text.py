"""The report as text: one block a checkpoint, findings by code, those that are alike on one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

from ckpt_cli.findings.grouping import Alike, alike
from ckpt_cli.findings.verdict import Verdict
from ckpt_cli.screen.blocks import Cell, bytes_text, facts, n_text, seconds_text
from ckpt_cli.screen.terminal import Screen, columns_of, escaped
from core.checks.finding import Finding, Severity
from core.checks.level import Level
from core.checks.registry import codes

LIMIT = 8
"""So many places of a code are shown."""

STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "blue"}
_READ = {
    Level.METADATA: "names, sizes and metadata",
    Level.HEADERS: "names, sizes, metadata, and the headers of all containers",
    Level.DEEP: "every byte",
}
_COMMAND = re.compile(r"^(?=\s*::)|(?<=##)(?=\[)")
"""What GitHub's runner takes for a command, old ones anywhere in a line; a name out of a checkpoint must be none."""
_UNREAD = {
    Level.METADATA: "what is inside the containers (--headers); checksums, NaN, copies of a tensor (--deep)",
    Level.HEADERS: "checksums, NaN, copies of a tensor (--deep)",
}


def text_lines(screen: Screen, verdicts: Sequence[Verdict], *, limit: int | None, is_quiet: bool) -> Iterator[str]:
    """The page.

    Args:
        limit: most places of a code; 0 for all, None for ``LIMIT``.
        is_quiet: checkpoints without errors are left out.
    """
    for line in _page(screen, verdicts, LIMIT if limit is None else limit, is_quiet=is_quiet):
        yield _COMMAND.sub(r"\\", line)


def _page(screen: Screen, verdicts: Sequence[Verdict], limit: int, *, is_quiet: bool) -> Iterator[str]:
    shown = [verdict for verdict in verdicts if not (is_quiet and verdict.judgement.is_valid)]
    for number, verdict in enumerate(shown):
        if number:
            yield ""
        yield from _verdict_lines(screen, verdict, limit)
    if len(verdicts) > 1 and not is_quiet:
        yield ""
        n_bad = sum(not verdict.judgement.is_valid for verdict in verdicts)
        rest = screen.styled(f"{n_bad} with errors", "red") if n_bad else screen.styled("none with errors", "green")
        yield screen.plain(f"{n_text(len(verdicts), 'checkpoint')}: {rest}")


def _verdict_lines(screen: Screen, verdict: Verdict, limit: int) -> Iterator[str]:
    """One checkpoint."""
    validation, judgement = verdict.validation, verdict.judgement
    worst = max((finding.severity for finding in judgement.counted), default=Severity.NOTE)
    mark, color = {Severity.ERROR: ("✗", "red"), Severity.WARNING: ("!", "yellow")}.get(worst, ("✓", "green"))
    lead = screen.styled(f"{mark} {verdict.counts_text}", "bold", color)
    yield screen.plain(f"{lead} in {screen.styled(escaped(validation.path), 'bold')}")
    yield from facts(screen, _facts(verdict), indent=2)
    groups: dict[tuple[Severity, str], list[Finding]] = {}
    for finding in judgement.counted:
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    for (severity, code), findings in groups.items():
        yield ""
        yield from _code_lines(screen, code, severity, findings, limit, path=validation.path)


def _facts(verdict: Verdict) -> Iterator[tuple[str, Cell | str]]:
    """What was looked at, and what was not."""
    validation, judgement = verdict.validation, verdict.judgement
    yield "format", Cell("not recognised", ("yellow",)) if validation.format is None else validation.format
    size = f"{n_text(validation.n_files, 'file')}, {bytes_text(validation.n_bytes)}"
    if validation.n_files:
        yield "size", f"{size}, {n_text(validation.n_tensors, 'tensor')}" if validation.n_tensors else size
    rate = ""
    if validation.level == Level.DEEP and validation.seconds > 0.1:
        rate = f", {bytes_text(round(validation.n_bytes / validation.seconds))}/s"
    yield "read", f"{_READ[validation.level]}, in {seconds_text(validation.seconds)}{rate}"
    unread = [_UNREAD[validation.level]] if validation.level in _UNREAD else []
    for number, text in enumerate([*unread, *validation.unchecked]):
        yield "" if number else "unchecked", Cell(escaped(text), ("dim",))
    if validation.against is not None:
        label, n = validation.against
        yield "compared", f"every byte of {n_text(n, 'tensor')}, by fingerprint, with {escaped(label)}"
    for number, note in enumerate(validation.notes):
        yield "" if number else "note", Cell(escaped(note), ("yellow",))
    for name, findings in (("ignored", judgement.ignored), ("known", judgement.known)):
        if findings:
            some = ", ".join(sorted({finding.code for finding in findings}))
            yield name, Cell(f"{n_text(len(findings), 'finding')} ({some})", ("dim",))


def _code_lines(
    screen: Screen, code: str, severity: Severity, findings: list[Finding], limit: int, *, path: str
) -> Iterator[str]:
    """The findings of one code: a title, places with what is wrong there, and what to do."""
    known = codes().get(code)
    title = f" {known.title}" if known else ""
    label = screen.styled(f"{severity.label} {code}", "bold", STYLES[severity])
    count = screen.styled(f" × {len(findings):,}", "dim") if len(findings) > 1 else ""
    length = columns_of(f"  {severity.label} {code}{title} × {len(findings):,}")
    if screen.width is None or length <= screen.width:
        yield screen.plain(f"  {label}{screen.styled(title, 'bold')}{count}")
    else:
        yield screen.plain(f"  {label}{count}")
        yield from _wrapped(screen, title.strip(), 4, "bold")
    found = alike(findings, path=path)
    shown = found[:limit] if limit else found
    for one in shown:
        yield from _place_lines(screen, one)
        yield from _other_lines(screen, one.others, limit)
    if len(found) > len(shown):
        n_more = sum(len(one.findings) for one in found[len(shown) :])
        yield screen.plain(screen.styled(f"    … {n_more:,} more; --limit 0 shows all", "dim"))
    for hint in dict.fromkeys(one.first.hint for one in shown if one.first.hint):
        yield from _wrapped(screen, f"→ {hint}", 4, "dim")


def _place_lines(screen: Screen, one: Alike) -> Iterator[str]:
    """Where, and below it what; on one line where both fit."""
    times = f"{len(one.findings):,} × " if len(one.findings) > 1 else ""
    where = f"{times}{one.where}" if one.where else ""
    what = escaped(one.what)
    room = 120 if screen.width is None else screen.width
    if where and columns_of(where) + columns_of(what) + 6 <= room:
        yield screen.plain(f"    {screen.styled(escaped(where), 'cyan')}  {what}")
        return
    if where:
        yield screen.plain(f"    {screen.styled(escaped(where), 'cyan')}")
    yield from _wrapped(screen, what, 6 if where else 4)


def _other_lines(screen: Screen, keys: Sequence[str], limit: int) -> Iterator[str]:
    """The other tensors of findings about several."""
    names = keys[:limit] if limit else keys
    n_more = len(keys) - len(names)
    more = f" and {n_more:,} more (--limit 0 shows all)" if n_more else ""
    if names:
        yield from _wrapped(screen, f"also {', '.join(names)}{more}", 6, "dim")


def _wrapped(screen: Screen, text: str, indent: int, *styles: str) -> Iterator[str]:
    """A paragraph; the lines after the first of a hint stand below its text."""
    lead = " " * indent
    below = lead + "  " if text.startswith("→ ") else lead
    lines = [line for part in text.split("\n") for line in _lines_of(escaped(part), screen, indent + 2)]
    for number, line in enumerate(lines):
        yield screen.plain((lead if number == 0 else below) + screen.styled(line, *styles))


def _lines_of(text: str, screen: Screen, taken: int) -> list[str]:
    if screen.width is None or columns_of(text) <= screen.width - taken:
        return [text]
    return wrap(text, max(screen.width - taken, 24), break_long_words=False, break_on_hyphens=False)
