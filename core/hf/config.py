"""``config.json`` ↔ Megatron's training arguments.

Arguments made from a configuration are those that Megatron needs to build the model, to find its checkpoint's layout
and to start from it (``--use-checkpoint-args``). How the model was or will be trained (batch sizes, learning rates,
dropout, loss coefficients) is not in them: the run's own arguments say it.

A configuration made from arguments is what transformers 4 and 5 need to load the model. What arguments do not say is
null (``bos_token_id``, ``eos_token_id``) or left to transformers' defaults.

Not supported: values that the other side cannot express; each is refused by its name.

Source: transformers 5.23.0 ``models/*/configuration_*.py``; Megatron-LM d98e8a64 ``training/arguments.py``,
``training/checkpointing.py`` ``load_args_from_checkpoint``; arguments of the checkpoints in tests/golden.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from core.arrays.sharding import padded_vocab_size
from core.errors import CorruptError, UnsupportedError
from core.hf.name_tables import Family
from core.hf.rope import rope_arguments, rope_config
from core.hf.traits import Model
from core.pickle.inert import Global

CONFIG = "config.json"
_ALIASES = {"layernorm_epsilon": "norm_epsilon"}
"""Arguments that have another name in some versions of Megatron."""

_WHERE_TO_START: Mapping[str, object] = {
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "transformer_pipeline_model_parallel_size"),
            *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            *("world_size", "data_parallel_size"),
        ),
        1,
    ),
    **dict.fromkeys(
        (
            *("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
            *("num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers"),
            *("decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout", "vocab_file", "merge_file"),
        ),
    ),
    **dict.fromkeys(
        (
            *("sequence_parallel", "account_for_embedding_in_pipeline_split", "use_distributed_optimizer"),
            *("account_for_loss_in_pipeline_split", "use_dist_ckpt", "squared_relu", "openai_gelu", "quick_geglu"),
            *("apply_query_key_layer_scaling", "apply_residual_connection_post_layernorm", "apply_layernorm_1p"),
            *("layernorm_zero_centered_gamma", "multi_latent_attention"),
        ),
        False,
    ),
    **dict.fromkeys(("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"), 0),
    **dict.fromkeys(("num_experts", "mtp_num_layers", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")),
    "moe_layer_freq": 1,
    "moe_grouped_gemm": False,
    "ckpt_format": "torch",
    "add_position_embedding": True,
    "use_rotary_position_embeddings": True,
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": None,
}
"""Arguments that are the same for every model that has just been converted: one rank, nothing trained yet."""


def arguments_of(
    config: Mapping[str, object],
    family: Family,
    *,
    dtype: str,
    transformer_impl: str | None,
    divisible_by: int,
    iteration: int,
    n_mtp: int,
) -> dict[str, object]:
    """The training arguments of a model, by name.

    Args:
        config: the parsed ``config.json``.
        family: its family.
        dtype: of the parameters.
        transformer_impl: ``local`` or ``transformer_engine``; None takes what the model can be built with.
        divisible_by: what padded vocabularies are multiples of, times TP.
        iteration: the iteration that the checkpoint is to have.
        n_mtp: multi-token prediction layers that there are tensors for.

    Raises:
        CorruptError: the configuration does not say something, or contradicts itself.
        UnsupportedError: it says something that Megatron has no arguments for.
    """
    config = {**family.defaults, **config}
    _check_fixed(config, family)
    is_latent = "latent" in family.requires
    args: dict[str, object] = dict(_WHERE_TO_START)
    args |= family.fixed_args
    args |= {name: _value(config, names) for name, names in family.config.items()}
    heads, hidden = count_of(config, "num_attention_heads"), count_of(config, "hidden_size")
    groups = count_of(config, "num_key_value_heads", default=heads)
    n_rows = count_of(config, "vocab_size")
    impl = transformer_impl or ("transformer_engine" if is_latent else "local")
    args |= {
        "num_query_groups": groups,
        "group_query_attention": groups != heads and not is_latent,
        "kv_channels": args["v_head_dim"]
        if is_latent
        else count_of(config, "head_dim", default=max(hidden // heads, 1)),
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
    args |= rope_arguments(config, is_latent=is_latent)
    if "moe" in family.requires:
        args |= _moe_arguments(config, family, n_layers=count_of(config, "num_hidden_layers"))
        args["moe_grouped_gemm"] = impl == "transformer_engine"
    if is_latent:
        args["q_lora_rank"] = None if config.get("q_lora_rank") is None else count_of(config, "q_lora_rank")
        args["mtp_num_layers"] = n_mtp or None
        if groups != heads:
            raise UnsupportedError(f"{groups} key heads for {heads} query heads in latent attention", file=CONFIG)
    return args | {other: args[name] for name, other in _ALIASES.items()}


def _check_fixed(config: Mapping[str, object], family: Family) -> None:
    for name, wanted in family.fixed_config.items():
        found = config.get(name)
        if found is not None and found != wanted:
            raise UnsupportedError(
                f"{name} is {found!r}; {family.model_type} models are mapped with {wanted!r} only", file=CONFIG
            )
    for name in family.absent:
        if config.get(name) is not None:
            raise UnsupportedError(f"{name} is {config[name]!r}, which is not mapped", file=CONFIG)


def _has_linear_bias(config: Mapping[str, object], family: Family) -> bool:
    if "linear_bias" not in family.allows:
        return False
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention != mlp:
        raise UnsupportedError(
            f"attention_bias is {attention} and mlp_bias is {mlp}; Megatron has one argument for both, add_bias_linear",
            file=CONFIG,
        )
    return attention


def _moe_arguments(config: Mapping[str, object], family: Family, *, n_layers: int) -> dict[str, object]:
    args: dict[str, object] = {}
    if "pre_softmax" in family.allows:
        args["moe_router_pre_softmax"] = not config.get("norm_topk_prob", False)
        args["moe_layer_freq"] = _frequency(dense_layers(config, family, n_layers=n_layers), n_layers)
    if "sigmoid" in family.requires:
        args["moe_layer_freq"] = _frequency(dense_layers(config, family, n_layers=n_layers), n_layers)
        shared, inner = count_of(config, "n_shared_experts"), count_of(config, "moe_intermediate_size")
        args |= {
            "moe_shared_expert_intermediate_size": shared * inner,
            "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
            "moe_router_num_groups": count_of(config, "n_group", default=1),
            "moe_router_group_topk": count_of(config, "topk_group", default=1),
            "moe_router_dtype": "fp32",
        }
    return args


def dense_layers(config: Mapping[str, object], family: Family, *, n_layers: int) -> frozenset[int]:
    """Return the numbers of the layers without experts in a family with experts.

    DeepSeek-V3 has them first. In Qwen3-MoE they are those that are listed, and all but every n-th, counted from the
    n-th.

    Raises:
        CorruptError: the configuration is malformed.
    """
    if "sigmoid" in family.requires:
        return frozenset(range(min(count_of(config, "first_k_dense_replace", default=0, least=0), n_layers)))
    if "dense_layers" not in family.allows:
        return frozenset()
    step = count_of(config, "decoder_sparse_step", default=1)
    listed = config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise CorruptError(f"mlp_only_layers is {repr(listed)[:80]}, not a list of layers", file=CONFIG)
    return frozenset(layer for layer in range(n_layers) if layer in set(listed) or (layer + 1) % step)


def _frequency(dense: frozenset[int], n_layers: int) -> object:
    return [int(layer not in dense) for layer in range(n_layers)] if dense else 1


def _value(config: Mapping[str, object], names: tuple[str, ...]) -> object:
    """Return the number that is stated under one of the names; an epsilon may be less than 1."""
    value = next((value for name in names if (value := config.get(name)) is not None), None)
    return value if isinstance(value, float) and 0 < value < 1 else number_of(config, names)


def number_of(config: Mapping[str, object], names: tuple[str, ...]) -> int:
    """Return the positive number that is stated under the first of the names that has a value.

    Raises:
        CorruptError: none has, or it is not a positive integer.
    """
    return count_of(config, next((name for name in names if config.get(name) is not None), names[0]))


def count_of(config: Mapping[str, object], name: str, *, default: int | None = None, least: int = 1) -> int:
    """Return a number that the configuration states.

    Raises:
        CorruptError: it is not stated and there is no default, or it is not an integer from ``least``.
    """
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise CorruptError(f"the configuration does not say {name}", file=CONFIG)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 40:
        raise CorruptError(f"{name} is {repr(value)[:80]}, not a number from {least}", file=CONFIG)
    return value


def config_of(fields: Mapping[str, object], family: Family, model: Model, *, dtype: str) -> dict[str, object]:
    """The configuration of a model.

    Args:
        fields: the training arguments by name.
        family: the model's family.
        model: what ``core.hf.traits.model_of`` made of them.
        dtype: of the weights.

    Raises:
        UnsupportedError: transformers has no counterpart of an argument, or the arguments do not say something.
    """
    config: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": model.sizes["vocab"],
        "tie_word_embeddings": "tied" in model.features,
        "num_key_value_heads": model.n_groups,
        **family.fixed_config,
        **rope_config(fields),
    }
    for arg, names in family.config.items():
        value = fields.get(arg, fields.get(_ALIASES.get(arg, arg)))
        if value is None and arg == "moe_ffn_hidden_size":
            value = fields.get("ffn_hidden_size")
        if value is None:
            raise UnsupportedError(f"the training arguments do not say {arg}, which is {names[0]} in config.json")
        if config.setdefault(names[0], value) != value:
            _unite(config, fields, names[0], model)
    if "latent" not in model.features:
        config["head_dim"] = model.sizes["head"]
    if "linear_bias" in family.allows:
        config |= dict.fromkeys(("attention_bias", "mlp_bias"), "linear_bias" in model.features)
    if "pre_softmax" in family.allows:
        config["norm_topk_prob"] = "pre_softmax" not in model.features
        config["mlp_only_layers"] = sorted(model.dense or ())
        config["decoder_sparse_step"] = 1
    if "sigmoid" in family.requires:
        config |= _deepseek_config(fields, model)
    return config


def _unite(config: dict[str, object], fields: Mapping[str, object], name: str, model: Model) -> None:
    """Two arguments are one name in config.json (Mixtral's intermediate_size): the experts' size counts.

    Raises:
        UnsupportedError: a layer is dense, so that the other one counts as well.
    """
    if model.dense is None or model.dense:
        raise UnsupportedError(f"two training arguments that are both {name} in config.json differ")
    config[name] = fields.get("moe_ffn_hidden_size", config[name])


def _deepseek_config(fields: Mapping[str, object], model: Model) -> dict[str, object]:
    dense, sizes = model.dense or frozenset(), model.sizes
    if dense != frozenset(range(len(dense))):
        raise UnsupportedError("argument moe_layer_freq has dense layers after others; deepseek_v3 has them first")
    if sizes["shared_ffn"] % sizes["moe_ffn"]:
        raise UnsupportedError(
            f"argument moe_shared_expert_intermediate_size is {sizes['shared_ffn']}, not a multiple of an expert's "
            f"{sizes['moe_ffn']} channels, as in deepseek_v3"
        )
    groups = fields.get("moe_router_num_groups") or 1
    return {
        "first_k_dense_replace": len(dense),
        "n_shared_experts": sizes["shared_ffn"] // sizes["moe_ffn"],
        "routed_scaling_factor": fields.get("moe_router_topk_scaling_factor") or 1.0,
        "n_group": groups,
        "topk_group": fields.get("moe_router_group_topk") or groups,
        "q_lora_rank": sizes.get("q_lora"),
        "num_nextn_predict_layers": model.n_mtp,
    }


def document(config: Mapping[str, object]) -> bytes:
    """The file of a configuration, the same for the same content."""
    return (json.dumps(config, indent=2, sort_keys=True, ensure_ascii=True) + "\n").encode("ascii")
