"""A launch that has published its destination is not told that the destination exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_cli.launch_results import RESULTS_VARIABLE
from ckpt_cli.published import recalled, remember
from core.job import Report
from core.team import Figures


def report(dst: Path) -> Report:
    numbers = dict.fromkeys(
        ("n_tensors", "bytes_read", "bytes_written", "bytes_resumed", "bytes_verified", "n_copies"), 1
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
        dropped=(),
        workers=(Figures(0, "h", 1, 2, 0.5), Figures(1, "h", 1, 2, 0.5)),
        **numbers,
    )


def test_the_next_attempt_finds_what_was_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dst = tmp_path / "out"
    dst.mkdir()
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "launch" / "attempt_0"))
    (tmp_path / "launch" / "attempt_0").mkdir(parents=True)
    assert recalled() is None
    remember(report(dst))
    monkeypatch.setenv(RESULTS_VARIABLE, str(tmp_path / "launch" / "attempt_1"))
    assert recalled() == report(dst)
    dst.rename(tmp_path / "old")
    assert recalled() is None
    dst.mkdir()
    assert recalled() is None, "another directory has the name"
    monkeypatch.delenv(RESULTS_VARIABLE)
    remember(report(dst))
    assert recalled() is None
