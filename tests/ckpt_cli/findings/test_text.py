from __future__ import annotations

import re

import pytest

from ckpt_cli.findings.grouping import group_similar
from ckpt_cli.findings.text import text_lines
from ckpt_cli.findings.verdict import Verdict
from ckpt_cli.screen.terminal import Screen, columns_of
from core.verbs.checks.check import Level, Severity, codes
from core.verbs.validate.accepted import Acceptance, parse_patterns
from tests.support.verdicts import HOSTILE, finding, verdict


def page(
    *verdicts: Verdict,
    screen: Screen | None = None,
    limit: int | None = None,
    is_quiet: bool = False,
) -> str:
    return "\n".join(text_lines(screen or Screen(), verdicts, limit=limit, is_quiet=is_quiet))


def places(*names: str) -> list[str]:
    return [
        f"{len(group.findings)} {group.file}"
        for group in group_similar([finding(file=name) for name in names], path="somewhere")
    ]


def test_findings_fold_where_only_numbers_differ() -> None:
    assert places(*(f"__{n}_0.distcp" for n in range(8))) == ["8 __[0-7]_0.distcp"]
    assert places("mp_rank_00/x", "mp_rank_01/x", "mp_rank_03/x") == ["3 mp_rank_[00-01,03]/x"]
    assert places("a.0", "b.0", "a.1") == ["2 a.[0-1]", "1 b.0"]
    assert places("x") == ["1 x"]


def test_folding_loses_nothing() -> None:
    grid = [f"r{rank}/l{layer}" for rank in range(2) for layer in range(3)]
    assert places(*grid) == ["6 r[0-1]/l[0-2]"]
    assert sorted(places(*grid[:-1])) == ["2 r1/l[0-1]", "3 r0/l[0-2]"]


def test_names_that_differ_in_zeros_stay_two_names() -> None:
    assert places("x1", "x01") == ["2 x[01,1]"]
    assert places("x9", "x10", "x09") == ["3 x[09,10,9]"]


def test_numbers_of_any_length_are_no_trouble() -> None:
    assert places("9" * 5000, "8" * 5000) == [f"1 {'9' * 5000}", f"1 {'8' * 5000}"]


def test_what_differs_is_shown_by_example() -> None:
    (group,) = group_similar(
        [finding(file=f"f{n}", expected="8 bytes", found=f"{n} bytes") for n in range(3)], path="p"
    )
    assert group.message == "for example: the file ends early (expected 8 bytes, found 0 bytes)"


def test_findings_of_other_words_severities_and_hints_do_not_fold() -> None:
    rows = [
        finding(file="f0"),
        finding(file="f1", message="another thing"),
        finding(file="f2", severity=Severity.NOTE),
        finding(file="f3", hint="another hint"),
    ]
    assert len(group_similar(rows, path="p")) == 4


def test_a_whole_checkpoint_takes_few_lines_and_says_what_was_not_read() -> None:
    assert page(verdict()) == "\n".join(
        [
            "✓ no findings in runs/iter_0000010",
            "  format     dcp",
            "  size       3 files, 4.00 KiB, 7 tensors",
            "  read       names, sizes and metadata, in 0.25 s",
            "  unchecked  container headers (--headers); checksums, NaN, zeros, replicas (--deep)",
        ]
    )
    assert "unchecked  checksums, NaN, zeros, replicas (--deep)" in page(
        verdict(level=Level.HEADERS)
    )
    deep = page(verdict(level=Level.DEEP))
    assert "unchecked" not in deep
    assert "every byte, in 0.25 s, 16.0 KiB/s" in deep


def test_findings_stand_below_their_code_with_places_values_and_a_hint() -> None:
    findings = [
        finding(
            file=f"__{n}_0.distcp", expected="100 bytes", found="64 bytes", hint="copy it again"
        )
        for n in range(4)
    ]
    text = page(
        verdict(
            [
                *findings,
                finding("CK200", Severity.WARNING, message="odd", key="w", rank="mp_rank_00"),
            ]
        )
    )
    assert text.splitlines()[0] == "✗ 4 errors, 1 warning in runs/iter_0000010"
    assert text.splitlines()[5:] == [
        "",
        f"  error CK100 {codes()['CK100'].title} × 4",
        "    4 × __[0-3]_0.distcp  the file ends early (expected 100 bytes, found 64 bytes)",
        "    → copy it again",
        "",
        f"  warning CK200{' ' + codes()['CK200'].title if 'CK200' in codes() else ''}",
        "    w · mp_rank_00  odd",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("has_color", [True, False])
def test_lines_fit_in_a_terminal(width: int, has_color: bool) -> None:
    findings = [
        finding(
            message="many words " * 12,
            file="some/file.pt",
            key=f"k{'y' * n}",
            hint="do this and that " * 9,
        )
        for n in range(20)
    ]
    lines = page(verdict(findings), screen=Screen(width, has_color)).splitlines()
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert max(map(columns_of, plain)) <= width
    assert (lines != plain) == has_color


def test_at_most_some_places_of_a_code_are_shown() -> None:
    findings = [finding(file=f"{'x' * n}.pt") for n in range(1, 21)]
    assert "… 12 more; --limit 0 shows all" in page(verdict(findings))
    assert "more;" not in page(verdict(findings), limit=0)
    assert "… 19 more; --limit 0 shows all" in page(verdict(findings), limit=1)


def test_what_does_not_count_is_counted() -> None:
    acceptance = Acceptance(
        ignored=parse_patterns(["CK100:a"], known=codes()),
        known=frozenset({finding(file="b").fingerprint}),
    )
    text = page(verdict([finding(file="a"), finding(file="b")], acceptance=acceptance))
    assert text.startswith("✓ no findings in")
    assert "ignored    1 finding (CK100)" in text
    assert "known      1 finding (CK100)" in text


def test_quiet_shows_only_checkpoints_with_errors() -> None:
    good, bad = verdict([finding(severity=Severity.NOTE)]), verdict([finding()])
    assert page(good, is_quiet=True) == ""
    assert page(good, bad, is_quiet=True) == page(bad)
    assert page(good, bad).endswith("2 checkpoints: 1 with errors")
    assert page(good, good).endswith("2 checkpoints: none with errors")


def test_hostile_names_move_no_cursor() -> None:
    hostile = finding(
        message=HOSTILE, file=HOSTILE, key=HOSTILE, rank=HOSTILE, expected=HOSTILE, hint=HOSTILE
    )
    for screen in (Screen(), Screen(60), Screen(60, has_unicode=False)):
        lines = page(verdict([hostile], path=HOSTILE), screen=screen).splitlines()
        assert all(line.isprintable() for line in lines)
        assert not any(line.lstrip().startswith("::") or "##[" in line for line in lines), (
            "GitHub's runner would obey"
        )


def test_a_long_place_is_broken_between_its_parts() -> None:
    key = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    result = verdict([finding(file="__0_0.distcp", key=key, span=(135_358, 135_486))])
    for screen, width in ((Screen(), 100), (Screen(width=80), 80)):
        lines = page(result, screen=screen).splitlines()
        assert max(map(columns_of, lines)) <= width
        assert any(line.strip().startswith(key) or f"· {key}" in line for line in lines)
