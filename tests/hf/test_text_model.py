"""Vision-language models of transformers: the text model becomes one of its family, bit for bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_cli.app import main
from core.errors import CorruptError, UnsupportedError, UsageError
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from core.verbs.merge.request import Merge
from tests.hf.models import (
    COMMON,
    GATED_DELTA,
    MINISTRAL_ROPE,
    QWEN2_MOE,
    QWEN3_MOE,
    WINDOWS,
    assert_same,
    config_of,
    loaded_model,
    logits,
    quietly,
    saved,
    tensors,
)
from tests.support.covering import every_third
from tests.support.materialize import Bytes

_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4} | {
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1]}
VL: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        "language_model.model.",
        {"head_dim": 8, "sliding_window": 5, "layer_types": WINDOWS, "model_type": "gemma3_text"},
        _SIGLIP,
    ),
    "mistral3": (
        "mistral",
        "language_model.model.",
        {"model_type": "mistral", "sliding_window": None},
        {**_SIGLIP, "head_dim": 8},
    ),
    "mistral3 ministral3": (
        "ministral3",
        "language_model.model.",
        {"model_type": "ministral3", "head_dim": 8, "rope_parameters": MINISTRAL_ROPE},
        {**_SIGLIP, "head_dim": 8},
    ),
    "qwen2_5_vl": (
        "qwen2",
        "model.",
        {"rope_parameters": _MROPE},
        {key: value for key, value in _QWEN.items() if key != "num_position_embeddings"},
    ),
    "qwen3_vl": (
        "qwen3",
        "model.language_model.",
        {"head_dim": 8, "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}},
        {**_QWEN, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "qwen3_moe",
        "model.language_model.",
        {
            **QWEN3_MOE,
            "moe_intermediate_size": 24,
            "head_dim": 8,
            "rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]},
        },
        {**_QWEN, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("qwen3_5_text", "model.language_model.", GATED_DELTA, _QWEN),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        "model.language_model.",
        {**GATED_DELTA, **QWEN2_MOE},
        _QWEN,
    ),
}
"""Type (and another text model's than its usual one) → (family of its text model, beginning of that
one's names, its values, the tower's).
"""


def _saved(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """What ``save_pretrained`` writes of a vision-language model with random weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    quietly()
    _, _, text, vision = VL[name]
    options = {"mm_tokens_per_image": 4} if name == "gemma3" else {}
    config = AutoConfig.for_model(
        name.partition(" ")[0],
        text_config={**COMMON, **text, **changes},
        vision_config=vision,
        **options,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for key, value in model.state_dict().items():
        value.copy_(torch.randn(value.shape) * 0.2 + (1.5 if value.ndim == 1 else 0))
        if key.endswith("linear_attn.norm.weight"):
            value.clamp_(min=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", every_third(VL, start=0))
def test_the_text_model_goes_through_rank_files_and_computes_the_same(
    name: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    model = _saved(name, tmp_path / "model")
    family, body, *_ = VL[name]
    ranks, back, text = tmp_path / "ranks", tmp_path / "back", tmp_path / "text"
    topology = TopologyChange(tp=2, pp=3, ep=2 if "moe" in name else None)
    run(Job(src=model, dst=ranks, to="megatron", topology=topology, text_model=True, fsync=False))
    run(Job(src=ranks, dst=back, to="hf", fsync=False))
    # Its tensors are those of the complete model, in files of either way.
    head = body.removesuffix("model.")
    names = {body: "model.", "lm_head.": "lm_head.", f"{head}lm_head.": "lm_head."}
    wanted = {
        names[old] + key.removeprefix(old): data
        for key, data in tensors(model).items()
        for old in names
        if key.startswith(old)
    }
    if name == "qwen3_vl_moe":
        wanted = _single_experts(wanted)
    assert_same(tensors(back), wanted)
    run(Job(src=model, dst=text, text_model=True, fsync=False))
    assert_same(tensors(text), wanted)
    # transformers runs it as a model of its family, and finds what the complete model finds.
    assert config_of(back)["model_type"] == family
    assert (back / "config.json").read_bytes() == (text / "config.json").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        complete = AutoModelForImageTextToText.from_pretrained(model).eval()
    assert torch.equal(logits(loaded_model(back)), logits(complete))


def _single_experts(stacked: dict[str, Bytes]) -> dict[str, Bytes]:
    """The tensors with those of single experts in place of stacks, as Qwen3 has them."""
    result: dict[str, Bytes] = {}
    for key, data in stacked.items():
        if "mlp.experts." not in key:
            result[key] = data
            continue
        start, _, kind = key.removesuffix("_proj").rpartition(".")
        for number, expert in enumerate(data):
            parts = kind.split("_")
            for part, rows in zip(parts, np.split(expert, len(parts)), strict=True):
                result[f"{start}.{number}.{part}_proj.weight"] = rows
    return result


def _transpose_experts(folder: Path) -> None:
    """Transpose the matrices of all experts, as published files of Qwen3-VL have them."""
    weights = load_file(folder / "model.safetensors")
    for key in [name for name in weights if ".experts." in name]:
        weights[key] = weights[key].transpose(1, 2).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("inner", [24, 16, 32])
def test_transposed_experts_of_published_qwen3_vl_are_recognised(
    inner: int, tmp_path: Path
) -> None:
    # One of a layer's two stacks is square with 16 inner channels, the other one with 32.
    model = _saved("qwen3_vl_moe", tmp_path / "model", moe_intermediate_size=inner)
    texts = tmp_path / "text", tmp_path / "same text"
    for text in texts:
        run(Job(src=model, dst=text, text_model=True, fsync=False))
        _transpose_experts(model)
    assert_same(*map(tensors, texts))
    assert config_of(texts[1])["norm_topk_prob"] is True


def test_trained_experts_are_put_back_transposed(tmp_path: Path) -> None:
    model, trained = (_saved("qwen3_vl_moe", tmp_path / str(seed), seed=seed) for seed in range(2))
    ranks, complete = tmp_path / "ranks", tmp_path / "whole"
    topology = TopologyChange(tp=2, pp=3, ep=2)
    run(Job(src=trained, dst=ranks, to="megatron", topology=topology, text_model=True, fsync=False))
    replace = Merge(method="replace", others=(ranks,))
    for is_transposed in (False, True):
        run(
            Job(
                src=model,
                dst=complete,
                merge=replace,
                is_reshard=True,
                fsync=False,
                force=is_transposed,
            )
        )
        parts = {True: tensors(model), False: tensors(trained)}
        assert_same(tensors(complete), {key: parts["visual" in key][key] for key in parts[True]})
        _transpose_experts(model)
        _transpose_experts(trained)


def test_experts_of_qwen3_vl_that_do_not_fit_its_configuration_are_refused(tmp_path: Path) -> None:
    model = _saved("qwen3_vl_moe", tmp_path / "model")
    config = config_of(model)
    config["text_config"]["moe_intermediate_size"] = 20
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptError, match="implies experts of shape"):
        run(Job(src=model, dst=tmp_path / "x", to="megatron", text_model=True))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5_moe"])
def test_a_trained_text_model_is_put_back_into_the_complete_one(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model, trained = _saved(name, tmp_path / "model"), _saved(name, tmp_path / "trained", seed=1)
    if "moe" in name:  # published files have the experts of a layer in two tensors
        _stack_experts(model, n_layers=3)
    ranks, complete = tmp_path / "ranks", tmp_path / "whole"
    topology = TopologyChange(tp=2, pp=3)
    run(Job(src=trained, dst=ranks, to="megatron", topology=topology, text_model=True, fsync=False))
    replace = Merge(method="replace", others=(ranks,))
    report = run(Job(src=model, dst=complete, merge=replace, is_reshard=True, fsync=False))
    assert any("tensors come from" in note for note in report.notes)
    assert (complete / "config.json").read_bytes() == (model / "config.json").read_bytes()
    assert tensors(complete).keys() == tensors(model).keys()
    if "moe" in name:
        _stack_experts(trained, n_layers=3)
    parts = {True: tensors(model), False: tensors(trained)}
    is_tower = {key: "vision" in key or "visual" in key or "multi" in key for key in parts[True]}
    assert_same(tensors(complete), {key: parts[tower][key] for key, tower in is_tower.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, ours = (
            AutoModelForImageTextToText.from_pretrained(each).eval() for each in (trained, complete)
        )
    assert torch.equal(logits(ours), logits(theirs))


def _stack_experts(folder: Path, *, n_layers: int) -> None:
    """Put the experts of each layer into two tensors."""
    weights = load_file(folder / "model.safetensors")
    for layer in range(n_layers):
        start = f"model.language_model.layers.{layer}.mlp.experts"
        parts: dict[str, list[torch.Tensor]] = {"gate": [], "up": [], "down": []}
        for number in range(4):
            for part, tensors_of_part in parts.items():
                tensors_of_part.append(weights.pop(f"{start}.{number}.{part}_proj.weight"))
        gate, up, down = map(torch.stack, parts.values())
        weights |= {f"{start}.gate_up_proj": torch.cat((gate, up), 1), f"{start}.down_proj": down}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_without_the_option_the_parts_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _saved("qwen3_vl", tmp_path / "model")
    with pytest.raises(
        UnsupportedError, match="the model has towers in addition to its text"
    ) as err:
        run(Job(src=model, dst=tmp_path / "ranks", to="megatron"))
    assert "--text-model" in str(err.value.hint)
    assert not (tmp_path / "ranks").exists()
    args = ["convert", str(model), str(tmp_path / "text"), "--to", "hf", "--text-model"]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "model.visual.* (not part of the text model)" in shown


def test_files_of_transformers_4_mean_the_same(tmp_path: Path) -> None:
    # Published Qwen2.5-VL files have the text model's values among the others.
    model = _saved("qwen2_5_vl", tmp_path / "model")
    config = config_of(model)
    text = {key: value for key, value in config.pop("text_config").items() if key != "model_type"}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1]}
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    (model / "config.json").write_text(json.dumps({**text, **config}))
    back = tmp_path / "back"
    run(Job(src=model, dst=tmp_path / "ranks", to="megatron", text_model=True, fsync=False))
    run(Job(src=tmp_path / "ranks", dst=back, to="hf", fsync=False))
    assert config_of(back)["model_type"] == "qwen2"
    assert logits(loaded_model(back)).isfinite().all()


def test_what_has_no_text_model_that_megatron_knows_is_refused(tmp_path: Path) -> None:
    plain = saved("llama", tmp_path / "plain")
    with pytest.raises(
        UsageError, match=r"not a vision-language model with a config.json \(its type"
    ):
        run(Job(src=plain, dst=tmp_path / "x", to="megatron", text_model=True))
    model = _saved("qwen3_vl", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    towers = {key: value for key, value in weights.items() if "visual" in key}
    save_file(towers, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedError, match="ckpt does not recognize the names of the text model"
    ):
        run(Job(src=model, dst=tmp_path / "x", to="megatron", text_model=True))
