"""Models of families without a table of their names: what is told without one, and no alarm where
nothing is wrong.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_cli.app import main
from core.engine.catalog.tensor import Tensor
from core.errors import MissingShardError
from core.hf.names import model_types
from core.hf.proof.comparison import find_differences
from core.hf.proof.problem import Problem
from core.verbs.checks.finding import Level, Severity
from core.verbs.convert.run import Job, run
from core.verbs.validate.run import validate
from tests.hf.models import catalog_of, config_of, quietly
from tests.support.covering import every_third

Tensors = dict[str, Tensor]

SIZES = {
    "vocab_size": 130,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
}
LINEAR = {
    f"linear_{part}": 4
    for part in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
}

MODELS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("mistral", "ForCausalLM", {}),
    "mistral of two layers": ("mistral", "ForCausalLM", {"num_hidden_layers": 2}),
    "gemma2": ("gemma2", "ForCausalLM", {"head_dim": 8}),
    "gemma3": ("gemma3_text", "ForCausalLM", {"head_dim": 8, "sliding_window_pattern": 3}),
    "phi3": ("phi3", "ForCausalLM", {}),
    "gpt_oss": (
        "gpt_oss",
        "ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        "ForCausalLM",
        {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        "ForCausalLM",
        {
            **MOE,
            **LATENT,
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "jamba": (
        "jamba",
        "ForCausalLM",
        {
            **dict.fromkeys(
                ("num_experts", "attn_layer_period", "mamba_d_state", "mamba_dt_rank"), 4
            ),
            "num_hidden_layers": 8,
            "attn_layer_offset": 1,
        },
    ),
    "qwen3_next": ("qwen3_next", "ForCausalLM", {**MOE, **LINEAR, "num_experts": 4, "head_dim": 8}),
    "modernbert": ("modernbert", "ForMaskedLM", {}),
    "bert": ("bert", "ForSequenceClassification", {}),
    "gpt2": ("gpt2", "ForCausalLM", {"n_embd": 32, "n_layer": 3, "n_head": 4}),
    "t5": (
        "t5",
        "ForSeq2SeqLM",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 4, "num_heads": 4},
    ),
    "whisper": (
        "whisper",
        "ForSpeechSeq2Seq",
        {
            "d_model": 32,
            "encoder_layers": 3,
            "decoder_layers": 4,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            **{
                f"{part}_{size}": n
                for part in ("encoder", "decoder")
                for size, n in (("attention_heads", 4),)
            },
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_target_positions": 20,
        },
    ),
    "clip": (
        "clip",
        "",
        {
            "text_config": {**TOWER, "vocab_size": 130, "eos_token_id": 2},
            "vision_config": {**TOWER, "image_size": 16, "patch_size": 8},
            "projection_dim": 16,
        },
    ),
}
"""Name → (model type, what ``AutoModel`` is followed by, what differs from ``SIZES``)."""


def built(name: str, folder: Path, **changes: Any) -> Path:
    """What ``save_pretrained`` writes of a tiny model, of a type that has no table."""
    import transformers

    quietly()
    model_type, head, differing = MODELS[name]
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **differing, **changes})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"AutoModel{head}").from_config(config)
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape) * 0.2 + 0.5)
        model.save_pretrained(folder)
    # A model of a family with a table has a type that has none.
    config = config_of(folder)
    if model_type in model_types():
        config |= {"model_type": f"new_{model_type}", "architectures": [f"New{head}"]}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def of(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    return dict(catalog_of(folder)[1].tensors), config_of(folder)


def list_problems(problems: tuple[Problem, ...]) -> list[tuple[str, str | None]]:
    return [(problem.kind, problem.key) for problem in problems]


@pytest.mark.parametrize("name", every_third(MODELS, start=0))
def test_what_transformers_writes_raises_no_alarm_and_what_is_not_checked_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = built(name, tmp_path / "model")
    for level in Level:
        validation = validate(folder, level=level)
        assert [
            finding for finding in validation.findings if finding.severity > Severity.NOTE
        ] == []
        assert any("there is no table for them" in text for text in validation.unchecked)
    assert main(["validate", str(folder), "--strict"]) == 0
    assert "no table" in " ".join(capsys.readouterr().out.split())
    assert main(["validate", str(folder), "--json"]) == 0
    assert "no table" in json.loads(capsys.readouterr().out)["checkpoints"][0]["unchecked"][0]
    notes = run(Job(src=folder, dst=tmp_path / "out", to="hf", fsync=False)).notes
    assert any(note.startswith("not checked: ") and "no table" in note for note in notes)


@pytest.mark.parametrize("name", every_third(MODELS, start=1))
def test_a_tensor_that_one_layer_lost_is_found(name: str, tmp_path: Path) -> None:
    metas, config = of(built(name, tmp_path / "model"))
    lost = {
        "gpt2": "transformer.h.1.attn.c_attn.weight",
        "t5": "decoder.block.1.layer.2.DenseReluDense.wo.weight",
        "whisper": "model.decoder.layers.2.fc2.weight",
        "clip": "vision_model.encoder.layers.1.mlp.fc1.bias",
        "bert": "bert.encoder.layer.5.attention.self.query.weight",
        "modernbert": "model.layers.2.mlp.Wo.weight",
        "phi3": "model.layers.0.mlp.gate_up_proj.weight",
        "gpt_oss": "model.layers.5.mlp.router.bias",
        "qwen2_moe": "model.layers.3.mlp.experts.1.up_proj.weight",
        "deepseek_v2": "model.layers.4.mlp.shared_experts.up_proj.weight",
        "jamba": "model.layers.2.mamba.x_proj.weight",
        "qwen3_next": "model.layers.2.linear_attn.conv1d.weight",
    }.get(name, "model.layers.1.self_attn.q_proj.weight")
    del metas[lost]
    assert list_problems(find_differences(metas, config)) == [("sisters", lost)]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("mistral", {"num_hidden_layers": 5}, ("layers", "model.layers.5")),
        ("mistral", {"vocab_size": 999}, ("shape", "model.embed_tokens.weight")),
        ("mistral", {"intermediate_size": 64}, ("shape", "model.layers.0.mlp.gate_proj.weight")),
        (
            "mistral",
            {"num_key_value_heads": 4},
            ("shape", "model.layers.0.self_attn.k_proj.weight"),
        ),
        (
            "mistral",
            {"num_attention_heads": 8, "head_dim": 8},
            ("shape", "model.layers.0.self_attn.q_proj.weight"),
        ),
        ("phi3", {"intermediate_size": 64}, ("shape", "model.layers.0.mlp.gate_up_proj.weight")),
        ("phi3", {"num_key_value_heads": 4}, ("shape", "model.layers.0.self_attn.qkv_proj.weight")),
        (
            "bert",
            {"intermediate_size": 64},
            ("shape", "bert.encoder.layer.0.intermediate.dense.weight"),
        ),
        (
            "whisper",
            dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "intermediate_size"), 64),
            ("shape", "model.decoder.layers.0.fc1.weight"),
        ),
        ("gpt_oss", {"num_local_experts": 8}, ("experts", "model.layers.0.mlp.experts.down_proj")),
        ("qwen2_moe", {"num_experts": 3}, ("experts", "model.layers.1.mlp.experts.3")),
        ("deepseek_v2", {"n_routed_experts": 6}, ("experts", "model.layers.1.mlp.experts.3")),
        (
            "mistral",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            ("quantization", None),
        ),
        ("phi3", {"quantization_config": {"quant_method": "fp8"}}, ("quantization", None)),
    ],
    ids=str,
)
def test_a_size_that_the_configuration_states_otherwise_is_found(
    name: str, changes: dict[str, Any], problem: tuple[str, str | None], tmp_path: Path
) -> None:
    metas, config = of(built(name, tmp_path / "model"))
    assert problem in list_problems(find_differences(metas, {**config, **changes}))


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma2"])
def test_an_output_layer_that_is_said_not_to_be_tied_is_missed(name: str, tmp_path: Path) -> None:
    metas, config = of(built(name, tmp_path / "model", tie_word_embeddings=False))
    assert find_differences(metas, config) == ()
    del metas["lm_head.weight"]
    assert list_problems(find_differences(metas, config)) == [("ties", "model.embed_tokens.weight")]
    assert find_differences(metas, {**config, "tie_word_embeddings": True}) == ()
    del config["tie_word_embeddings"]  # what the family takes for it is not known
    assert find_differences(metas, config) == ()


def test_experts_that_lack_a_tensor_and_layers_that_lack_all_are_found(tmp_path: Path) -> None:
    metas, config = of(built("qwen2_moe", tmp_path / "model"))
    expert = [key for key in metas if ".layers.3.mlp.experts.1." in key]
    layer = [key for key in metas if ".layers.3." in key]
    both = [
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.3.mlp.experts.2.up_proj.weight",
    ]
    assert list_problems(find_differences(_without(metas, both), config)) == [
        ("sisters", key) for key in both
    ]
    assert list_problems(find_differences(_without(metas, expert), config)) == [
        ("experts", "model.layers.3.mlp.experts.1")
    ]
    last = [key for key in metas if ".layers.5.mlp.experts.3." in key]
    assert list_problems(find_differences(_without(metas, last), config)) == [
        ("experts", "model.layers.5.mlp.experts.3")
    ]
    assert list_problems(find_differences(_without(metas, layer), config)) == [
        ("layers", "model.layers.3")
    ]


def test_one_layer_with_another_shape_is_found_unless_it_is_of_another_kind(tmp_path: Path) -> None:
    tensors, config = of(built("mistral", tmp_path / "model"))
    key = "model.layers.2.mlp.down_proj.weight"
    tensors[key] = Tensor("float32", (32, 40))
    assert list_problems(find_differences(tensors, config)) == [("sisters", key)]
    kinds = ["sliding", "sliding", "full", "sliding", "sliding", "sliding"]
    assert find_differences(tensors, {**config, "layer_types": kinds}) == ()
    assert find_differences(tensors, {**config, "wide_layers": [2]}) == ()


def _alternating(number: int) -> list[str]:
    """Names of the tensors of a layer; every third one has cross-attention."""
    names = [
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "mlp.up_proj.weight",
        "norm.weight",
    ]
    return names + (["cross.q.weight", "cross.k.weight"] if number % 3 else [])


@pytest.mark.parametrize("n_layers", range(2, 12))
def test_kinds_of_layers_that_nothing_states_raise_no_alarm(n_layers: int) -> None:
    names = [f"model.layers.{n}.{name}" for n in range(n_layers) for name in _alternating(n)]
    config = {"model_type": "new", "num_hidden_layers": n_layers, "vocab_size": 9}
    assert find_differences({name: Tensor("float32", (4, 4)) for name in names}, config) == ()


def test_weights_that_are_quantized_in_some_layers_only_raise_no_alarm(tmp_path: Path) -> None:
    tensors, config = of(built("mistral", tmp_path / "model"))
    for number in (0, 1, 3, 4, 5):
        for part in ("up_proj", "down_proj"):
            key = f"model.layers.{number}.mlp.{part}.weight"
            rows, columns = tensors[key].shape
            tensors[key] = Tensor("float8_e4m3fn", (rows, columns))
            tensors[f"{key}_scale_inv"] = Tensor("float32", (1, 1))
    stated = {**config, "quantization_config": {"quant_method": "fp8"}}
    assert find_differences(tensors, stated) == ()
    assert list_problems(find_differences(tensors, config)) == [
        ("quantization", "model.layers.0.mlp.up_proj.weight_scale_inv")
    ]
    lost = [key for key in tensors if key.startswith("model.layers.3.mlp.up_proj.")]
    assert list_problems(find_differences(_without(tensors, lost), stated)) == [
        ("sisters", "model.layers.3.mlp.up_proj")
    ]


def test_what_validate_finds_in_an_unknown_family_a_conversion_refuses(tmp_path: Path) -> None:
    folder = built("mistral", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (finding,) = validate(folder).findings
    assert (finding.code, finding.key) == ("CK540", "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(
        MissingShardError, match="missing from this layer, but present in 5 other layers"
    ):
        run(Job(src=folder, dst=tmp_path / "out", to="hf", fsync=False))


def test_a_configuration_with_absurd_lists_is_answered_at_once(tmp_path: Path) -> None:
    names = [f"layers.{n}.a{n}.weight" for n in range(2000)]
    tensors = {name: Tensor("float32", (2,)) for name in names}
    config = {
        "model_type": "new",
        "layer_types": [["x"] * 3] * 2000,
        "indexes": list(range(100_000)),
    }
    assert find_differences(tensors, config) == ()
    sizes = {
        "num_attention_heads": list(range(1, 50_000)),
        "head_dim": list(range(1, 50_000)),
        "vocab_size": 9,
    }
    assert find_differences(tensors, config | sizes | {"num_experts": list(range(50_000))}) == ()


def test_a_model_without_a_vocabulary_is_not_judged_by_its_heads() -> None:
    """Towers for pictures and sound state key heads that they do not use (hunyuan_vl_vision)."""
    name = "layers.0.self_attn.k_proj.weight"
    config = {
        "model_type": "new",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    assert find_differences({name: Tensor("float32", (32, 32))}, config) == ()
    assert list_problems(
        find_differences({name: Tensor("float32", (32, 32))}, {**config, "vocab_size": 9})
    ) == [("shape", name)]


def _without(metas: Tensors, keys: list[str]) -> Tensors:
    return {key: meta for key, meta in metas.items() if key not in keys}
