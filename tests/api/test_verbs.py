"""The verbs as functions of core, and as the packages that have their names."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

import core
from core.errors import UsageError

RUN = "mcore_legacy/dense_gqa/tp2_pp2_optim"


def test_convert_reshard_diff_and_validate(golden: Path, tmp_path: Path) -> None:
    report = core.reshard(golden / RUN, tmp_path / "tp1", tp=1, pp=1)
    assert report.n_tensors > 0
    # What Megatron itself saved at TP1.
    truth = golden / "mcore_legacy/dense_gqa/tp1_pp1_optim"
    assert core.diff(tmp_path / "tp1", truth, entries=False).same
    assert not core.diff(tmp_path / "tp1", golden / "mcore_legacy/dense_gelu/tp1_pp1").same
    assert core.validate(tmp_path / "tp1", level="deep").findings == ()
    core.convert(tmp_path / "tp1", tmp_path / "model.pt", optimizer=False, names="hf")


def test_the_suffix_and_the_names_imply_the_format(golden: Path, tmp_path: Path) -> None:
    report = core.convert(golden / "hf/qwen2_tied/safetensors_single", tmp_path / "model.pt")
    assert report.format == "torch"
    assert "model.norm.weight" in torch.load(tmp_path / "model.pt", weights_only=True)
    report = core.convert(golden / RUN, tmp_path / "hf", names="hf", optimizer=False)
    assert report.format == "safetensors"
    assert (tmp_path / "hf/config.json").exists()


def test_inspect_returns_the_summary(golden: Path) -> None:
    assert core.inspect(golden / RUN).parallel["tp"] == 2


def test_wrong_arguments(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no target size"):
        core.reshard(golden / RUN, tmp_path / "x")
    with pytest.raises(UsageError, match="Did you mean torch_dist"):
        core.convert(golden / RUN, to="torchdist")
    with pytest.raises(UsageError, match="Did you mean bf16"):
        core.convert(golden / RUN, dtype="b16")
    with pytest.raises(UsageError, match="level='all' is none of: metadata, headers, deep"):
        core.validate(golden / RUN, level="all")


def test_every_verb_has_a_function() -> None:
    assert callable(core.reshard)
    assert "optimizer" in inspect.signature(core.convert).parameters
    assert "level" in inspect.signature(core.validate).parameters


def test_progress_is_told_in_bytes_up_to_all_of_them(golden: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    report = core.convert(
        golden / "torch_dcp/tp2_only",
        tmp_path / "out",
        to="torch_dist",
        progress=lambda done, total: reports.append((done, total)),
    )
    done, total = reports[-1]
    assert 0 < done == total <= report.bytes_written
    assert {of for _, of in reports} == {total}
