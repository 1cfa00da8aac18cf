"""The report as SARIF 2.1.0, for code scanning and other collectors.

One run for all checkpoints. Every code that exists is a rule; a finding is a result at a file of the checkpoint
(``artifactLocation``), at a tensor (``logicalLocations``), or at bytes (``region``). What ``--ignore`` and
``--baseline`` leave out is there as well, with a suppression, and with ``baselineState`` where a baseline was given.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0, §3.14 (runs), §3.20 (invocations), §3.27 (results),
§3.11 (messages), §3.30 (regions); URIs are RFC 3986.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ckpt_cli.findings.grouping import sentence
from ckpt_cli.screen.terminal import escaped
from core import __version__
from core.checks.registry import codes

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict
    from core.checks.finding import Finding

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LINK = re.compile(r"\[(?=[^\[\]]*\]\()")


def sarif_lines(verdicts: Sequence[Verdict], *, has_baseline: bool) -> Iterator[str]:
    """The document.

    Args:
        has_baseline: say of each result whether it is new.
    """
    used = {f.code for verdict in verdicts for f in verdict.validation.findings}
    names = sorted({*codes(), *used})
    driver = {"name": "ckpt", "version": __version__, "rules": [_rule(name) for name in names]}
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(verdicts)],
        "results": [
            result
            for verdict in verdicts
            for result in _results(verdict, {name: at for at, name in enumerate(names)}, has_baseline=has_baseline)
        ],
    }
    yield json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def _invocation(verdicts: Sequence[Verdict]) -> dict[str, object]:
    """The run: which checkpoints were taken, and what was not looked at, are notifications of it."""
    notifications = [
        {
            "level": "note",
            "message": {"text": _message(_sentence(note))},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri_of(verdict.validation.path)}}}],
        }
        for verdict in verdicts
        for note in verdict.validation.notes
    ]
    invocation: dict[str, object] = {"executionSuccessful": True}
    if notifications:
        invocation["toolExecutionNotifications"] = notifications
    return invocation


def _rule(code: str) -> dict[str, object]:
    """A reporting descriptor."""
    known = codes().get(code)
    if known is None:
        return {"id": code}
    return {
        "id": code,
        "shortDescription": {"text": _message(_sentence(known.title))},
        "help": {"text": _message(_sentence(known.hint))},
        "defaultConfiguration": {"level": known.severity.label},
        "properties": {"tags": [f"level/{known.level.name.lower()}"]},
    }


def _results(verdict: Verdict, rules: dict[str, int], *, has_baseline: bool) -> Iterator[dict[str, object]]:
    """The findings of one checkpoint."""
    judgement = verdict.judgement
    kinds = ((judgement.counted, None), (judgement.ignored, "--ignore"), (judgement.known, "--baseline"))
    for findings, suppressed_by in kinds:
        for finding in findings:
            made: dict[str, object] = {
                "ruleId": finding.code,
                "ruleIndex": rules[finding.code],
                "level": finding.severity.label,
                "message": {"text": _message(_text_of(finding))},
                "locations": [_location(verdict, finding)],
                "partialFingerprints": {"ckptFinding/v1": sha256(_bytes(finding.fingerprint)).hexdigest()},
            }
            if has_baseline:
                made["baselineState"] = "unchanged" if suppressed_by == "--baseline" else "new"
            if suppressed_by:
                made["suppressions"] = [{"kind": "external", "justification": suppressed_by}]
            names = ("rank", "expected", "found")
            extra = {name: escaped(value) for name in names if (value := getattr(finding, name)) is not None}
            if extra:
                made["properties"] = extra
            yield made


def _location(verdict: Verdict, finding: Finding) -> dict[str, object]:
    """Where a finding is: the file, else the checkpoint."""
    physical: dict[str, object] = {"artifactLocation": {"uri": uri_of(verdict.path_of(finding))}}
    if finding.span is not None and 0 <= finding.span[0] < finding.span[1]:
        start, stop = finding.span
        physical["region"] = {"byteOffset": start, "byteLength": stop - start}
    made: dict[str, object] = {"physicalLocation": physical}
    if finding.key is not None:
        made["logicalLocations"] = [{"fullyQualifiedName": escaped(finding.key), "kind": "object"}]
    return made


def uri_of(path: str) -> str:
    """A path as a URI: relative where the path is, else of the scheme ``file``."""
    text = quote(_bytes(path), safe="/-._~")
    return f"file://{text}" if Path(path).is_absolute() else text


def _text_of(finding: Finding) -> str:
    place = "" if finding.key is None else f"{finding.key}: "
    what = sentence(finding)  # may begin with a name, so its case stays
    return f"{place}{what}{'' if what.endswith('.') else '.'}" + (f" {_sentence(finding.hint)}" if finding.hint else "")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def _message(text: str) -> str:
    """Plain text of a message: braces and links have a meaning there (§3.11.5, §3.11.6)."""
    return _LINK.sub(r"\\[", escaped(text).replace("{", "{{").replace("}", "}}"))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape") if not _is_lone(text) else text.encode("utf-8", "backslashreplace")


def _is_lone(text: str) -> bool:
    """Whether it holds surrogates that are no bytes of a file name."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return True
    return False
