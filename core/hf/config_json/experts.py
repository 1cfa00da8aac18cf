"""Convert what ``config.json`` says about experts to Megatron's arguments, and back.

Families say the same things under different names, so a table names them in ``[experts]``
(``core.hf.family.ExpertNames``)::

    first_k_dense_replace: 1   ──▶  moe_layer_freq: [0, 1, 1, …]
    n_shared_experts: 2        ──▶  moe_shared_expert_intermediate_size: 2 × moe_intermediate_size
    norm_topk_prob: false      ──▶  moe_router_pre_softmax: true

Dense layers are described in one of these ways, or in several that say the same:

=========================  =========================================================================
name                       layers without experts
=========================  =========================================================================
``first_k_dense_replace``  this many at the beginning
``mlp_only_layers``        the listed ones
``decoder_sparse_step``    all except each n-th, starting with the n-th
``mlp_layer_types``        those called ``dense`` in a list with an entry per layer
``moe_layers_enum``        all but the listed ones, in a text (``3,4,5``) or a list
``moe_layer_start_index``  all but each n-th (``moe_layer_interval``) from there to
                           ``moe_layer_end_index``
=========================  =========================================================================

Source: transformers 5.23.0 ``models/*/configuration_*.py``; megatron-core 0.16.1
``transformer/moe/moe_utils.py`` ``topk_routing_with_score_function``, ``group_limited_topk``.

Groups of experts that the two sides rank by another number of experts are converted with a note
(``describe_ranking``).
"""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import UnsupportedError
from core.hf.family import Family
from core.hf.traits import Model, size_of
from core.hf.values import IN_CONFIG, count_of

_ENUM = "moe_layers_enum"
_LAYER_TYPES = {"dense": True, "sparse": False}
"""Entry of ``mlp_layer_types`` → whether the layer is dense."""


def expert_arguments(
    config: Mapping[str, object], family: Family, *, n_layers: int
) -> dict[str, object]:
    """Return the arguments for experts, except those that only have another name in config.json.

    Raises:
        CorruptError: the configuration is malformed.
    """
    names = family.experts
    args: dict[str, object] = {}
    if names.dense:
        # 1 for each layer with experts and 0 for a dense one, or just 1 if all have experts and
        # are alike otherwise.
        dense = dense_layers(config, family, n_layers=n_layers)
        args["moe_layer_freq"] = (
            [int(layer not in dense) for layer in range(n_layers)]
            if dense or _ENUM in names.dense
            else 1
        )
    if names.normalized is not None:
        # transformers normalises the top-k probabilities, Megatron instead takes the softmax of the
        # top-k logits; both give the same weights.
        args["moe_router_pre_softmax"] = not config.get(names.normalized, False)
    if names.shared:
        args["moe_shared_expert_intermediate_size"] = shared_size(config, family) or None
    if names.scaling is not None:
        scaling = config.get(names.scaling)
        args["moe_router_topk_scaling_factor"] = 1.0 if scaling is None else scaling
    if names.groups:
        args |= _group_arguments(config, family)
    if "sigmoid" in (*family.requires, *names.requires):
        args["moe_router_dtype"] = "fp32"
    return args


def _group_arguments(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the arguments for groups of experts, of which a token may use only the best."""
    names = family.experts
    n_groups, n_chosen = (count_of(config, name, default=1) for name in names.groups)
    if names.method is not None and config.get(names.method) == "greedy":
        n_groups = n_chosen = 1
    return {"moe_router_num_groups": n_groups, "moe_router_group_topk": n_chosen}


def describe_ranking(fields: Mapping[str, object], family: Family) -> str | None:
    """Describe how the two sides rank groups of experts differently.

    Megatron ranks a group by the sum of its k best experts, where k is the number of experts of a
    token divided by the number of its groups. transformers always takes ``ranked_by`` of them.

    Args:
        fields: training arguments by name.

    Returns:
        None if the two sides choose the same experts.

    Raises:
        CorruptError: an argument is not a number.
    """
    ranked_by = family.experts.ranked_by
    n_groups = size_of(fields, "moe_router_num_groups", default=1)
    n_chosen = size_of(fields, "moe_router_group_topk", default=n_groups)
    n_used = size_of(fields, "moe_router_topk", default=1)
    if not family.experts.groups or n_groups <= n_chosen or n_used // n_chosen == ranked_by:
        return None
    return (
        f"each token uses {n_used} experts from {n_chosen} of {n_groups} expert groups, and "
        f"{family.model_type} models in transformers rank a group by its {ranked_by} best experts, "
        f"but Megatron ranks it by its {n_used // n_chosen} best, so the two select different "
        "experts (--moe-router-num-groups 1 trains the weights without groups)"
    )


def has_experts(config: Mapping[str, object], family: Family) -> bool:
    """Return whether a model has layers with experts.

    Args:
        config: configuration with the pattern of a hybrid model (``core.hf.config_json.hybrid``).
    """
    return "moe" in family.requires or "E" in _symbols(config, family)


def _symbols(config: Mapping[str, object], family: Family) -> str:
    """Return the pattern of a hybrid model; empty for other models."""
    is_hybrid = "hybrid_override_pattern" in family.settings
    return str(config["hybrid_override_pattern"]) if is_hybrid else ""


def shared_size(config: Mapping[str, object], family: Family) -> int:
    """Return the number of inner channels of all shared experts together; 0 if there are none.

    Raises:
        CorruptError: the configuration does not contain it.
    """
    least = 0 if "shared_expert" in family.allows else 1
    size = 1
    for name in family.experts.shared:
        size *= count_of(config, name, least=least)
    return size


def dense_layers(config: Mapping[str, object], family: Family, *, n_layers: int) -> frozenset[int]:
    """Return the numbers of the layers without experts in a family with experts.

    Raises:
        CorruptError: the configuration is malformed.
    """
    if symbols := _symbols(config, family):
        return frozenset(layer for layer in range(n_layers) if symbols[layer : layer + 1] != "E")
    names = family.experts.dense
    kinds = config.get("mlp_layer_types") if "mlp_layer_types" in names else None
    if kinds is not None:
        kinds = IN_CONFIG.read_choices(kinds, "mlp_layer_types", _LAYER_TYPES, least=n_layers)
        return frozenset(layer for layer in range(n_layers) if _LAYER_TYPES[kinds[layer]])
    if "first_k_dense_replace" in names:
        n_dense = count_of(config, "first_k_dense_replace", default=0, least=0)
        return frozenset(range(min(n_dense, n_layers)))
    if "mlp_only_layers" in names:
        step = count_of(config, "decoder_sparse_step", default=1)
        listed = config.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            raise IN_CONFIG.build_error(listed, "mlp_only_layers", "a list of layers")
        return frozenset(
            layer for layer in range(n_layers) if layer in set(listed) or (layer + 1) % step
        )
    if _ENUM in names:
        listed = config.get(_ENUM)
        items = listed.split(",") if isinstance(listed, str) else listed
        texts = [str(item).strip() for item in items] if isinstance(items, list) else ["?"]
        if not all(text.isdecimal() and len(text) < 10 for text in texts if text):
            raise IN_CONFIG.build_error(listed, _ENUM, "a list of layers")
        return frozenset(range(n_layers)) - frozenset(int(text) for text in texts if text)
    if "moe_layer_start_index" in names:
        first = count_of(config, "moe_layer_start_index", least=0)
        step = count_of(config, "moe_layer_interval")
        last = config.get("moe_layer_end_index")
        end = n_layers if last == -1 else count_of(config, "moe_layer_end_index", least=0) + 1
        moe = {layer for layer in range(first, min(end, n_layers)) if not (layer + 1) % step}
        return frozenset(range(n_layers)) - moe
    return frozenset()


def expert_config(fields: Mapping[str, object], family: Family, model: Model) -> dict[str, object]:
    """Return the values of ``config.json`` for experts, except those that only have another name.

    Args:
        fields: training arguments by name.
        family: family of the model.
        model: the model that ``core.hf.traits.model_of`` derived from the arguments.

    Raises:
        UnsupportedError: dense layers or shared experts that the configuration cannot express.
    """
    names = family.experts
    dense, sizes = model.dense or frozenset(), model.sizes
    config: dict[str, object] = {}
    # The layers without experts, in every way of the family.
    if "mlp_layer_types" in names.dense:
        config["mlp_layer_types"] = [
            "dense" if layer in dense else "sparse" for layer in range(model.n_layers)
        ]
    if "mlp_only_layers" in names.dense:
        config |= {"mlp_only_layers": sorted(dense), "decoder_sparse_step": 1}
    if "first_k_dense_replace" in names.dense:
        if dense == frozenset(range(len(dense))):
            config["first_k_dense_replace"] = len(dense)
        elif "mlp_layer_types" not in names.dense:
            raise UnsupportedError(
                f"moe_layer_freq places dense layers after MoE layers, but {family.model_type} "
                "models must start with their dense layers"
            )
    if _ENUM in names.dense:
        config[_ENUM] = ",".join(str(n) for n in range(model.n_layers) if n not in dense)
    if "moe_layer_start_index" in names.dense:
        layers = [n for n in range(model.n_layers) if n not in dense]
        step = layers[1] - layers[0] if len(layers) > 1 else 1
        is_regular = layers and layers == list(range(layers[0], layers[-1] + 1, step))
        if not is_regular or (layers[0] + 1) % step:
            raise UnsupportedError(
                "moe_layer_freq places MoE layers at irregular intervals, which "
                "moe_layer_start_index, moe_layer_end_index and moe_layer_interval cannot express"
            )
        config |= {
            "moe_layer_start_index": layers[0],
            "moe_layer_end_index": layers[-1],
            "moe_layer_interval": step,
        }
    # The router.
    if names.normalized is not None:
        config[names.normalized] = "pre_softmax" not in model.features
    if names.scaling is not None:
        config[names.scaling] = fields.get("moe_router_topk_scaling_factor") or 1.0
    if names.groups:
        n_groups = size_of(fields, "moe_router_num_groups", default=1)
        n_chosen = size_of(fields, "moe_router_group_topk", default=n_groups)
        if names.method is not None:
            config[names.method] = "greedy" if n_groups == 1 else "group_limited_greedy"
        if names.method is None or n_groups > 1:
            config |= dict(zip(names.groups, (n_groups, n_chosen), strict=True))
    # The shared experts: a number of channels, or of experts that are as wide as the others.
    if len(names.shared) == 1:
        config[names.shared[0]] = sizes["shared_ffn"]
    elif names.shared and "shared_ffn" not in sizes:
        config[names.shared[0]] = 0
    elif names.shared:
        if sizes["shared_ffn"] % sizes["moe_ffn"]:
            raise UnsupportedError(
                f"moe_shared_expert_intermediate_size is {sizes['shared_ffn']}, but "
                f"{family.model_type} requires a multiple of an expert's {sizes['moe_ffn']} "
                "channels"
            )
        config[names.shared[0]] = sizes["shared_ffn"] // sizes["moe_ffn"]
    return config
