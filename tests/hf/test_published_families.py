"""Published models that transformers loads under another name, or does not have.

Kimi K2 is a DeepSeek-V3 with a ``model_type`` of its own; its configuration is the published one
with small sizes. Ling 2's modeling code is published with the weights: its layers are those of
transformers' GLM-4.5 with norms of queries and keys, which Megatron has run (test_megatron_logits),
so a GLM-4.5 under Ling's names must become the same Megatron model. So must a Qwen2 under MiMo's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.engine.catalog.facets import HuggingFaceModel
from core.errors import UnsupportedError
from core.hf.proof.comparison import find_differences
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.hf.values import ARGUMENT
from core.pickle.inert import make_namespace
from core.verbs.convert.job import TopologyChange
from core.verbs.convert.run import Job, run
from tests.hf.models import (
    YARN,
    add_prediction,
    arguments,
    assert_same,
    built,
    catalog_of,
    config_of,
    contents,
    saved,
    tensors,
)
from tests.support.facets import facet_of

_LING = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".gate.e_score_correction_bias": ".gate.expert_bias",
}


def test_kimis_published_configuration_describes_the_same_model(tmp_path: Path) -> None:
    folder = saved("kimi_k2", tmp_path / "model")
    store, source = catalog_of(folder)
    new = config_of(folder)
    scaling = {key: value for key, value in new["rope_parameters"].items() if key != "rope_theta"}
    published = {key: value for key, value in new.items() if key != "rope_parameters"} | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**scaling, "type": scaling.pop("rope_type")},
        "rope_theta": 50000.0,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    }
    ours, theirs = to_megatron(source, published), to_megatron(source, new)
    differing = {
        name
        for name, value in arguments(theirs).items()
        if arguments(ours)[name] != value and name != "params_dtype"
    }
    assert all("config" in name for name in differing), differing  # the configuration itself
    assert_same(contents(ours, store), contents(theirs, store))
    back = to_hf(ours)
    assert_same(contents(back, store), tensors(folder))
    assert json.loads(back.documents["config.json"])["model_type"] == "kimi_k2"


def test_olmo3s_published_configuration_keeps_its_yarn_and_a_note_tells_of_it(
    tmp_path: Path,
) -> None:
    from transformers import Olmo3Config

    folder = saved("olmo3_yarn", tmp_path / "model")
    store, source = catalog_of(folder)
    new = config_of(folder)
    scaling = {
        name: value
        for name, value in new["rope_parameters"]["full_attention"].items()
        if name != "rope_theta"
    }
    published = {name: value for name, value in new.items() if name != "rope_parameters"} | {
        "rope_theta": 500000,
        "rope_scaling": {**scaling, "attention_factor": 1.2079441541679836},
    }
    for config in (published, new):
        middle = to_megatron(source, config, transformer_impl="local")
        fields = arguments(middle)
        assert (fields["position_embedding_type"], fields["rotary_base"]) == ("rope", 500000)
        assert fields["window_attn_skip_freq"] == [1, 1, 1]
        assert "yarn RoPE scaling" in " ".join(middle.notes)
        assert "computes different logits" in " ".join(middle.notes)
        back = to_hf(middle)
        assert json.loads(back.documents["config.json"]) == config
        assert_same(contents(back, store), tensors(folder))
    # transformers fills in a section that is missing or null.
    rope = new["rope_parameters"]
    for sections in ({}, {"full_attention": rope["full_attention"], "sliding_attention": None}):
        filled = {**new, "rope_parameters": sections}
        theirs = Olmo3Config(**filled).rope_parameters["sliding_attention"]
        assert theirs["rope_theta"] == 5e5
        assert arguments(to_megatron(source, filled))["rotary_base"] == 500000
    # What Megatron cannot express without changing other layers is refused.
    scaled = {**rope, "sliding_attention": rope["full_attention"]}
    with pytest.raises(UnsupportedError, match="'yarn' in sliding-window layers"):
        to_megatron(source, {**new, "rope_parameters": scaled})
    other_base = {**rope, "full_attention": {**rope["full_attention"], "rope_theta": 1e6}}
    with pytest.raises(UnsupportedError, match="single rotary_base for all"):
        to_megatron(source, {**new, "rope_parameters": other_base})


@pytest.fixture
def ling(tmp_path: Path) -> Path:
    """A GLM-4.5 with norms of queries and keys, under the names of Ling 2."""
    folder = saved("glm4_moe_norms", tmp_path / "ling")
    weights: dict[str, torch.Tensor] = {}
    glm = load_file(folder / "model.safetensors")
    for key, value in glm.items():
        if key.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if key.endswith("q_proj.weight"):
            parts = [glm[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            key, value = (
                key.replace("self_attn.q_proj", "attention.query_key_value"),
                torch.cat(parts),
            )
        for old, new in _LING.items():
            key = key.replace(old, new)
        weights[key] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(folder)
    for old, new in {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
    }.items():
        config[new] = config.pop(old)
    config |= {
        "model_type": "bailing_moe_v2",
        "architectures": ["BailingMoeV2ForCausalLM"],
        "score_function": "sigmoid",
        "use_bias": False,
        "use_qkv_bias": False,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_ling_becomes_the_megatron_model_that_the_same_glm_becomes(
    ling: Path, tmp_path: Path
) -> None:
    glm = saved("glm4_moe_norms", tmp_path / "glm")
    glm_store, glm_source = catalog_of(glm)
    store, source = catalog_of(ling)
    ours, theirs = (
        to_megatron(source, config_of(ling)),
        to_megatron(glm_source, config_of(glm)),
    )
    assert_same(contents(ours, store), contents(theirs, glm_store))
    differing = {
        name
        for name, value in arguments(theirs).items()
        if arguments(ours)[name] != value and name != "params_dtype"
    }
    assert all("config" in name for name in differing), differing
    back = to_hf(ours)
    assert facet_of(back, HuggingFaceModel).model_type == "bailing_moe_v2"
    assert_same(contents(back, store), tensors(ling))


@pytest.mark.parametrize("version", [4, 5])
def test_sarvam_has_the_names_and_the_configuration_of_ling(ling: Path, version: int) -> None:
    store, source = catalog_of(ling)
    config = config_of(ling) | {
        "model_type": "sarvam_moe",
        "architectures": ["SarvamMoEForCausalLM"],
        "n_group": 1,
        "topk_group": 1,
    }
    theirs = to_megatron(source, {**config, "model_type": "bailing_moe_v2"})
    if version == 5:  # rotary settings are one entry, and defaults may be left out
        theta, factor = config.pop("rope_theta"), config.pop("partial_rotary_factor")
        config["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": factor,
        }
        for name in ("n_group", "topk_group", "num_key_value_heads"):
            del config[name]
    assert not find_differences(source.tensors, config)
    ours = to_megatron(source, config)
    assert_same(contents(ours, store), contents(theirs, store))
    assert arguments(ours) | {ARGUMENT: ""} == arguments(theirs) | {ARGUMENT: ""}
    back = to_hf(ours)
    stated = json.loads(back.documents["config.json"])
    assert (stated["model_type"], stated["architectures"]) == (
        "sarvam_moe",
        ["SarvamMoEForCausalLM"],
    )
    assert_same(contents(back, store), tensors(ling))


@pytest.mark.parametrize("version", [4, 5])
def test_sarvam_of_latent_attention_becomes_the_megatron_model_of_the_same_deepseek(
    tmp_path: Path, version: int
) -> None:
    folder = tmp_path / "model"
    changes = {
        "q_lora_rank": None,
        "n_shared_experts": 1,
        "rope_parameters": {**YARN, "rope_theta": 10000.0},
    }
    built("deepseek_v3", **changes).save_pretrained(folder)
    store, source = catalog_of(folder)
    deepseek = config_of(folder)
    theirs = to_megatron(source, deepseek)

    # Names and values of the published file, and what transformers 5 makes of them.
    config = deepseek | {
        "model_type": "sarvam_mla",
        "architectures": ["SarvamMLAForCausalLM"],
        "num_experts": deepseek["n_routed_experts"],
        "num_shared_experts": deepseek["n_shared_experts"],
        "q_head_dim": deepseek["qk_nope_head_dim"] + deepseek["qk_rope_head_dim"],
        "head_dim": deepseek["kv_lora_rank"] + deepseek["qk_rope_head_dim"],
    }
    for name in ("n_routed_experts", "n_shared_experts", "q_lora_rank"):
        del config[name]
    if version == 4:
        yarn = {name: value for name, value in YARN.items() if name != "rope_type"}
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = {**yarn, "type": "deepseek_yarn"}
    else:
        config["rope_parameters"]["rope_type"] = "deepseek_yarn"
    assert not find_differences(source.tensors, config)
    ours = to_megatron(source, config)
    assert_same(contents(ours, store), contents(theirs, store))
    assert arguments(ours) | {ARGUMENT: ""} == arguments(theirs) | {ARGUMENT: ""}

    # Arguments alone are a configuration of the same model.
    fields = {**arguments(ours), ARGUMENT: None}
    back = to_hf(replace(ours, args=make_namespace(fields)), model_type="sarvam_mla")
    stated = json.loads(back.documents["config.json"])
    assert (stated["num_experts"], stated["num_shared_experts"]) == (4, 1)
    assert_same(contents(back, store), tensors(folder))
    again = to_megatron(back, stated)
    assert arguments(again) | {ARGUMENT: ""} == arguments(ours) | {ARGUMENT: ""}


def test_ling_comes_back_from_files_of_several_ranks(ling: Path, tmp_path: Path) -> None:
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    run(
        Job(
            src=ling,
            dst=ranks,
            to="megatron",
            topology=TopologyChange(tp=2, pp=3, ep=2),
            fsync=False,
        )
    )
    run(Job(src=ranks, dst=back, to="hf", fsync=False))
    assert_same(tensors(back), tensors(ling))


@pytest.fixture
def mimo(tmp_path: Path) -> Path:
    """A Qwen2 with a layer for multi-token prediction, under MiMo's names."""
    folder = saved("qwen2", tmp_path / "mimo")
    start = "model.mtp_layers.0."
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    add_prediction(
        folder,
        start,
        norms=[f"{start}{name}" for name in norms],
        projection=f"{start}input_proj",
    )
    config = config_of(folder) | {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
        "attention_bias": True,
        "head_dim": 4,
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_mimo_becomes_the_megatron_model_that_the_same_qwen2_becomes(
    mimo: Path, tmp_path: Path
) -> None:
    qwen2 = saved("qwen2", tmp_path / "qwen2")
    qwen2_store, qwen2_source = catalog_of(qwen2)
    store, source = catalog_of(mimo)
    ours, theirs = (
        to_megatron(source, config_of(mimo)),
        to_megatron(qwen2_source, config_of(qwen2)),
    )
    data = contents(ours, store)
    body = {key: value for key, value in data.items() if not key.startswith("mtp.")}
    assert_same(body, contents(theirs, qwen2_store))
    # MiMo projects [hidden state; token] and Megatron [token; hidden state], as in Megatron-Bridge.
    stored = tensors(mimo)["model.mtp_layers.0.input_proj.weight"]
    swapped = np.concatenate((stored[:, 32:], stored[:, :32]), axis=1)
    assert np.array_equal(data["mtp.layers.0.eh_proj.weight"], swapped)
    for ours_name, mimo_name in (("enorm", "token_layernorm"), ("hnorm", "hidden_layernorm")):
        norm = tensors(mimo)[f"model.mtp_layers.0.{mimo_name}.weight"]
        assert np.array_equal(data[f"mtp.layers.0.{ours_name}.weight"], norm)


def test_mimo_comes_back_from_files_of_several_ranks(mimo: Path, tmp_path: Path) -> None:
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    topology = TopologyChange(tp=2, pp=3)
    run(Job(src=mimo, dst=ranks, to="megatron", topology=topology, fsync=False))
    run(Job(src=ranks, dst=back, to="hf", fsync=False))
    assert_same(tensors(back), tensors(mimo))
    assert (back / "config.json").read_bytes() == (mimo / "config.json").read_bytes()


def test_groups_that_megatron_ranks_by_another_number_of_experts_are_converted_with_a_note(
    tmp_path: Path,
) -> None:
    folder = saved("deepseek_v2_groups", tmp_path / "model")
    store, source = catalog_of(folder)
    config = config_of(folder)
    middle = to_megatron(source, config | {"topk_group": 1})  # as DeepSeek-V2 236B: 3 of 6
    fields = arguments(middle)
    assert (fields["moe_router_num_groups"], fields["moe_router_group_topk"]) == (4, 1)
    back = to_hf(replace(middle, notes=()))
    for result in (middle, back):
        assert "a group by its 1 best experts, but Megatron ranks it by its 2 best" in " ".join(
            result.notes
        )
    assert_same(contents(back, store), tensors(folder))
    assert json.loads(back.documents["config.json"])["topk_group"] == 1
    for same in ({}, {"topk_group": 1, "topk_method": "greedy"}):
        assert "best" not in " ".join(to_megatron(source, config | same).notes)
