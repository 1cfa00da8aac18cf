"""Convert between ``config.json`` and Megatron's training arguments.

Arguments derived from a configuration are those that Megatron needs to build the model, to
recognise its checkpoint's layout and to start from it (``--use-checkpoint-args``). Arguments of
training (batch sizes, learning rates, dropout, loss coefficients) are not set: those of the run
apply.

A configuration derived from arguments contains the values that transformers 4 and 5 need to load
the model. Values that the arguments do not contain are null (``eos_token_id``, and ``bos_token_id``
unless transformers requires one) or missing, so that transformers' defaults apply.

Not supported: values that the other side cannot express; each is refused by name.

Source: transformers 5.23.0 ``models/*/configuration_*.py``; Megatron-LM d98e8a64
``training/arguments.py``, ``training/checkpointing.py`` ``load_args_from_checkpoint``; arguments of
the checkpoints in tests/golden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from core.errors import UnsupportedError
from core.hf.config_json.experts import expert_arguments, expert_config, has_experts
from core.hf.config_json.hybrid import (
    PATTERN,
    completed,
    hybrid_config,
    layer_names,
    prediction_arguments,
    prediction_config,
)
from core.hf.family import Family
from core.hf.settings import setting_argument, setting_value
from core.hf.traits import FEATURES, Model
from core.hf.values import CONFIG, count_of, number_of
from core.megatron.model.blocks import TEXT, LayerBlocks, blocks_of
from core.pickle.inert import Global

_BLOCKS = "block_configs"
_OF_EXPERTS = ("num_experts", "moe_ffn_hidden_size", "moe_router_topk")
"""Arguments that a model without experts does not have, whatever its ``config.json`` states."""
_ALIASES = {"layernorm_epsilon": "norm_epsilon"}
"""Argument → its name in other versions of Megatron."""

_INITIAL_ARGUMENTS: Mapping[str, object] = {
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "transformer_pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "world_size",
            "data_parallel_size",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "virtual_pipeline_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
            "vocab_file",
            "merge_file",
        ),
    ),
    **dict.fromkeys(
        """
        sequence_parallel account_for_embedding_in_pipeline_split
        use_distributed_optimizer account_for_loss_in_pipeline_split
        use_dist_ckpt squared_relu openai_gelu quick_geglu
        apply_query_key_layer_scaling apply_residual_connection_post_layernorm
        apply_layernorm_1p layernorm_zero_centered_gamma multi_latent_attention
        """.split(),
        False,
    ),
    **dict.fromkeys(
        ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"), 0
    ),
    **dict.fromkeys(
        (
            "num_experts",
            "mtp_num_layers",
            "moe_ffn_hidden_size",
            "moe_shared_expert_intermediate_size",
        )
    ),
    "moe_layer_freq": 1,
    "moe_grouped_gemm": False,
    "ckpt_format": "torch",
    "add_position_embedding": True,
    "use_rotary_position_embeddings": True,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": None,
}
"""Arguments that are the same for every newly converted model: one rank, nothing trained yet."""


def build_arguments(
    config: Mapping[str, object],
    family: Family,
    *,
    dtype: str,
    transformer_impl: str | None,
    divisible_by: int,
    iteration: int,
    n_mtp: int,
) -> dict[str, object]:
    """Return the training arguments of a model, by name.

    Args:
        config: parsed ``config.json``.
        family: family of the model.
        dtype: element type of the parameters.
        transformer_impl: ``local`` or ``transformer_engine``; None for that of the family:
            Transformer Engine, unless the table of a user's own family states another.
        divisible_by: the padded vocabulary is a multiple of this times TP.
        iteration: iteration to record in the checkpoint.
        n_mtp: number of multi-token prediction layers with tensors.

    Raises:
        CorruptError: the configuration lacks a value, or contradicts itself.
        UnsupportedError: Megatron has no arguments for a value.
    """
    from core.arrays.sharding import padded_vocab_size
    from core.hf.config_json.rope import rope_arguments

    config = completed(config, family)
    _check_fixed(config, family)
    # Start with fixed arguments and those that only have another name in config.json.
    args: dict[str, object] = dict(_INITIAL_ARGUMENTS)
    args |= {name: _first(value) for name, value in family.fixed_args.items()}
    has_moe = has_experts(config, family)
    args |= {
        name: _value(config, names)
        for name, names in family.config.items()
        if names and (has_moe or name not in _OF_EXPERTS)
    }
    args |= {name: bool(config.get(switch)) for name, switch in family.switches.items()}
    n_layers = count_of(config, "num_hidden_layers")
    args |= {
        name: setting_argument(setting, config, n_layers=n_layers)
        for name, setting in family.settings.items()
    }
    # Add those that are computed. The head size is optional in config.json and then follows from
    # the hidden size. Megatron's latent attention has no key groups, and its kv_channels is the
    # size of a value head.
    is_latent = "latent" in family.requires
    heads = number_of(config, family.config.get("num_attention_heads", ("num_attention_heads",)))
    hidden = count_of(config, "hidden_size")
    groups = count_query_groups(config, family, n_heads=heads)
    n_rows = count_of(config, "vocab_size")
    head_dim = max(hidden // heads, 1)
    kv_channels: object = head_dim
    if is_latent:
        kv_channels = args["v_head_dim"]
    elif family.config.get("kv_channels") != ():
        kv_channels = count_of(config, "head_dim", default=head_dim)
    impl = transformer_impl or family.implementation
    args |= {
        "num_query_groups": groups,
        "group_query_attention": groups != heads and not is_latent,
        "kv_channels": kv_channels,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "add_bias_linear": _has_linear_bias(config, family),
        "seq_length": args["max_position_embeddings"],
        "encoder_num_layers": args["num_layers"],
        "vocab_size": n_rows,
        "make_vocab_size_divisible_by": divisible_by,
        "padded_vocab_size": padded_vocab_size(n_rows, divisible_by=divisible_by, tp=1),
        "params_dtype": Global("torch", dtype),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "transformer_impl": impl,
        "iteration": iteration,
    }
    # Add those of rotary embeddings, experts and latent attention.
    args |= rope_arguments(config, family)
    if has_moe:
        args |= expert_arguments(config, family, n_layers=n_layers)
        # Only Transformer Engine's experts are grouped, and that decides their parameter names.
        args["moe_grouped_gemm"] = impl == "transformer_engine"
    if "mtp" in family.allows:
        args["mtp_num_layers"] = n_mtp or None
        if n_mtp and PATTERN in family.settings:
            args |= prediction_arguments(config, n_mtp=n_mtp)
    if is_latent:
        args["q_lora_rank"] = (
            None if config.get("q_lora_rank") is None else count_of(config, "q_lora_rank")
        )
        if groups != heads:
            raise UnsupportedError(
                f"latent attention with {groups} key heads for {heads} query heads is not "
                "supported; the numbers must be equal",
                file=CONFIG,
            )
    return args | {other: args[name] for name, other in _ALIASES.items()}


def count_query_groups(config: Mapping[str, object], family: Family, *, n_heads: int) -> int:
    """Return the number of query groups that a ``config.json`` states.

    Args:
        n_heads: number of query heads; so many groups if it states none.

    Raises:
        CorruptError: it is not a positive number.
    """
    for item in family.settings.values():
        if item.way == "one_group" and config.get(item.name):
            return 1
        if item.way == "blocks":
            # Every layer has its own number; Megatron's argument is the first layer's.
            blocks = stated_blocks(config, family)
            return next((block.n_groups for block in blocks if block.n_groups), n_heads)
    names = family.config.get("num_query_groups", ("num_key_value_heads",))
    return number_of(config, names, default=n_heads) if names else n_heads


def stated_blocks(config: Mapping[str, object], family: Family) -> tuple[LayerBlocks, ...]:
    """Return attention and MLP of each layer of a heterogeneous model.

    Raises:
        CorruptError, UnsupportedError: a layer is malformed, or Megatron has no such one.
    """
    names = family.config.get("num_attention_heads", ("num_attention_heads",))
    fields = {
        TEXT: json.dumps({_BLOCKS: config.get(_BLOCKS)}),
        "num_layers": count_of(config, "num_hidden_layers"),
        "num_attention_heads": number_of(config, names),
        "hidden_size": count_of(config, "hidden_size"),
    }
    return blocks_of(fields) or ()


def _check_fixed(config: Mapping[str, object], family: Family) -> None:
    """Raise UnsupportedError for values that Megatron's models of the family do not have."""
    for name, supported in family.fixed_config.items():
        value = config.get(name)
        if name in family.inert and not config.get(family.inert[name]):
            continue
        options = supported if isinstance(supported, list) else [supported]
        if value is not None and value not in options:
            reason = f": {family.reasons[name]}" if name in family.reasons else ""
            raise UnsupportedError(
                f"{name} is {value!r}, but {family.model_type} models are supported only with "
                f"{' or '.join(map(repr, options))}{reason}",
                file=CONFIG,
            )
    for name in family.absent:
        if config.get(name) not in (None, False):
            raise UnsupportedError(
                f"{name} is {config[name]!r}, which is not supported", file=CONFIG
            )


def _first(value: object) -> object:
    """Return the first of several values that a table lists; another value as it is."""
    return value[0] if isinstance(value, list) else value


def _has_linear_bias(config: Mapping[str, object], family: Family) -> bool:
    """Return whether all linear layers have a bias.

    Raises:
        UnsupportedError: only those of the attention or of the MLP have one.
    """
    if "linear_bias" in family.requires:
        return True
    if "linear_bias" not in family.allows:
        return False
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention != mlp:
        raise UnsupportedError(
            f"attention_bias is {attention} and mlp_bias is {mlp}, but Megatron has a single "
            "argument for both (add_bias_linear)",
            file=CONFIG,
        )
    return attention


def _value(config: Mapping[str, object], names: tuple[str, ...]) -> object:
    """Return the number recorded under the first of the names that has a value."""
    # An epsilon is the only value that may be a fraction.
    value = next((value for name in names if (value := config.get(name)) is not None), None)
    return value if isinstance(value, float) and 0 < value < 1 else number_of(config, names)


def build_config(
    fields: Mapping[str, object], family: Family, model: Model, *, dtype: str
) -> dict[str, object]:
    """Return the content of ``config.json`` for a model.

    Args:
        fields: training arguments by name.
        family: family of the model.
        model: the model that ``core.hf.traits.model_of`` derived from the arguments.
        dtype: element type of the weights.

    Raises:
        UnsupportedError: transformers has no counterpart of an argument, or an argument is missing.
    """
    from core.hf.config_json.rope import rope_config

    # Values of every family. transformers 4 reads torch_dtype, transformers 5 reads dtype.
    has_moe = "moe" in model.features
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "bos_token_id": family.defaults.get("bos_token_id"),
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": model.sizes["vocab"],
        "tie_word_embeddings": "tied" in model.features,
        **{name: _first(value) for name, value in family.fixed_config.items()},
        **rope_config(fields, family),
    }
    if family.config.get("num_query_groups") != ():
        config["num_key_value_heads"] = model.n_groups
    # Values that only have another name. Heads of attention mean nothing to a model without it.
    has_attention = model.kinds is None or "attention" in model.kinds
    for arg, names in family.config.items():
        if not names or (arg in _OF_EXPERTS and not has_moe):
            continue
        if arg == "num_attention_heads" and not has_attention and names[0] in config:
            continue
        value = fields.get(arg, fields.get(_ALIASES.get(arg, arg)))
        if value is None and arg == "moe_ffn_hidden_size":
            value = fields.get("ffn_hidden_size")
        if value is None:
            raise UnsupportedError(
                f"the training argument {arg}, which sets {names[0]} in config.json, is missing"
            )
        if config.setdefault(names[0], value) != value:
            # Two arguments become one value: Mixtral's intermediate_size, for dense MLPs and
            # experts. If all layers have experts, the size of the dense MLPs does not matter.
            if model.dense is None or model.dense:
                raise UnsupportedError(
                    f"two training arguments that both set {names[0]} in config.json have "
                    "different values"
                )
            config[names[0]] = fields.get("moe_ffn_hidden_size", config[names[0]])
    for arg, setting in family.settings.items():
        if arg == PATTERN:
            assert model.kinds is not None  # required by the family
            is_number = setting.name == "num_hidden_layers"
            config[setting.name] = model.n_layers if is_number else layer_names(model.kinds)
            continue
        config[setting.name] = setting_value(
            setting, fields.get(arg), fields, n_layers=model.n_layers
        )
    config |= hybrid_config(family, model)
    # Values that only some families have.
    if "latent" not in model.features and family.config.get("kv_channels") != ():
        config.setdefault("head_dim", model.sizes["head"])
    if "linear_bias" in family.allows:
        config |= dict.fromkeys(("attention_bias", "mlp_bias"), "linear_bias" in model.features)
    config |= {
        name: feature in model.features
        for feature, arg in FEATURES.items()
        if (name := family.switches.get(arg)) is not None
    }
    if has_moe:
        config |= expert_config(fields, family, model)
    if "mtp" in family.allows:
        config |= {family.mtp_names.count: model.n_mtp, **prediction_config(fields, model)}
    if "latent" in model.features:
        config["q_lora_rank"] = model.sizes.get("q_lora")
    return config


def document(config: Mapping[str, object]) -> bytes:
    """Return the content of ``config.json``; the same configuration gives the same bytes."""
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")
