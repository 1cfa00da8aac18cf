from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.opening.open import open_checkpoint
from core.verbs.inspect.model_description import ModelDescription
from core.verbs.inspect.summary import summarize
from tests.verbs.inspect.test_summary import catalog_of, checkpoint_of


def described(path: Path) -> ModelDescription:
    checkpoint = open_checkpoint(path, samples=True)
    try:
        return summarize(checkpoint).description
    finally:
        checkpoint.store.close()


def hf_directory(folder: Path, config: dict[str, Any], **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name.replace("__", "."): t for name, t in tensors.items()}, folder / "x.safetensors")
    return folder / "x.safetensors"


@pytest.mark.parametrize(
    ("name", "n_parameters"),
    [
        ("hf/llama/safetensors_sharded", 40_800),
        # The .bin files have lm_head.weight as well, which is the embedding.
        ("hf/qwen2_tied/safetensors_single", 36_832),
        ("hf/qwen2_tied/bin_sharded", 36_832),
        # TP 4 pads 300 rows of the vocabulary to 512, TP 1 to 320.
        ("mcore_legacy/dense_gqa/tp1_pp1", 162_368),
        ("mcore_legacy/dense_gqa/tp4_pp1_optim", 162_368),
        ("mcore0121_torch_dist/dense_gqa/tp2_pp2_optim", 162_368),
        ("mcore0121_zarr/dense_gqa/tp2_pp2_optim", 162_368),
        # The last stage of PP 2 has a copy of the tied embedding.
        ("mcore_legacy/dense_gelu/tp1_pp2", 71_104),
        ("mcore0161_torch_dist/dense_gelu/tp2_pp2", 71_104),
        ("torch_dcp/fsdp2_dp4", 29_984),
    ],
)
def test_each_parameter_counts_once(name: str, n_parameters: int, golden: Path) -> None:
    assert described(golden / name).n_parameters == n_parameters


def test_one_rank_does_not_tell_the_number_of_parameters(golden: Path) -> None:
    rank_dir = golden / "mcore_legacy/dense_gqa/tp2_pp2/iter_0000010/mp_rank_00_000"
    assert described(rank_dir).n_parameters is None


def test_sizes_come_from_the_training_arguments(golden: Path) -> None:
    moe = described(golden / "mcore_legacy/moe_seq/tp2_pp1_ep2")
    assert moe == ModelDescription(
        n_parameters=78_624,
        n_layers=4,
        hidden_size=32,
        n_heads=4,
        n_groups=2,
        ffn_size=64,
        is_swiglu=True,
        n_experts=4,
        n_experts_per_token=2,
        expert_ffn_size=32,
        vocab_size=256,
        padded_vocab_size=256,
        is_tied=False,
    )
    ungrouped = described(golden / "mcore_legacy/dense_gelu/tp1_pp1")
    assert (ungrouped.n_heads, ungrouped.n_groups) == (4, 4)
    assert (ungrouped.is_swiglu, ungrouped.is_tied) == (False, True)


def test_sizes_come_from_the_configuration(golden: Path) -> None:
    assert described(golden / "hf/qwen2_tied/safetensors_sharded") == ModelDescription(
        family="qwen2",
        n_parameters=36_832,
        n_layers=3,
        hidden_size=32,
        n_heads=4,
        n_groups=2,
        ffn_size=80,
        is_swiglu=True,
        vocab_size=130,
        is_tied=True,
    )


def test_a_family_without_a_table_of_names_is_described_too(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 2, "vocab_size": 10}
    path = hf_directory(
        tmp_path / "m",
        {**config, "tie_word_embeddings": True},
        transformer__wte__weight=torch.zeros(10, 4),
        transformer__h__0__attn__c_attn__weight=torch.zeros(4, 12),
        lm_head__weight=torch.zeros(10, 4),
    )
    model = described(path.parent)
    assert (model.family, model.n_layers, model.hidden_size, model.n_heads) == ("gpt2", 1, 4, 2)
    assert (model.n_parameters, model.is_tied, model.n_groups) == (10 * 4 + 4 * 12, True, None)


def test_the_language_model_of_several_is_described(tmp_path: Path) -> None:
    config = {
        "model_type": "llava",
        "text_config": {"hidden_size": 8, "num_hidden_layers": True, "vocab_size": -3},
        "vision_config": {"hidden_size": 99},
    }
    path = hf_directory(tmp_path / "m", config, language_model__a=torch.zeros(3))
    model = described(path.parent)
    assert (model.family, model.hidden_size, model.is_tied) == ("llava", 8, None)
    # Values that are not sizes are not shown as such.
    assert (model.n_layers, model.vocab_size) == (None, None)


def test_scales_are_no_parameters_and_packed_weights_are_not_counted(tmp_path: Path) -> None:
    fp8 = hf_directory(
        tmp_path / "fp8",
        {"model_type": "x", "quantization_config": {"quant_method": "fp8"}},
        a__weight=torch.zeros(8, 8, dtype=torch.float8_e4m3fn),
        a__weight_scale_inv=torch.zeros(1, 1),
    )
    assert described(fp8.parent).n_parameters == 64
    gptq = hf_directory(
        tmp_path / "gptq",
        {"model_type": "x", "quantization_config": {"quant_method": "gptq"}},
        a__qweight=torch.zeros(1, 8, dtype=torch.int32),
        a__qzeros=torch.zeros(1, 1, dtype=torch.int32),
        a__scales=torch.zeros(1, 8),
        a__g_idx=torch.zeros(8, dtype=torch.int32),
    )
    assert described(gptq.parent).n_parameters is None


def test_two_names_of_one_tensor_count_once(tmp_path: Path) -> None:
    weight = torch.zeros(10, 4)
    torch.save({"embed.weight": weight, "head.weight": weight}, tmp_path / "x.pt")
    assert described(tmp_path / "x.pt").n_parameters == 40


def test_the_states_of_optax_are_no_parameters(tmp_path: Path) -> None:
    catalog = catalog_of({"params.w": (4, 2), "opt_state.0.mu.w": (4, 2)})
    assert summarize(checkpoint_of(catalog, tmp_path)).description.n_parameters == 8


def test_a_checkpoint_without_a_model_has_no_parameters(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(catalog_of({"optimizer.state.exp_avg.w": (4, 2)}), tmp_path)
    assert summarize(checkpoint).description == ModelDescription()
