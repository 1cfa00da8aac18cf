"""What is told without a plan is what the plans say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import CheckpointingException
from core.inspect.capabilities import capabilities_of
from core.inspect.capability import ModelTraits, list_plain_capabilities
from core.opening.open import open_checkpoint

UNDESCRIBED = "neither training arguments of Megatron nor a config.json (--config names one)"
GOLDEN = [
    "torch_dcp/fsdp2_dp2",
    "torch_dcp/bf16_fsdp2_dp2_modelonly",
    "hf/llama/torch_single/model_zip.pt",
    "orbax/ocdbt_zarr3",
    "oracle/hf/llama.safetensors",
    "oracle/dense_gqa/global_optim.safetensors",
]


def answers(path: Path, *, has_optimizer: bool) -> tuple[object, object]:
    """The answers without plans, None if there are none, and those of the plans."""
    opened = open_checkpoint(path)
    model = ModelTraits(
        layout_refusal=UNDESCRIBED,
        is_hf=False,
        has_optimizer=has_optimizer,
        has_scales=False,
        is_undescribed=True,
    )
    try:
        return list_plain_capabilities(opened, model), capabilities_of(opened, model)
    finally:
        opened.store.close()


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_golden_checkpoints_get_the_answers_of_plans(
    name: str, has_optimizer: bool, golden: Path
) -> None:
    plain, planned = answers(golden / name, has_optimizer=has_optimizer)
    assert plain in (None, planned)


STATE = {
    "optimizer.state.w.exp_avg": torch.zeros(2, 3),
    "optimizer.state.w.step": torch.tensor(3.0),
    "optimizer.param_groups.0.lr": 0.1,
}
PLAIN: dict[str, dict[str, Any]] = {
    "one tensor": {"w": torch.zeros(2, 3)},
    "half": {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "n": torch.tensor(1)},
    "values": {"w": torch.zeros(2, 3), "step": 3, "names": ["a", None, {"b": 1.5}]},
    "nested": {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(2)}, "epoch": 1},
    "states": {"w": torch.zeros(2, 3), **STATE},
    "states of half": {"w": torch.zeros(2, 3, dtype=torch.bfloat16), **STATE},
    "states of nothing": {"v": torch.zeros(2, 3), **STATE},
}


@pytest.mark.parametrize("what", PLAIN)
def test_plain_state_dicts_need_no_plan(what: str, tmp_path: Path) -> None:
    torch.save(PLAIN[what], tmp_path / "x.pt")
    plain, planned = answers(tmp_path / "x.pt", has_optimizer="states" in what)
    assert plain is not None
    assert plain == planned


ODD: dict[str, dict[str, Any]] = {
    "a name of a file": {"zarr.json": torch.zeros(2)},
    "a name that is a path": {"a/b": torch.zeros(2)},
    "a name and a name below it": {"a": torch.zeros(2), "a.b": torch.zeros(2)},
    "names that differ in case": {"a": torch.zeros(2), "A": torch.zeros(2)},
    "a number as key": {"w": torch.zeros(2), "d": {1: 2}},
    "a long integer": {"w": torch.zeros(2), "n": 1 << 70},
    "complex numbers": {"w": torch.zeros(2, dtype=torch.complex64)},
    "no elements": {"w": torch.zeros(0)},
    "no tensors": {"n": 1},
    "a class": {"w": torch.zeros(2), "p": Path("x")},
}


@pytest.mark.parametrize("what", ODD)
def test_anything_else_is_planned(what: str, tmp_path: Path) -> None:
    torch.save(ODD[what], tmp_path / "x.pt")
    try:
        plain, _ = answers(tmp_path / "x.pt", has_optimizer=False)
    except CheckpointingException:
        return
    assert plain is None
