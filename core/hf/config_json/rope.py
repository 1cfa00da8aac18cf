"""Convert between the rotary position embeddings of ``config.json`` and Megatron's arguments.

============  ======================================================================================
rope_type     arguments
============  ======================================================================================
(none)        ``rotary_base``
``linear``    also ``rotary_seq_len_interpolation_factor``
``llama3``    also ``use_rope_scaling``, ``rope_scaling_factor``; Megatron fixes the others
``yarn``      ``position_embedding_type`` "yarn", ``rotary_scaling_factor``, ``yarn_beta_fast`` …;
              in latent attention ``rope_type`` "yarn", ``rotary_scaling_factor``, ``beta_fast`` …
``longrope``  as without scaling: Megatron has no such embeddings (``unsaid_rope``)
============  ======================================================================================

A family's table lists the types that its models may have (``rope``), and whether they may rotate
only a part of each head's channels (``partial``: ``rotary_percent``).

``none``: a family without position embeddings; ``learned``: each position has an embedding, and
nothing rotates. ``rotary_pct``: GPT-NeoX's names in files of transformers 4. ``rotary_dim``:
MiniMax-M2's name for the number of channels that rotate, without which vLLM does not load it.

``windows``, ``full``: layers with a window rotate differently from the others::

    Gemma 3   two bases, layers with a window first      ──▶  rotary_base (10000, 1000000)
    OLMo 3    one base; layers without a window may      ──▶  rotary_base 500000; the scaling stays
              have a scaling                                  in config.json (``unsaid_rope``)

The pair is Megatron-Bridge's argument. No argument of Megatron gives a part of the layers a
scaling. ``layers``: every layer has settings of its own (``core.hf.config_json.per_layer``).

Versions: ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq`` (transformers 4) and
``rope_parameters`` (5), which may have a section for each kind of layer, are read; all are written,
so that both versions can read them.

Source: transformers 5.23.0 ``modeling_rope_utils.py``, ``models/gemma3/configuration_gemma3.py``,
``models/olmo3/configuration_olmo3.py``; 4.57 ``models/olmo3/modeling_olmo3.py``; megatron-core
0.16.1 ``models/common/embeddings/``, ``transformer/multi_latent_attention.py``,
``models/gpt/gpt_model.py`` (one rotary embedding for all layers); Megatron-LM d98e8a64
``training/argument_utils.py`` (YaRN); Megatron-Bridge 067f987d ``models/gemma/gemma3_bridge.py``.

Not supported: ``dynamic``; ``attention_factor`` other than the one that follows from the factor; a
scaling in layers with a window; OLMo 3 with two bases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.errors import UnsupportedError
from core.hf.config_json.per_layer import per_layer_arguments, per_layer_config
from core.hf.config_json.yarn import (
    HINT,
    as_int,
    latent_yarn_arguments,
    latent_yarn_config,
    plain_yarn_arguments,
    plain_yarn_config,
    rope_number,
)
from core.hf.family import Family
from core.hf.values import IN_CONFIG, count_of
from core.pickle.fields import FieldReader, describe_value

_LLAMA3: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Numbers that Megatron uses for the scaling of Llama 3, whatever the model."""


_WITHOUT_ROTATION: Mapping[str, str] = {"none": "none", "learned": "learned_absolute"}
"""Type of a family → ``position_embedding_type`` of models that do not rotate."""
WINDOW, FULL = "sliding_attention", "full_attention"
_NAMES = ("rope_parameters", "rope_scaling", "rope_theta")


def rope_arguments(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the training arguments for the rotary embeddings of a ``config.json``.

    Raises:
        UnsupportedError: Megatron has no arguments for them.
        CorruptError: a number is missing or invalid.
    """
    if "layers" in family.rope:
        return per_layer_arguments(config)
    if "windows" in family.rope:
        return arguments_by_window(config, family)
    for rope, argument in _WITHOUT_ROTATION.items():
        if rope in family.rope:
            return {"position_embedding_type": argument, "use_rotary_position_embeddings": False}
    if "full" in family.rope:
        config = plain_rotation(config)
    # Read the parameters under the names of both versions of transformers. Older files call the
    # type "type" and keep rope_theta next to the scaling.
    parameters = (
        config.get("rope_scaling")
        or config.get("rope_parameters")
        or family.defaults.get("rope_parameters")
        or {}
    )
    if not isinstance(parameters, Mapping) or any(
        isinstance(value, Mapping) for value in parameters.values()
    ):
        raise UnsupportedError(
            "RoPE parameters that differ between layers are not supported", file="config.json"
        )
    parameters = {str(name): value for name, value in parameters.items() if value is not None}
    kind = parameters.pop("rope_type", parameters.pop("type", None)) or "default"
    parameters.pop("type", None)
    kind = "yarn" if kind == "deepseek_yarn" else kind  # as Sarvam calls it
    if "rotary_pct" in family.rope:
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        config = {**{name: config.get(old) for name, old in names.items()}, **config}
    usual = rope_number({"rope_theta": 10000.0, **family.defaults}, "rope_theta")
    base = rope_number(
        parameters, "rope_theta", default=rope_number(config, "rope_theta", default=usual)
    )
    parameters.pop("rope_theta", None)
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is None and config.get("rotary_dim") is not None:  # MiniMax-M2
        partial = count_of(config, "rotary_dim") / count_of(config, "head_dim")
    if partial is not None and partial != 1 and "partial" not in family.rope:
        raise UnsupportedError(
            f"partial rotary embeddings ({partial!r}) are not supported "
            f"for {family.model_type} models",
            file="config.json",
        )
    # Set the arguments of embeddings without scaling.
    is_latent = "latent" in family.requires
    args: dict[str, object] = {
        "position_embedding_type": "rope",
        "rotary_base": as_int(base),
        "rotary_percent": 1.0 if partial is None else rope_number({"factor": partial}, "factor"),
        "rotary_interleaved": family.fixed_args.get("rotary_interleaved", False),
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": 8.0,
    }
    if is_latent:
        args |= {
            "rope_type": "rope",
            "rotary_scaling_factor": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }
    # Add the arguments of each type of scaling.
    if kind == "default":
        return args
    if kind == "linear" and kind in family.rope and not is_latent:
        return args | {
            "rotary_seq_len_interpolation_factor": as_int(rope_number(parameters, "factor"))
        }
    if kind == "llama3" and kind in family.rope and not is_latent:
        for name, fixed in _LLAMA3.items():
            if rope_number(parameters, name) != fixed:
                raise UnsupportedError(
                    f"{name} of the RoPE scaling is {parameters[name]!r}, but Megatron always uses "
                    f"{fixed}",
                    file="config.json",
                    hint=HINT,
                )
        return args | {
            "use_rope_scaling": True,
            "rope_scaling_factor": rope_number(parameters, "factor"),
        }
    if kind == "yarn" and is_latent:
        return args | latent_yarn_arguments(config, parameters)
    if kind == "yarn" and kind in family.rope:
        return args | plain_yarn_arguments(config, parameters)
    if kind == "longrope" and kind in family.rope:
        return args
    raise UnsupportedError(
        f"Megatron's arguments do not support RoPE scaling of type {str(kind)[:40]!r}",
        file="config.json",
        hint=HINT,
    )


def unsaid_rope(config: Mapping[str, object], family: Family) -> str | None:
    """Describe the settings of the rotary embeddings that Megatron's models do not apply.

    Args:
        config: parsed ``config.json``.
        family: family of the model.

    Returns:
        None if Megatron applies all.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters")
    if {"layers", "full"} & family.rope and isinstance(parameters, Mapping):
        parameters = parameters.get(FULL, parameters)
    if not isinstance(parameters, Mapping):
        return None
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind not in (None, "default") and "full" in family.rope:
        return (
            f"{str(kind)[:40]} RoPE scaling only in layers without a sliding window (a Megatron "
            "model with these arguments does not apply the scaling and computes different logits)"
        )
    if kind == "longrope" or (kind not in (None, "default") and "layers" in family.rope):
        return f"{str(kind)[:40]} RoPE scaling (Megatron does not apply it)"
    if parameters.get("llama_4_scaling_beta"):
        length = parameters.get("original_max_position_embeddings")
        return f"llama_4_scaling_beta (it scales the attention scores from position {length} on)"
    return None


_UNSAID: Mapping[str, str] = {
    "longrope": "longrope RoPE scaling",
    "full": "RoPE scaling in layers without a sliding window",
    "layers": "RoPE scaling in some layers",
    "llama4": "llama_4_scaling_beta",
}
"""Type in a family's table → what ``config.json`` may state and no argument of Megatron does."""


def list_unsaid_rope(candidates: Iterable[Family]) -> list[str]:
    """List what no argument says about the rotary embeddings of models of some families."""
    names_of: dict[str, list[str]] = {}
    for family in candidates:
        for rope in _UNSAID.keys() & family.rope:
            names_of.setdefault(_UNSAID[rope], []).append(family.model_type)
    return [f"{text} ({', '.join(sorted(names))})" for text, names in sorted(names_of.items())]


def rope_config(fields: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the entries of ``config.json`` for the rotary embeddings of training arguments.

    Raises:
        UnsupportedError: transformers has no such scaling.
        CorruptError: a number is invalid.
    """
    if "layers" in family.rope:
        return per_layer_config(fields)
    if "windows" in family.rope:
        return config_by_window(fields)
    if _WITHOUT_ROTATION.keys() & family.rope:
        return {}
    base = float(rope_number(fields, "rotary_base", default=10000))
    scaling: dict[str, object] | None = None
    factor = fields.get("rotary_seq_len_interpolation_factor")
    # Latent attention has YaRN or no scaling; ordinary attention has all types.
    if fields.get("multi_latent_attention"):
        if fields.get("rope_type") in (None, "yarn"):
            scaling = latent_yarn_config(fields)
        elif fields.get("rope_type") != "rope":
            raise UnsupportedError(
                f"rope_type is {describe_value(fields.get('rope_type'))}, which is not supported"
            )
    elif fields.get("position_embedding_type") == "yarn":
        scaling = plain_yarn_config(fields)
    elif fields.get("use_rope_scaling"):
        scaling = {
            "rope_type": "llama3",
            "factor": float(rope_number(fields, "rope_scaling_factor", default=8.0)),
            **_LLAMA3,
        }
        if factor is not None:
            raise UnsupportedError(
                "rotary_seq_len_interpolation_factor and use_rope_scaling cannot both be set"
            )
    elif factor is not None:
        scaling = {
            "rope_type": "linear",
            "factor": float(rope_number(fields, "rotary_seq_len_interpolation_factor")),
        }
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": base}
    entries: dict[str, object] = {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
    }
    if "llama4" in family.rope:
        parameters["llama_4_scaling_beta"] = 0.0  # transformers requires it; Megatron has no other
    if "full" in family.rope:
        if scaling is not None:
            raise UnsupportedError(
                f"the arguments apply {scaling['rope_type']} RoPE scaling to all layers, but "
                f"{family.model_type} models in transformers apply RoPE scaling only to layers "
                "without a sliding window"
            )
        entries["rope_parameters"] = sections_of(parameters)
    if "partial" in family.rope:
        part = rope_number(fields, "rotary_percent", default=1.0)
        parameters["partial_rotary_factor"] = entries["partial_rotary_factor"] = part
        if "rotary_pct" in family.rope:
            entries |= {"rotary_pct": part, "rotary_emb_base": base}
        if "rotary_dim" in family.rope:
            entries["rotary_dim"] = round(part * count_of(fields, "kv_channels"))
    return entries


def arguments_by_window(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the arguments for layers with and without a window that rotate differently.

    Raises:
        UnsupportedError: layers with a window have a scaling, or others have an unknown one.
        CorruptError: a number is missing or invalid.
    """
    both = config.get("rope_parameters")
    if isinstance(both, Mapping) and FULL in both:
        full, window = ({} if both.get(name) is None else both[name] for name in (FULL, WINDOW))
    else:  # transformers 4
        full = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}  # type: ignore[dict-item]
        window = {"rope_theta": config.get("rope_local_base_freq")}
    full, window = (IN_CONFIG.read_names(part, "rope_parameters") for part in (full, window))
    kind = full.get("rope_type", full.get("type")) or "default"
    if (window.get("rope_type") or "default") != "default" or kind not in ("default", "linear"):
        raise UnsupportedError(
            f"Megatron's arguments do not support RoPE scaling of type {str(kind)[:40]!r}",
            file="config.json",
            hint=HINT,
        )
    bases = (
        rope_number(window, "rope_theta", default=10000.0),
        rope_number(full, "rope_theta", default=1000000.0),
    )
    return {
        "position_embedding_type": "rope",
        "rotary_base": tuple(map(as_int, bases)),
        "rotary_percent": 1.0,
        "rotary_interleaved": family.fixed_args.get("rotary_interleaved", False),
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rope_scaling_factor": float(rope_number(full, "factor")) if kind == "linear" else 1.0,
    }


def config_by_window(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the entries for layers with and without a window that rotate differently.

    Raises:
        CorruptError: ``rotary_base`` is not a pair of numbers.
    """
    expected = "two RoPE bases, for layers with and without a sliding window"
    bases = FieldReader().read_list(
        fields.get("rotary_base"), "argument rotary_base", n=2, expected=expected
    )
    window, full = (float(rope_number({"base": base}, "base")) for base in bases)
    factor = float(rope_number(fields, "rope_scaling_factor", default=1.0))
    scaling = {"rope_type": "linear", "factor": factor} if factor != 1 else None
    return {
        "rope_theta": full,
        "rope_local_base_freq": window,
        "rope_scaling": scaling,
        "rope_parameters": {
            FULL: {"rope_type": "default", **(scaling or {}), "rope_theta": full},
            WINDOW: {"rope_type": "default", "rope_theta": window},
        },
    }


def plain_rotation(config: Mapping[str, object]) -> dict[str, object]:
    """Return a configuration with the rotation of layers with a window alone, which has no scaling.

    That of the other layers may have one; ``unsaid_rope`` reports it.

    Raises:
        UnsupportedError: layers with a window have a scaling, or the others have another base.
        CorruptError: ``rope_parameters`` or one of its sections is no mapping.
    """
    result = {name: config[name] for name in config if name not in _NAMES}
    both = config.get("rope_parameters")
    if both is None:  # transformers 4: rope_scaling is that of layers without a window
        return {**result, "rope_theta": config.get("rope_theta")}
    both = IN_CONFIG.read_names(both, "rope_parameters")
    # transformers fills in a section that is missing.
    window, full = (
        IN_CONFIG.read_names({} if both.get(name) is None else both[name], name)
        for name in (WINDOW, FULL)
    )
    kind = window.get("rope_type") or "default"
    if kind != "default":
        raise UnsupportedError(
            f"RoPE scaling of type {str(kind)[:40]!r} in sliding-window layers is not supported",
            file="config.json",
            hint=HINT,
        )
    usual = rope_number(config, "rope_theta", default=10000.0)
    bases = [rope_number(section, "rope_theta", default=usual) for section in (window, full)]
    if bases[0] != bases[1]:
        raise UnsupportedError(
            f"the RoPE base is {bases[0]} in sliding-window layers and {bases[1]} in the other "
            "layers, but Megatron has a single rotary_base for all layers",
            file="config.json",
        )
    return {**result, "rope_theta": bases[0]}


def sections_of(parameters: Mapping[str, object]) -> dict[str, object]:
    """Return ``rope_parameters`` with a section for each kind of layer.

    Args:
        parameters: those of all layers.
    """
    return {FULL: dict(parameters), WINDOW: dict(parameters)}
