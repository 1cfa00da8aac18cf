"""The report as JSON, one object on one line (fields may be added, none change meaning)::

    {"schema": "ckpt.validate/1", "level": "metadata" | "headers" | "deep",
     "strict": bool, "valid": bool,
     "checkpoints": [{"path": str, "format": str | null, "valid": bool,
                      "files": int, "bytes": int, "tensors": int,
                      "checks": int, "seconds": float, "notes": [str], "unchecked": [str],
                      "against": {"name": str, "tensors": int} | null,
                      "counts": {"error": int, "warning": int, "note": int},
                      "findings": [FINDING], "ignored": [FINDING], "known": [FINDING]}],
     "store": {"requests": int, "retries": int, "bytes": int}, "launch": {…}}

where a FINDING is ``{"code": str, "severity": "error" | "warning" | "note", "title": str,
"message": str, "file": str, "key": str, "keys": [str], "rank": str, "span": [int, int],
"expected": str, "found": str, "hint": str}``; fields that do not apply are omitted.

``keys`` are the names of all affected tensors if there are several, ``key`` is the first. ``file``
is relative to ``path``; ``span`` is a range of its bytes. ``unchecked`` lists what was not read, or
could not be compared. ``ignored`` are the findings accepted by ``--ignore``, ``known`` those
accepted by ``--baseline``; neither counts for ``valid``. ``launch``
(``ckpt_cli.workers.current_team``) is present if several workers validated. ``store`` is present if
a checkpoint is a URL: the requests that this process has sent, those of them that repeat one that
failed, and the bytes of data that it has received.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpt_cli.findings.verdict import LEVELS
from ckpt_cli.workers.current_team import launch_of
from ckpt_cli.workers.work_state import traffic_fields
from core.engine.team.protocol import sum_figures
from core.verbs.checks.check import Finding, Level, Severity, codes

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict

SCHEMA = "ckpt.validate/1"


def json_lines(verdicts: Sequence[Verdict], *, level: Level, is_strict: bool) -> Iterator[str]:
    """Yield the object as one line.

    Args:
        level: what was read of each checkpoint.
        is_strict: warnings count as errors.
    """
    report: dict[str, object] = {
        "schema": SCHEMA,
        "level": LEVELS[level],
        "strict": is_strict,
        "valid": all(verdict.judgement.is_valid for verdict in verdicts),
        "checkpoints": [_checkpoint(verdict) for verdict in verdicts],
    }
    figures = sum_figures(verdict.validation.figures for verdict in verdicts)
    report |= traffic_fields(verdict.validation.path for verdict in verdicts)
    yield json.dumps(report | launch_of(figures))


def _checkpoint(verdict: Verdict) -> dict[str, object]:
    """Return one of ``checkpoints``; the module's docstring contains the schema."""
    validation, judgement = verdict.validation, verdict.judgement
    return {
        "path": validation.path,
        "format": validation.format,
        "valid": judgement.is_valid,
        "files": validation.n_files,
        "bytes": validation.n_bytes,
        "tensors": validation.n_tensors,
        "checks": validation.n_checks,
        "seconds": round(validation.seconds, 6),
        "notes": list(validation.notes),
        "unchecked": list(validation.unchecked),
        "against": None
        if validation.against is None
        else dict(zip(("name", "tensors"), validation.against, strict=True)),
        "counts": {
            severity.label: judgement.n_of(severity) for severity in sorted(Severity, reverse=True)
        },
        "findings": list(map(_finding, judgement.counted)),
        "ignored": list(map(_finding, judgement.ignored)),
        "known": list(map(_finding, judgement.known)),
    }


def _finding(finding: Finding) -> dict[str, object]:
    """Return a finding with the title of its code, if the code is registered."""
    code = codes().get(finding.code)
    return finding.as_dict() | ({"title": code.title} if code else {})
