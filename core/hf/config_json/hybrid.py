"""Read and write what ``config.json`` says about the layers of a hybrid model.

::

    num_hidden_layers: 3                                       ──▶  hybrid_override_pattern "MMM"
    layers_block_type: ["linear_attention", "mlp", "moe", …]   ──▶  "M-E…"
    hybrid_override_pattern: "M-E…"                            ──▶  the same
    mtp_layers_block_type: ["full_attention", "moe"]           ──▶  mtp_hybrid_override_pattern "*E"

Megatron's Mamba layers have a convolution over 4 positions, no biases but the convolution's, and no
limits of their time steps; tables fix what ``config.json`` says about these.

Versions: ``hybrid_override_pattern`` (the published models) and ``layers_block_type`` (transformers
5, with its older names of kinds) are read; the latter is written. So for the layers of a
multi-token prediction, of which all have the same tensors if ``mtp_use_repeated_layer`` is not
false.

Source: transformers 5.23.0 ``models/nemotron_h/configuration_nemotron_h.py``,
``models/mamba2/modeling_mamba2.py``; megatron-core 0.16.1 ``ssm/mamba_mixer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from core.errors import CorruptError, UnsupportedError
from core.hf.family import Family
from core.hf.traits import Model, kinds_of
from core.hf.values import CONFIG, IN_CONFIG, count_of
from core.pickle.fields import describe_value

PATTERN = "hybrid_override_pattern"
"""Training argument with the kinds of layers, and the name that published models have for it."""
PREDICTION = "mtp_hybrid_override_pattern"
"""The same of the layers of a multi-token prediction."""
_PREDICTION_KINDS = "mtp_layers_block_type"
_DEFAULT_PREDICTION = "*E"
"""The layers that transformers takes for it if the configuration does not list them."""
_SYMBOLS: Mapping[str, str] = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",
}
"""Entry of ``layers_block_type`` → symbol in a pattern; the last two are older names."""
_SIZES: Mapping[str, str] = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size"}
"""Argument → its usual name in ``config.json``, under which it is read."""
_MAX_LAYERS = 1 << 20
"""More layers than any model has: no damaged number makes a pattern that fills the memory."""
_MOST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
"""The largest float32. Time steps are float32, so no larger limit limits them."""


def completed(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return a configuration with the family's defaults, and the sizes under their usual names.

    That of a hybrid model also gets its pattern of layers and their number.

    Raises:
        CorruptError: the layers are not described, or malformed.
        UnsupportedError: Megatron's Mamba layers cannot do what the configuration states.
    """
    result = {**family.defaults, **config}
    # GPT-2 has names of its own for the sizes that every model has.
    for arg, name in _SIZES.items():
        own = family.config.get(arg, (name,))[0]
        if own in result:
            result[name] = result[own]
    inner = family.config.get("ffn_hidden_size", ("",))[0]
    if family.inner is not None and result.get(inner) is None:
        result[inner] = family.inner * count_of(result, "hidden_size")
    _check_time_steps(result)
    if PATTERN not in family.settings:
        return result
    pattern = _pattern(result, family)
    kinds_of(pattern)
    prediction = prediction_pattern(result)
    return {
        **result,
        PATTERN: pattern,
        PREDICTION: prediction,
        "num_hidden_layers": len(pattern),
    }


def prediction_pattern(config: Mapping[str, object]) -> str:
    """Return the pattern of the layers of a multi-token prediction of a hybrid model.

    Raises:
        CorruptError: the layers are malformed.
        UnsupportedError: transformers has no such layers.
    """
    kinds = config.get(_PREDICTION_KINDS)
    if kinds is not None:
        return _pattern_of_names(_PREDICTION_KINDS, kinds)
    pattern = config.get(PREDICTION) or _DEFAULT_PREDICTION
    kinds_of(str(pattern))
    return str(pattern)


def count_predictions(
    keys: Collection[str], config: Mapping[str, object], family: Family, *, n_layers: int
) -> int:
    """Return how many multi-token predictions have tensors.

    Args:
        keys: names of the tensors.
        n_layers: number of the decoder's layers.

    Raises:
        CorruptError, UnsupportedError: the layers of a prediction are malformed, or unknown.
    """
    n_stored = family.mtp_names.count_layers(keys, n_layers=n_layers)
    if PATTERN not in family.settings:
        return n_stored
    return math.ceil(n_stored / len(prediction_pattern(config)))


def prediction_arguments(config: Mapping[str, object], *, n_mtp: int) -> dict[str, object]:
    """Return the arguments for the multi-token predictions of a hybrid model.

    Args:
        config: configuration with the pattern of their layers (``completed``).
        n_mtp: number of predictions with tensors, at least 1.

    Raises:
        CorruptError: the number of predictions is malformed.
    """
    is_repeated = n_mtp == 1 and config.get("mtp_use_repeated_layer", True) is not False
    n_declared = count_of(config, "num_nextn_predict_layers", default=0, least=0)
    return {
        PREDICTION: config[PREDICTION],
        "mtp_use_repeated_layer": is_repeated,
        "mtp_num_layers": max(n_declared, 1) if is_repeated else n_mtp,
    }


def prediction_config(fields: Mapping[str, object], model: Model) -> dict[str, object]:
    """Return the values of ``config.json`` for the multi-token predictions of a hybrid model.

    Args:
        fields: training arguments by name.
        model: the model that they describe.
    """
    if model.prediction is None:
        return {}
    is_repeated = bool(fields.get("mtp_use_repeated_layer"))
    return {
        _PREDICTION_KINDS: layer_names(model.prediction),
        "mtp_use_repeated_layer": is_repeated,
        "num_nextn_predict_layers": fields["mtp_num_layers"] if is_repeated else model.n_mtp,
    }


def _pattern(config: Mapping[str, object], family: Family) -> str:
    """Return the pattern of a hybrid model's layers.

    Raises:
        CorruptError: the layers are not described, or malformed.
    """
    name = family.settings[PATTERN].name
    if name == "num_hidden_layers":
        return "M" * min(count_of(config, name), _MAX_LAYERS)
    kinds = config.get(name)
    if kinds is None:
        pattern = config.get(PATTERN)
        if not isinstance(pattern, str) or not pattern:
            raise CorruptError(f"neither {name} nor {PATTERN} lists the layer types", file=CONFIG)
        return pattern
    return _pattern_of_names(name, kinds)


def _pattern_of_names(name: str, kinds: object) -> str:
    """Return the pattern of layers whose kinds a list names.

    Args:
        name: name of the list in ``config.json``.

    Raises:
        CorruptError: it is no such list.
    """
    names = IN_CONFIG.read_choices(kinds, name, _SYMBOLS, least=1)
    return "".join(_SYMBOLS[name] for name in names)


def _check_time_steps(config: Mapping[str, object]) -> None:
    """Raise UnsupportedError if a Mamba layer's time steps are limited.

    transformers 5 writes an infinity as ``{"__float__": "Infinity"}``.
    """
    limits = config.get("time_step_limit")
    if limits is None:
        return
    ends = limits if isinstance(limits, (list, tuple)) and len(limits) == 2 else (None, None)
    low, high = (
        math.inf if isinstance(end, Mapping) and end.get("__float__") == "Infinity" else end
        for end in ends
    )
    is_unlimited = isinstance(high, (int, float)) and high >= _MOST_FLOAT32
    if low not in (0, None) or not is_unlimited:
        raise UnsupportedError(
            f"time_step_limit is {describe_value(limits)}, but Megatron's Mamba layers have no "
            "time-step limits",
            file=CONFIG,
        )


def hybrid_config(family: Family, model: Model) -> dict[str, object]:
    """Return the values of ``config.json`` that follow from the sizes of Mamba layers.

    Raises:
        UnsupportedError: transformers has no layers of these sizes.
    """
    if "parallel_mamba" in model.features:
        return {"mamba_d_ssm": model.sizes["mamba_inner"]}
    if model.kinds is None:
        return {}
    expand, rest = divmod(model.sizes["mamba_inner"], model.sizes["hidden"])
    if not rest:
        return {"expand": expand}
    if "expand" in family.defaults:
        raise UnsupportedError(
            f"Mamba layers have {model.sizes['mamba_inner']} channels, but {family.model_type} "
            f"requires a multiple of the hidden size {model.sizes['hidden']}"
        )
    return {}


def layer_names(kinds: Sequence[str]) -> list[str]:
    """Return the entries of ``layers_block_type`` for the kinds of layers (``Model.kinds``)."""
    first = {symbol: name for name, symbol in reversed(list(_SYMBOLS.items()))}
    symbols = {kinds_of(symbol)[0]: symbol for symbol in first}
    return [first[symbols[kind]] for kind in kinds]
