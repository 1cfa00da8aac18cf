"""The report as SARIF 2.1.0, for code scanning and other collectors.

One run describes all checkpoints. Every code that exists is a rule; a finding is a result at a file
of the checkpoint (``artifactLocation``), at a tensor (``logicalLocations``), or at bytes
(``region``). Findings that ``--ignore`` and ``--baseline`` accept are included with a suppression,
and with ``baselineState`` if a baseline was given.

Source: OASIS, Static Analysis Results Interchange Format 2.1.0, §3.14 (runs), §3.20 (invocations),
§3.27 (results), §3.11 (messages), §3.30 (regions); URIs are RFC 3986.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ckpt_cli.findings.grouping import message_of
from ckpt_cli.screen.terminal import escaped
from core.verbs.checks.check import codes
from core.version import __version__

if TYPE_CHECKING:
    from ckpt_cli.findings.verdict import Verdict
    from core.verbs.checks.check import Finding

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_LINK = re.compile(r"\[(?=[^\[\]]*\]\()")
"""The bracket that begins an embedded link, ``[text](target)``."""


def sarif_lines(verdicts: Sequence[Verdict], *, has_baseline: bool) -> Iterator[str]:
    """Yield the JSON document.

    Args:
        has_baseline: each result declares whether it is new or in the baseline.
    """
    # A rule for every registered code and every code of a finding; results refer to it by index.
    found_codes = {finding.code for verdict in verdicts for finding in verdict.validation.findings}
    names = sorted({*codes(), *found_codes})
    rule_indexes = {name: i for i, name in enumerate(names)}
    driver = {"name": "ckpt", "version": __version__, "rules": [_rule(name) for name in names]}
    # Notes about the checkpoints are notifications of the invocation, as they are not findings.
    notifications = [
        {
            "level": "note",
            "message": {"text": _message(_sentence(note))},
            "locations": [
                {"physicalLocation": {"artifactLocation": {"uri": uri_of(verdict.validation.path)}}}
            ],
        }
        for verdict in verdicts
        for note in verdict.validation.notes
    ]
    invocation: dict[str, object] = {"executionSuccessful": True}
    if notifications:
        invocation["toolExecutionNotifications"] = notifications
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [
            result
            for verdict in verdicts
            for result in _results(verdict, rule_indexes, has_baseline=has_baseline)
        ],
    }
    yield json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def _rule(code: str) -> dict[str, object]:
    """Return the reporting descriptor of a code; only its id if the code is not registered."""
    entry = codes().get(code)
    if entry is None:
        return {"id": code}
    return {
        "id": code,
        "shortDescription": {"text": _message(_sentence(entry.title))},
        "help": {"text": _message(_sentence(entry.hint))},
        "defaultConfiguration": {"level": entry.severity.label},
        "properties": {"tags": [f"level/{entry.level.name.lower()}"]},
    }


def _results(
    verdict: Verdict, rules: dict[str, int], *, has_baseline: bool
) -> Iterator[dict[str, object]]:
    """Yield the findings of one checkpoint as results.

    Args:
        rules: code → index of its rule.
        has_baseline: each result declares whether it is new or in the baseline.
    """
    # Findings that count, then those that an option suppresses.
    judgement = verdict.judgement
    kinds = (
        (judgement.counted, None),
        (judgement.ignored, "--ignore"),
        (judgement.known, "--baseline"),
    )
    for findings, suppressed_by in kinds:
        for finding in findings:
            result: dict[str, object] = {
                "ruleId": finding.code,
                "ruleIndex": rules[finding.code],
                "level": finding.severity.label,
                "message": {"text": _message(_text_of(finding))},
                "locations": [_location(verdict, finding)],
                "partialFingerprints": {
                    "ckptFinding/v1": sha256(_bytes(finding.fingerprint)).hexdigest()
                },
            }
            # What only some results have: the state of a baseline, a suppression, properties.
            if has_baseline:
                result["baselineState"] = "unchanged" if suppressed_by == "--baseline" else "new"
            if suppressed_by:
                result["suppressions"] = [{"kind": "external", "justification": suppressed_by}]
            names = ("rank", "expected", "found")
            extra = {
                name: escaped(value)
                for name in names
                if (value := getattr(finding, name)) is not None
            }
            if extra:
                result["properties"] = extra
            yield result


def _location(verdict: Verdict, finding: Finding) -> dict[str, object]:
    """Return the location of a finding: its file, else the checkpoint."""
    physical: dict[str, object] = {"artifactLocation": {"uri": uri_of(verdict.path_of(finding))}}
    # A region is not empty and does not begin before 0; the span from a damaged header may.
    if finding.span is not None and 0 <= finding.span[0] < finding.span[1]:
        start, stop = finding.span
        physical["region"] = {"byteOffset": start, "byteLength": stop - start}
    location: dict[str, object] = {"physicalLocation": physical}
    if finding.key is not None:
        location["logicalLocations"] = [
            {"fullyQualifiedName": escaped(finding.key), "kind": "object"}
        ]
    return location


def uri_of(path: str) -> str:
    """Return a path as a URI: relative if the path is relative, else with the scheme ``file``."""
    text = quote(_bytes(path), safe="/-._~")
    return f"file://{text}" if Path(path).is_absolute() else text


def _text_of(finding: Finding) -> str:
    """Return a finding's key, message and hint as sentences."""
    key = "" if finding.key is None else f"{finding.key}: "
    # The message may begin with a name, whose case must stay.
    message = message_of(finding)
    message += "" if message.endswith(".") else "."
    return f"{key}{message}" + (f" {_sentence(finding.hint)}" if finding.hint else "")


def _sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith(('.', '!', '?')) else '.'}"


def _message(text: str) -> str:
    """Escape a message's text, in which braces and links have a meaning (§3.11.5, §3.11.6)."""
    return _LINK.sub(r"\\[", escaped(text).replace("{", "{{").replace("}", "}}"))


def _bytes(text: str) -> bytes:
    """Encode a file name; spell out surrogates that do not stand for an undecodable byte."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
