"""What is wrong with a checkpoint, its configuration or its arguments is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.tensor import Tensor
from core.errors import (
    CheckpointingException,
    CorruptError,
    MissingShardError,
    UnknownTensorError,
    UnsupportedError,
    UsageError,
)
from core.hf.names import is_hf
from core.hf.to_hf import to_hf
from core.hf.to_megatron import to_megatron
from core.pickle.inert import make_namespace
from tests.hf.models import DEEPSEEK, LLAMA3, YARN, arguments, catalog_of, config_of, saved


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Catalog, dict[str, Any]]]:
    """Name → (catalog, configuration) of a model."""
    root = tmp_path_factory.mktemp("models")
    opened: dict[str, tuple[Catalog, dict[str, Any]]] = {}

    def open_model(name: str) -> tuple[Catalog, dict[str, Any]]:
        if name not in opened:
            folder = saved(name, root / name)
            opened[name] = catalog_of(folder)[1], config_of(folder)
        catalog, config = opened[name]
        return catalog, dict(config)

    return open_model


Folders = Callable[[str], tuple[Catalog, dict[str, Any]]]


def without(catalog: Catalog, key: str) -> Catalog:
    assert key in catalog.tensors
    return replace(
        catalog, tensors={name: meta for name, meta in catalog.tensors.items() if name != key}
    )


def with_tensor(
    catalog: Catalog, key: str, *, dtype: str = "bfloat16", shape: tuple[int, ...] = (4,)
) -> Catalog:
    """The catalog with one more tensor, or one of another dtype or shape."""
    return replace(catalog, tensors={**catalog.tensors, key: Tensor(dtype, shape)})


Q = "model.layers.1.self_attn.q_proj.weight"

BROKEN: dict[str, tuple[str, Callable[[Catalog], Catalog], type[CheckpointingException], str]] = {
    "a tensor is absent": (
        "llama",
        lambda c: without(c, Q),
        MissingShardError,
        r"not in the checkpoint \(tensor model\.layers\.1\.self_attn\.q_proj\.weight\)",
    ),
    "the embedding is absent": (
        "llama",
        lambda c: without(c, "model.embed_tokens.weight"),
        MissingShardError,
        r"tensor model\.embed_tokens\.weight",
    ),
    "the head of an untied model is absent": (
        "llama",
        lambda c: without(c, "lm_head.weight"),
        MissingShardError,
        r"tensor lm_head\.weight",
    ),
    "a bias is absent": (
        "qwen2",
        lambda c: without(c, "model.layers.2.self_attn.v_proj.bias"),
        MissingShardError,
        r"self_attn\.v_proj\.bias",
    ),
    "an expert is absent": (
        "mixtral",
        lambda c: without(c, "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        MissingShardError,
        (
            r"experts\.3\.w2\.weight\)\. The stacked tensor "
            r"model\.layers\.0\.mlp\.experts\.down_proj is missing"
        ),
    ),
    "a tensor is left over": (
        "llama",
        lambda c: with_tensor(c, "model.layers.0.self_attn.q_proj.bias"),
        UnknownTensorError,
        r"ckpt's table of llama models has no such tensor .*q_proj\.bias",
    ),
    "several tensors are left over": (
        "llama",
        lambda c: with_tensor(with_tensor(c, "model.a"), "model.b"),
        UnknownTensorError,
        r"no such tensor \(and 1 more like it\) \(tensor model\.a\)",
    ),
    "a layer is left over": (
        "llama",
        lambda c: with_tensor(c, "model.layers.3.input_layernorm.weight"),
        UnknownTensorError,
        r"model\.layers\.3\.input_layernorm",
    ),
    "a shape contradicts the configuration": (
        "llama",
        lambda c: with_tensor(c, Q, shape=(16, 32)),
        CorruptError,
        r"shape \(16, 32\), but config\.json implies \(32, 32\)",
    ),
    "a shape has another rank": (
        "llama",
        lambda c: with_tensor(c, "model.norm.weight", shape=()),
        CorruptError,
        r"shape \(\), but config\.json implies \(32,\)",
    ),
    "the vocabulary has other rows": (
        "llama",
        lambda c: with_tensor(c, "lm_head.weight", shape=(131, 32)),
        CorruptError,
        r"\(131, 32\).*lm_head",
    ),
    "parts of one tensor differ in dtype": (
        "llama",
        lambda c: with_tensor(c, Q, dtype="float32", shape=(32, 32)),
        CorruptError,
        r"q_proj\.weight is float32 and .*k_proj\.weight is bfloat16.*linear_qkv",
    ),
    "a tied head has another dtype": (
        "llama_tied",
        lambda c: with_tensor(c, "lm_head.weight", dtype="float32", shape=(130, 32)),
        CorruptError,
        r"embed_tokens\.weight is bfloat16 and lm_head\.weight is float32",
    ),
    "stacked experts are of another number": (
        "mixtral",
        lambda c: with_tensor(c, "model.layers.0.mlp.experts.gate_up_proj", shape=(5, 96, 32)),
        CorruptError,
        r"\(5, 96, 32\), but config\.json implies \(4, 96, 32\)",
    ),
    "experts are there one by one and stacked": (
        "mixtral",
        lambda c: with_tensor(c, "model.layers.0.mlp.experts.gate_up_proj", shape=(4, 96, 32)),
        UnknownTensorError,
        r"block_sparse_moe\.experts\.0\.w1",
    ),
    "weights are quantized": (
        "deepseek_v3",
        lambda c: with_tensor(
            c, "model.layers.0.self_attn.o_proj.weight_scale_inv", dtype="float32", shape=(1, 1)
        ),
        UnsupportedError,
        r"weight_scale_inv\)\. Apply the scales with --dequantize bf16",
    ),
    "there is optimizer state": (
        "llama",
        lambda c: with_tensor(c, f"optimizer.state.{Q}.exp_avg", shape=(32, 32)),
        UnsupportedError,
        r"optimizer state under Hugging Face names .*--no-optim",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_is_refused_when(folders: Folders, case: str) -> None:
    name, change, error, message = BROKEN[case]
    catalog, config = folders(name)
    with pytest.raises(error, match=message):
        to_megatron(change(catalog), config)


CONFIGS: dict[str, tuple[str, dict[str, object], type[CheckpointingException], str]] = {
    "a family that Megatron does not have": (
        "llama",
        {"model_type": "cohere"},
        UnsupportedError,
        "'cohere' are not supported: attention and MLP read the same input",
    ),
    "no family": (
        "llama",
        {"model_type": None},
        UnsupportedError,
        "'None' are not supported.*llama, mamba2, mimo, minimax",
    ),
    "a hostile family": (
        "llama",
        {"model_type": ["x" * 1000]},
        UnsupportedError,
        "are not supported",
    ),
    "another activation": (
        "llama",
        {"hidden_act": "gelu"},
        UnsupportedError,
        "hidden_act is 'gelu'",
    ),
    "a missing size": (
        "llama",
        {"hidden_size": None},
        CorruptError,
        "hidden_size is missing from the configuration",
    ),
    "a size of text": (
        "llama",
        {"intermediate_size": "48"},
        CorruptError,
        "intermediate_size is '48', not a positive integer",
    ),
    "a negative size": (
        "llama",
        {"num_attention_heads": -8},
        CorruptError,
        "num_attention_heads is -8",
    ),
    "a boolean size": ("llama", {"vocab_size": True}, CorruptError, "vocab_size is True"),
    "uneven groups": (
        "llama",
        {"num_key_value_heads": 3},
        CorruptError,
        "8 attention heads .* 3 query groups",
    ),
    "a hostile number of layers": (
        "llama",
        {"num_hidden_layers": 10**11},
        MissingShardError,
        "has only 30 tensors",
    ),
    "a hostile number of heads": ("llama", {"num_attention_heads": 2**39}, CorruptError, "shape"),
    "a hostile number of experts": (
        "mixtral",
        {"num_local_experts": 10**11},
        CorruptError,
        "gate.weight",
    ),
    "more layers than there are": (
        "llama",
        {"num_hidden_layers": 4},
        MissingShardError,
        r"model\.layers\.3\.",
    ),
    "a lone attention bias": (
        "llama",
        {"attention_bias": True},
        UnsupportedError,
        "mlp_bias is False.*add_bias_linear",
    ),
    "an attention bias": (
        "qwen3",
        {"attention_bias": True},
        UnsupportedError,
        "attention_bias is True",
    ),
    "sliding windows": (
        "qwen2",
        {"use_sliding_window": True},
        UnsupportedError,
        "use_sliding_window is True",
    ),
    "a sliding window": (
        "mixtral",
        {"sliding_window": 4096},
        UnsupportedError,
        "sliding_window is 4096",
    ),
    "dynamic scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        UnsupportedError,
        "scaling of type 'dynamic'",
    ),
    "YaRN with a factor of its own": (
        "qwen3",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 3.0}},
        UnsupportedError,
        "attention_factor of 3.0 is not supported, because Megatron always uses 1 ",
    ),
    "YaRN with an unknown number": (
        "qwen3",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_medium": 3.0}},
        UnsupportedError,
        "YaRN scaling with beta_medium",
    ),
    "partial rotary embeddings": (
        "llama",
        {"partial_rotary_factor": 0.5},
        UnsupportedError,
        "partial rotary embeddings .0.5. are not supported for llama",
    ),
    "Llama 3 with other numbers": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 4096}},
        UnsupportedError,
        "original_max_position_embeddings .* 4096, but Megatron always uses 8192",
    ),
    "Llama 3 without a factor": (
        "llama",
        {"rope_parameters": {**LLAMA3, "factor": None}},
        CorruptError,
        "factor of the rotary embeddings is None",
    ),
    "partly rotated channels": (
        "llama",
        {"partial_rotary_factor": 0.5},
        UnsupportedError,
        "partial rotary embeddings .0.5.",
    ),
    "parameters by kind of layer": (
        "llama",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        UnsupportedError,
        "differ between layers",
    ),
    "YaRN with more numbers": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "attention_factor": 2.0}},
        UnsupportedError,
        "YaRN scaling with attention_factor",
    ),
    "YaRN with mscale alone": (
        "deepseek_v3",
        {"rope_parameters": {**YARN, "mscale": 2.0, "mscale_all_dim": 0}},
        UnsupportedError,
        "mscale 2",
    ),
    "an unnormalised router": (
        "deepseek_v3",
        {"norm_topk_prob": False},
        UnsupportedError,
        "norm_topk_prob is False",
    ),
    "fewer key heads in latent attention": (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        UnsupportedError,
        "2 key heads for 8 query heads is not supported",
    ),
    "layers that are no numbers": (
        "qwen3_moe",
        {"mlp_only_layers": ["1"]},
        CorruptError,
        "mlp_only_layers is",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_configuration_is_refused_with(folders: Folders, case: str) -> None:
    name, changes, error, message = CONFIGS[case]
    catalog, config = folders(name)
    with pytest.raises(error, match=message):
        to_megatron(catalog, config | changes)


ARGUMENTS: dict[str, tuple[str, dict[str, object], type[CheckpointingException], str]] = {
    "LayerNorm": (
        "llama",
        {"normalization": "LayerNorm"},
        MissingShardError,
        r"linear_qkv\.layer_norm_bias",
    ),
    "a plain MLP": ("llama", {"swiglu": False}, UnsupportedError, "swiglu is False"),
    "learned positions": (
        "llama",
        {"position_embedding_type": "learned_absolute"},
        UnsupportedError,
        "position_embedding_type is 'learned_absolute'",
    ),
    "norms around zero": (
        "llama",
        {"layernorm_zero_centered_gamma": True},
        UnsupportedError,
        "layernorm_zero_centered_gamma is True",
    ),
    "windows": ("qwen2", {"window_size": (127, 0)}, UnsupportedError, r"window_size is \(127, 0\)"),
    "windows of keys after the query": (
        "mistral",
        {"window_size": (127, 1)},
        UnsupportedError,
        r"window_size is \(127, 1\), but transformers supports only windows",
    ),
    "interleaved rotation": (
        "qwen3",
        {"rotary_interleaved": True},
        UnsupportedError,
        "rotary_interleaved is True",
    ),
    "half rotation": ("qwen2", {"rotary_percent": 0.5}, UnsupportedError, "rotary_percent is 0.5"),
    "two scalings": (
        "llama",
        {"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2},
        UnsupportedError,
        "rotary_seq_len_interpolation_factor and use_rope_scaling cannot both be set",
    ),
    "a scaling of layers with a window": (
        "olmo3",
        {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
        UnsupportedError,
        "apply llama3 RoPE scaling to all layers",
    ),
    "an interpolation of layers with a window": (
        "olmo3",
        {"rotary_seq_len_interpolation_factor": 2},
        UnsupportedError,
        "apply linear RoPE scaling to all layers",
    ),
    "biases with norms of queries": (
        "qwen3",
        {"add_qkv_bias": True},
        UnsupportedError,
        "argument (add_qkv_bias|qk_layernorm) is True",
    ),
    "shared experts": (
        "qwen3_moe",
        {"moe_shared_expert_intermediate_size": 16},
        UnsupportedError,
        "moe_shared_expert_intermediate_size is 16",
    ),
    "a router's bias": (
        "mixtral",
        {"moe_router_enable_expert_bias": True},
        UnsupportedError,
        "moe_router_enable_expert_bias is True",
    ),
    "a frequency of nothing": (
        "mixtral",
        {"moe_layer_freq": "x"},
        CorruptError,
        "moe_layer_freq is 'x'",
    ),
    "a frequency of other layers": (
        "mixtral",
        {"moe_layer_freq": [1]},
        CorruptError,
        "moe_layer_freq is .1., not a list of 3 items, each 0 or 1",
    ),
    "dense layers after MoE layers": (
        "deepseek_v3",
        {"moe_layer_freq": [0, 1, 0]},
        CheckpointingException,
        "moe_layer_freq|not in the checkpoint",
    ),
    "a hostile number of layers": (
        "llama",
        {"num_layers": 10**12},
        MissingShardError,
        "has only 21 tensors",
    ),
    "uneven groups": ("llama", {"num_query_groups": 3}, CorruptError, "3 query groups"),
    "other heads": (
        "llama",
        {"kv_channels": 8},
        CorruptError,
        r"but the training arguments imply \(32, 64\)",
    ),
    "no size": (
        "llama",
        {"hidden_size": None},
        UnsupportedError,
        "argument hidden_size is missing",
    ),
    "no epsilon": (
        "llama",
        {"layernorm_epsilon": None, "norm_epsilon": None},
        UnsupportedError,
        "argument layernorm_epsilon, which sets rms_norm_eps in config.json, is missing",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_refused_with(folders: Folders, case: str) -> None:
    name, changes, error, message = ARGUMENTS[case]
    middle = to_megatron(*folders(name))
    with pytest.raises(error, match=message):
        to_hf(replace(middle, args=make_namespace(arguments(middle) | changes)))


def test_no_arguments_are_refused(folders: Folders) -> None:
    with pytest.raises(UnsupportedError, match="no training arguments"):
        to_hf(replace(to_megatron(*folders("llama")), args=None))


def test_a_tensor_that_is_absent_or_left_over_is_refused_on_the_way_back(folders: Folders) -> None:
    middle = to_megatron(*folders("llama"))
    with pytest.raises(MissingShardError, match=r"decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        to_hf(without(middle, "decoder.layers.1.mlp.linear_fc2.weight"))
    with pytest.raises(
        UnsupportedError, match=r"have no such tensor \(tensor decoder\.layers\.0\.mlp\.extra\)"
    ):
        to_hf(with_tensor(middle, "decoder.layers.0.mlp.extra"))
    with pytest.raises(CorruptError, match=r"shape \(129, 32\)"):
        to_hf(with_tensor(middle, "embedding.word_embeddings.weight", shape=(129, 32)))


def test_options_are_checked(folders: Folders) -> None:
    catalog, config = folders("llama")
    with pytest.raises(UsageError, match="transformer_impl is 'apex'"):
        to_megatron(catalog, config, transformer_impl="apex")
    with pytest.raises(UsageError, match="'bert' are not supported"):
        to_hf(to_megatron(catalog, config), model_type="bert")


def test_frequencies_that_follow_from_the_configuration_are_listed(folders: Folders) -> None:
    catalog, config = folders("llama")
    key = "model.layers.0.self_attn.rotary_emb.inv_freq"
    result = to_megatron(with_tensor(catalog, key, dtype="float32"), config)
    assert (key,) in [entries.names for entries in result.dropped if entries.is_listed]


def test_objects_that_megatron_has_no_place_for_are_listed(folders: Folders) -> None:
    catalog, config = folders("llama")
    catalog = replace(
        catalog,
        objects={"lr_scheduler": StoredObject("lr_scheduler", value={"step": 1})},
        files={"config.json": b"{}", "tokenizer.json": b"{}"},
    )
    assert tuple(map(str, to_megatron(catalog, config).dropped)) == (
        "lr_scheduler (not stored in Megatron checkpoints)",
        "sidecar files, which this format does not include: tokenizer.json",
    )


def test_published_names_of_the_same_family_are_read(folders: Folders) -> None:
    catalog, config = folders("deepseek_v3")
    assert to_megatron(catalog, config | {"model_type": "kimi_k2"}).facet(MegatronModel) is not None
    assert DEEPSEEK["n_group"] == arguments(to_megatron(catalog, config))["moe_router_num_groups"]


def test_only_a_configuration_and_names_that_are_not_megatrons_make_hugging_face(
    folders: Folders,
) -> None:
    catalog, config = folders("llama")
    assert is_hf(catalog, config)
    assert is_hf(catalog, {"model_type": "gpt2"})
    assert not is_hf(catalog, None)
    assert not is_hf(catalog, {})
    assert not is_hf(to_megatron(catalog, config), config)


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (
            ["shared", "full", "full"],
            "must be the first layers and then layers at regular intervals",
        ),
        (["full", "shared"], "not a list of 3 items, each full or shared"),
        (["full", "shared", "some"], "not a list of 3 items, each full or shared"),
    ],
)
def test_layers_without_an_indexer_that_megatron_does_not_have_are_refused(
    types: list[str], message: str, folders: Folders
) -> None:
    catalog, config = folders("glm_moe_dsa")
    with pytest.raises((UnsupportedError, CorruptError), match=message):
        to_megatron(catalog, config | {"indexer_types": types})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"mamba_norm_before_gate": True, "mamba_rms_norm": True},
            "mamba_norm_before_gate is True",
        ),
        ({"time_step_limit": [0.0, 0.5]}, "no time-step limits"),
        ({"time_step_limit": [0.0, 3.4e38]}, "no time-step limits"),
        ({"ssm_multipliers": 2.0}, "not a list of numbers"),
        ({"mamba_d_conv": 2}, "mamba_d_conv is 2"),
    ],
)
def test_mamba_layers_of_falcon_that_megatron_does_not_have_are_refused(
    change: dict[str, Any], message: str, folders: Folders
) -> None:
    catalog, config = folders("falcon_h1")
    with pytest.raises(CheckpointingException, match=message):
        to_megatron(catalog, config | change)


@pytest.mark.parametrize(
    "change",
    [
        {"mamba_norm_before_gate": True},  # there is no norm
        {"mamba_norm_before_gate": ...},
        {"time_step_limit": [0.0, 1e308]},  # Nemotron 3 Ultra: time steps are float32
        {"time_step_limit": [0.0, 3.4028234663852886e38]},
        {"time_step_limit": [0.0, float("inf")]},
        {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    ],
    ids=str,
)
def test_what_changes_no_mamba_layer_is_not_refused(
    change: dict[str, Any], folders: Folders
) -> None:
    catalog, config = folders("falcon_h1")
    changed = {name: value for name, value in (config | change).items() if value is not ...}
    usual = arguments(to_megatron(catalog, config))
    args = arguments(to_megatron(catalog, changed))
    assert args | {"huggingface_config": None} == usual | {"huggingface_config": None}
