"""Convert between the rotary position embeddings of ``config.json`` and Megatron's arguments.

==========  ========================================================================================
rope_type   arguments
==========  ========================================================================================
(none)      ``rotary_base``
``linear``  also ``rotary_seq_len_interpolation_factor``
``llama3``  also ``use_rope_scaling``, ``rope_scaling_factor``; Megatron fixes the others
``yarn``    latent attention only: ``rope_type`` "yarn", ``rotary_scaling_factor``, ``mscale`` …
==========  ========================================================================================

Versions: ``rope_theta`` and ``rope_scaling`` (transformers 4) and ``rope_parameters`` (5) are read;
all three are written, so that both versions can read them.

Source: transformers 5.23.0 ``modeling_rope_utils.py``; megatron-core 0.16.1
``models/common/embeddings/rotary_pos_embedding.py``, ``transformer/multi_latent_attention.py``.

Not supported: ``dynamic``, ``longrope``, partial rotary embeddings, and YaRN for ordinary
attention: Megatron has no arguments for them, or not in all of the supported versions.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import CorruptError, UnsupportedError

_LLAMA3: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Numbers that Megatron uses for the scaling of Llama 3, whatever the model."""

_YARN: Mapping[str, tuple[str, float | int | None]] = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""YaRN parameter → (training argument, default value; None if it is required)."""

_HINT = (
    "remove the scaling from config.json if the weights were not trained with it, "
    "and restore it for inference"
)


def rope_arguments(config: Mapping[str, object], *, is_latent: bool) -> dict[str, object]:
    """Return the training arguments for the rotary embeddings of a ``config.json``.

    Raises:
        UnsupportedError: Megatron has no arguments for them.
        CorruptError: a number is missing or invalid.
    """
    # Read the parameters under the names of both versions of transformers. Older files call the
    # type "type" and keep rope_theta next to the scaling.
    parameters = _shared_parameters(config)
    kind = parameters.pop("rope_type", parameters.pop("type", None)) or "default"
    parameters.pop("type", None)
    base = _number(parameters, "rope_theta", default=_number(config, "rope_theta", default=10000.0))
    parameters.pop("rope_theta", None)
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedError(
            f"partial rotary embeddings ({partial!r}) are not supported", file="config.json"
        )
    # Set the arguments of embeddings without scaling.
    args: dict[str, object] = {
        "position_embedding_type": "rope",
        "rotary_base": _as_int(base),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
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
    if kind == "linear" and not is_latent:
        return args | {
            "rotary_seq_len_interpolation_factor": _as_int(_number(parameters, "factor"))
        }
    if kind == "llama3" and not is_latent:
        return args | _llama3_arguments(parameters)
    if kind == "yarn" and is_latent:
        return args | _yarn_arguments(parameters)
    raise UnsupportedError(
        f"rotary scaling of type {kind!r} has no counterpart in Megatron's arguments",
        file="config.json",
        hint=_HINT,
    )


def _llama3_arguments(parameters: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments for the scaling of Llama 3; Megatron fixes three of its numbers."""
    for name, fixed in _LLAMA3.items():
        if _number(parameters, name) != fixed:
            raise UnsupportedError(
                f"{name} of the rotary scaling is {parameters[name]!r}; "
                f"Megatron always uses {fixed}",
                file="config.json",
                hint=_HINT,
            )
    return {"use_rope_scaling": True, "rope_scaling_factor": _number(parameters, "factor")}


def _yarn_arguments(parameters: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments for YaRN scaling in latent attention."""
    # ``truncate`` (round the borders of the ranges) is always on in Megatron.
    extra = sorted(set(parameters) - set(_YARN) - {"truncate"})
    if extra or parameters.get("truncate", True) is not True:
        raise UnsupportedError(
            f"YaRN scaling with {', '.join(extra or ['truncate'])} is not supported",
            file="config.json",
            hint=_HINT,
        )
    numbers = {
        arg: _as_int(_number(parameters, name, default=default))
        for name, (arg, default) in _YARN.items()
    }
    _check_mscale(numbers["mscale"], numbers["mscale_all_dim"])
    return {"rope_type": "yarn", **numbers}


def rope_config(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of ``config.json`` for the rotary embeddings of training arguments.

    Raises:
        UnsupportedError: transformers has no such scaling.
        CorruptError: a number is invalid.
    """
    base = float(_number(fields, "rotary_base", default=10000))
    scaling: dict[str, object] | None = None
    factor = fields.get("rotary_seq_len_interpolation_factor")
    # Latent attention has YaRN or no scaling; ordinary attention has Llama 3's, linear or none.
    if fields.get("multi_latent_attention"):
        if fields.get("rope_type") in (None, "yarn"):
            scaling = {"rope_type": "yarn"}
            for name, (arg, usual) in _YARN.items():
                scaling[name] = _number(fields, arg, default=40 if usual is None else usual)
            scaling["factor"] = float(_number(scaling, "factor"))
            _check_mscale(_number(scaling, "mscale"), _number(scaling, "mscale_all_dim"))
        elif fields.get("rope_type") != "rope":
            raise UnsupportedError(
                f"rope_type is {fields.get('rope_type')!r}, which is not supported"
            )
    elif fields.get("use_rope_scaling"):
        scaling = {
            "rope_type": "llama3",
            "factor": float(_number(fields, "rope_scaling_factor", default=8.0)),
            **_LLAMA3,
        }
        if factor is not None:
            raise UnsupportedError(
                "rotary_seq_len_interpolation_factor and use_rope_scaling are both set"
            )
    elif factor is not None:
        scaling = {
            "rope_type": "linear",
            "factor": float(_number(fields, "rotary_seq_len_interpolation_factor")),
        }
    return {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": base},
    }


def _check_mscale(mscale: float, mscale_all_dim: float) -> None:
    """Raise if only ``mscale`` is set.

    Megatron applies it even then, transformers only together with ``mscale_all_dim``.
    """
    if mscale != 1 and not mscale_all_dim:
        raise UnsupportedError(
            f"YaRN scaling with mscale {mscale} but without mscale_all_dim: "
            "Megatron and transformers interpret it differently"
        )


def _shared_parameters(config: Mapping[str, object]) -> dict[str, object]:
    """Return the rotary parameters that all layers of a configuration share.

    Raises:
        UnsupportedError: layers have parameters of their own.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping) or any(
        isinstance(value, Mapping) for value in parameters.values()
    ):
        raise UnsupportedError(
            "rotary parameters that differ between layers are not supported", file="config.json"
        )
    return {str(name): value for name, value in parameters.items() if value is not None}


def _number(values: Mapping[str, object], name: str, *, default: float | None = None) -> float:
    """Return a non-negative number of the rotary embeddings.

    Raises:
        CorruptError: it is missing without a default, or not such a number.
    """
    value = values.get(name)
    if value is None:
        value = default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e18:
        raise CorruptError(f"{name} of the rotary embeddings is {value!r}, not a number")
    return value


def _as_int(number: float) -> float:
    """Return an integral number as int, the type that Megatron's command line parses it to."""
    return int(number) if number == int(number) else number
