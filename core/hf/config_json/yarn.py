"""Convert YaRN scaling of rotary position embeddings (``core.hf.config_json.rope``).

Latent attention and ordinary attention have it under different arguments, and with different
defaults. transformers takes ``mscale`` and ``mscale_all_dim`` only together.

Source: transformers 5.23.0 ``modeling_rope_utils.py`` ``_compute_yarn_parameters``; megatron-core
0.16.1 ``models/common/embeddings/yarn_rotary_pos_embedding.py``,
``transformer/multi_latent_attention.py``; Megatron-LM d98e8a64 ``training/argument_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from core.errors import UnsupportedError
from core.pickle.fields import FieldReader

_YARN: Mapping[str, tuple[str, float | int | None]] = {
    "factor": ("rotary_scaling_factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", 4096),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""YaRN parameter → (training argument, default value; None if it is required)."""

_PLAIN_YARN: Mapping[str, tuple[str, float]] = {
    "beta_fast": ("yarn_beta_fast", 32),
    "beta_slow": ("yarn_beta_slow", 1),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}
"""The same for ordinary attention, besides the factor and the original length."""

HINT = (
    "remove the scaling from config.json if the weights were not trained with it, "
    "and restore it for inference"
)
"""What to do about scaling that Megatron does not have."""


def latent_yarn_arguments(
    config: Mapping[str, object], parameters: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments for YaRN scaling in latent attention.

    Raises:
        UnsupportedError: Megatron has no argument for a parameter.
    """
    # ``truncate`` (round the borders of the ranges) is always on in Megatron.
    extra = sorted(set(parameters) - set(_YARN) - {"truncate"})
    if extra or parameters.get("truncate", True) is not True:
        raise UnsupportedError(
            f"YaRN scaling with {', '.join(extra or ['truncate'])} is not supported",
            file="config.json",
            hint=HINT,
        )
    length = _original_length(config, parameters)
    parameters = {**parameters, "original_max_position_embeddings": length}
    numbers = {
        arg: as_int(rope_number(parameters, name, default=default))
        for name, (arg, default) in _YARN.items()
    }
    _check_mscale(numbers["mscale"], numbers["mscale_all_dim"])
    return {"rope_type": "yarn", **numbers}


def _original_length(config: Mapping[str, object], parameters: Mapping[str, object]) -> float:
    """Return the number of positions that the model was trained with before it was scaled."""
    name = "original_max_position_embeddings"
    if parameters.get(name) is not None:
        return rope_number(parameters, name)
    return rope_number(config, "max_position_embeddings")


def latent_yarn_config(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters of YaRN scaling in latent attention.

    Raises:
        UnsupportedError: transformers would scale the attention scores differently.
    """
    scaling: dict[str, object] = {"rope_type": "yarn"}
    for name, (arg, usual) in _YARN.items():
        scaling[name] = rope_number(fields, arg, default=40 if usual is None else usual)
    scaling["factor"] = float(rope_number(scaling, "factor"))
    _check_mscale(rope_number(scaling, "mscale"), rope_number(scaling, "mscale_all_dim"))
    return scaling


def plain_yarn_arguments(
    config: Mapping[str, object], parameters: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments for YaRN scaling in ordinary attention.

    Raises:
        UnsupportedError: Megatron has no argument for a parameter.
    """
    common = {"factor", "original_max_position_embeddings", "truncate", "attention_factor"}
    # Not of the embeddings: ``unsaid_rope`` reports it; the length stands in config.json as well.
    inert = {"llama_4_scaling_beta", "max_position_embeddings"}
    extra = sorted(set(parameters) - set(_PLAIN_YARN) - common - inert)
    if extra:
        raise UnsupportedError(
            f"YaRN scaling with {', '.join(extra)} is not supported",
            file="config.json",
            hint=HINT,
        )
    length = _original_length(config, parameters)
    # transformers takes mscale and mscale_all_dim only together, and a factor before both.
    numbers = {
        name: rope_number(parameters, name, default=usual)
        for name, (_, usual) in _PLAIN_YARN.items()
    }
    if not (numbers["mscale"] and numbers["mscale_all_dim"]):
        numbers |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    factor = rope_number(parameters, "factor")
    usual = _mscale(factor, numbers["mscale"]) / _mscale(factor, numbers["mscale_all_dim"])
    if not math.isclose(
        rope_number(parameters, "attention_factor", default=usual), usual, rel_tol=1e-6
    ):
        raise UnsupportedError(
            f"YaRN scaling with an attention_factor of {parameters['attention_factor']!r} is not "
            f"supported, because Megatron always uses {usual:.6g} for this scaling factor",
            file="config.json",
            hint=HINT,
        )
    return {
        "position_embedding_type": "yarn",
        # Megatron's training script takes it for a reason to rotate without YaRN.
        "use_rotary_position_embeddings": False,
        "rotary_scaling_factor": float(factor),
        "yarn_original_max_position_embeddings": as_int(length),
        "yarn_correction_range_round_to_int": parameters.get("truncate", True) is not False,
        **{arg: as_int(numbers[name]) for name, (arg, _) in _PLAIN_YARN.items()},
    }


def _mscale(factor: float, mscale: float) -> float:
    """Return YaRN's scale of the attention scores."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def plain_yarn_config(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters of YaRN scaling in ordinary attention.

    Arguments without a value have Megatron's defaults.

    Raises:
        UnsupportedError: transformers would scale the attention scores differently.
    """
    scaling: dict[str, object] = {
        "rope_type": "yarn",
        "factor": float(rope_number(fields, "rotary_scaling_factor", default=1.0)),
        "original_max_position_embeddings": as_int(
            rope_number(fields, "yarn_original_max_position_embeddings", default=4096)
        ),
    }
    if fields.get("yarn_correction_range_round_to_int") is False:
        scaling["truncate"] = False
    for name, (arg, usual) in _PLAIN_YARN.items():
        scaling[name] = rope_number(fields, arg, default=usual)
    mscale, all_dim = rope_number(scaling, "mscale"), rope_number(scaling, "mscale_all_dim")
    if not (mscale and all_dim):
        # transformers takes no account of one alone, and scales as Megatron with its defaults.
        _check_mscale(mscale, all_dim)
        del scaling["mscale"], scaling["mscale_all_dim"]
    return scaling


def _check_mscale(mscale: float, mscale_all_dim: float) -> None:
    """Raise if only ``mscale`` is set.

    Megatron applies it even then, transformers only together with ``mscale_all_dim``.
    """
    if mscale != 1 and not mscale_all_dim:
        raise UnsupportedError(
            f"YaRN scaling with mscale {mscale} but without mscale_all_dim is not supported, "
            "because Megatron and transformers interpret it differently"
        )


def rope_number(values: Mapping[str, object], name: str, *, default: float | None = None) -> float:
    """Return a non-negative number of the rotary embeddings.

    Raises:
        CorruptError: it is missing without a default, or not such a number.
    """
    value = values.get(name)
    if value is None:
        value = default
    return FieldReader().read_number(value, f"{name} of the rotary embeddings", least=0, most=1e18)


def as_int(number: float) -> float:
    """Return an integral number as int, the type that Megatron's command line parses it to."""
    return int(number) if number == int(number) else number
