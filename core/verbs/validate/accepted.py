"""Accepted findings: patterns of findings to ignore, and baselines from earlier runs.

A baseline is a JSON file with one finding per line, meant to be kept with a project's code::

    {"schema": "ckpt.baseline/1", "findings": [
      {"code": "CK101", "file": "__0_0.distcp"},
      {"code": "CK201", "key": "w", "rank": "mp_rank_00"}]}

A finding matches the baseline if its code, file, rank and key are the same. The wording and the
path of the checkpoint do not matter, so a baseline applies to every iteration of a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from core.errors import CorruptError, UsageError
from core.files.json_object import MAX_BYTES, parse_json_object
from core.files.store import translate_os_errors
from core.values import dataclass
from core.verbs.checks.check import Finding, Severity

SCHEMA = "ckpt.baseline/1"
_PLACE = ("code", "file", "rank", "key")
_CODE = re.compile(r"CK\d{0,3}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of findings to ignore.

    Args:
        code: a code, or the beginning of several codes.
        glob: pattern for the file, rank or key; None for all.
    """

    code: str
    glob: str | None = None

    def matches(self, finding: Finding) -> bool:
        """Return whether the pattern covers a finding; the glob must match all of several keys."""
        if not finding.code.startswith(self.code):
            return False
        glob = self.glob
        if glob is None:
            return True
        if any(
            place is not None and fnmatchcase(place, glob) for place in (finding.file, finding.rank)
        ):
            return True
        # A finding about several tensors must not disappear because one of them is to be ignored.
        keys = finding.keys or ((finding.key,) if finding.key is not None else ())
        return bool(keys) and all(fnmatchcase(key, glob) for key in keys)


def parse_patterns(texts: Iterable[str], *, known: Collection[str]) -> tuple[Pattern, ...]:
    """Parse patterns such as ``CK101``, ``CK7``, ``CK101,CK2`` and ``CK701:*.bias``.

    Args:
        known: all existing codes.

    Raises:
        UsageError: a text has another form, or no existing code begins with it.
    """
    patterns = []
    for text in texts:
        names, colon, glob = text.partition(":")
        for name in names.split(","):
            code = name.strip().upper()
            if not _CODE.fullmatch(code) or (colon and not glob):
                raise UsageError(
                    f"{text!r} is neither a code nor CODE:GLOB", hint="for example CK701:*.bias"
                )
            if not any(known_code.startswith(code) for known_code in known):
                raise UsageError(
                    f"no check has the code {code}",
                    hint="list them with: ckpt validate --list-checks",
                )
            patterns.append(Pattern(code, glob if colon else None))
    return tuple(patterns)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The rules for counting findings.

    Args:
        ignored: patterns of findings to ignore.
        known: ``Finding.fingerprint`` of the findings in the baseline; None without a baseline.
        is_strict: warnings count as errors.
    """

    ignored: tuple[Pattern, ...] = ()
    known: frozenset[str] | None = None
    is_strict: bool = False

    def judge(self, findings: Iterable[Finding]) -> Judgement:
        """Sort findings into those that count, are ignored, or are in the baseline."""
        judgement = Judgement()
        # The first rule that applies decides, so an ignored finding is not reported as known.
        for finding in findings:
            if any(pattern.matches(finding) for pattern in self.ignored):
                judgement.ignored.append(finding)
            elif self.known is not None and finding.fingerprint in self.known:
                judgement.known.append(finding)
            elif self.is_strict and finding.severity == Severity.WARNING:
                judgement.counted.append(replace(finding, severity=Severity.ERROR))
            else:
                judgement.counted.append(finding)
        judgement.counted.sort(key=lambda finding: finding.order)
        return judgement


@dataclass(frozen=True, slots=True)
class Judgement:
    """The findings of a checkpoint, divided into those that count and those that do not.

    Args:
        counted: findings to report, the worst first.
        ignored: findings covered by a pattern.
        known: findings in the baseline.
    """

    counted: list[Finding] = field(default_factory=list)
    ignored: list[Finding] = field(default_factory=list)
    known: list[Finding] = field(default_factory=list)

    def n_of(self, severity: Severity) -> int:
        """Return the number of counted findings of a severity."""
        return sum(finding.severity == severity for finding in self.counted)

    @property
    def is_valid(self) -> bool:
        """No counted finding is an error."""
        return not any(finding.severity == Severity.ERROR for finding in self.counted)


def baseline_text(findings: Sequence[Finding]) -> str:
    """Return the text of a baseline file for some findings, sorted and without duplicates."""
    # One finding per line, so that changes of the file are easy to review.
    rows = {finding.fingerprint: finding for finding in findings}
    lines = [
        json.dumps(
            {name: value for name in _PLACE if (value := getattr(finding, name)) is not None}
        )
        for _, finding in sorted(rows.items())
    ]
    body = "".join(
        f"\n  {line}{'' if number == len(lines) - 1 else ','}" for number, line in enumerate(lines)
    )
    return f'{{"schema": "{SCHEMA}", "findings": [{body}]}}\n'


def read_baseline(path: Path) -> frozenset[str]:
    """Return the fingerprints of the findings in a baseline file.

    Raises:
        UsageError: the file does not exist, or is not a baseline.
        StorageError: the file cannot be read (permission denied or I/O error).
    """
    # Read at most one byte more than a baseline may have, because the path may be any file.
    with translate_os_errors(str(path), doing="read"):
        if not path.is_file():
            raise UsageError(
                "--baseline: no such file", file=str(path), hint="create one with --write-baseline"
            )
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError("--baseline: the file is too large to be a baseline", file=str(path))
    try:
        content = parse_json_object(data, file=str(path))
    except CorruptError as err:
        raise UsageError(
            f"--baseline: {err.message}", file=str(path), hint="create one with --write-baseline"
        ) from err
    # Wording and checkpoint path are not part of a baseline, so fingerprints are sufficient.
    rows = content.get("findings")
    if content.get("schema") != SCHEMA or not isinstance(rows, list):
        raise UsageError(
            f"--baseline: not a {SCHEMA} file",
            file=str(path),
            hint="create one with --write-baseline",
        )
    return frozenset(_fingerprint_of(row, file=str(path)) for row in rows)


def _fingerprint_of(row: object, *, file: str) -> str:
    """Return the fingerprint of a finding in a baseline file.

    Raises:
        UsageError: the entry is not a finding.
    """
    values = [row.get(name) for name in _PLACE] if isinstance(row, dict) else [None]
    if not isinstance(values[0], str) or not all(
        value is None or isinstance(value, str) for value in values
    ):
        raise UsageError(f"--baseline: {str(row)[:80]!r} is not a finding", file=file)
    code, place, rank, key = values
    return Finding(
        code=str(code), severity=Severity.NOTE, message="", file=place, rank=rank, key=key
    ).fingerprint
