"""Megatron-FSDP of megatron-core over checkpoints that another kind of run saved and we converted.

The runs with Megatron-FSDP need einops, which scripts/framework-tests has.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run as convert
from tests.megatron.placement.test_fsdp_dtensor import (
    BF16,
    DENSE,
    EXPERTS,
    RUNS,
    STEP,
    place_in,
    truth,
)
from tests.real_megatron.megatron import ROOT, Form, megatron
from tests.real_megatron.setting import Layout, Model, Optimizer, Run

PYTHON = os.environ.get("CKPT_MEGATRON_FSDP_PYTHON")
"""An interpreter with einops, as scripts/framework-tests has it; else that of the tests."""
if PYTHON is None and importlib.util.find_spec("einops") is None:
    pytest.skip("einops is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow


def loaded(run: Run, folder: Path, *, out: Path, optim: bool = True) -> dict[str, Any]:
    """What Megatron-FSDP has after it loaded a checkpoint strictly, and after two more steps."""
    run_file, result = out / "run.json", out / "result.pt"
    out.mkdir()
    run_file.write_text(json.dumps(run.as_json()))
    script = ROOT / "tests/golden/frameworks/megatron_fsdp_load.py"
    subprocess.run(
        [
            PYTHON or sys.executable,
            "-W",
            "ignore",
            str(script),
            str(run_file),
            str(folder),
            str(result),
            *([] if optim else ["--no-optim"]),
        ],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    values: dict[str, Any] = torch.load(result)
    return values


def by_sample(losses: list[list[float]]) -> list[float]:
    """Losses of all data parallel ranks, which take turns, in the order of samples."""
    return [loss for turn in zip(*losses, strict=True) for loss in turn]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("dense_dp2", Layout(dp=2)),
        ("dense_dp2", Layout(tp=2)),
        ("experts", Layout()),
        ("experts", Layout(dp=2, ep=2)),
        ("experts", Layout(tp=2)),
        ("experts_ep2", Layout(dp=2)),
        ("tied_tp2", Layout(dp=2)),
        ("tied_tp2", Layout(tp=2)),
    ],
)
def test_megatron_fsdp_goes_on_as_from_its_own_checkpoint(
    megatron_fsdp: Path, tmp_path: Path, case: str, layout: Layout
) -> None:
    src = megatron_fsdp / case
    convert(Job(src=src, dst=tmp_path / "dist", to="torch_dist"))
    run = RUNS[case].at(layout)
    change = TopologyChange(tp=layout.tp, ep=layout.ep if run.model.experts is not None else None)
    convert(Job(src=tmp_path / "dist", dst=tmp_path / "back", to="fsdp_dtensor", topology=change))
    ours = loaded(run, tmp_path / "back" / STEP, out=tmp_path / "ours")
    own = loaded(run, src / STEP, out=tmp_path / "own")
    assert ours["losses"] == own["losses"]
    for moment in ("before", "after"):
        assert ours[moment].keys() == own[moment].keys()
        for key, tensor in own[moment].items():
            assert torch.equal(ours[moment][key], tensor), (moment, key)
    for key, tensor in truth(src).items():
        n_rows = run.model.vocab if "embed" in key or "output_layer" in key else None
        assert torch.equal(ours["before"][key][:n_rows], tensor[:n_rows]), key


@dataclass(frozen=True)
class Source:
    """A run without Megatron-FSDP, the form in which it was saved, and the run that goes on.

    Args:
        to: layout of the run with Megatron-FSDP.
    """

    model: Model
    layout: Layout
    form: Form
    optimizer: Optimizer
    to: Layout


TORCH_DIST = Form("torch_dist", "fully_reshardable")
SOURCES = {
    "rank_files": Source(DENSE, Layout(tp=2, pp=2), Form(), BF16, Layout(dp=2)),
    "experts": Source(EXPERTS, Layout(ep=2, dp=2), TORCH_DIST, BF16, Layout(ep=2, dp=2)),
    "experts_of_rank_files": Source(EXPERTS, Layout(ep=2, dp=2), Form(), BF16, Layout(dp=2)),
    "tied_to_tp2": Source(
        replace(DENSE, is_tied=True), Layout(), Form(), Optimizer(), Layout(tp=2, dp=2)
    ),
}
"""No destination has one data parallel rank: there 0.16.1 adds every gradient twice."""


@pytest.mark.parametrize("name", SOURCES)
def test_megatron_fsdp_goes_on_with_a_run_without_fsdp(tmp_path: Path, name: str) -> None:
    source = SOURCES[name]
    run = Run(model=source.model, layout=source.layout, optimizer=source.optimizer)
    with megatron() as worker:
        before = worker.save(run, [(source.form, tmp_path / "src")], out=tmp_path / "saved")
    ep = source.to.ep if source.model.experts is not None else None
    change = TopologyChange(tp=source.to.tp, ep=ep)
    convert(Job(src=tmp_path / "src", dst=tmp_path / "out", to="fsdp_dtensor", topology=change))
    after = loaded(run.at(source.to), tmp_path / "out" / STEP, out=tmp_path / "fsdp")

    # Masters and moments are those of the run, and it trains on with the same losses.
    live = {
        place.replace("/", ".", 1).replace("fp32_param", "param", 1): tensor
        for place, tensor in before.before.items()
    }
    for key, tensor in after["before"].items():
        n = source.model.vocab if "embed" in key or "output_layer" in key else None
        assert torch.equal(place_in(live, key)[:n], tensor[:n]), key
    losses = after["losses"][:: source.to.tp]  # those of TP ranks are the same
    assert by_sample(losses) == pytest.approx(before.losses, rel=5e-3)
