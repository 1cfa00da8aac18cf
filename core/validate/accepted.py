"""Findings that are known: patterns to leave out, and a baseline of an earlier run.

A baseline is a JSON file, one finding a line, made to be kept beside a project's code::

    {"schema": "ckpt.baseline/1", "findings": [
      {"code": "CK101", "file": "__0_0.distcp"},
      {"code": "CK201", "key": "w", "rank": "mp_rank_00"}]}

A finding is the same one as in the baseline if its code, file, rank and key are; the wording and the path of the
checkpoint do not matter, so that a baseline holds for every iteration of a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from core.checks.finding import Finding, Severity
from core.errors import CorruptError, UsageError
from core.files.json_object import MAX_BYTES, parse_json_object
from core.files.store import translate_os_errors

SCHEMA = "ckpt.baseline/1"
_PLACE = ("code", "file", "rank", "key")
_CODE = re.compile(r"CK\d{0,3}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Findings that are to be left out.

    Args:
        code: a code, or what some codes begin with.
        glob: of file, rank or key; None for all places.
    """

    code: str
    glob: str | None = None

    def matches(self, finding: Finding) -> bool:
        """Whether the finding is one of them."""
        if not finding.code.startswith(self.code):
            return False
        glob = self.glob
        if glob is None or any(
            place is not None and fnmatchcase(place, glob) for place in (finding.file, finding.rank)
        ):
            return True
        keys = finding.keys or ((finding.key,) if finding.key is not None else ())
        return bool(keys) and all(fnmatchcase(key, glob) for key in keys)  # one about several is not ignored in part


def patterns_of(texts: Iterable[str], *, known: Collection[str]) -> tuple[Pattern, ...]:
    """The patterns that ``CK101``, ``CK7``, ``CK101,CK2`` and ``CK701:*.bias`` stand for.

    Args:
        known: all codes.

    Raises:
        UsageError: a text is none of these, or no code begins so.
    """
    found = []
    for text in texts:
        names, colon, glob = text.partition(":")
        for name in names.split(","):
            code = name.strip().upper()
            if not _CODE.fullmatch(code) or (colon and not glob):
                raise UsageError(f"{text!r} is neither a code nor CODE:GLOB", hint="for example CK701:*.bias")
            if not any(one.startswith(code) for one in known):
                raise UsageError(f"no check has the code {code}", hint="list them with: ckpt validate --list-checks")
            found.append(Pattern(code, glob if colon else None))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Which findings do not count, and which count more.

    Args:
        ignored: patterns of findings that are left out.
        known: ``Finding.fingerprint`` of those of the baseline; None without one.
        is_strict: warnings are errors.
    """

    ignored: tuple[Pattern, ...] = ()
    known: frozenset[str] | None = None
    is_strict: bool = False

    def judged(self, findings: Iterable[Finding]) -> Judgement:
        """Which of the findings count."""
        made = Judgement()
        for finding in findings:
            if any(pattern.matches(finding) for pattern in self.ignored):
                made.ignored.append(finding)
            elif self.known is not None and finding.fingerprint in self.known:
                made.known.append(finding)
            elif self.is_strict and finding.severity == Severity.WARNING:
                made.counted.append(replace(finding, severity=Severity.ERROR))
            else:
                made.counted.append(finding)
        made.counted.sort(key=lambda finding: finding.order)
        return made


@dataclass(frozen=True, slots=True)
class Judgement:
    """The findings of a checkpoint, told apart.

    Args:
        counted: what is to be reported, the worst first.
        ignored: what a pattern leaves out.
        known: what the baseline holds.
    """

    counted: list[Finding] = field(default_factory=list)
    ignored: list[Finding] = field(default_factory=list)
    known: list[Finding] = field(default_factory=list)

    def n_of(self, severity: Severity) -> int:
        """How many findings of a severity count."""
        return sum(finding.severity == severity for finding in self.counted)

    @property
    def is_valid(self) -> bool:
        """Whether no error counts."""
        return not any(finding.severity == Severity.ERROR for finding in self.counted)


def baseline_text(findings: Sequence[Finding]) -> str:
    """The baseline file for some findings: sorted, each once."""
    rows = {finding.fingerprint: finding for finding in findings}
    lines = [
        json.dumps({name: value for name in _PLACE if (value := getattr(finding, name)) is not None})
        for _, finding in sorted(rows.items())
    ]
    body = "".join(f"\n  {line}{'' if number == len(lines) - 1 else ','}" for number, line in enumerate(lines))
    return f'{{"schema": "{SCHEMA}", "findings": [{body}]}}\n'


def read_baseline(path: Path) -> frozenset[str]:
    """The fingerprints of a baseline file.

    Raises:
        UsageError: there is no such file, or it is no baseline.
        StorageError: the system refuses to read it.
    """
    with translate_os_errors(str(path), doing="read"):
        if not path.is_file():
            raise UsageError("--baseline: there is no such file", file=str(path), hint="make it with --write-baseline")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError("--baseline: this file is too large for one", file=str(path))
    try:
        found = parse_json_object(data, file=str(path))
    except CorruptError as err:
        raise UsageError(f"--baseline: {err.message}", file=str(path), hint="make it with --write-baseline") from err
    rows = found.get("findings")
    if found.get("schema") != SCHEMA or not isinstance(rows, list):
        raise UsageError(f"--baseline: not a file of {SCHEMA}", file=str(path), hint="make it with --write-baseline")
    return frozenset(map(_fingerprint_in(str(path)), rows))


def _fingerprint_in(path: str) -> Callable[[object], str]:
    def fingerprint(row: object) -> str:
        values = [row.get(name) for name in _PLACE] if isinstance(row, dict) else [None]
        if not isinstance(values[0], str) or not all(value is None or isinstance(value, str) for value in values):
            raise UsageError(f"--baseline: {str(row)[:80]!r} is no finding", file=path)
        code, file, rank, key = values
        return Finding(code=str(code), severity=Severity.NOTE, message="", file=file, rank=rank, key=key).fingerprint

    return fingerprint
