"""What programs read: JSON, JUnit, SARIF, GitHub's commands; each is held against the rules of its
specification.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest

from ckpt_cli.findings.github import github_lines
from ckpt_cli.findings.json_report import json_lines
from ckpt_cli.findings.junit import junit_lines
from ckpt_cli.findings.sarif import sarif_lines, uri_of
from core.verbs.checks.check import Finding, Level, Severity, codes
from core.verbs.validate.accepted import Acceptance, parse_patterns
from tests.support.verdicts import HOSTILE, finding, verdict

FINDINGS = [
    finding(
        file="__0_0.distcp",
        expected="100 bytes",
        found="64 bytes",
        span=(64, 100),
        hint="copy it again",
    ),
    finding(
        file="__1_0.distcp",
        expected="100 bytes",
        found="64 bytes",
        span=(64, 100),
        hint="copy it again",
    ),
    finding("CK200", Severity.WARNING, key="decoder.layers.0.weight", rank="mp_rank_00"),
    finding("CK300", Severity.NOTE, message="worth knowing"),
    finding(
        message=HOSTILE,
        file=HOSTILE,
        key=HOSTILE,
        rank=HOSTILE,
        expected=HOSTILE,
        found=HOSTILE,
        hint=HOSTILE,
    ),
]
VERDICTS = [
    verdict(FINDINGS, notes=(HOSTILE,)),
    verdict(path="/data/whole", level=Level.HEADERS),
    verdict(FINDINGS[2:4], path=HOSTILE),
]


def test_json_holds_every_finding_with_all_its_parts() -> None:
    (line,) = json_lines(VERDICTS, level=Level.METADATA, is_strict=False)
    page = json.loads(line)
    assert (page["schema"], page["level"], page["strict"], page["valid"]) == (
        "ckpt.validate/1",
        "metadata",
        False,
        False,
    )
    assert [checkpoint["valid"] for checkpoint in page["checkpoints"]] == [False, True, True]
    first = page["checkpoints"][0]
    assert first["counts"] == {"error": 3, "warning": 1, "note": 1}
    assert (
        first["findings"][0]
        == {
            "code": "CK100",
            "title": codes()["CK100"].title,
            "severity": "error",
            "message": "the file ends early",
            "file": "__0_0.distcp",
            "span": [64, 100],
            "expected": "100 bytes",
            "found": "64 bytes",
            "hint": "copy it again",
        }
        or first["findings"][0]["file"] == HOSTILE
    )
    assert HOSTILE in [entry.get("file") for entry in first["findings"]]


# JUnit: what the schemas of Jenkins' xUnit plugin (junit-10.xsd) and of Ant's JUnit task both
# allow, save for what Ant's asks of a suite beside: time stamp, host name and an empty system-out.
CHILDREN = {
    "testsuites": ["testsuite*"],
    "testsuite": ["properties?", "testcase*", "system-out?"],
    "properties": ["property*"],
    "property": [],
    "testcase": ["skipped?", "failure?", "system-out?"],
    "skipped": [],
    "failure": [],
    "system-out": [],
}
ATTRIBUTES = {
    "testsuites": {"name", "tests", "failures", "errors", "skipped", "time"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
    "properties": set(),
    "property": {"name", "value"},
    "testcase": {"classname", "name"},
    "skipped": {"message"},
    "failure": {"message", "type"},
    "system-out": set(),
}


def check_junit(element: ElementTree.Element) -> None:
    order = [child.rstrip("*?") for child in CHILDREN[element.tag]]
    tags = [child.tag for child in element]
    assert tags == sorted(tags, key=order.index), "elements are in the schema's order"
    for child in CHILDREN[element.tag]:
        assert child.endswith("*") or tags.count(child.rstrip("?")) <= 1
    assert set(element.attrib) == ATTRIBUTES[element.tag]
    for child in element:
        check_junit(child)


def junit(*verdicts: Any) -> ElementTree.Element:
    lines = list(junit_lines(verdicts))
    assert lines[0] == '<?xml version="1.0" encoding="UTF-8"?>'
    root = ElementTree.fromstring("\n".join(lines).encode("utf-8"))
    check_junit(root)
    return root


def test_junit_is_valid_and_its_counts_are_true() -> None:
    root = junit(*VERDICTS)
    assert [suite.get("name") for suite in root][:2] == ["runs/iter_0000010", "/data/whole"]
    for element in (root, *root):
        for name, tag in (("tests", "testcase"), ("failures", "failure"), ("skipped", "skipped")):
            assert int(element.attrib[name]) == len(list(element.iter(tag)))
        assert element.get("errors") == "0"
        assert re.fullmatch(r"\d+\.\d{3}", element.attrib["time"])
    assert root.find("testsuite/properties/property[@name='format']").get("value") == "dcp"  # type: ignore[union-attr]


def test_junit_has_a_case_for_every_code_that_the_level_can_find() -> None:
    for level in Level:
        cases = {case.attrib["name"] for case in junit(verdict(level=level)).iter("testcase")}
        wanted = [
            code
            for code in codes().values()
            if code.level <= level and not code.code.startswith("CK9")
        ]
        assert cases == {f"{code.code} {code.title}" for code in wanted}


def test_junit_fails_for_errors_only_and_skips_what_is_left_out() -> None:
    acceptance = Acceptance(ignored=parse_patterns(["CK100"], known=codes()))
    cases = {
        case.attrib["name"][:5]: case
        for case in junit(verdict(FINDINGS, acceptance=acceptance)).iter("testcase")
    }
    assert [child.tag for child in cases["CK100"]] == ["skipped"]
    assert [child.tag for child in cases["CK200"]] == ["system-out"]
    failed = {case.attrib["name"][:5]: case for case in junit(verdict(FINDINGS)).iter("testcase")}[
        "CK100"
    ]
    (failure,) = failed
    assert failure.attrib["message"].startswith("3 × CK100")
    assert "2 × __[0-1]_0.distcp" in (failure.text or "")
    assert "(expected 100 bytes, found 64 bytes)" in (failure.text or "")


# SARIF 2.1.0: the rules of the specification and of its JSON schema for the parts that are used.
LEVELS = {"none", "note", "warning", "error"}
RESULT = {
    "ruleId",
    "ruleIndex",
    "level",
    "message",
    "locations",
    "partialFingerprints",
    "baselineState",
    "suppressions",
    "properties",
}


def check_sarif(log: dict[str, Any]) -> None:
    assert set(log) == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-schema-2.1.0.json")
    for run in log["runs"]:
        assert set(run) == {"tool", "invocations", "results"}
        driver = run["tool"]["driver"]
        assert set(driver) == {"name", "version", "rules"}
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(set(ids)) == len(ids)
        for rule in driver["rules"]:
            assert set(rule) <= {
                "id",
                "shortDescription",
                "help",
                "defaultConfiguration",
                "properties",
            }
            assert rule.get("defaultConfiguration", {"level": "none"})["level"] in LEVELS
            for name in {"shortDescription", "help"} & set(rule):
                check_message(rule[name])
            assert len(set(rule.get("properties", {"tags": []})["tags"])) == len(
                rule.get("properties", {"tags": []})["tags"]
            )
        (invocation,) = run["invocations"]
        assert (
            {"executionSuccessful"}
            <= set(invocation)
            <= {"executionSuccessful", "toolExecutionNotifications"}
        )
        for notification in invocation.get("toolExecutionNotifications", []):
            assert set(notification) == {"level", "message", "locations"}
            assert notification["level"] in LEVELS
            check_message(notification["message"])
            for location in notification["locations"]:
                check_location(location)
        for result in run["results"]:
            assert set(result) <= RESULT
            assert {"ruleId", "ruleIndex", "message", "locations", "partialFingerprints"} <= set(
                result
            )
            assert ids[result["ruleIndex"]] == result["ruleId"]
            assert result["level"] in LEVELS
            assert result.get("baselineState", "new") in {"new", "unchanged", "updated", "absent"}
            for suppression in result.get("suppressions", []):
                assert suppression["kind"] in {"inSource", "external"}
            assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
            check_message(result["message"])
            for location in result["locations"]:
                check_location(location)


def check_message(message: dict[str, str]) -> None:
    """§3.11: text that ends a sentence, braces doubled, links only where they are meant."""
    assert set(message) == {"text"}
    text = message["text"]
    assert text
    assert text.isprintable()
    assert re.sub(r"\{\{|\}\}", "", text).count("{") == 0
    assert re.search(r"(?<!\\)\[[^\[\]]*\]\(", text) is None


def check_location(location: dict[str, Any]) -> None:
    assert set(location) <= {"physicalLocation", "logicalLocations"}
    physical = location["physicalLocation"]
    uri = physical["artifactLocation"]["uri"]
    assert re.fullmatch(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+", uri)
    assert re.search(r"%(?![0-9A-F]{2})", uri) is None
    assert urlsplit(uri).scheme in ("", "file")
    region = physical.get("region")
    if region is not None:
        assert set(region) == {"byteOffset", "byteLength"}
        assert region["byteOffset"] >= 0
        assert region["byteLength"] > 0
    for logical in location.get("logicalLocations", []):
        assert set(logical) == {"fullyQualifiedName", "kind"}


def sarif(*verdicts: Any, has_baseline: bool = False) -> dict[str, Any]:
    log = json.loads("\n".join(sarif_lines(verdicts, has_baseline=has_baseline)))
    check_sarif(log)
    return dict(log)


def test_sarif_is_valid_and_has_a_result_for_each_finding() -> None:
    (run,) = sarif(*VERDICTS)["runs"]
    assert [result["ruleId"] for result in run["results"]].count("CK100") == 3
    assert len(run["results"]) == 7
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} >= set(codes())
    by_uri = {
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]: r for r in run["results"]
    }
    cut = by_uri["runs/iter_0000010/__1_0.distcp"]
    assert cut["locations"][0]["physicalLocation"]["region"] == {"byteOffset": 64, "byteLength": 36}
    assert cut["message"]["text"] == (
        "the file ends early (expected 100 bytes, found 64 bytes). Copy it again."
    )
    warning = next(result for result in run["results"] if result["ruleId"] == "CK200")
    assert warning["level"] == "warning"
    assert (
        warning["locations"][0]["logicalLocations"][0]["fullyQualifiedName"]
        == "decoder.layers.0.weight"
    )
    assert warning["properties"] == {"rank": "mp_rank_00"}
    assert "baselineState" not in warning


def test_sarif_keeps_what_is_left_out_with_its_suppression() -> None:
    acceptance = Acceptance(
        ignored=parse_patterns(["CK100:*1_0*"], known=codes()),
        known=frozenset({FINDINGS[3].fingerprint}),
    )
    (run,) = sarif(verdict(FINDINGS, acceptance=acceptance), has_baseline=True)["runs"]
    states = [
        (r["ruleId"], r["baselineState"], [s["justification"] for s in r.get("suppressions", [])])
        for r in run["results"]
    ]
    assert sorted(states) == [
        ("CK100", "new", []),
        ("CK100", "new", []),
        ("CK100", "new", ["--ignore"]),
        ("CK200", "new", []),
        ("CK300", "unchanged", ["--baseline"]),
    ]


@pytest.mark.parametrize(
    ("path", "uri"),
    [
        ("a/b c.pt", "a/b%20c.pt"),
        ("/a/ö", "file:///a/%C3%B6"),
        ("c:x/y", "c%3Ax/y"),
        ("a%20b", "a%2520b"),
        ("x\udc80y", "x%80y"),
        ("[1]#?", "%5B1%5D%23%3F"),
    ],
)
def test_paths_are_written_as_uris(path: str, uri: str) -> None:
    assert uri_of(path) == uri
    assert unquote(urlsplit(uri).path, errors="surrogateescape") == path


def test_a_lone_surrogate_has_a_uri_too() -> None:
    assert uri_of("x\ud800") == "x%5Cud800"


COMMAND = re.compile(r"::(error|warning|notice) (file=[^:]*,title=[^:,]*)::(.*)")


def decoded(text: str) -> str:
    """As GitHub's runner decodes a property."""
    for code, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, char)
    return text


def commands(*verdicts: Any) -> Iterator[tuple[str, dict[str, str], str]]:
    for line in github_lines(verdicts):
        assert line.isprintable(), "one line, and nothing in it that a terminal obeys"
        match = COMMAND.fullmatch(line)
        if line.startswith("::"):
            assert match, line
            properties = dict(pair.split("=", 1) for pair in match[2].split(","))
            yield (
                match[1],
                {name: decoded(value) for name, value in properties.items()},
                decoded(match[3]),
            )
        else:
            assert not line.lstrip().startswith("::")
            assert "##[" not in line


def test_github_gets_one_annotation_for_findings_that_are_alike() -> None:
    parsed = list(commands(*VERDICTS))
    assert [kind for kind, _, _ in parsed].count("error") == 2
    kind, properties, text = next(
        annotation for annotation in parsed if "× 2" in annotation[1]["title"]
    )
    assert kind == "error"
    assert properties["file"] == "runs/iter_0000010/__0_0.distcp"
    assert text.splitlines() == [
        "__[0-1]_0.distcp",
        "the file ends early (expected 100 bytes, found 64 bytes)",
        "→ copy it again",
    ]
    assert {kind for kind, _, _ in parsed} == {"error", "warning", "notice"}


def test_every_format_has_the_notes_on_what_was_taken_and_not_looked_at() -> None:
    note = "3 other iterations were not looked at (--all-iterations): iter_0000001, 2 more"
    noted = verdict(FINDINGS, notes=(note, HOSTILE))
    (suite,) = junit(noted)
    assert note in (suite.findtext("system-out") or "")
    (run,) = sarif(noted)["runs"]
    texts = [
        notification["message"]["text"]
        for notification in run["invocations"][0]["toolExecutionNotifications"]
    ]
    assert texts[0] == f"{note}."
    assert len(texts) == 2
    place = {"file": "runs/iter_0000010", "title": "ckpt validate"}
    assert ("notice", place, note) in list(commands(noted))


def test_every_format_bears_hostile_names() -> None:
    for write in (junit, sarif):
        write(*VERDICTS)
    assert list(commands(*VERDICTS))
    for lines in (
        junit_lines(VERDICTS),
        sarif_lines(VERDICTS, has_baseline=True),
        github_lines(VERDICTS),
    ):
        text = "\n".join(lines)
        assert "\x1b" not in text
        assert "\udc80" not in text
    text = "\n".join(json_lines(VERDICTS, level=Level.DEEP, is_strict=True))
    assert text.isascii()


def test_reports_do_not_depend_on_the_clock() -> None:
    """Other than by the seconds that they state."""
    assert list(sarif_lines(VERDICTS, has_baseline=False)) == list(
        sarif_lines(VERDICTS, has_baseline=False)
    )


def test_findings_of_codes_that_are_not_in_the_table_are_reported_all_the_same() -> None:
    odd = [
        verdict([Finding(code="CK999", severity=Severity.ERROR, message="from another version")])
    ]
    assert "CK999" in "\n".join(junit_lines(odd))
    assert "CK999" in "\n".join(github_lines(odd))
    assert sarif(*odd)["runs"][0]["results"][0]["ruleId"] == "CK999"
