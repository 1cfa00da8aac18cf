from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from core.errors import UsageError
from core.verbs.checks.check import Finding, Severity
from core.verbs.validate.accepted import (
    Acceptance,
    Pattern,
    baseline_text,
    parse_patterns,
    read_baseline,
)

KNOWN = ("CK100", "CK101", "CK201", "CK701")


def make_finding(code: str, severity: Severity = Severity.ERROR, **place: str) -> Finding:
    return Finding(code=code, severity=severity, message="some words", **place)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("CK101", [("CK101", None)]),
        ("ck7", [("CK7", None)]),
        ("CK", [("CK", None)]),
        ("CK101,CK2", [("CK101", None), ("CK2", None)]),
        ("CK701:*.bias", [("CK701", "*.bias")]),
        ("CK1:a:b", [("CK1", "a:b")]),
    ],
)
def test_patterns_are_codes_what_codes_begin_with_and_places(
    text: str, patterns: list[tuple[str, str | None]]
) -> None:
    assert parse_patterns([text], known=KNOWN) == tuple(Pattern(*pattern) for pattern in patterns)


@pytest.mark.parametrize(
    "text", ["", "101", "CK1011", "E501", "CK101:", "CK101,", "CK9", "CK102", "*.bias"]
)
def test_a_pattern_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_patterns([text], known=KNOWN)


def test_a_glob_is_tried_on_file_key_and_rank() -> None:
    pattern = Pattern("CK7", "*.bias")
    assert pattern.matches(make_finding("CK701", key="layers.0.bias"))
    assert pattern.matches(make_finding("CK701", file="x/y.bias"))
    assert pattern.matches(make_finding("CK701", rank="r.bias"))
    assert not pattern.matches(make_finding("CK701", key="layers.0.weight"))
    assert not pattern.matches(make_finding("CK701"))
    assert not pattern.matches(make_finding("CK101", key="layers.0.bias"))


def test_findings_are_told_apart_and_the_worst_is_first() -> None:
    findings = [
        make_finding("CK201", Severity.NOTE, key="n"),
        make_finding("CK201", Severity.WARNING, key="w"),
        make_finding("CK701", key="a.bias"),
        make_finding("CK101", file="known"),
        make_finding("CK101", file="new"),
    ]
    ignored = parse_patterns(["CK701:*.bias"], known=KNOWN)
    acceptance = Acceptance(
        ignored=ignored, known=frozenset({make_finding("CK101", file="known").fingerprint})
    )
    judgement = acceptance.judge(findings)
    assert [finding.key or finding.file for finding in judgement.counted] == ["new", "w", "n"]
    assert [finding.key for finding in judgement.ignored] == ["a.bias"]
    assert [finding.file for finding in judgement.known] == ["known"]
    assert not judgement.is_valid


def test_strict_makes_errors_of_warnings_but_not_of_notes() -> None:
    findings = [make_finding("CK201", Severity.NOTE), make_finding("CK101", Severity.WARNING)]
    assert Acceptance().judge(findings).is_valid
    strict = Acceptance(is_strict=True).judge(findings)
    assert not strict.is_valid
    assert [finding.severity for finding in strict.counted] == [Severity.ERROR, Severity.NOTE]


def test_a_baseline_holds_what_was_found_whatever_the_words(tmp_path: Path) -> None:
    odd = "a|b\n\x1b\udc80 ☃"
    findings = [
        make_finding("CK101", file=odd),
        make_finding("CK201", key="k", rank="r"),
        make_finding("CK201", key="k", rank="r"),
        make_finding("CK100"),
    ]
    path = tmp_path / "baseline.json"
    path.write_text(baseline_text(findings), "utf-8")
    assert json.loads(path.read_text())["schema"] == "ckpt.baseline/1"
    baseline = read_baseline(path)
    assert baseline == {finding.fingerprint for finding in findings}
    again = Finding(
        code="CK201", severity=Severity.WARNING, message="other words", key="k", rank="r", found="9"
    )
    assert Acceptance(known=baseline).judge([again]).known == [again]
    assert Acceptance(known=baseline).judge([make_finding("CK201", key="k")]).counted


def test_baselines_do_not_depend_on_the_order_of_findings() -> None:
    findings = [make_finding("CK101", file=name) for name in "cab"]
    assert baseline_text(findings) == baseline_text(findings[::-1])
    assert baseline_text([]) == '{"schema": "ckpt.baseline/1", "findings": []}\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "ckpt.baseline/2", "findings": []}',
        '{"schema": "ckpt.baseline/1", "findings": {}}',
        '{"schema": "ckpt.baseline/1", "findings": [1]}',
        '{"schema": "ckpt.baseline/1", "findings": [{"file": "x"}]}',
        '{"schema": "ckpt.baseline/1", "findings": [{"code": "CK101", "file": 3}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_baseline_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "baseline.json").write_text(text)
    with pytest.raises(UsageError, match="--baseline"):
        read_baseline(tmp_path / "baseline.json")


def test_a_baseline_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "missing"):
        with pytest.raises(UsageError, match="no such file"):
            read_baseline(path)
