"""Step-3.5, of which transformers has the text model alone: its files are those that transformers
writes of Step-3.7 without the towers, its configuration is the published one's form.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from ckpt_cli.app import main
from core.errors import CorruptError, UnsupportedError
from core.formats.mcore.run_config import get_arguments as arguments_of_run_config
from core.hf.config_json.experts import expert_arguments
from core.hf.config_json.per_layer import per_layer_arguments, per_layer_config
from core.hf.family import families
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.hf.values import ARGUMENT
from core.pickle.inert import make_namespace
from tests.hf.models import arguments, assert_same, catalog_of, config_of, quietly, tensors

WINDOW = {
    "attention_type": "sliding_attention",
    "num_attention_heads": 6,
    "num_attention_groups": 2,
    "head_dim": 8,
    "true_head_dim": 8,
}
TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 8,
    "vocab_size": 130,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "share_expert_dim": 24,
    "moe_layers_enum": "1,2,3",
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "zero_centered": True,
    "sliding_window": 5,
    "attention_other_setting": WINDOW,
    # One entry more than layers, for a multi-token prediction.
    "layer_types": [*TYPES, "sliding_attention"],
    "rope_theta": [5e6, 1e4, 1e4, 5e6, 1e4],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
    "swiglu_limits": [0.0, 0.0, 0.0, 7.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.0, 16.0, 0.0],
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step-3.7 with a tiny tower, as transformers writes it."""
    from transformers import Step3p7Config, Step3p7ForConditionalGeneration

    quietly()
    tower = {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14}
    text = {name: value for name, value in CONFIG.items() if name != "architectures"}
    torch.manual_seed(35)
    model = Step3p7ForConditionalGeneration(Step3p7Config(text_config=text, vision_config=tower))
    for value in model.state_dict().values():
        value.copy_(torch.randn(value.shape) * 0.2 + (0.1 if value.ndim == 1 else 0))
    folder = tmp_path_factory.mktemp("step") / "complete"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(complete: Path) -> Path:
    """Step-3.5: the text model's tensors, and a configuration in the published form."""
    text_path = complete.parent / "text"
    text_path.mkdir()
    text = {
        name: tensor
        for name, tensor in load_file(complete / "model.safetensors").items()
        if name.startswith(("model.", "lm_head."))
    }
    save_file(text, text_path / "model.safetensors", metadata={"format": "pt"})
    (text_path / "config.json").write_text(json.dumps(CONFIG, indent=1))
    return text_path


@pytest.fixture(scope="module")
def dist(folder: Path) -> Path:
    """The torch_dist checkpoint for TP 2."""
    path = folder.parent / "dist"
    convert(folder, path, "--to", "torch_dist", "--tp-new", "2")
    return path


@pytest.fixture(scope="module")
def stored(dist: Path) -> dict[str, torch.Tensor]:
    """The tensors of the torch_dist checkpoint, under its own names."""
    path = dist.parent / "stored"
    convert(dist, path, "--to", "safetensors")
    return load_file(path / "model.safetensors")


def convert(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments), "--quiet"]) == 0


def test_files_come_back_bit_for_bit_through_torch_dist(folder: Path, dist: Path) -> None:
    back = dist.parent / "back"
    convert(dist, back, "--to", "hf")
    assert_same(tensors(back), tensors(folder))
    assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize(("layer", "n_heads"), [(0, 4), (1, 6)])
def test_rows_are_in_the_order_of_megatron_bridge(
    layer: int, n_heads: int, folder: Path, stored: dict[str, torch.Tensor]
) -> None:
    hf = load_file(folder / "model.safetensors")
    q, k, v, gate = (hf[f"model.layers.{layer}.self_attn.{part}_proj.weight"] for part in "qkvg")
    q, k, v = q.view(2, n_heads // 2, 8, 32), k.view(2, 1, 8, 32), v.view(2, 1, 8, 32)
    attention = f"decoder.layers.{layer}.self_attention"
    rows = torch.cat([q, k, v], dim=1).reshape(-1, 32)
    assert torch.equal(stored[f"{attention}.linear_qkv.weight._qkv"], rows)
    assert torch.equal(stored[f"{attention}.linear_qkv.weight._gate"], gate)
    assert stored[f"{attention}.linear_proj.weight"].shape == (32, n_heads * 8)


def test_layers_have_the_names_of_megatron_bridge(stored: dict[str, torch.Tensor]) -> None:
    attention = {
        "self_attention.k_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight._gate",
        "self_attention.linear_qkv.weight._qkv",
        "self_attention.q_layernorm.weight",
    }
    dense = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    experts = {
        "mlp.experts.experts.linear_fc1.weight",
        "mlp.experts.experts.linear_fc2.weight",
        "mlp.router.expert_bias",
        "mlp.router.weight",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
        "pre_mlp_layernorm.weight",
    }
    for layer, mlp in enumerate((dense, experts, experts, experts)):
        start = f"decoder.layers.{layer}."
        stored_layer = {name.removeprefix(start) for name in stored if name.startswith(start)}
        assert stored_layer == attention | mlp


def test_logits_of_megatrons_tensors_are_those_of_transformers(
    complete: Path, stored: dict[str, torch.Tensor]
) -> None:
    from transformers import Step3p7ForConditionalGeneration

    model = Step3p7ForConditionalGeneration.from_pretrained(complete, dtype=torch.float32).eval()
    tokens = torch.arange(3, 33)[None] * 7 % 130
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits[0]
    logits = megatron_logits({name: value.float() for name, value in stored.items()}, tokens[0])
    torch.testing.assert_close(logits[:, :130], wanted, rtol=1e-4, atol=1e-4)


def megatron_logits(weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """What Megatron-LM's branch dev d48bd6be computes with Megatron-Bridge's layers: attention.py,
    mlp.py and router.py written down for one sequence, in float32.
    """
    x = weights["embedding.word_embeddings.weight"][tokens]
    for layer, kind in enumerate(TYPES):
        own = partial(_weight, weights, f"decoder.layers.{layer}.")
        y = _norm(x, own("self_attention.linear_qkv.layer_norm_weight"))
        x = x + _attention(y, own, has_window=kind != "full_attention")
        if layer == 0:
            y = _norm(x, own("mlp.linear_fc1.layer_norm_weight"))
            x = x + _mlp(y, own("mlp.linear_fc1.weight"), own("mlp.linear_fc2.weight"))
        else:
            x = x + _experts(_norm(x, own("pre_mlp_layernorm.weight")), own)
    x = _norm(x, weights["decoder.final_layernorm.weight"])
    return x @ weights["output_layer.weight"].T


def _weight(weights: dict[str, torch.Tensor], start: str, name: str) -> torch.Tensor:
    return weights[start + name]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (1 + weight)


def _attention(x: torch.Tensor, own: Any, *, has_window: bool) -> torch.Tensor:
    """Attention over (tokens, hidden)."""
    n_heads, base, n_rotated = (6, 1e4, 8) if has_window else (4, 5e6, 4)
    rows = (x @ own("self_attention.linear_qkv.weight._qkv").T).view(len(x), 2, -1, 8)
    gate = x @ own("self_attention.linear_qkv.weight._gate").T
    q, k, v = rows.split([n_heads // 2, 1, 1], dim=2)
    q = _rotate(_norm(q, own("self_attention.q_layernorm.weight")), base, n_rotated)
    k = _rotate(_norm(k, own("self_attention.k_layernorm.weight")), base, n_rotated)
    scores = torch.einsum("sghd,tgd->ghst", q, k[:, :, 0]) / 8**0.5
    before = torch.arange(len(x))[:, None] - torch.arange(len(x))[None]
    is_visible = (before >= 0) & (before < (5 if has_window else len(x)))
    weights = scores.masked_fill(~is_visible, -torch.inf).softmax(-1)
    result = torch.einsum("ghst,tgd->sghd", weights, v[:, :, 0]).reshape(len(x), n_heads, 8)
    result = result * gate.sigmoid()[..., None]
    return result.reshape(len(x), -1) @ own("self_attention.linear_proj.weight").T


def _rotate(x: torch.Tensor, base: float, n_rotated: int) -> torch.Tensor:
    """Rotate the first channels of every head; axes are (tokens, groups, heads, channels)."""
    frequencies = base ** (-torch.arange(0, n_rotated, 2).float() / n_rotated)
    angles = torch.arange(len(x)).float()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None, None]
    turned, rest = x[..., :n_rotated], x[..., n_rotated:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()
    return torch.cat([turned, rest], dim=-1)


def _mlp(x: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ fc1.T).chunk(2, dim=-1)
    return (silu(gate) * up) @ fc2.T


def _experts(x: torch.Tensor, own: Any) -> torch.Tensor:
    scores = (x @ own("mlp.router.weight").T).sigmoid()
    _, chosen = (scores + own("mlp.router.expert_bias")).topk(2, dim=-1)
    share = torch.zeros_like(scores).scatter(1, chosen, scores.gather(1, chosen))
    share = 3.0 * share / share.sum(-1, keepdim=True)
    experts = zip(
        own("mlp.experts.experts.linear_fc1.weight"),
        own("mlp.experts.experts.linear_fc2.weight"),
        share.T,
        strict=True,
    )
    result = sum(part[:, None] * _mlp(x, fc1, fc2) for fc1, fc2, part in experts)
    shared = ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc2.weight")
    return result + _mlp(x, *map(own, shared))


def test_the_text_model_that_transformers_writes_of_step_3_7_is_the_same(
    complete: Path, folder: Path, tmp_path: Path
) -> None:
    convert(complete, tmp_path / "dist", "--to", "torch_dist", "--text-model")
    convert(tmp_path / "dist", tmp_path / "back", "--to", "hf")
    assert_same(tensors(tmp_path / "back"), tensors(folder))
    ours = to_megatron(catalog_of(folder)[1], CONFIG)
    theirs = to_megatron(catalog_of(folder)[1], config_of(tmp_path / "back"))
    for name in ("sliding_attention_setting", "moe_layer_freq", "num_query_groups", "num_experts"):
        assert arguments(theirs)[name] == arguments(ours)[name]
    for name in ("rotary_base_per_layer", "rotary_percents", "layer_types", "swiglu_limits"):
        assert arguments(theirs)[name][:4] == arguments(ours)[name][:4]  # type: ignore[index]


def test_arguments_are_those_of_megatron_bridge_and_tell_the_configuration(folder: Path) -> None:
    fields = arguments(to_megatron(catalog_of(folder)[1], CONFIG))
    assert fields["head_wise_attn_gate"] is True
    assert fields["moe_layer_freq"] == [0, 1, 1, 1]
    assert fields["rotary_base_per_layer"] == CONFIG["rope_theta"]
    assert fields["rotary_percents"] == CONFIG["partial_rotary_factors"]
    assert fields["swiglu_limits_shared"] == CONFIG["swiglu_limits_shared"]
    assert fields["sliding_attention_setting"] == {
        "window_size": [4, 0],
        "num_attention_heads": 6,
        "num_query_groups": 2,
        "kv_channels": 8,
    }
    # Without the configuration that it came from, as Megatron-Bridge saves a model.
    config = per_layer_config(fields)
    assert config["sliding_window"] == 5
    assert config["layer_types"] == TYPES
    assert config["rope_theta"] == CONFIG["rope_theta"][:4]
    assert {**WINDOW, **config["attention_other_setting"]} == WINDOW  # type: ignore[dict-item]
    assert (
        per_layer_arguments({**CONFIG, **config})["sliding_attention_setting"]
        == (fields["sliding_attention_setting"])
    )


def test_the_sizes_of_layers_with_a_window_are_read_from_a_run_configuration() -> None:
    setting = {"window_size": [4, 0], "num_attention_heads": 6}
    fields = arguments_of_run_config({"sliding_attention_setting": setting, "cuda": {"a": 1}})
    assert fields["sliding_attention_setting"] == setting
    assert "cuda" not in fields


def test_torch_dist_does_not_stack_layers_even_if_all_have_experts() -> None:
    config = {**CONFIG, "moe_layers_enum": [0, 1, 2, 3]}
    fields = expert_arguments(config, families()["step3p5"], n_layers=4)
    assert fields["moe_layer_freq"] == [1, 1, 1, 1]


def test_arguments_alone_make_a_configuration_with_the_same_arguments(folder: Path) -> None:
    source = catalog_of(folder)[1]
    fields = arguments(to_megatron(source, CONFIG))
    # As Megatron-Bridge saves it: without the configuration that it came from.
    alone = {name: value for name, value in fields.items() if name != ARGUMENT}
    model = to_hf(replace(to_megatron(source, CONFIG), args=make_namespace(alone)))
    config = json.loads(model.documents["config.json"])
    assert config["model_type"] == "step3p5"
    assert config["moe_layers_enum"] == "1,2,3"
    again = arguments(to_megatron(source, config))
    per_layer = ("rotary_base_per_layer", "rotary_percents", "layer_types")
    limits = ("swiglu_limits", "swiglu_limits_shared")
    for name in (*per_layer, *limits):  # the entry of the multi-token prediction is gone
        assert again.pop(name) == alone.pop(name)[:4]  # type: ignore[index]
    assert again.pop(ARGUMENT) is not None
    assert again == alone


def test_rank_files_and_other_heads_are_refused_before_anything_is_written(
    folder: Path, dist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in (folder, dist):
        assert main(["convert", str(source), str(tmp_path / "ranks"), "--to", "megatron"]) != 0
        assert "only torch_dist distinguishes the gate rows" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    source = catalog_of(folder)[1]
    for changed, kind, text in (
        ({"attention_other_setting": {**WINDOW, "head_dim": 16}}, UnsupportedError, "head_dim"),
        ({"sliding_window": None}, CorruptError, "sliding_window"),
        ({"layer_types": TYPES[:3]}, CorruptError, "layer_types"),
        ({"rope_theta": [1e4, "x", 1e4, 1e4]}, CorruptError, "rope_theta"),
        ({"moe_layers_enum": "1,x"}, CorruptError, "moe_layers_enum"),
        ({"use_head_wise_attn_gate": False}, UnsupportedError, "use_head_wise_attn_gate"),
        ({"attention_other_setting": {**WINDOW, "num_attention_heads": 8}}, CorruptError, "shape"),
    ):
        with pytest.raises(kind, match=text):
            to_megatron(source, {**CONFIG, **changed})


@pytest.fixture(scope="module")
def predicting(folder: Path) -> Path:
    """The model with two layers of multi-token prediction, as the published files have them: dense,
    the first with a window and the second without.
    """
    path = folder.parent / "mtp"
    path.mkdir()
    weights = load_file(folder / "model.safetensors")
    extra = {}
    for number, attention in enumerate((1, 0)):
        start = f"model.layers.{4 + number}."
        names = [
            *(name for name in weights if name.startswith(f"model.layers.{attention}.self_attn.")),
            *(name for name in weights if name.startswith("model.layers.0.mlp.")),
            *(
                name
                for name in weights
                if name.startswith("model.layers.0.") and "layernorm" in name
            ),
        ]
        torch.manual_seed(number)
        extra |= {start + name.split(".", 3)[3]: torch.randn_like(weights[name]) for name in names}
        for name in ("enorm", "hnorm", "transformer.shared_head.norm"):
            extra[f"{start}{name}.weight"] = torch.randn(32).bfloat16()
        extra[f"{start}eh_proj.weight"] = torch.randn(32, 64).bfloat16()
        extra[f"{start}transformer.shared_head.output.weight"] = weights["lm_head.weight"].clone()
    save_file(weights | extra, path / "model.safetensors", metadata={"format": "pt"})
    two = {"layer_types": [*CONFIG["layer_types"], "full_attention"]}
    for name in ("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"):
        two[name] = [*CONFIG[name], CONFIG[name][0]]
    config = {**CONFIG, **two, "num_nextn_predict_layers": 2}
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def test_layers_of_multi_token_prediction_come_back(predicting: Path, tmp_path: Path) -> None:
    middle = to_megatron(catalog_of(predicting)[1], config_of(predicting))
    assert arguments(middle)["mtp_num_layers"] == 2
    for number, rows in ((0, 6), (1, 4)):
        start = f"mtp.layers.{number}.transformer_layer."
        gate = middle.tensors[f"{start}self_attention.linear_qkv.weight._gate"]
        assert gate.shape == (rows, 32)
        assert middle.tensors[f"{start}mlp.linear_fc1.weight"].shape == (96, 32)
    assert f"{start}mlp.router.weight" not in middle.tensors
    convert(predicting, tmp_path / "dist", "--to", "torch_dist", "--tp-new", "2")
    convert(tmp_path / "dist", tmp_path / "back", "--to", "hf")
    assert_same(tensors(tmp_path / "back"), tensors(predicting))
    assert main(["validate", str(tmp_path / "back"), "--quiet"]) == 0
    # Arguments alone list these layers as well.
    alone = {name: value for name, value in arguments(middle).items() if name != ARGUMENT}
    model = to_hf(replace(middle, args=make_namespace(alone)))
    config = json.loads(model.documents["config.json"])
    assert config["layer_types"] == config_of(predicting)["layer_types"]
    assert sorted(model.tensors) == sorted(tensors(predicting))
    # transformers 5 lists them apart.
    apart = {"layer_types": TYPES, "mtp_layer_types": config["layer_types"][4:]}
    again = to_megatron(catalog_of(predicting)[1], config_of(predicting) | apart)
    assert arguments(again)["layer_types"] == config["layer_types"]
    with pytest.raises(CorruptError, match="mtp_layer_types"):
        to_megatron(catalog_of(predicting)[1], {**CONFIG, **apart, "mtp_layer_types": ["x"]})


def test_layers_of_multi_token_prediction_can_be_left_out(
    folder: Path, predicting: Path, tmp_path: Path
) -> None:
    left_out = ("--exclude", "model.layers.4.*", "--exclude", "model.layers.5.*")
    convert(predicting, tmp_path / "dist", "--to", "torch_dist", *left_out)
    convert(tmp_path / "dist", tmp_path / "back", "--to", "hf")
    assert_same(tensors(tmp_path / "back"), tensors(folder))


def test_a_head_of_its_own_is_refused_with_the_option_that_leaves_it_out(
    predicting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "heads"
    source.mkdir()
    weights = load_file(predicting / "model.safetensors")
    weights["model.layers.4.transformer.shared_head.output.weight"] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_bytes((predicting / "config.json").read_bytes())
    target = tmp_path / "dist"
    assert main(["convert", str(source), str(target), "--to", "torch_dist"]) != 0
    message = " ".join(capsys.readouterr().err.split())
    assert "multi-token prediction heads" in message and "out with --exclude" in message
    assert not target.exists()
    convert(source, target, "--to", "torch_dist", "--exclude", "*.shared_head.output.weight")
    convert(target, tmp_path / "back", "--to", "hf")
    assert_same(tensors(tmp_path / "back"), tensors(predicting))


def test_scaling_that_megatron_does_not_apply_is_noted(folder: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 2.0}
    middle = to_megatron(catalog_of(folder)[1], {**CONFIG, "rope_scaling": scaling})
    assert any("llama3 RoPE scaling" in note for note in middle.notes)
    assert to_hf(middle).documents["config.json"]
