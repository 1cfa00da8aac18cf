"""Find the family of a model with Hugging Face's names.

The ``model_type`` of ``config.json`` names it. A model of another type is taken as one of a family
if its tensors are exactly those of the family, in names and shapes: many models keep the layers of
a known one under a name of their own. That is a guess about what the tensors mean, so it comes with
a note; models of the types in ``hf/refused.toml`` may have such tensors and mean something else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import starmap
from pathlib import Path

from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.hf.config_json.config import build_arguments
from core.hf.family import Family, families, find_family
from core.hf.name_tables import pairs_of
from core.hf.traits import Model, model_of
from core.hf.values import CONFIG

_N_NEAREST = 3
_N_NAMED = 2
"""Number of tensors that the error names for each family."""


def detect_family(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> tuple[Family, str | None]:
    """Return the family of a model, and a note if it was recognised by its tensors alone.

    Args:
        tensors: tensors of the checkpoint, by name.
        config: parsed ``config.json``.

    Raises:
        UnsupportedError: Megatron has no such models, or no family has these tensors.
    """
    model_type = config.get("model_type")
    family = find_family(model_type)
    if family is not None:
        return family, None
    text = str(model_type)[:80]
    if not isinstance(model_type, str):
        raise UnsupportedError(
            f"models of type {text!r} are not supported",
            hint=f"supported types: {', '.join(families())}",
        )
    reason = refused_types().get(text)
    if reason is not None:
        raise UnsupportedError(
            f"models of type {text!r} are not supported: {reason}",
            hint="if your version of Megatron builds such layers, describe their tensors and "
            "settings in a file and pass it with --family FILE.toml",
        )

    # Compare with every family that the configuration could be of.
    differences = sorted(
        _differences(tensors, config),
        key=lambda item: (len(item[1]), *_remoteness(item[0], config)),
    )
    # Models whose layers Megatron's own script cannot build, or computes differently, are too
    # special to be guessed.
    fitting = [family for family, keys in differences if not keys]
    built = [family for family in fitting if family.builder is None and family.differs is None]
    plain = [family for family in built if _ignored_window(config, family) is None]
    if plain:
        note = (
            f"model type {text!r} is unknown, but its tensors are exactly those of a "
            f"{plain[0].model_type} model, so ckpt converts it like a {plain[0].model_type} model; "
            "check that it computes the same results"
        )
        return plain[0], note
    if built:
        raise UnsupportedError(
            f"models of type {text!r} are not supported, because their tensors are those of a "
            f"{built[0].model_type} model, whose layers have no sliding window, but "
            f"{_ignored_window(config, built[0])} is set",
            file=CONFIG,
            hint="describe the family in a file and pass it with --family FILE.toml",
        )
    raise UnsupportedError(
        f"models of type {text!r} are not supported, and their tensors are not those of a "
        "supported family",
        hint="closest families: "
        + "; ".join(starmap(_difference_text, differences[:_N_NEAREST]))
        + "; describe the family in a file and pass it with --family FILE.toml"
        if differences
        else f"{CONFIG} lacks the sizes that the supported families have; "
        "describe the family in a file and pass it with --family FILE.toml",
    )


@cache
def refused_types() -> Mapping[str, str]:
    """Return the model types that are refused by name, each with the reason."""
    text = Path(__file__).with_name("refused.toml").read_text(encoding="utf-8")
    return {
        model_type: reason
        for reason, model_types in tomllib.loads(text)["reasons"].items()
        for model_type in model_types
    }


def _ignored_window(config: Mapping[str, object], family: Family) -> str | None:
    """Return the setting that gives layers a window where models of a family have none.

    Returns:
        None if there is no window, or the family has it.
    """
    names = {setting.name for setting in family.settings.values()}
    types = config.get("layer_types")
    if isinstance(types, list):
        is_set = set(map(str, types)) != {"full_attention"}
        return "layer_types" if is_set and "layer_types" not in names else None
    is_off = config.get("sliding_window") is None or config.get("use_sliding_window") is False
    return None if is_off or "sliding_window" in names else "sliding_window"


def _remoteness(family: Family, config: Mapping[str, object]) -> tuple[bool | int, ...]:
    """Return a key by which the likeliest of several families with the same tensors sorts first."""
    try:
        _arguments(config, family)
        is_contradicted = False
    except (CorruptError, UnsupportedError):
        is_contradicted = True
    has_builder = family.builder is not None
    # Among equals, Llama, from which most other families took their names.
    is_other = family.model_type != "llama"
    return is_contradicted, has_builder, not family.is_detected, len(family.settings), is_other


def _arguments(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return the training arguments of a model, if it is of a family.

    Raises:
        CorruptError: the configuration lacks a value.
        UnsupportedError: no model of the family has one of its values.
    """
    return build_arguments(
        config,
        family,
        dtype="float32",
        transformer_impl=None,
        divisible_by=1,
        iteration=1,
        n_mtp=0,
    )


def _differences(
    tensors: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[tuple[Family, list[str]]]:
    """Yield every family whose sizes the configuration has, with the tensors that do not fit."""
    for family in families().values():
        try:
            args = _arguments(_sizes_alone(config, family), family)
            n_rows = args["vocab_size"]
            assert isinstance(n_rows, int)
            model = model_of(args, n_rows=n_rows, n_tensors=len(tensors))
        except (CorruptError, MissingShardError, UnsupportedError):
            continue
        yield family, list(_misfits(tensors, family, model))


def _sizes_alone(config: Mapping[str, object], family: Family) -> dict[str, object]:
    """Return a configuration with the sizes of a model, and with the family's other values.

    Whatever else the model's own configuration states is checked when the model is converted.
    """
    ignored = {"rope_parameters", "rope_scaling", "partial_rotary_factor", *family.absent}
    sizes = {name: value for name, value in config.items() if name not in ignored}
    fixed = {
        name: value[0] if isinstance(value, list) else value
        for name, value in family.fixed_config.items()
    }
    epsilon = dict.fromkeys(family.config.get("layernorm_epsilon", ()), 1e-5)
    return {**epsilon, **sizes, **fixed}


def _misfits(tensors: Mapping[str, Tensor], family: Family, model: Model) -> Iterator[str]:
    """Yield the names of tensors that are missing, have another shape, or are surplus."""
    used: set[str] = set()
    for pair in pairs_of(family, model):
        if pair.stack is not None and pair.stack[0] in tensors:
            used.add(pair.stack[0])
            continue
        for part in pair.tensors:
            name = next((name for name in part.names if name in tensors), None)
            shape = part.shape if pair.entry is None else (pair.entry[1], *part.shape)
            if name is None or tensors[name].shape != shape:
                yield part.names[0]
            if name is not None:
                used.add(name)
        used.update(name for name in (*pair.copies, *pair.twins) if name in tensors)
    for key in tensors:
        if key not in used and not any(pattern.search(key) for pattern in family.ignored):
            yield key


def _difference_text(family: Family, keys: Sequence[str]) -> str:
    """Describe what does not fit a family."""
    more = f" and {len(keys) - _N_NAMED:,} more" if keys[_N_NAMED:] else ""
    return f"{family.model_type} (differs in {', '.join(keys[:_N_NAMED])}{more})"
