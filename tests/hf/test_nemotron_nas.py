"""Llama-Nemotron (DeciLM), which transformers does not have: its files are those of transformers'
Llama layers put together as ``block_configs`` says, and so are the logits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.errors import UnsupportedError
from core.hf.block_configs import block_configs
from core.hf.proof.comparison import find_differences
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.hf.values import ARGUMENT
from core.megatron.model.blocks import TEXT
from core.pickle.inert import make_namespace
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from tests.hf.models import (
    LLAMA3,
    arguments,
    assert_same,
    catalog_of,
    config_of,
    contents,
    quietly,
    tensor_of,
    tensors,
)
from tests.hf.test_megatron_logits import SCRIPT
from tests.support.asked import told
from tests.support.facets import facet_of

_USUAL = {"no_op": False, "replace_with_linear": False}
_NONE = {"no_op": True, "replace_with_linear": False}
_LINEAR = {"no_op": False, "replace_with_linear": True}
_ATTENTION = {**_USUAL, "n_heads_in_group": 4, "window_length": None}
BLOCKS: list[dict[str, dict[str, Any]]] = [
    {"attention": _ATTENTION, "ffn": {**_USUAL, "ffn_mult": 1.5, "hidden_act": "silu"}},
    {"attention": {**_NONE, "n_heads_in_group": None}, "ffn": {**_USUAL, "ffn_mult": 13.0}},
    {"attention": {**_LINEAR, "n_heads_in_group": None}, "ffn": {**_NONE, "ffn_mult": None}},
    {"attention": {**_NONE, "n_heads_in_group": None}, "ffn": {**_NONE, "ffn_mult": None}},
    {"attention": {**_ATTENTION, "n_heads_in_group": 2}, "ffn": {**_LINEAR, "ffn_mult": None}},
    {"attention": _ATTENTION, "ffn": {**_USUAL, "ffn_mult": 13.0}},
]
INNER = {0: 256, 1: 512, 5: 512}
"""Number of a layer with a usual MLP → its inner channels, multiples of 256."""


class Layers(nn.Module):
    """The body of a DeciLM with the parts of transformers' Llama."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama import modeling_llama as llama

        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        self.norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = llama.LlamaRotaryEmbedding(config)
        for number, block in enumerate(BLOCKS):
            layer = nn.Module()
            attention, mlp = block["attention"], block["ffn"]
            if not attention["no_op"]:
                layer.input_layernorm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
                own = type(config)(
                    **{**config.to_dict(), "num_key_value_heads": _groups(attention)}
                )
                own._attn_implementation = "eager"
                layer.self_attn = llama.LlamaAttention(own, number)
            if attention["replace_with_linear"]:
                layer.self_attn = _named("linear_attn", config.hidden_size)
            if not mlp["no_op"]:
                layer.post_attention_layernorm = llama.LlamaRMSNorm(
                    config.hidden_size, config.rms_norm_eps
                )
                own = type(config)(
                    **{**config.to_dict(), "intermediate_size": INNER.get(number, 8)}
                )
                layer.mlp = llama.LlamaMLP(own)
            if mlp["replace_with_linear"]:
                layer.mlp = _named("linear_mlp", config.hidden_size)
            self.layers.append(layer)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        x: torch.Tensor = self.embed_tokens(tokens)
        rotary = self.rotary_emb(x, torch.arange(n)[None])
        mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
        for layer, block in zip(self.layers, BLOCKS, strict=True):
            if block["attention"]["replace_with_linear"]:
                x = x + layer.self_attn.linear_attn(layer.input_layernorm(x))
            elif not block["attention"]["no_op"]:
                y = layer.input_layernorm(x)
                x = x + layer.self_attn(y, position_embeddings=rotary, attention_mask=mask)[0]
            if block["ffn"]["replace_with_linear"]:
                x = x + layer.mlp.linear_mlp(layer.post_attention_layernorm(x))
            elif not block["ffn"]["no_op"]:
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        y = self.norm(x)
        assert isinstance(y, torch.Tensor)
        return y


def _groups(attention: dict[str, Any]) -> int:
    return 8 // (attention["n_heads_in_group"] or 8)


def _named(name: str, channels: int) -> nn.Module:
    module = nn.Module()
    setattr(module, name, nn.Linear(channels, channels, bias=False))
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """The directory of a model in float32, and the logits of the tokens below."""
    from transformers import LlamaConfig

    quietly()
    config = LlamaConfig(
        vocab_size=130,
        hidden_size=32,
        num_hidden_layers=len(BLOCKS),
        num_attention_heads=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
    )
    torch.manual_seed(7)
    body = nn.ModuleDict({"model": Layers(config)})
    head = nn.Linear(32, 130, bias=False)
    for value in (*body.parameters(), *head.parameters()):
        value.data.copy_(torch.randn(value.shape) * 0.2 + (0.5 if value.ndim == 1 else 0))
    weights = {**body.state_dict(), "lm_head.weight": head.weight.data}
    folder = tmp_path_factory.mktemp("nemotron")
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors"
    )
    stated = {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "block_configs": BLOCKS,
        "vocab_size": 130,
        "hidden_size": 32,
        "num_hidden_layers": len(BLOCKS),
        "num_attention_heads": 8,
        "num_key_value_heads": None,
        "intermediate_size": None,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    }
    (folder / "config.json").write_text(json.dumps(stated, indent=2))
    with torch.no_grad():
        logits = head(body["model"](_tokens()))
    return folder, logits


def _tokens() -> torch.Tensor:
    return torch.tensor([token * 7 % 130 for token in range(3, 33)])[None]


def test_a_nemotron_nas_model_goes_to_megatron_and_back_in_every_layout(
    model: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    folder, _ = model
    store, source = catalog_of(folder)
    assert find_differences(source.tensors, config_of(folder)) == ()
    middle = to_megatron(source, config_of(folder), transformer_impl="local")
    assert middle.tensors["decoder.layers.1.mlp.linear_fc1.weight"].shape == (1024, 32)
    assert not any(key.startswith("decoder.layers.3.") for key in middle.tensors)
    result = to_hf(middle)
    assert facet_of(result, HuggingFaceModel).model_type == "nemotron-nas"
    assert_same(contents(result, store), tensors(folder))
    for number, to in enumerate(("megatron", "torch_dist")):
        for impl in ("local", "transformer_engine"):
            ranks, back = tmp_path / f"ranks-{number}-{impl}", tmp_path / f"back-{number}-{impl}"
            topology = TopologyChange(tp=2, pp=2 if impl == "local" else 1)
            run(
                Job(
                    src=folder,
                    dst=ranks,
                    to=to,
                    transformer_impl=impl,
                    topology=topology if to == "megatron" else TopologyChange(),
                    fsync=False,
                )
            )
            run(Job(src=ranks, dst=back, to="hf", fsync=False))
            assert_same(tensors(back), tensors(folder))
            assert (back / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_the_arguments_are_those_that_megatron_compares_with_the_text(
    model: tuple[Path, torch.Tensor],
) -> None:
    folder, _ = model
    fields = arguments(to_megatron(catalog_of(folder)[1], config_of(folder)))
    text = json.loads(str(fields[TEXT]))
    assert text["block_configs"] == BLOCKS
    # The comparison of Megatron-LM d98e8a64 training/arguments.py.
    assert text["hidden_act"] == "silu"
    per_group = [block["attention"]["n_heads_in_group"] for block in text["block_configs"]]
    assert {
        "group_query_attention": True,
        "use_rope_scaling": True,
        "use_rotary_position_embeddings": True,
        "num_layers": text["num_hidden_layers"],
        "hidden_size": text["hidden_size"],
        "num_attention_heads": text["num_attention_heads"],
        "untie_embeddings_and_output_weights": not text["tie_word_embeddings"],
        "rotary_base": text["rope_theta"],
        "rope_scaling_factor": text["rope_scaling"]["factor"],
        "num_query_groups": text["num_attention_heads"] // per_group[0],
    }.items() <= fields.items()
    assert fields["heterogeneous_layers_config_path"]  # by which Megatron chooses the layers


def test_megatrons_own_names_of_the_sizes_become_those_of_decilm(
    model: tuple[Path, torch.Tensor],
) -> None:
    folder, _ = model
    store, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder))
    fields = arguments(middle)
    layers: list[dict[str, Any]] = []
    for number, block in enumerate(BLOCKS):
        attention, mlp = dict(block["attention"]), dict(block["ffn"])
        if per_group := attention.pop("n_heads_in_group"):
            attention["num_query_groups"] = 8 // per_group
        if mlp.pop("ffn_mult", None):
            mlp["ffn_hidden_size"] = INNER[number]
        layers.append({"attention": attention, "mlp": mlp})
    described = {**json.loads(str(fields[TEXT])), "block_configs": layers}
    changed = {key: value for key, value in fields.items() if key != ARGUMENT}
    changed |= {TEXT: json.dumps(described)}
    result = to_hf(replace(middle, args=make_namespace(changed)))
    config = json.loads(result.documents["config.json"])
    for block_config, wanted in zip(config["block_configs"], BLOCKS, strict=True):
        assert block_config.keys() == {"attention", "ffn"}
        groups = wanted["attention"]["n_heads_in_group"]
        assert block_config["attention"].get("n_heads_in_group") == groups
        assert not {"num_query_groups", "ffn_hidden_size"} & {
            *block_config["attention"],
            *block_config["ffn"],
        }
    again = to_megatron(source, config)
    assert {key: tensor.shape for key, tensor in again.tensors.items()} == {
        key: tensor.shape for key, tensor in middle.tensors.items()
    }
    assert_same(contents(result, store), tensors(folder))
    # Of these no ffn_mult gives the size.
    layers[0]["mlp"]["ffn_hidden_size"] = 300
    changed |= {TEXT: json.dumps(described)}
    with pytest.raises(UnsupportedError, match="layer 0 has an MLP with 300 inner channels"):
        block_configs(changed)


@pytest.mark.parametrize(
    ("part", "change"),
    [("attention", {"window_length": 8}), ("ffn", {"moe": {"num_local_experts": 4}})],
)
def test_layers_that_megatron_does_not_build_are_refused(
    part: str, change: dict[str, Any], model: tuple[Path, torch.Tensor]
) -> None:
    folder, _ = model
    config = config_of(folder)
    config["block_configs"][0][part] |= change
    with pytest.raises(UnsupportedError, match=f"{next(iter(change))} of layer 0 is"):
        to_megatron(catalog_of(folder)[1], config)


@pytest.mark.slow
def test_megatron_finds_the_same_logits(model: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, wanted = model
    store, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder), transformer_impl="local")
    data = contents(middle, store)
    weights = {key: tensor_of(data[key], tensor.dtype) for key, tensor in middle.tensors.items()}
    save_file(weights, tmp_path / "weights")
    args = {key: value for key, value in arguments(middle).items() if key != "params_dtype"}
    order = facet_of(middle, MegatronModel).order
    assert order is not None
    case = {
        "name": "nemotron-nas",
        "family": "nemotron-nas",
        "weights": str(tmp_path / "weights"),
        "args": args,
        "states": sorted(middle.objects),
        "order": [key for key in order if key != "output_layer.weight"],
        "tokens": _tokens()[0].tolist(),
        "out": str(tmp_path / "logits"),
    }
    told("-c", SCRIPT, question=[case], timeout=1200)
    logits = load_file(tmp_path / "logits")["logits"]
    assert wanted.std() > 0.1
    assert torch.allclose(logits, wanted, rtol=1e-3, atol=1e-4), (logits - wanted).abs().max()
