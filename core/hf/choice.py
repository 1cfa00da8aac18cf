"""Choose the family of a model with Megatron's names.

Training arguments do not name a family, and several families may have the same layers: a model with
a Llama's arguments may have been a Mistral without windows, or a Phi-3. The first of these decides:

1. the family that the user names, or its table;
2. the ``model_type`` of the ``config.json`` that the model was converted from
   (``core.hf.config_json.origin``);
3. the only family that is recognised by its arguments; of several, the one with the fewest settings
   of its own, as every other one would be a special case of it.

A family's table names the arguments that it fixes (``[fixed.args]``) or that ``config.json`` states
(``[config]``, ``[settings]``). All others must have the neutral values listed here, as
``config.json`` could not express them.

Source: Megatron-LM d98e8a64 ``training/arguments.py``; megatron-core 0.16.1
``transformer/transformer_config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import UnsupportedError
from core.hf.config_json.origin import PASS_THIS_MODEL, ConfigOrigin
from core.hf.family import Family, families, family_called
from core.hf.traits import FEATURES
from core.hf.values import CONFIG
from core.megatron.model.blocks import TEXT
from core.megatron.model.hybrid import parse_pattern

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

_N_NEAREST = 3


def choose_family(
    fields: Mapping[str, object],
    features: frozenset[str],
    *,
    requested: str | Family | None,
    origin: ConfigOrigin | None,
) -> Family:
    """Return the family of a model.

    Args:
        fields: training arguments by name.
        features: features of the model (``core.hf.traits``).
        requested: the family that the user wants, by its model type or as a table; or None.
        origin: the ``config.json`` that the model had before it was converted to Megatron, or that
            the user passed; or None.

    Raises:
        UnsupportedError: no family, or not the requested one, has such models; the message names
            the arguments. Or several families have. Or the user passed the ``config.json`` of a
            model of another family.
        UsageError: the requested family is unknown.
    """
    if requested is not None:
        family = family_called(requested) if isinstance(requested, str) else requested
        misfits = _misfits_of(family, fields, features)
        if misfits:
            raise UnsupportedError(
                f"the model does not belong to the {family.model_type} family, because "
                f"{' and '.join(misfits)}",
                hint=_hint_to_choose(fields, features),
            )
        return family

    model_type = None if origin is None else origin.model_type
    fits = sorted(
        ((family, _misfits_of(family, fields, features)) for family in families().values()),
        key=lambda fit: (
            len(fit[1]),
            model_type not in (fit[0].model_type, *fit[0].aliases),
            not fit[0].is_detected,
            len(fit[0].settings),
        ),
    )
    type_names = {
        name for family in families().values() for name in (family.model_type, *family.aliases)
    }
    if model_type is not None and model_type not in type_names:
        raise UnsupportedError(
            f"the model's {CONFIG} has the type {model_type[:80]!r}, which is not a supported "
            "family",
            hint="describe the family in a file and pass it with --family FILE.toml, or specify a "
            "supported family with --names hf:MODEL_TYPE",
        )
    candidates = [family for family, misfits in fits if not misfits]
    for family in candidates:
        if model_type in (family.model_type, *family.aliases):
            return family
    if origin is not None and origin.is_passed and model_type is not None:
        misfits = _misfits_of(family_called(model_type), fields, features)
        raise UnsupportedError(
            f"the {CONFIG} passed with --config describes a {model_type} model, but in the "
            f"checkpoint {' and '.join(misfits)}",
            hint=PASS_THIS_MODEL,
        )
    if not candidates:
        raise _no_family(fits)
    # Of the families that are recognized by their arguments, take the plainest.
    candidates = [family for family in candidates if family.is_detected] or candidates
    fewest = min(len(family.settings) for family in candidates)
    plainest = [family for family in candidates if len(family.settings) == fewest]
    if len(plainest) > 1:
        names = [family.model_type for family in plainest]
        raise UnsupportedError(
            f"the arguments fit {len(names)} model families: {', '.join(names)}",
            hint=f"specify the family, for example --names hf:{names[0]}",
        )
    return plainest[0]


def _hint_to_choose(fields: Mapping[str, object], features: frozenset[str]) -> str:
    """Return a hint to the families of a model that does not belong to the requested one."""
    fitting = [family.model_type for family in list_fitting_families(fields, features)]
    if fitting:
        return (
            f"the arguments fit these families: {', '.join(fitting)}; specify the right one, for "
            f"example --names hf:{fitting[0]}, or omit the type (--names hf) to have it detected"
        )
    return "describe the model's family in a file, and pass it with --family FILE.toml"


def list_fitting_families(fields: Mapping[str, object], features: frozenset[str]) -> list[Family]:
    """Return the families whose models may have such arguments, whatever their tensors are."""
    return [family for family in families().values() if not _misfits_of(family, fields, features)]


def _misfits_of(
    family: Family, fields: Mapping[str, object], features: frozenset[str]
) -> list[str]:
    """Return, as texts, the arguments of a model that a family cannot have."""
    args = [FEATURES[name] for name in family.misfits(features)]
    return [
        *(f"argument {arg} is {fields.get(arg)!r}" for arg in args),
        *(
            f"argument {arg} is {fields.get(arg)!r}, not {value!r}"
            for arg, value in _misfitting_arguments(fields, family).items()
        ),
    ]


def _no_family(fits: Sequence[tuple[Family, list[str]]]) -> UnsupportedError:
    """Build the error for a model of no family.

    Args:
        fits: families with the arguments that they cannot have, the nearest family first.
    """
    nearest, misfits = fits[0]
    alike = [family.model_type for family, other in fits if other == misfits]
    if len(alike) > 1:
        return UnsupportedError(
            f"no Hugging Face model family fits, because {' and '.join(misfits)}",
            hint=f"closest families: {', '.join(alike[:_N_NEAREST])}; describe the model's family "
            "in a file and pass it with --family FILE.toml",
        )
    others = [
        f"{family.model_type} ({len(other)} argument{'s' * (len(other) > 1)})"
        for family, other in fits[1:_N_NEAREST]
    ]
    return UnsupportedError(
        f"the model does not belong to the {nearest.model_type} family, because "
        f"{' and '.join(misfits)}",
        hint=f"other families do not fit either: {', '.join(others)}; describe the model's family "
        "in a file and pass it with --family FILE.toml",
    )


def _misfitting_arguments(fields: Mapping[str, object], family: Family) -> dict[str, object]:
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
    pattern = parse_pattern(fields)
    layers = "" if pattern is None else pattern.layers
    names = set()
    if "*" not in layers:
        names |= {"position_embedding_type", "rotary_percent", "qk_layernorm"}
    if "-" not in layers and "E" not in layers:
        names |= {"swiglu", "squared_relu", "openai_gelu", "quick_geglu", "glu_activation"}
    if "E" not in layers:
        names |= {"moe_router_score_function", "moe_latent_size"}
    return frozenset(names)
