"""Find the options that Megatron's ``--use-checkpoint-args`` does not take from a checkpoint.

The arguments of a model that was converted from Hugging Face are in the checkpoint; no training
script has them yet. Megatron copies most of them from there, but for example neither the epsilon of
the norms nor what multi-latent attention consists of: a model that is built without these has other
values or other parameters.

Source: ``load_args_from_checkpoint`` of Megatron-LM core_v0.12.0 to core_v0.19.0 and d98e8a64
``training/checkpointing.py``, and the parsers of core_v0.16.1 and d98e8a64. What one of them does
not copy is listed here. Stating it is harmless for the others that have the option, and those that
do not cannot build such a model. ``apply_layernorm_1p`` is copied,
but the model is built from ``layernorm_zero_centered_gamma``.

Not listed: what only a fork can be told (multipliers of Falcon-H1, soft caps), and what
``core.hf`` notes as not reaching the model.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

_OPTIONS: Mapping[str, tuple[str, object]] = {
    "bf16": ("--bf16", False),
    "fp16": ("--fp16", False),
    "transformer_impl": ("--transformer-impl", "transformer_engine"),
    "layernorm_epsilon": ("--norm-epsilon", 1e-5),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", False),
    "qk_layernorm": ("--qk-layernorm", False),
    "apply_residual_connection_post_layernorm": (
        "--apply-residual-connection-post-layernorm",
        False,
    ),
    "fp32_residual_connection": ("--fp32-residual-connection", False),
    "make_vocab_size_divisible_by": ("--make-vocab-size-divisible-by", 128),
    # Activations.
    "activation_func_clamp_value": ("--activation-func-clamp-value", None),
    "glu_linear_offset": ("--glu-linear-offset", 0.0),
    "openai_gelu": ("--openai-gelu", False),
    "quick_geglu": ("--quick-geglu", False),
    # Attention and its rotary embedding.
    "attention_output_gate": ("--attention-output-gate", False),
    "softmax_type": ("--softmax-type", "vanilla"),
    "window_size": ("--window-size", None),
    "window_attn_skip_freq": ("--window-attn-skip-freq", None),
    "no_rope_freq": ("--no-rope-freq", None),
    "use_rope_scaling": ("--use-rope-scaling", False),
    "rope_scaling_factor": ("--rope-scaling-factor", 8.0),
    "rotary_seq_len_interpolation_factor": ("--rotary-seq-len-interpolation-factor", None),
    # Multi-latent attention.
    "multi_latent_attention": ("--multi-latent-attention", False),
    "q_lora_rank": ("--q-lora-rank", None),
    "kv_lora_rank": ("--kv-lora-rank", 32),
    "qk_head_dim": ("--qk-head-dim", 128),
    "qk_pos_emb_head_dim": ("--qk-pos-emb-head-dim", 64),
    "v_head_dim": ("--v-head-dim", 128),
    "rope_type": ("--rope-type", None),
    "rotary_scaling_factor": ("--rotary-scaling-factor", 1.0),
    "mscale": ("--mscale", 1.0),
    "mscale_all_dim": ("--mscale-all-dim", 0.0),
    # Sparse and linear attention.
    "experimental_attention_variant": ("--experimental-attention-variant", None),
    "dsa_indexer_n_heads": ("--dsa-indexer-n-heads", None),
    "dsa_indexer_head_dim": ("--dsa-indexer-head-dim", None),
    "dsa_indexer_topk": ("--dsa-indexer-topk", None),
    "dsa_indexer_topk_freq": ("--dsa-indexer-topk-freq", 1),
    "dsa_indexer_skip_topk_offset": ("--dsa-indexer-skip-topk-offset", 0),
    "dsa_indexer_rope_interleaved": ("--dsa-indexer-rope-interleaved", False),
    "dsa_indexer_k_norm_epsilon": ("--dsa-indexer-k-norm-epsilon", None),
    "linear_attention_freq": ("--linear-attention-freq", None),
    "linear_conv_kernel_dim": ("--linear-conv-kernel-dim", 4),
    "linear_key_head_dim": ("--linear-key-head-dim", 128),
    "linear_value_head_dim": ("--linear-value-head-dim", 128),
    "linear_num_key_heads": ("--linear-num-key-heads", 16),
    "linear_num_value_heads": ("--linear-num-value-heads", 32),
    # Experts.
    "moe_router_dtype": ("--moe-router-dtype", None),
    "moe_router_num_groups": ("--moe-router-num-groups", None),
    "moe_router_group_topk": ("--moe-router-group-topk", None),
    "moe_shared_expert_gate": ("--moe-shared-expert-gate", False),
    "mtp_num_layers": ("--mtp-num-layers", None),
}
"""Argument → its option, and the default of Megatron's parser."""
_YARN: Mapping[str, str] = {
    "yarn_original_max_position_embeddings": "--yarn-original-max-position-embeddings",
    "yarn_beta_fast": "--yarn-beta-fast",
    "yarn_beta_slow": "--yarn-beta-slow",
}
"""The same for YaRN of ordinary attention, which has no defaults and only newer versions."""
_INTEGER = "rotary_seq_len_interpolation_factor"
"""The parser takes no other numbers; ``core.hf`` notes that a fraction does not reach the model."""
_SWITCHED_OFF = {
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "dsa_indexer_rotate_activation": "--no-dsa-indexer-rotate-activation",
}
_OF_MLA = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
)
_OF_YARN = ("rotary_scaling_factor", "mscale", "mscale_all_dim")


def list_uncopied_options(fields: Mapping[str, object]) -> Iterator[str]:
    """Yield the options of Megatron's script that give a model the arguments of its checkpoint.

    Args:
        fields: the arguments in the checkpoint.
    """
    yield "--use-checkpoint-args"
    has_mla = fields.get("multi_latent_attention") is True
    has_yarn = fields.get("position_embedding_type") == "yarn"
    for name, (option, default) in _OPTIONS.items():
        value = fields.get(name, default)
        if name == _INTEGER and isinstance(value, float):
            value = int(value) if value.is_integer() else None
        is_used = (has_mla or name not in _OF_MLA) and (has_mla or has_yarn or name not in _OF_YARN)
        if is_used and value is not None and value != default:
            yield option if value is True else f"{option} {_text(value)}"
    for name, option in _YARN.items():
        if has_yarn and fields.get(name) is not None:
            yield f"{option} {_text(fields[name])}"
    if has_yarn and fields.get("yarn_correction_range_round_to_int") is False:
        yield "--no-yarn-correction-range-round-to-int"
    for name, option in _SWITCHED_OFF.items():
        if fields.get(name) is False:
            yield option


def _text(value: object) -> str:
    """Return an argument's value as the parser takes it: lists without spaces, windows as pairs."""
    if isinstance(value, (list, tuple)):
        items = ",".join(map(str, value))
        return shlex.quote(f"[{items}]") if isinstance(value, list) else items
    return shlex.quote(str(value))
