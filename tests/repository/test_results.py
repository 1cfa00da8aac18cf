"""The published results of the benches: recorded by name, and each on a page."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.measure import Case, Run
from scripts.benchmarks.results import RESULTS_PATH, format_results, list_table_rows, record_cases


def test_recording_replaces_rows_and_drops_runs_that_no_row_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    row = {"name": "a", "result": 9.0, "unit": "× copy", "run": "old"}
    kept = {"name": "z", "result": 5.0, "unit": "s", "run": "kept"}
    path.write_text(
        format_results({"runs": {"old": "m", "kept": "m"}, "cases": {"scale": [row, kept]}})
    )
    monkeypatch.setattr(
        sys, "argv", ["scripts/bench scale", "--runs", "2", "--scratch", "/x", "--record"]
    )
    ours = [Run(1.0, 1.0, 30_000_000, ""), Run(3.0, 1.0, 47_000_000, "")]
    memory = Case("a: memory", ours=ours, value=47.0, unit="MB")
    record_cases([Case("a", ours=ours, copies=[2.0, 2.0]), memory], path)
    results = json.loads(path.read_text())
    new, other = results["cases"]["scale"]
    assert other == kept
    assert (new["result"], new["range"], new["memory_mb"]) == (1.0, [0.5, 1.5], [47, 47])
    assert new["run"].endswith(" scripts/bench scale --runs 2")
    assert set(results["runs"]) == {new["run"], "kept"}


def test_ends_of_names_are_columns_and_a_range_needs_no_median() -> None:
    ends = (", 1 thread: GPU", ", kernel alone", "")
    rows = [{"name": f"a{end}", "result": n, "unit": "s"} for n, end in enumerate(ends)]
    rows.append({"name": "b, 2", "range": [2.8, 6.0], "unit": "s", "memory_mb": [4, 5]})
    assert list_table_rows(rows) == (
        ["work", "1 thread: GPU", "kernel alone", "result", "memory"],
        [["a", "0 s", "1 s", "2 s", ""], ["b, 2", "", "", "2.8–6 s", "4–5 MB"]],
    )


def test_the_file_of_results_is_as_recording_writes_it() -> None:
    text = RESULTS_PATH.read_text("utf-8")
    assert format_results(json.loads(text)) == text


def test_every_result_is_on_the_page_of_numbers(repo_dir: Path) -> None:
    page = (repo_dir / "docs/explanation/numbers.md").read_text("utf-8")
    blocks = re.findall(r"<!-- generated: figures (\w+) (.+) -->", page)
    results = json.loads(RESULTS_PATH.read_text("utf-8"))
    for bench, rows in results["cases"].items():
        for row in rows:
            patterns = [pattern for name, pattern in blocks if name == bench]
            assert sum(bool(re.search(p, row["name"])) for p in patterns) == 1, row["name"]
            assert row["run"] in results["runs"]


def test_other_pages_refer_to_the_figures_of_speed_instead_of_repeating_them(
    repo_dir: Path,
) -> None:
    folders = ("guide", "howto", "tasks", "adding")
    pages = [page for name in folders for page in (repo_dir / "docs" / name).glob("*.md")]
    repeated = []
    for page in (*pages, repo_dir / "README.md", repo_dir / "docs/index.md"):
        text = re.sub(
            r"^(```).*?^\1|<!-- generated: .*?<!-- end: ",
            "",
            page.read_text("utf-8"),
            flags=re.MULTILINE | re.DOTALL,
        )
        figures = re.findall(r"\d ?× (?:the|as|copy)|\d ?[GM]i?B/s|times as \w+", text)
        repeated += [f"{page.relative_to(repo_dir)}: {figure}" for figure in figures]
    assert repeated == []
