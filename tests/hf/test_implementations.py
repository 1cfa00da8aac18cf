"""Megatron's implementations: Transformer Engine's module names are the default from Hugging Face.

tests/golden has Megatron-Bridge's own names of such models (``test_towers``); Transformer Engine
itself does not run on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.api.verbs import diff, merge
from core.hf.family import read_family
from core.hf.to_megatron import to_megatron
from core.verbs.convert.job import Job, TopologyChange
from core.verbs.convert.run import run
from tests.hf.models import arguments, catalog_of, config_of, saved
from tests.support.starship import write_starship

_RANK_LAYER = (
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj._extra_state",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv._extra_state",
    "self_attention.q_layernorm.weight",
    "self_attention.q_layernorm._extra_state",
    "self_attention.k_layernorm.weight",
    "self_attention.k_layernorm._extra_state",
    "pre_mlp_layernorm.weight",
    "pre_mlp_layernorm._extra_state",
    "mlp.router.weight",
    "mlp.experts.linear_fc1.weight0",
    "mlp.experts.linear_fc1.weight1",
    "mlp.experts.linear_fc1._extra_state",
    "mlp.experts.linear_fc2.weight0",
    "mlp.experts.linear_fc2.weight1",
    "mlp.experts.linear_fc2._extra_state",
)
"""Entries of a layer with two experts on the rank: the modules that megatron-core 0.16.1 builds in
``get_gpt_layer_with_transformer_engine_spec``. Each has a state in Transformer Engine 1.13 and
later; the attention core loads without one."""


def _ranks(dst: Path) -> list[dict[str, Any]]:
    paths = sorted(dst.glob("iter_0000001/*/model_optim_rng.pt"))
    return [torch.load(path, weights_only=False) for path in paths]


def test_rank_files_have_the_modules_of_transformer_engine_by_default(tmp_path: Path) -> None:
    folder, dst = saved("qwen3_moe", tmp_path / "model"), tmp_path / "ranks"
    change = TopologyChange(ep=2)
    report = run(Job(src=folder, dst=dst, to="megatron", topology=change, fsync=False))
    for content in _ranks(dst):
        args, model = content["args"], content["model"]
        assert (args.transformer_impl, args.moe_grouped_gemm) == ("transformer_engine", True)
        start = "decoder.layers.0."
        layer = [name.removeprefix(start) for name in model if name.startswith(start)]
        assert layer == list(_RANK_LAYER)
        assert "decoder.final_layernorm._extra_state" in model
        assert not any(model[name] for name in model if name.endswith("_extra_state"))
    notes = "\n".join(report.notes)
    assert "module names are for Transformer Engine, Megatron's default" in notes
    assert "start Megatron with --moe-grouped-gemm, or convert with --experts sequential" in notes


def test_an_option_chooses_the_other_module_of_experts(tmp_path: Path) -> None:
    folder, dst = saved("qwen3_moe", tmp_path / "model"), tmp_path / "ranks"
    report = run(Job(src=folder, dst=dst, to="megatron", experts="sequential", fsync=False))
    (content,) = _ranks(dst)
    module = "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1"
    assert {f"{module}.weight", f"{module}._extra_state"} <= content["model"].keys()
    assert content["args"].transformer_impl == "transformer_engine"
    assert not content["args"].moe_grouped_gemm
    assert not any("start Megatron with --moe-grouped-gemm" in note for note in report.notes)


def test_the_other_implementation_has_to_be_named(tmp_path: Path) -> None:
    folder, dst = saved("llama", tmp_path / "model"), tmp_path / "ranks"
    report = run(Job(src=folder, dst=dst, to="megatron", transformer_impl="local", fsync=False))
    (content,) = _ranks(dst)
    assert content["args"].transformer_impl == "local"
    assert "decoder.layers.0.input_layernorm.weight" in content["model"]
    assert "decoder.layers.0.self_attention.linear_qkv._extra_state" in content["model"]
    assert not any("norm._extra_state" in name for name in content["model"])
    assert not any("module names" in note for note in report.notes)


def test_a_familys_own_table_may_state_the_other_one(golden: Path, tmp_path: Path) -> None:
    write_starship(golden / "hf/llama/safetensors_single", tmp_path)
    table = tmp_path / "starship.toml"
    table.write_text(f'implementation = "local"\n{table.read_text()}')
    folder = tmp_path / "models/starship"
    _, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder), family=read_family(table))
    assert arguments(middle)["transformer_impl"] == "local"
    assert "module names are for --transformer-impl local" in middle.notes


@pytest.mark.parametrize(
    ("name", "has_local"), [("llama", True), ("olmo2", False), ("nemotron_h", False)]
)
def test_only_what_the_other_one_can_build_is_advised_to_use_it(
    name: str, has_local: bool, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    notes = to_megatron(catalog_of(folder)[1], config_of(folder)).notes
    (note,) = [note for note in notes if note.startswith("module names are for")]
    assert ("--transformer-impl local" in note) is has_local


@pytest.mark.parametrize("impl", [None, "local"])
def test_models_of_both_implementations_are_compared_and_merged_with_the_original(
    impl: str | None, tmp_path: Path
) -> None:
    folder, megatron = saved("qwen3", tmp_path / "model"), tmp_path / "megatron"
    run(Job(src=folder, dst=megatron, to="torch_dist", transformer_impl=impl, fsync=False))
    assert diff(folder, megatron).same
    other = tmp_path / "other"
    other_impl = None if impl else "local"
    run(Job(src=folder, dst=other, to="megatron", transformer_impl=other_impl, fsync=False))
    assert diff(megatron, other, tensors_only=True).same

    # The mean of a model with itself is the model; the names are those of the first one.
    merge([megatron, folder, other], tmp_path / "mean", average=True)
    assert diff(tmp_path / "mean", megatron, tensors_only=True).same
    merge([folder, megatron], tmp_path / "hf", average=True)
    assert diff(tmp_path / "hf", folder, tensors_only=True).same


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa", "gemma", "qwen3_5", "nemotron_h"])
def test_no_local_model_is_offered_where_megatron_builds_none(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    catalog, config = catalog_of(folder)[1], config_of(folder)
    assert "pass --transformer-impl local" not in " ".join(to_megatron(catalog, config).notes)
    local = " ".join(to_megatron(catalog, config, transformer_impl="local").notes)
    assert "omit the option to get Transformer Engine's names" in local
    for other in ("llama", "nemotron"):  # nemotron: LayerNorm minus one, which Apex has
        folder = saved(other, tmp_path / other)
        notes = to_megatron(catalog_of(folder)[1], config_of(folder)).notes
        assert "pass --transformer-impl local" in " ".join(notes)
