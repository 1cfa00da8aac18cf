"""Find the arguments of a model that no model of a family has.

A family's table names the arguments that it fixes (``[fixed.args]``) or that ``config.json`` states
(``[config]``, ``[settings]``). All others must have the neutral values listed here, as
``config.json`` could not express them.

Source: Megatron-LM d98e8a64 ``training/arguments.py``; megatron-core 0.16.1
``transformer/transformer_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.hf.family import Family
from core.megatron.model.blocks import TEXT
from core.megatron.model.hybrid import pattern_of

_OFF = [
    "activation_func_clamp_value",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "dsa_indexer_rope_interleaved",
    "experimental_attention_variant",
    "falconh1_ratio",
    "geglu",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "layernorm_zero_centered_gamma",
    "linear_attention_freq",
    "mla_down_proj_fusion",
    "moe_apply_probs_on_input",
    "moe_latent_size",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_gate",
    "no_rope_freq",
    "openai_gelu",
    "qk_l2_norm",
    "quick_geglu",
    "reglu",
    "rotary_interleaved",
    "squared_relu",
    "use_mup",
    "window_attn_skip_freq",
    "window_size",
]

_FACTORS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "lm_head_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "glu_activation": ("swiglu", None),
    "position_embedding_type": ("rope",),
    "moe_router_score_function": ("softmax", "sigmoid"),
    "rotary_percent": (1, 1.0, None),
    "softmax_type": ("vanilla", None),
    "softmax_scale": (None,),
    "glu_linear_offset": (0, 0.0, None),
    "layernorm_epsilon": (1e-5,),
    "dsa_indexer_topk_freq": (1, None),
    **dict.fromkeys(_FACTORS, (1, 1.0, None)),
    **dict.fromkeys(_OFF, (False, None, 0, "")),
}
"""Argument → values that it has in a model of any family whose table states nothing else."""

_DEFAULTS: Mapping[str, object] = {
    "normalization": "LayerNorm",
    "swiglu": False,
    "position_embedding_type": "learned_absolute",
    "moe_router_score_function": "softmax",
}
"""Megatron's defaults for missing arguments, where they differ from all values above."""


def misfitting_arguments(fields: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the arguments whose values no model of a family has.

    Args:
        fields: training arguments by name.

    Returns:
        Argument → the value that models of the family have.
    """
    stated = {*family.config, *family.settings, *family.switches}
    if "hybrid_override_pattern" in stated:
        stated |= {"hybrid_layer_pattern", *_without_effect(fields)}
    if TEXT in stated:
        stated |= {"heterogeneous_layers_config_path"}  # Megatron prefers the text
    misfits: dict[str, object] = {}
    for name, neutral in _NEUTRAL.items():
        if name in stated or (name == "rotary_percent" and "partial" in family.rope):
            continue
        fixed = family.fixed_args.get(name)
        allowed = tuple(fixed) if isinstance(fixed, list) else (fixed,)
        if name not in family.fixed_args:
            allowed = neutral
        if name == "position_embedding_type" and "yarn" in family.rope:
            allowed = (*allowed, "yarn")
        value = fields.get(name, _DEFAULTS.get(name, allowed[0]))
        # None means False. Types are compared too, as True == 1 in Python.
        if value is None and False in allowed:
            continue
        if not any(
            value is item or (type(value) is type(item) and value == item) for item in allowed
        ):
            misfits[name] = allowed[0]
    # What config.json has no name for follows from the other sizes.
    heads, hidden = fields.get("num_attention_heads"), fields.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        usual = {"num_query_groups": heads, "kv_channels": hidden // heads}
        for name, value in usual.items():
            is_fixed = family.config.get(name) == () and name not in family.settings
            if name == "num_query_groups" and not fields.get("group_query_attention"):
                continue
            if is_fixed and fields.get(name) not in (None, value):
                misfits[name] = value
    return misfits


def _without_effect(fields: Mapping[str, object]) -> frozenset[str]:
    """Return the arguments that no layer of a hybrid model depends on."""
    pattern = pattern_of(fields)
    layers = "" if pattern is None else pattern.layers
    names = set()
    if "*" not in layers:
        names |= {"position_embedding_type", "rotary_percent", "qk_layernorm"}
    if "-" not in layers and "E" not in layers:
        names |= {"swiglu", "squared_relu", "openai_gelu", "quick_geglu", "glu_activation"}
    if "E" not in layers:
        names |= {"moe_router_score_function", "moe_latent_size"}
    return frozenset(names)
