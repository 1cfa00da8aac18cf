"""Models of transformers to the global Megatron form and back: the same files, and the same
logits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.hf.config_json.rope import unsaid_rope
from core.hf.family import family_of
from core.hf.names import is_hf, model_types
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.hf.values import ARGUMENT
from core.pickle.inert import make_namespace
from tests.hf.models import (
    FAMILIES,
    MODELS,
    MOE,
    arguments,
    assert_same,
    catalog_of,
    config_of,
    contents,
    loaded_model,
    logits,
    saved,
    tensors,
    written,
)
from tests.support.covering import every_third
from tests.support.facets import facet_of


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_comes_back_bit_for_bit_and_transformers_runs_it(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    store, source = catalog_of(folder)
    config = config_of(folder)
    assert is_hf(source, config)
    middle = to_megatron(source, config)
    back = to_hf(middle)
    assert facet_of(back, HuggingFaceModel).model_type == MODELS[name][0]
    assert_same(contents(back, store), tensors(folder))
    ours = written(back, store, tmp_path / "ours")
    assert torch.equal(logits(loaded_model(ours)), logits(loaded_model(folder)))


@pytest.mark.parametrize("name", every_third(MODELS))
def test_the_configuration_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path / "model")
    _, source = catalog_of(folder)
    text = (folder / "config.json").read_bytes()
    middle = to_megatron(replace(source, files={"config.json": text}), config_of(folder))
    assert to_hf(middle).documents["config.json"] == text
    passed = to_hf(_as_megatron_saves_it(middle), config=text)
    assert passed.documents["config.json"] == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64 there and 32 in the checkpoint"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8 there and 4 in the checkpoint"),
        ({"model_type": "qwen2"}, "describes a qwen2 model, but in the checkpoint argument"),
        ({"model_type": "no_such"}, "has the type 'no_such', which is not a supported family"),
    ],
)
def test_the_configuration_of_another_model_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = saved("llama", tmp_path / "model")
    _, source = catalog_of(folder)
    middle = _as_megatron_saves_it(to_megatron(source, config_of(folder)))
    with pytest.raises(UnsupportedError, match=message):
        to_hf(middle, config=json.dumps(config_of(folder) | changes).encode())


def test_a_key_that_only_one_configuration_has_is_named(tmp_path: Path) -> None:
    folder = saved("mistral", tmp_path / "model")
    _, source = catalog_of(folder)
    config = config_of(folder) | {"sliding_window": None}
    middle = _as_megatron_saves_it(to_megatron(source, config))
    del config["sliding_window"]  # transformers' default is a window
    result = to_hf(middle, config=json.dumps(config).encode())
    assert json.loads(result.documents["config.json"])["sliding_window"] is None
    assert any("except for values from the training arguments: " in n for n in result.notes)


def test_sizes_that_no_tensor_has_are_those_of_the_arguments(tmp_path: Path) -> None:
    folder = saved("qwen3_moe", tmp_path / "model")
    _, source = catalog_of(folder)
    middle = _as_megatron_saves_it(to_megatron(source, config_of(folder)))
    config = config_of(folder) | {"intermediate_size": 8}
    assert to_hf(middle, config=json.dumps(config).encode()).tensors.keys() == source.tensors.keys()


@pytest.mark.parametrize("name", every_third(FAMILIES, start=1))
def test_the_arguments_alone_describe_a_configuration_of_the_same_model(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    _, source = catalog_of(folder)
    middle = _as_megatron_saves_it(to_megatron(source, config_of(folder)))
    ours = tmp_path / "ours"
    ours.mkdir()
    model = to_hf(middle, model_type=MODELS[name][0])
    (ours / "config.json").write_bytes(model.documents["config.json"])
    wanted, config_of_ours = (
        AutoConfig.from_pretrained(folder).to_dict(),
        AutoConfig.from_pretrained(ours).to_dict(),
    )
    untold = {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "_name_or_path",
        "transformers_version",
        "router_aux_loss_coef",
    }
    if (
        unsaid_rope(config_of(folder), family_of(MODELS[name][0])) is not None
        or name == "ministral3_plain"
    ):
        untold |= {"rope_parameters"}
        assert any(note.startswith("the arguments do not record") for note in model.notes)
    if name == "qwen3_moe_sparse":
        untold |= {"decoder_sparse_step", "mlp_only_layers"}  # the same in other words
    if name == "ernie4_5_moe_sparse":  # the same in other words
        untold |= {f"moe_layer_{key}" for key in ("start_index", "end_index", "interval")}
    if MODELS[name][0] == "nemotron_h":
        untold |= {"time_step_min"}
    if name == "nemotron_h":  # it has no experts, whatever is stated about them
        untold |= {"n_routed_experts", "n_group", "routed_scaling_factor"}
        untold |= {"moe_intermediate_size", "moe_shared_expert_intermediate_size"}
    if name == "qwen3_5_moe":
        untold |= {"intermediate_size"}  # not a value of its own: such a model has no dense MLP
    if name == "dots1_moe":
        untold |= {"max_window_layers"}  # layer_types in other words
    if name in ("gpt2", "gpt_bigcode_heads"):
        untold |= {"n_inner"}  # null: four times the hidden size
    differing = {
        key: (config_of_ours.get(key), value)
        for key, value in wanted.items()
        if config_of_ours.get(key) != value
    }
    if wanted.get("head_dim") is None:  # what transformers takes for it is stated
        assert differing.pop("head_dim", None) in (None, (4, None))
    assert set(differing) <= untold, differing


def _as_megatron_saves_it(catalog: Catalog) -> Catalog:
    """The checkpoint with the arguments that Megatron's own run would save: all but the origin."""
    fields = {key: value for key, value in arguments(catalog).items() if key != ARGUMENT}
    return replace(catalog, args=make_namespace(fields))


def test_a_scaling_that_no_argument_expresses_is_told_of_whatever_family_is_chosen(
    tmp_path: Path,
) -> None:
    for name, text in (
        ("phi3_longrope", "longrope RoPE scaling (phi3)"),
        ("olmo3_yarn", "RoPE scaling in layers without a sliding window (olmo3)"),
        ("ministral3", "llama_4_scaling_beta (ministral3)"),
        ("qwen3", None),
    ):
        folder = saved(name, tmp_path / name)
        _, source = catalog_of(folder)
        middle = to_megatron(source, config_of(folder))
        notes = to_hf(_as_megatron_saves_it(middle)).notes
        unsaid = [note for note in notes if note.startswith("the arguments do not record")]
        assert [text in note for note in unsaid if text] == ([True] if text else [])
        assert all("--config" in note for note in unsaid)
        assert not any(note in unsaid for note in to_hf(middle).notes)


@pytest.mark.parametrize(
    ("name", "families"),
    [("olmo2", "olmo2, olmo3"), ("olmoe", "olmoe"), ("exaone4", "exaone4")],
)
def test_tensors_of_another_family_than_the_arguments_suggest_name_those_that_fit(
    name: str, families: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    _, source = catalog_of(folder)
    middle = _as_megatron_saves_it(to_megatron(source, config_of(folder)))
    with pytest.raises((CorruptError, MissingShardError)) as refusal:
        to_hf(middle)
    assert refusal.value.hint == (
        f"the arguments and tensors fit these families: {families}; specify the right family, "
        f"for example --names hf:{name}"
    )
    assert to_hf(middle, model_type=name).tensors.keys() == source.tensors.keys()


def test_what_arguments_cannot_say_comes_back_and_what_they_say_is_theirs(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    _, source = catalog_of(folder)
    config = config_of(folder) | {
        "bos_token_id": 7,
        "eos_token_id": [8, 9],
        "initializer_range": 0.5,
        "attention_dropout": 0.25,
        "our_own": {"nested": [1, None]},
    }
    middle = to_megatron(source, config)
    # The run changed the base of its rotary embeddings, and nothing else.
    fields = arguments(middle) | {"rotary_base": 500000}
    model = to_hf(replace(middle, args=make_namespace(fields)))
    config_back = json.loads(model.documents["config.json"])
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    assert config_back.pop("rope_parameters") == rope
    assert config_back.pop("rope_theta") == 500000.0
    assert config_back == {key: value for key, value in config.items() if key != "rope_parameters"}


@pytest.mark.parametrize("name", every_third(MOE, start=2))
def test_experts_that_are_stored_as_one_tensor_are_the_same_model(
    name: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    stacked = saved(name, tmp_path / "stacked", save_original_format=False)
    store, source = catalog_of(stacked)
    assert any(key.endswith(("experts.gate_up_proj", "experts.up_proj")) for key in source.tensors)
    assert not any(".experts.0." in key for key in source.tensors)
    middle = to_megatron(source, config_of(stacked))
    assert_same(contents(to_hf(middle), store), tensors(folder))


@pytest.mark.each_value
@pytest.mark.parametrize("name", every_third(MODELS, start=1))
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_both_implementations_names_are_written_and_read(
    name: str, impl: str, tmp_path: Path
) -> None:
    folder = saved(name, tmp_path / "model")
    store, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder), transformer_impl=impl)
    is_fused = impl == "transformer_engine"
    # Without a norm before the linear modules:
    if MODELS[name][0] not in ("exaone4", "olmo2", "olmo3"):
        assert is_fused == any("layer_norm_weight" in key for key in middle.tensors)
    # Every linear module has an extra state, and Transformer Engine's norms have one, too.
    states = {key.removesuffix("._extra_state") for key in middle.objects}
    assert any(module.endswith((".linear_proj", ".out_proj")) for module in states)
    assert is_fused == any(module.endswith("norm") for module in states)
    assert_same(contents(to_hf(middle), store), tensors(folder))


def test_query_key_and_value_rows_lie_group_by_group(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path / "model")
    store, source = catalog_of(folder)
    wanted = tensors(folder)
    values = contents(to_megatron(source, config_of(folder)), store)
    for kind in ("weight", "bias"):
        q, k, v = (wanted[f"model.layers.1.self_attn.{part}_proj.{kind}"] for part in "qkv")
        fused = values[f"decoder.layers.1.self_attention.linear_qkv.{kind}"]
        head, per_group, groups = 4, 2, 4
        rows = [
            part
            for group in range(groups)
            for part in (
                *(q[(group * per_group + j) * head :][:head] for j in range(per_group)),
                k[group * head :][:head],
                v[group * head :][:head],
            )
        ]
        assert np.array_equal(fused, np.concatenate(rows))


def test_the_gate_comes_before_the_up_projection(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "model")
    store, source = catalog_of(folder)
    wanted = tensors(folder)
    values = contents(to_megatron(source, config_of(folder)), store)
    gate, up = (
        wanted[f"model.layers.2.block_sparse_moe.experts.3.{name}.weight"] for name in ("w1", "w3")
    )
    assert np.array_equal(
        values["decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"],
        np.concatenate([gate, up]),
    )


def test_the_arguments_describe_the_model(tmp_path: Path) -> None:
    folder = saved("deepseek_v3", tmp_path / "model")
    _, source = catalog_of(folder)
    middle = to_megatron(source, config_of(folder))
    args = arguments(middle)
    expected = {
        "num_layers": 3,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "moe_layer_freq": [0, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "transformer_impl": "transformer_engine",
        "vocab_size": 130,
        "padded_vocab_size": 256,
        "layernorm_epsilon": 1e-6,
        "norm_epsilon": 1e-6,
        "bf16": True,
        "tensor_model_parallel_size": 1,
    }
    assert {name: args[name] for name in expected} == expected
    assert str(args["params_dtype"]) == "torch.bfloat16"
    assert facet_of(middle, MegatronModel).expert_names == "te_grouped"
    assert middle.tensors["decoder.layers.1.mlp.router.expert_bias"].shape == (4,)


def test_every_family_is_found_by_its_features(tmp_path: Path) -> None:
    # transformers has no causal model of Ling 2, MiMo and Sarvam (test_published_families), nor of
    # Step-3.5 (test_step3p5).
    absent = {"bailing_moe_v2", "mimo", "nemotron-nas", "sarvam_mla", "sarvam_moe", "step3p5"}
    assert {MODELS[name][0] for name in MODELS} == set(model_types()) - absent


def test_configurations_of_transformers_4_mean_the_same(tmp_path: Path) -> None:
    folder = saved("llama_rope_scaling", tmp_path / "model")
    _, source = catalog_of(folder)
    new = config_of(folder)
    rope = dict(new["rope_parameters"])
    old = {
        key: value
        for key, value in new.items()
        if key not in ("rope_parameters", "dtype", "head_dim")
    }
    old |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": "bfloat16"}
    own = ("params_dtype", ARGUMENT)
    new_fields, other = arguments(to_megatron(source, new)), arguments(to_megatron(source, old))
    assert new_fields == {
        name: value if name not in own else new_fields[name] for name, value in other.items()
    }
    assert new_fields["use_rope_scaling"] is True
    assert new_fields["rope_scaling_factor"] == 8.0
    assert new_fields["rotary_base"] == 500000
