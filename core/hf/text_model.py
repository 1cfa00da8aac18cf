"""Take the text model out of a vision-language model.

::

    model.language_model.layers.0.…   ─┐                           model.layers.0.…
    lm_head.weight, mtp.…             ─┴─ text_model_of ─────────▶ lm_head.weight, mtp.…
    model.visual.…, vision_tower.…    ─── towers, left out
    config.json: text_config          ───────────────────────────▶ config.json of the text model

The result is a checkpoint of a text model: transformers loads it, and it becomes a Megatron model
as any other of its family. Its arithmetic on text is that of the complete model, whose rotary
embeddings turn text as ordinary ones do (``mrope``).

Text models that differ from a family only in what concerns images become models of that family.

Source: names and configurations that transformers 5.23.0 writes for ``models/gemma3``,
``mistral3``, ``qwen2_5_vl``, ``qwen3_vl``, ``qwen3_5`` and ``qwen3_5_moe``, and published ones.

Not supported: Qwen3-VL with experts, which stores the matrices of experts transposed; towers
without their text model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from core.catalog.catalog import Catalog, Fragment
from core.catalog.files_beside import with_documents
from core.errors import UnsupportedError, UsageError
from core.hf.config_json.config import document
from core.hf.family import families, family_of
from core.hf.values import CONFIG

_LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"model.language_model.": "model.", "lm_head.": "lm_head.", "mtp.": "mtp."},
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    {"model.": "model.", "lm_head.": "lm_head."},
)
"""Beginnings of the text model's names → those in a text model; the first layout with a layer."""
_TEXT_TYPES: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Type of a text model without a class of its own → the family that computes the same."""
_REFUSED: Mapping[str, str] = {
    "qwen3_vl_moe_text": "its files hold the matrices of experts transposed",
}
_OF_BOTH = ("dtype", "torch_dtype", "transformers_version")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text model of a vision-language model.

    Args:
        catalog: its tensors, named as in a text model, with a ``config.json``.
        config: the parsed ``config.json``.
        name_of: name of a tensor in the text model → in the complete model.
        towers: beginnings of the names of all other tensors, sorted.
    """

    catalog: Catalog
    config: Mapping[str, object]
    name_of: Mapping[str, str]
    towers: tuple[str, ...]


def is_composite(config: Mapping[str, object] | None) -> bool:
    """Return whether a configuration describes a text model with other parts."""
    model_type = None if config is None else config.get("model_type")
    if config is None or not isinstance(model_type, str) or model_type in _family_types():
        return False
    return any(isinstance(config.get(name), Mapping) for name in ("text_config", "vision_config"))


def text_model_of(catalog: Catalog, config: Mapping[str, object] | None) -> TextModel:
    """Return the text model of a vision-language model.

    Args:
        catalog: flat keys, as transformers names them.
        config: parsed ``config.json``.

    Raises:
        UsageError: the configuration is not that of a vision-language model.
        UnsupportedError: the text model is of no supported family, or its names are unknown.
    """
    if config is None or not is_composite(config):
        kind = "" if config is None else f": its type is {str(config.get('model_type'))[:80]!r}"
        raise UsageError(
            f"--text-model: SRC is not a vision-language model with a {CONFIG}{kind}",
            hint="omit it; it takes a text model out of a larger one",
        )
    names = _text_names(catalog, config)
    text_config = _text_config(config, has_head="lm_head.weight" in names)
    others = [key for key in catalog.tensors if key not in set(names.values())]

    def fragments_of(key: str) -> Sequence[Fragment]:
        if key not in names:
            return catalog.fragments(key)
        return [replace(fragment, key=key) for fragment in catalog.fragments(names[key])]

    towers = tuple(sorted({_tower_of(key) for key in others}))
    text = replace(
        catalog,
        tensors={name: replace(catalog.tensors[key], key=name) for name, key in names.items()},
        fragments_of=fragments_of,
        dropped=(
            *catalog.dropped,
            *(f"{tower}.* (not part of the text model)" for tower in towers),
        ),
    )
    text = with_documents(text, {CONFIG: document(text_config)})
    return TextModel(text, text_config, names, towers)


def towers_text(catalog: Catalog, config: Mapping[str, object]) -> str:
    """List the beginnings of the names that are not the text model's."""
    try:
        keys = set(_text_names(catalog, config).values())
    except UnsupportedError:
        keys = set()
    return ", ".join(sorted({_tower_of(key) for key in catalog.tensors if key not in keys})[:4])


def _text_names(catalog: Catalog, config: Mapping[str, object]) -> dict[str, str]:
    """Return name in a text model → name in the complete model, in the order of the catalog.

    Raises:
        UnsupportedError: the names are unknown.
    """
    for layout in _LAYOUTS:
        (body, _), *_ = layout.items()
        if any(key.startswith(f"{body}layers.") for key in catalog.tensors):
            return {
                new + key.removeprefix(old): key
                for key in catalog.tensors
                for old, new in layout.items()
                if key.startswith(old)
            }
    raise UnsupportedError(
        f"the text model of this {str(config.get('model_type'))[:80]} model has unknown names",
        key=next(iter(catalog.tensors), None),
        hint=f"known: {', '.join(next(iter(layout)) + 'layers.' for layout in _LAYOUTS)}",
    )


def _tower_of(key: str) -> str:
    """Return the beginning of a tensor's name that names its part of the model."""
    first, _, rest = key.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "model" else first


def _text_config(config: Mapping[str, object], *, has_head: bool) -> dict[str, object]:
    """Return the ``config.json`` of the text model.

    Args:
        config: parsed ``config.json`` of the complete model.
        has_head: the model has an output layer that is not the embedding.

    Raises:
        UnsupportedError: the text model is of no supported family.
    """
    # Files of transformers 4 may have the values of Qwen2-VL's text model among the others.
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        text = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
        text |= {name: config[name] for name in ("rope_scaling",) if name in config}
        text["model_type"] = f"{config['model_type']}_text"
    kind = str(text.get("model_type"))[:80]
    if kind in _REFUSED:
        raise UnsupportedError(f"text models of type {kind!r} are not supported: {_REFUSED[kind]}")
    result = {name: config[name] for name in _OF_BOTH if name in config} | dict(text)
    if kind in _TEXT_TYPES:
        result["model_type"] = _TEXT_TYPES[kind]
        for name in ("rope_parameters", "rope_scaling"):
            result[name] = _plain_rope(result.get(name))
    # The complete model decides whether embedding and output layer are one tensor.
    declared = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    result["tie_word_embeddings"] = bool(declared) or not has_head
    if result["model_type"] in _family_types():
        result["architectures"] = [family_of(result["model_type"]).architecture]
    return result


def _plain_rope(parameters: object) -> object:
    """Return rotary parameters without what concerns positions in images."""
    if not isinstance(parameters, Mapping):
        return parameters
    result = {name: value for name, value in parameters.items() if name not in _OF_IMAGES}
    for name in ("rope_type", "type"):
        if result.get(name) == "mrope":
            result[name] = "default"
    return result


def _family_types() -> set[str]:
    """Return the model types that have a table."""
    return {name for family in families().values() for name in (family.model_type, *family.aliases)}
