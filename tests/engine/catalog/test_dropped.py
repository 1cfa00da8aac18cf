from __future__ import annotations

from pathlib import Path

import torch

from core.engine.catalog.dropped import Dropped, dropped_each, dropped_together
from core.verbs.convert.job import Job
from core.verbs.convert.report.dropped import dropped_lines, group_by_reason
from core.verbs.convert.run import run


def test_an_entry_prints_its_reason_and_files_print_together() -> None:
    assert str(Dropped(("args",), "not stored")) == "args (not stored)"
    assert str(Dropped(("args",), "")) == "args"
    assert list(map(str, dropped_each(("a", 1), "why"))) == ["a (why)", "1 (why)"]
    assert list(map(str, dropped_together(("a", "b"), "files"))) == ["files: a, b"]
    assert dropped_together((), "files") == ()


def test_names_with_brackets_and_colons_are_not_taken_for_reasons() -> None:
    dropped = dropped_each(("files next to the weights: a (b).0.x", "layers.0.w"), "why (so)")
    dropped += dropped_each(("layers.1.w",), "why (so)")
    (reason,) = group_by_reason(dropped)
    assert reason.reason == "why (so)" and reason.n_entries == 3
    assert reason.examples == ("files next to the weights: a (b).0.x", "layers.0.w")
    assert dropped_lines(dropped) == (
        "files next to the weights: a (b).0.x (why (so))",
        "layers.[0-1].w (why (so))",
    )


def test_only_the_optimizer_itself_and_its_parts_are_of_the_optimizer() -> None:
    for name in ("optimizer", "optimizer.state.exp_avg.w", "optimizer state 'row' of flat group 0"):
        assert Dropped((name,), "why").is_of_optimizer
    for name in ("optimizer_head.weight", "args", "optimizers"):
        assert not Dropped((name,), "why").is_of_optimizer


def test_a_report_names_a_key_with_brackets_whole(tmp_path: Path) -> None:
    key = "files next to the weights: a (b)"
    torch.save({"w": torch.ones(2), key: b"bytes"}, tmp_path / "src.pt")
    report = run(Job(src=tmp_path / "src.pt", dst=tmp_path / "dst", to="orbax", fsync=False))
    (reason,) = report.dropped_reasons
    assert (reason.reason, reason.examples) == ("Orbax trees cannot contain bytes", (key,))
    assert report.dropped == (f"{key} (Orbax trees cannot contain bytes)",)
