"""Convert rotary embeddings of layers with a window that rotate differently from the others.

::

    Gemma 3   two bases, layers with a window first      ──▶  rotary_base (10000, 1000000)
    OLMo 3    one base; layers without a window may      ──▶  rotary_base 500000; the scaling stays
              have a scaling                                  in config.json (``unsaid_rope``)

The pair is Megatron-Bridge's argument. No argument of Megatron gives a part of the layers a
scaling.

Versions: ``rope_parameters`` with a section for each kind of layer (transformers 5), and
``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq`` (4), are read; all are written.

Source: transformers 5.23.0 ``models/gemma3/configuration_gemma3.py``,
``models/olmo3/configuration_olmo3.py``; 4.57 ``models/olmo3/modeling_olmo3.py``; Megatron-Bridge
067f987d ``models/gemma/gemma3_bridge.py``; megatron-core 0.16.1 and Megatron-LM d98e8a64
``models/gpt/gpt_model.py`` (one rotary embedding for all layers).

Not supported: a scaling in layers with a window; OLMo 3 with two bases.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.errors import CorruptError, UnsupportedError
from core.hf.config_json.yarn import HINT, as_int, rope_number
from core.hf.family import Family

WINDOW, FULL = "sliding_attention", "full_attention"
_NAMES = ("rope_parameters", "rope_scaling", "rope_theta")


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
    if not isinstance(full, Mapping) or not isinstance(window, Mapping):
        raise CorruptError("rope_parameters has no mappings for its layers", file="config.json")
    kind = full.get("rope_type", full.get("type")) or "default"
    if (window.get("rope_type") or "default") != "default" or kind not in ("default", "linear"):
        raise UnsupportedError(
            f"rotary scaling of type {str(kind)[:40]!r} has no counterpart in Megatron's arguments",
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
    bases = fields.get("rotary_base")
    if not isinstance(bases, (tuple, list)) or len(bases) != 2:
        raise CorruptError(
            f"argument rotary_base is {repr(bases)[:80]}, not the pair of the bases of layers with "
            "a window and without"
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
    if not isinstance(both, Mapping):
        raise CorruptError(f"rope_parameters is {repr(both)[:80]}, no mapping", file="config.json")
    # transformers fills in a section that is missing.
    window, full = ({} if both.get(name) is None else both[name] for name in (WINDOW, FULL))
    if not isinstance(window, Mapping) or not isinstance(full, Mapping):
        raise CorruptError(
            f"{WINDOW} or {FULL} of rope_parameters is no mapping", file="config.json"
        )
    kind = window.get("rope_type") or "default"
    if kind != "default":
        raise UnsupportedError(
            f"rotary scaling of type {str(kind)[:40]!r} in layers with a window",
            file="config.json",
            hint=HINT,
        )
    usual = rope_number(config, "rope_theta", default=10000.0)
    bases = [rope_number(section, "rope_theta", default=usual) for section in (window, full)]
    if bases[0] != bases[1]:
        raise UnsupportedError(
            f"layers with a window rotate with the base {bases[0]}, the others with {bases[1]}; "
            "Megatron has one rotary_base for all",
            file="config.json",
        )
    return {**result, "rope_theta": bases[0]}


def sections_of(parameters: Mapping[str, object]) -> dict[str, object]:
    """Return ``rope_parameters`` with a section for each kind of layer.

    Args:
        parameters: those of all layers.
    """
    return {FULL: dict(parameters), WINDOW: dict(parameters)}
