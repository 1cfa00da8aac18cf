"""Convert settings of single layers between ``config.json`` and Megatron's arguments.

Step-3.5's layers have windows, heads, rotary embeddings and limits of their own::

    layer_types             [full, sliding, …]    layer_types             the same
    attention_other_setting {num_attention_heads: 96, …}
    sliding_window          512                   sliding_attention_setting
                                                    {window_size: [511, 0], num_attention_heads: 96,
                                                     num_query_groups: 8, kv_channels: 128}
    rope_theta              [5e6, 1e4, …]         rotary_base_per_layer   the same
    partial_rotary_factors  [0.5, 1.0, …]         rotary_percents         the same
    swiglu_limits           [0, …, 7, 7]          swiglu_limits           the same
    swiglu_limits_shared    [0, …, 16, 16]        swiglu_limits_shared    the same

transformers 5 writes the same otherwise (``Step3p7TextConfig``), which is read: ``rope_parameters``
with a section for each type of layer, and ``num_sliding_attention_heads``.

Lists may go on with the layers of multi-token prediction; they keep these entries in arguments. A
``config.json`` that is created from arguments has them if the model has such layers. transformers 5
writes them as ``mtp_layer_types``.

A window of transformers counts the query's own key, Megatron's counts those before it.
Megatron-Bridge 067f987d takes the number of the one for the other (``window_size`` [512, 0]): a
model that it converted has windows of 513 keys, which is what becomes of its arguments here.

Source: Megatron-Bridge 067f987d ``models/stepfun/step35_bridge.py``, ``step35_provider.py``;
transformers 5.23.0 ``models/step3p7/configuration_step3p7.py``.

Not supported: layers with a window whose heads have other sizes or share other numbers of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import CorruptError, UnsupportedError
from core.hf.config_json.yarn import as_int, rope_number
from core.hf.values import CONFIG, IN_CONFIG, count_of, number_of
from core.megatron.model.blocks import window_layers_of
from core.pickle.fields import FieldReader

_SLIDING, _TYPES = "sliding_attention", ("full_attention", "sliding_attention")
_LISTS: Mapping[str, str] = {
    "rotary_percents": "partial_rotary_factors",
    "swiglu_limits": "swiglu_limits",
    "swiglu_limits_shared": "swiglu_limits_shared",
}
"""Argument → name in ``config.json`` of a list of numbers."""


def per_layer_arguments(config: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments for settings that differ from layer to layer.

    Raises:
        CorruptError: a list is malformed, or the window is missing.
        UnsupportedError: layers with a window have heads that the others do not have.
    """
    n_layers = count_of(config, "num_hidden_layers")
    types = config.get("layer_types")
    if types is None:
        types = ["full_attention"] * n_layers
    types = IN_CONFIG.read_choices(types, "layer_types", _TYPES, least=n_layers)
    predicted = config.get("mtp_layer_types")
    if len(types) == n_layers and predicted is not None:
        types += IN_CONFIG.read_choices(predicted, "mtp_layer_types", _TYPES)

    # One base for all layers, or a list with one for each.
    config = {**config, **_rotation_of_types(config, types)}
    bases = config.get("rope_theta", 10000.0)
    per_layer = _numbers(config, "rope_theta", n_layers) if isinstance(bases, list) else None
    base = per_layer[0] if per_layer else bases
    return {
        "position_embedding_type": "rope",
        "rotary_base": as_int(rope_number({"rope_theta": base}, "rope_theta")),
        "rotary_base_per_layer": per_layer,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
        "layer_types": types,
        "sliding_attention_setting": _window_arguments(config) if _SLIDING in types else None,
        **{name: _numbers(config, key, n_layers) for name, key in _LISTS.items()},
    }


def per_layer_config(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of ``config.json``, the inverse of ``per_layer_arguments``.

    Raises:
        CorruptError: an argument is malformed.
    """
    n_layers = count_of(fields, "num_layers")
    n_listed = n_layers + count_of(fields, "mtp_num_layers", default=0, least=0)
    types = fields.get("layer_types")
    bases = _numbers(fields, "rotary_base_per_layer", n_layers)
    base = float(rope_number(fields, "rotary_base", default=10000))
    config: dict[str, object] = {
        "layer_types": types[:n_listed] if isinstance(types, list) else types,
        "rope_theta": base if bases is None else bases[:n_listed],
    }
    for name, key in _LISTS.items():
        values = _numbers(fields, name, n_layers)
        config[key] = None if values is None else values[:n_listed]
    window = window_layers_of(fields)
    if window is not None:
        config["sliding_window"] = window.n_keys
        config["attention_other_setting"] = {
            "attention_type": _SLIDING,
            "num_attention_heads": window.n_heads,
            "num_attention_groups": window.n_groups,
            "head_dim": window.head_dim,
        }
    return config


def _rotation_of_types(config: Mapping[str, object], types: Sequence[object]) -> dict[str, object]:
    """Return lists with an entry for each layer of what ``rope_parameters`` has for each type.

    Returns:
        {} if it has nothing for a type.

    Raises:
        CorruptError: it lacks a type or a number.
    """
    sections = config.get("rope_parameters")
    if not isinstance(sections, Mapping) or not {*_TYPES} & {*sections}:
        return {}
    missing = next((kind for kind in types if not isinstance(sections.get(kind), Mapping)), None)
    if missing is not None:
        raise CorruptError(f"rope_parameters has no entry for {missing} layers", file=CONFIG)
    return {
        "rope_theta": [rope_number(sections[kind], "rope_theta") for kind in types],
        "partial_rotary_factors": [
            rope_number(sections[kind], "partial_rotary_factor", default=1.0) for kind in types
        ],
    }


def _window_arguments(config: Mapping[str, object]) -> dict[str, object]:
    """Return ``sliding_attention_setting``.

    Raises:
        CorruptError: the number of keys or of heads is missing or invalid.
        UnsupportedError: only these layers have such heads.
    """
    other = config.get("attention_other_setting") or {}
    other = IN_CONFIG.read_names(other, "attention_other_setting")
    heads = count_of(config, "num_attention_heads")
    own_heads = count_of(config, "num_sliding_attention_heads", default=heads)
    groups = number_of(config, ("num_attention_groups", "num_key_value_heads"), default=heads)
    head_dim = count_of(config, "head_dim", default=count_of(config, "hidden_size") // heads)
    for name, shared in (("num_attention_groups", groups), ("head_dim", head_dim)):
        if count_of(other, name, default=shared) != shared:
            raise UnsupportedError(
                f"{name} is {other[name]} in sliding-window layers (attention_other_setting) but "
                f"{shared} in the other layers; only the number of heads may differ",
                file=CONFIG,
            )
    return {
        "window_size": [count_of(config, "sliding_window") - 1, 0],
        "num_attention_heads": count_of(other, "num_attention_heads", default=own_heads),
        "num_query_groups": groups,
        "kv_channels": head_dim,
    }


def _numbers(values: Mapping[str, object], name: str, n_layers: int) -> list[float | None] | None:
    """Return a list of a number, or None, for each layer; None if there is no list.

    Raises:
        CorruptError: it is no list of at least ``n_layers`` such entries.
    """
    listed = values.get(name)
    if listed is None:
        return None
    fields, expected = FieldReader(), f"a list of {n_layers} numbers"
    items = fields.read_list(listed, name, expected=expected)
    if len(items) < n_layers:
        raise fields.build_error(listed, name, expected)
    return [None if item is None else fields.read_number(item, name, least=0) for item in items]
