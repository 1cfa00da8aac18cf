"""What is told without a plan is what the plans say."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_cli.app import main
from core.errors import CheckpointingException
from core.hf.to_megatron import to_megatron
from core.opening.open import open_checkpoint
from core.verbs.inspect.capabilities import capabilities_of
from core.verbs.inspect.capability import (
    ModelTraits,
    list_dense_capabilities,
    list_plain_capabilities,
)
from tests.hf.models import DENSE, MOE, config_of, saved
from tests.support.covering import every_third

UNDESCRIBED = "neither Megatron training arguments nor a config.json (pass one with --config FILE)"
GOLDEN = {
    "torch_dcp/fsdp2_dp2": True,
    "torch_dcp/bf16_fsdp2_dp2_modelonly": False,
    "hf/llama/torch_single/model_zip.pt": False,
    "orbax/ocdbt_zarr3": False,
    "oracle/hf/llama.safetensors": False,
    "oracle/dense_gqa/global_optim.safetensors": None,
}
"""Name → the ``has_optimizer`` for which the answers need no plans."""


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
    assert plain == (planned if has_optimizer is GOLDEN[name] else None)


def test_a_model_file_without_config_json_says_what_to_hf_needs(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = golden / "hf/llama/safetensors_single"
    path = tmp_path / "bare.safetensors"
    shutil.copyfile(model / "model.safetensors", path)
    assert main(["inspect", str(path)]) == 0
    assert f"convert to megatron, hf: {UNDESCRIBED}" in capsys.readouterr().out
    line = ["convert", str(path), str(tmp_path / "out"), "--to", "hf"]
    assert main(line) != 0
    assert main([*line, "--config", str(model / "config.json")]) == 0


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


@pytest.mark.parametrize("case", PLAIN)
def test_plain_state_dicts_need_no_plan(case: str, tmp_path: Path) -> None:
    torch.save(PLAIN[case], tmp_path / "x.pt")
    plain, planned = answers(tmp_path / "x.pt", has_optimizer="states" in case)
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


@pytest.mark.parametrize("case", ODD)
def test_anything_else_is_planned(case: str, tmp_path: Path) -> None:
    torch.save(ODD[case], tmp_path / "x.pt")
    try:
        plain, _ = answers(tmp_path / "x.pt", has_optimizer=False)
    except CheckpointingException:
        return
    assert plain is None


OF_MODEL = ModelTraits(layout_refusal=None, is_hf=True, has_optimizer=False, has_scales=False)


def model_answers(path: Path) -> tuple[object, object]:
    """The answers for a model of transformers without plans, None if there are none, and with."""
    opened = open_checkpoint(path)
    try:
        unsharded = to_megatron(opened.catalog, config_of(path))
        dense = list_dense_capabilities(opened, OF_MODEL, unsharded)
        return dense, None if dense is None else capabilities_of(opened, OF_MODEL)
    finally:
        opened.store.close()


@pytest.mark.each_value
@pytest.mark.parametrize("name", every_third(DENSE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_models_get_the_answers_of_plans(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    dense, planned = model_answers(saved(name, tmp_path / "model", dtype=dtype))
    assert dense == planned


@pytest.mark.parametrize("name", ["llama", "llama_tied", "mistral", "phi3", "qwen2", "qwen3"])
def test_usual_models_need_no_plan(name: str, tmp_path: Path) -> None:
    dense, _ = model_answers(saved(name, tmp_path / "model"))
    assert dense is not None


@pytest.mark.parametrize("name", MOE[:3])
def test_models_with_experts_are_planned(name: str, tmp_path: Path) -> None:
    assert model_answers(saved(name, tmp_path / "model")) == (None, None)


def test_a_model_beside_unusual_files_is_planned(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    assert model_answers(folder)[0] is not None
    (folder / "trainer_notes.json").write_text("{}")
    assert model_answers(folder) == (None, None)
