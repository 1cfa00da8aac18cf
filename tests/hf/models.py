"""Tiny models of transformers, built from configurations, and their files as catalogs."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from core.arrays.dtypes import DTYPES
from core.engine.catalog.catalog import Catalog, catalog_of_arrays
from core.engine.catalog.stored import Extent, StoredArray
from core.files.store import LocalStore
from core.pickle.inert import attributes
from tests.support.covering import covering_cases
from tests.support.materialize import Bytes, tensor_bytes

COMMON = {
    "vocab_size": 130,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 16,
}
QWEN2_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
DEEPSEEK = {
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
INDEXER = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 9}
KIMI_K2 = {
    **DEEPSEEK,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
DEEPSEEK_V2 = {
    **{name: value for name, value in DEEPSEEK.items() if name != "num_nextn_predict_layers"},
    "n_group": None,
    "topk_group": None,
    "routed_scaling_factor": 16.0,
}
GLM4_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 0,
    "attention_bias": True,
    "use_qk_norm": True,
}
ERNIE_MOE = {
    "head_dim": 8,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "moe_num_shared_experts": 2,
}
GATED_DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "sliding_window": 9,
    "swiglu_limit": 0.9,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

PLAIN_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}

# Its configuration has none of the numbers of attention and MLP.
MAMBA2: dict[str, Any] = {
    **dict.fromkeys(
        (
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            "intermediate_size",
        ),
        ...,
    ),
    "num_heads": 8,
    "head_dim": 8,
    "n_groups": 4,
    "state_size": 6,
}
NEMOTRON_H = {
    "num_hidden_layers": ...,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "ssm_state_size": 6,
    "time_step_min": 1e-30,  # Megatron does not raise time steps to it
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
}
FALCON_H1 = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 4,
    "mamba_n_groups": 4,
    "mamba_d_state": 5,
    "mamba_norm_before_gate": False,
    "embedding_multiplier": 5.65,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.55,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24,
    "mlp_multipliers": [0.88, 0.2],
    "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.36],
}
PADDED = {"pad_token_id": 0}
# GPT-2 has names of its own.
GPT2: dict[str, Any] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            "intermediate_size",
        ),
        ...,
    ),
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 8,
    "n_positions": 64,
    **PADDED,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 32,
}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_wide_heads": ("llama", {"head_dim": 12}),
    "llama_rope_scaling": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}),
    "llama_linear_scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}},
    ),
    "llama_biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_one_group": ("llama", {"num_key_value_heads": 1}),
    "llama_every_head": ("llama", {"num_key_value_heads": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_yarn": (
        "qwen3",
        {"head_dim": 16, "rope_parameters": {**PLAIN_YARN, "rope_theta": 1e4}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 5, "head_dim": 6}),
    "ministral": (
        "ministral",
        {"sliding_window": 5, "head_dim": 4, "layer_types": ["full_attention", *WINDOWS[:2]]},
    ),
    "ministral3": ("ministral3", {"head_dim": 8, "rope_parameters": MINISTRAL_ROPE}),
    "ministral3_plain": (
        "ministral3",
        {"head_dim": 8, "rope_parameters": {**MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0}},
    ),
    "phi3": ("phi3", PADDED),
    "phi3_partial": (
        "phi3",
        {
            **PADDED,
            "num_key_value_heads": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "phi3_longrope": ("phi3", {**PADDED, "rope_parameters": LONGROPE}),
    "smollm3": (
        "smollm3",
        {**PADDED, "bos_token_id": 1, "eos_token_id": 2, "no_rope_layers": [1, 0, 1]},
    ),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 12}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 5, "layer_types": WINDOWS, "query_pre_attn_scalar": 12},
    ),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4_windows": ("exaone4", {"sliding_window": 5, "layer_types": WINDOWS}),
    "exaone_moe": (
        "exaone_moe",
        {
            **QWEN3_MOE,
            "head_dim": 8,
            "num_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "sliding_window": 5,
            "layer_types": WINDOWS,
        },
    ),
    "olmo2": ("olmo2", PADDED),
    "olmo3": ("olmo3", {**PADDED, "sliding_window": 5, "layer_types": WINDOWS}),
    "olmo3_yarn": (
        "olmo3",
        {
            **PADDED,
            "sliding_window": 5,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                "full_attention": {**PLAIN_YARN, "rope_theta": 5e5},
            },
        },
    ),
    "seed_oss": ("seed_oss", {**PADDED, "head_dim": 12}),
    "arcee": ("arcee", {**PADDED, "bos_token_id": 1, "eos_token_id": 2}),
    "jais2": ("jais2", {**PADDED, "bos_token_id": 1, "eos_token_id": 2}),
    "cwm": (
        "cwm",
        {"head_dim": 8, "sliding_window": 5, "layer_types": ["full_attention", *WINDOWS[:2]]},
    ),
    "starcoder2": ("starcoder2", {**PADDED, "bos_token_id": 1, "eos_token_id": 2}),
    "starcoder2_window": (
        "starcoder2",
        {
            **PADDED,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "sliding_window": 5,
            "tie_word_embeddings": False,
        },
    ),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}),
    "stablelm_biased": (
        "stablelm",
        {"use_qkv_bias": True, "tie_word_embeddings": True, "partial_rotary_factor": 1.0},
    ),
    "dots1_moe": (
        "dots1",
        {
            **{name: GLM4_MOE[name] for name in ("n_routed_experts", "num_experts_per_tok")},
            "moe_intermediate_size": 16,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "head_dim": 8,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "solar_open_moe": (
        "solar_open",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
            "rope_parameters": {**PLAIN_YARN, "rope_theta": 1e4},
        },
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2_untied": (
        "gpt2",
        {**GPT2, "n_inner": 48, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    "gpt_bigcode": ("gpt_bigcode", {**GPT2, "n_inner": 48}),
    "gpt_bigcode_heads": (
        "gpt_bigcode",
        {**GPT2, "multi_query": False, "activation_function": "gelu"},
    ),
    "gpt_neox": (
        "gpt_neox",
        {
            "num_key_value_heads": ...,
            "use_parallel_residual": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "nemotron": ("nemotron", {}),
    "mixtral": ("mixtral", MIXTRAL),
    "qwen3_moe": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe_mixed": ("qwen3_moe", {**QWEN3_MOE, "mlp_only_layers": [1]}),
    "qwen3_moe_sparse": ("qwen3_moe", {**QWEN3_MOE, "decoder_sparse_step": 2}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "ernie4_5_moe": ("ernie4_5_moe", ERNIE_MOE),
    "ernie4_5_moe_sparse": (
        "ernie4_5_moe",
        {
            **ERNIE_MOE,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
        },
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE),
    "qwen2_moe_mixed": (
        "qwen2_moe",
        {**QWEN2_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3_next": ("qwen3_next", {**GATED_DELTA, **QWEN2_MOE}),
    "qwen3_next_mixed": (
        "qwen3_next",
        {
            **GATED_DELTA,
            **QWEN2_MOE,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**GATED_DELTA, **QWEN2_MOE}),
    # As Qwen3.5-27B: the rows of keys do not divide by the number of query heads.
    "qwen3_5_six_heads": (
        "qwen3_5_text",
        {
            **GATED_DELTA,
            "num_attention_heads": 6,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {
            **GATED_DELTA,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    "helium": ("helium", {**PADDED, "head_dim": 4}),
    "glm": ("glm", {**PADDED, "head_dim": 8}),
    "glm4": ("glm4", {**PADDED, "head_dim": 8, "attention_bias": True}),
    "hy_v3": (
        "hy_v3",
        {
            **QWEN3_MOE,
            "num_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "glm4_moe": ("glm4_moe", {**GLM4_MOE, "use_qk_norm": False}),
    "glm4_moe_norms": ("glm4_moe", {**GLM4_MOE, "attention_bias": False, "head_dim": 16}),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {
            name: value
            for name, value in DEEPSEEK.items()
            if name not in ("num_nextn_predict_layers", "first_k_dense_replace")
        },
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss_groups": ("gpt_oss", {**GPT_OSS, "intermediate_size": 64}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "minimax_m2": ("minimax_m2", {**MIXTRAL, "head_dim": 16, "rotary_dim": 8}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK_V2, "q_lora_rank": None}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {
            **DEEPSEEK_V2,
            "n_routed_experts": 8,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "rope_theta": 1e4},
        },
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        {**DEEPSEEK, "rope_parameters": {**YARN, "rope_theta": 1e4}},
    ),
    "kimi_k2": ("deepseek_v3", KIMI_K2),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2_tied": ("mamba2", {**MAMBA2, "tie_word_embeddings": True, "residual_in_fp32": False}),
    "nemotron_h": ("nemotron_h", {**NEMOTRON_H, "hybrid_override_pattern": "M-*"}),
    "nemotron_h_moe": ("nemotron_h", {**NEMOTRON_H, "hybrid_override_pattern": "M*EM-E"}),
    "deepseek_v32": ("deepseek_v32", {**DEEPSEEK, **INDEXER}),
    "glm_moe_dsa": ("glm_moe_dsa", {**DEEPSEEK, **INDEXER}),
    # As GLM-5.2: layers without an indexer use the choice of an earlier layer's.
    "glm_moe_dsa_shared": (
        "glm_moe_dsa",
        {
            **DEEPSEEK,
            **INDEXER,
            "num_hidden_layers": 6,
            "indexer_types": ["full", *["full", "shared"] * 2, "full"],
        },
    ),
    "falcon_h1": ("falcon_h1", FALCON_H1),
    "falcon_h1_norm": ("falcon_h1", {**FALCON_H1, "mamba_rms_norm": True}),
    "deepseek_v3_plain_query": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0},
    ),
}
"""Name → (model type, what differs from ``COMMON``; ``...`` for a value that it does not have)."""

MOE = tuple(
    name
    for name in MODELS
    if "moe" in name
    or name.startswith(("qwen3_next", "mixtral", "gpt_oss", "minimax", "deepseek", "kimi", "hy_v3"))
)
DENSE = tuple(name for name in MODELS if name not in MOE)
FAMILIES = covering_cases(MODELS, lambda name: {"family": MODELS[name][0]})
"""Cases for ``parametrize``: the first model of each family, with ``--long`` all."""


def built(
    name: str, dtype: torch.dtype = torch.bfloat16, *, kind: str = "ForCausalLM", **changes: Any
) -> Any:
    """A model with random weights, biases and norms that are not their usual zeros and ones.

    Args:
        kind: end of the auto class that builds it.
        changes: other values of its configuration.
    """
    import transformers

    model_type, differing = MODELS[name]
    values = {**COMMON, **differing, **changes}
    config = transformers.AutoConfig.for_model(
        model_type, **{name: value for name, value in values.items() if value is not ...}
    )
    torch.manual_seed(sum(name.encode()))
    model = getattr(transformers, f"AutoModel{kind}").from_config(config)
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            value.copy_(torch.randn(value.shape) * 0.2 + (0.5 if value.ndim == 1 else 0))
        if key.endswith("linear_attn.norm.weight"):  # Megatron holds it minus 1 (test_shifted)
            value.add_(0.5).clamp_(min=0.5)
    return model.to(dtype).eval()


def saved(name: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    """What ``save_pretrained`` writes of a model; a copy, which a test may change."""
    return Path(shutil.copytree(_first_saved(name, dtype, **options), folder, dirs_exist_ok=True))


def add_prediction(
    folder: Path,
    start: str,
    *,
    norms: Sequence[str],
    projection: str,
    copies: Mapping[str, str] | None = None,
) -> None:
    """Add a multi-token prediction to the weights of a model with three layers of 32 channels.

    Args:
        start: beginning of the names of its layer, which is like the model's last one.
        norms, projection: names of its norms, and of the weights that join embedding and hidden
            states, without ``.weight``.
        copies: name → the tensor of the model that it repeats.
    """
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(1)
    extra = {
        key.replace("model.layers.2.", start): torch.randn_like(value)
        for key, value in weights.items()
        if key.startswith("model.layers.2.")
    }
    extra |= {f"{name}.weight": torch.randn(32).bfloat16() for name in norms}
    extra[f"{projection}.weight"] = torch.randn(32, 64).bfloat16()
    extra |= {name: weights[key].clone() for name, key in (copies or {}).items()}
    save_file(weights | extra, folder / "model.safetensors", metadata={"format": "pt"})


@cache
def _first_saved(name: str, dtype: torch.dtype, **options: Any) -> Path:
    """The files of a model, made once in a process."""
    folder = Path(_models_dir().name, str(_first_saved.cache_info().misses))
    quietly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built(name, dtype).save_pretrained(folder, **options)
    return folder


@cache
def _models_dir() -> TemporaryDirectory[str]:
    """Removed when the process ends."""
    return TemporaryDirectory()


def loaded_model(folder: Path, kind: str = "ForCausalLM") -> Any:
    """What an auto class makes of a directory; every tensor is there, and none is left over."""
    import transformers

    quietly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        auto_class = getattr(transformers, f"AutoModel{kind}")
        model, info = auto_class.from_pretrained(folder, output_loading_info=True)
    assert not any(
        info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    ), info
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    """What a model makes of a fixed sequence."""
    tokens = torch.arange(3, 33)[None] * 7 % 130
    with torch.no_grad():
        result = model(tokens).logits
    assert isinstance(result, torch.Tensor)
    return result


@cache
def quietly() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def config_of(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json``."""
    config = json.loads((folder / "config.json").read_text())
    assert isinstance(config, dict)
    return config


_DTYPE_OF = {dtype.safetensors: dtype.name for dtype in DTYPES.values() if dtype.safetensors}


def catalog_of(folder: Path) -> tuple[LocalStore, Catalog]:
    """The tensors of a directory of safetensors files; where each lies is read from the header,
    which is JSON.
    """
    arrays: dict[str, StoredArray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for key, item in json.loads(data[8:start]).items():
            if key != "__metadata__":
                extent = Extent(path.name, start + item["data_offsets"][0])
                arrays[key] = StoredArray(
                    key, _DTYPE_OF[item["dtype"]], tuple(item["shape"]), extent
                )
    return LocalStore(folder), catalog_of_arrays(format="safetensors", arrays=arrays)


def contents(catalog: Catalog, store: LocalStore) -> dict[str, Bytes]:
    """The bytes of every tensor of a catalog, through its fragments."""
    return {key: tensor_bytes(catalog, store, key) for key in catalog.tensors}


def tensors(folder: Path) -> dict[str, Bytes]:
    """The bytes of every tensor of a directory, as the safetensors package reads them."""
    bytes_by_key: dict[str, Bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                bytes_by_key[key] = bytes_of(file.get_tensor(key))
    return bytes_by_key


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A tensor's bytes, as ``contents`` gives them."""
    data: Bytes = (
        tensor.contiguous()
        .flatten()
        .view(torch.uint8)
        .numpy()
        .reshape(*tensor.shape, tensor.element_size())
    )
    return data


_TORCH = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def tensor_of(data: Bytes, dtype: str) -> torch.Tensor:
    """The other way round."""
    flat = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).copy())
    return flat.view(_TORCH[dtype]).reshape(data.shape[:-1])


def written(catalog: Catalog, store: LocalStore, folder: Path) -> Path:
    """A directory of what ``to_hf`` made, written by the safetensors package."""
    folder.mkdir(parents=True)
    data = contents(catalog, store)
    save_file(
        {key: tensor_of(data[key], tensor.dtype) for key, tensor in catalog.tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name, content in catalog.documents.items():
        (folder / name).write_bytes(content)
    return folder


def assert_same(actual: Mapping[str, Bytes], wanted: Mapping[str, Bytes]) -> None:
    """The same keys with the same bytes and shapes."""
    assert sorted(actual) == sorted(wanted)
    for key, data in wanted.items():
        assert actual[key].shape == data.shape, key
        assert np.array_equal(actual[key], data), key


def arguments(catalog: Catalog) -> dict[str, object]:
    """The training arguments of a global form, by name."""
    fields = attributes(catalog.args)
    assert fields is not None
    return fields
