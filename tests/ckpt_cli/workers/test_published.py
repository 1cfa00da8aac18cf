"""A launch that has published its destination is not told that the destination exists."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_cli.host.results import RESULTS_VARIABLE
from ckpt_cli.workers.published import finish_published, recall_report, remember_report
from core.engine.team.protocol import Figures
from core.publish.stage.folder_lock import stage_dir_of
from core.verbs.convert.job import Report
from core.verbs.convert.report.dropped import DroppedReason


def report(dst: Path) -> Report:
    numbers = dict.fromkeys(
        ("n_tensors", "bytes_read", "bytes_written", "bytes_resumed", "bytes_verified", "n_copies"),
        1,
    )
    return Report(
        src="a",
        dst=str(dst),
        source_format="dcp",
        format="torch",
        seconds=1.5,
        files=("x", "y"),
        n_fingerprints=0,
        n_read_back=0,
        manifest="m",
        notes=("note",),
        dropped=("a (why)", "b (why)"),
        dropped_reasons=(DroppedReason("why", 2, ("a", "b")),),
        next="load_file()",
        workers=(Figures(0, "h", 1, 2, 0.5), Figures(1, "h", 1, 2, 0.5)),
        **numbers,
    )


def test_the_next_attempt_finds_what_was_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "launch" / "attempt_0"))
    (tmp_path / "launch" / "attempt_0").mkdir(parents=True)
    assert recall_report() is None
    remember_report(report(dst), dst.stat().st_ino)
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "launch" / "attempt_1"))
    assert recall_report() == report(dst)
    dst.rename(tmp_path / "old")
    assert recall_report() is None
    dst.mkdir()
    assert recall_report() is None, "another directory has the name"
    monkeypatch.delenv(RESULTS_VARIABLE)
    remember_report(report(dst), dst.stat().st_ino)
    assert recall_report() is None


def test_what_is_remembered_before_the_rename_counts_after_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = tmp_path / "launch" / "attempt_0"
    launch.mkdir(parents=True)
    monkeypatch.setenv(RESULTS_VARIABLE, str(launch))
    dst = tmp_path / "out.pt"
    dst.write_text("old")
    data = stage_dir_of(dst) / "data"
    data.mkdir(parents=True)
    (data / dst.name).write_text("new")
    (data / "out.pt.ckpt-manifest.json").write_text("manifest")
    remember_report(report(dst), (data / dst.name).stat().st_ino)
    monkeypatch.delenv(RESULTS_VARIABLE)
    assert recall_report(launch) is None, "the old one still has the name"
    (data / dst.name).replace(dst)
    recalled = recall_report(launch)
    assert recalled is not None and finish_published(recalled) == report(dst)
    assert (tmp_path / "out.pt.ckpt-manifest.json").read_text() == "manifest"
    assert not stage_dir_of(dst).exists() and finish_published(recalled) == recalled


def test_what_stood_at_the_destination_goes_when_the_new_one_has_its_name(tmp_path: Path) -> None:
    dst, old = tmp_path / "out", stage_dir_of(tmp_path / "out") / "data" / "x"
    dst.mkdir()
    old.parent.mkdir(parents=True)
    old.write_text("old")
    finish_published(report(dst))
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not list(dst.iterdir())


def test_of_a_store_the_report_alone_tells_that_all_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "launch" / "attempt_0"))
    (tmp_path / "launch" / "attempt_0").mkdir(parents=True)
    url = "s3://runs/out"
    written = replace(report(tmp_path), dst=url)
    assert recall_report() is None
    remember_report(written, 0)
    assert recall_report() == written
    assert finish_published(written) == written
    assert not (tmp_path / "s3:").exists()
