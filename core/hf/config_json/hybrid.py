"""Read and write what ``config.json`` says about the layers of a hybrid model.

::

    num_hidden_layers: 3                                       ──▶  hybrid_override_pattern "MMM"
    layers_block_type: ["linear_attention", "mlp", "moe", …]   ──▶  "M-E…"
    hybrid_override_pattern: "M-E…"                            ──▶  the same

Megatron's Mamba layers have a convolution over 4 positions, no biases but the convolution's, and no
limits of their time steps; tables fix what ``config.json`` says about these.

Versions: ``hybrid_override_pattern`` (the published models) and ``layers_block_type`` (transformers
5, with its older names of kinds) are read; the latter is written.

Source: transformers 5.23.0 ``models/nemotron_h/configuration_nemotron_h.py``,
``models/mamba2/modeling_mamba2.py``; megatron-core 0.16.1 ``ssm/mamba_mixer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from core.errors import CorruptError, UnsupportedError
from core.hf.family import Family
from core.hf.traits import Model, kinds_of
from core.hf.values import CONFIG, count_of

PATTERN = "hybrid_override_pattern"
"""Training argument with the kinds of layers, and the name that published models have for it."""
_SYMBOLS: Mapping[str, str] = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",
    "attention": "*",
}
"""Entry of ``layers_block_type`` → symbol in a pattern; the last two are older names."""
_MAX_LAYERS = 1 << 20
"""More layers than any model has: no damaged number makes a pattern that fills the memory."""


def completed(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return a configuration with the family's defaults.

    That of a hybrid model also gets its pattern of layers and their number.

    Raises:
        CorruptError: the layers are not described, or malformed.
        UnsupportedError: Megatron's Mamba layers cannot do what the configuration states.
    """
    result = {**family.defaults, **config}
    _check_time_steps(result)
    if PATTERN not in family.settings:
        return result
    pattern = _pattern(result, family)
    kinds_of(pattern)
    return {**result, PATTERN: pattern, "num_hidden_layers": len(pattern)}


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
            raise CorruptError(
                f"neither {name} nor {PATTERN} lists the kinds of layers", file=CONFIG
            )
        return pattern
    if not isinstance(kinds, list) or not kinds or not set(map(str, kinds)) <= set(_SYMBOLS):
        raise CorruptError(
            f"{name} is {repr(kinds)[:80]}, not a list of {', '.join(_SYMBOLS)}", file=CONFIG
        )
    return "".join(_SYMBOLS[str(kind)] for kind in kinds)


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
    if low not in (0, None) or high != math.inf:
        raise UnsupportedError(
            f"time_step_limit is {repr(limits)[:80]}; Megatron's Mamba layers have no limits",
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
            f"the {model.sizes['mamba_inner']} channels of a Mamba layer are not a multiple of the "
            f"model's {model.sizes['hidden']}, as {family.model_type} requires"
        )
    return {}


def layer_names(kinds: Sequence[str]) -> list[str]:
    """Return the entries of ``layers_block_type`` for the kinds of layers (``Model.kinds``)."""
    first = {symbol: name for name, symbol in reversed(list(_SYMBOLS.items()))}
    symbols = {kinds_of(symbol)[0]: symbol for symbol in first}
    return [first[symbols[kind]] for kind in kinds]
