"""Take the text model out of a vision-language model.

::

    model.language_model.layers.0.…   ─┐                           model.layers.0.…
    lm_head.weight, mtp.…             ─┴─ text_model_of ─────────▶ lm_head.weight, mtp.…
    model.visual.…, vision_tower.…    ─── towers, left out
    config.json: text_config          ───────────────────────────▶ config.json of the text model

    thinker.model.…, thinker.lm_head  ─── the same for a model that also speaks
    talker.…                          ─── left out
    config.json: thinker_config: …

The result is a checkpoint of a text model: transformers loads it, and it becomes a Megatron model
as any other of its family. Its arithmetic on text is that of the complete model, whose rotary
embeddings turn text as ordinary ones do (``mrope``).

Text models that differ from a family only in what concerns images become models of that family.

The experts of Qwen3-VL's text model become single tensors, as Qwen3's files have them::

    mlp.experts.gate_up_proj  (experts, 2 × inner, hidden)   as transformers 5 writes it
    mlp.experts.gate_up_proj  (experts, hidden, 2 × inner)   as transformers 4.57 does: transposed
        ──▶ mlp.experts.3.{gate,up}_proj.weight  (inner, hidden)

Source: names and configurations that transformers 5.23.0 writes for ``models/gemma3``,
``mistral3``, ``qwen2_5_vl``, ``qwen3_vl``, ``qwen3_vl_moe``, ``qwen3_5``, ``qwen3_5_moe``,
``glm4v_moe``, ``qwen2_5_omni`` and ``qwen3_omni_moe``, and published ones;
``conversion_mapping.py`` for the two orientations.

Not supported: towers without their text model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import dropped_each, dropped_unlisted
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, UnsupportedError, UsageError
from core.hf.config_json.config import document
from core.hf.family import find_family
from core.hf.tensors.packed import transpose_matrix
from core.hf.values import CONFIG, count_of
from core.values import dataclass

_LAYOUTS: tuple[Mapping[str, str], ...] = (
    {"model.language_model.": "model.", "lm_head.": "lm_head.", "mtp.": "mtp."},
    {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    {"thinker.model.": "model.", "thinker.lm_head.": "lm_head."},
    {"model.": "model.", "lm_head.": "lm_head."},
)
"""Beginnings of the text model's names → those in a text model; the first layout with a layer."""
_QWEN3_VL_MOE = "qwen3_vl_moe_text"
_TEXT_TYPES: Mapping[str, str] = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    _QWEN3_VL_MOE: "qwen3_moe",
    "glm4v_moe_text": "glm4_moe",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
}
"""Type of a text model without a class of its own → the family that computes the same."""
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
THINKER = "thinker_config"
"""Section of ``config.json`` with what other composite models have at its top."""
_OF_BOTH = ("dtype", "torch_dtype", "transformers_version")
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text model of a vision-language model.

    Args:
        catalog: its tensors, named as in a text model, with a ``config.json``.
        config: the parsed ``config.json``.
        name_of: name of a tensor in the text model, or of the stack of all experts that it is a
            part of → in the complete model.
        towers: beginnings of the names of all other tensors, sorted.
        transposed: stacks of experts whose matrices the complete model has transposed, by their
            names there.
    """

    catalog: Catalog
    config: Mapping[str, object]
    name_of: Mapping[str, str]
    towers: tuple[str, ...]
    transposed: frozenset[str] = frozenset()


def is_composite(config: Mapping[str, object] | None) -> bool:
    """Return whether a configuration describes a text model with other parts."""
    model_type = None if config is None else config.get("model_type")
    if config is None or not isinstance(model_type, str) or find_family(model_type) is not None:
        return False
    part = thinking_part(config)
    return any(isinstance(part.get(name), Mapping) for name in ("text_config", "vision_config"))


def thinking_part(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return what a configuration states of the text model and its towers.

    That of a model that also speaks has it in a section of its own.
    """
    part = config.get(THINKER)
    if not isinstance(part, Mapping):
        return config
    return {**{name: config[name] for name in _OF_BOTH if name in config}, **part}


def text_model_of(
    catalog: Catalog,
    config: Mapping[str, object] | None,
    *,
    defaults: Mapping[str, object] | None = None,
) -> TextModel:
    """Return the text model of a vision-language model.

    Args:
        catalog: flat keys, as transformers names them.
        config: parsed ``config.json``.
        defaults: values that its ``text_config`` may omit.

    Raises:
        UsageError: the configuration is not that of a vision-language model.
        UnsupportedError: the text model is of no supported family, or its names are unknown.
    """
    if config is None or not is_composite(config):
        kind = "" if config is None else f" (its type is {str(config.get('model_type'))[:80]!r})"
        raise UsageError(
            f"--text-model: SRC is not a vision-language model with a {CONFIG}{kind}",
            hint="omit --text-model, which extracts the text model from a vision-language model",
        )
    names = _text_names(catalog, config)
    text_config = text_config_of(config, has_head="lm_head.weight" in names, defaults=defaults)
    text_keys = set(names.values())
    others = [key for key in catalog.tensors if key not in text_keys]

    towers = tuple(sorted({_tower_of(key) for key in others}))
    text = replace(
        catalog,
        tensors={name: catalog.tensors[key] for name, key in names.items()},
        dropped=(
            *catalog.dropped,
            *dropped_each((f"{tower}.*" for tower in towers), "not part of the text model"),
            *dropped_unlisted(
                {key: catalog.tensors[key] for key in others}, "not part of the text model"
            ),
        ),
        files={**catalog.files, CONFIG: document(text_config)},
    )
    transposed: frozenset[str] = frozenset()
    if type_of_text(thinking_part(config)) == _QWEN3_VL_MOE:
        transposed = frozenset(_transposed_stacks(text, text_config))
        text = _with_single_experts(text, transposed)
    return TextModel(text, text_config, names, towers, frozenset(names[key] for key in transposed))


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
        "ckpt does not recognize the names of the text model in this "
        f"{str(config.get('model_type'))[:80]} model",
        key=next(iter(catalog.tensors), None),
        hint="names that ckpt recognizes begin with "
        f"{', '.join(next(iter(layout)) + 'layers.' for layout in _LAYOUTS)}",
    )


def _tower_of(key: str) -> str:
    """Return the beginning of a tensor's name that names its part of the model."""
    first, _, rest = key.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in ("model", "thinker") else first


def text_config_of(
    config: Mapping[str, object],
    *,
    has_head: bool,
    defaults: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the ``config.json`` of the text model.

    Args:
        config: parsed ``config.json`` of the complete model.
        has_head: the model has an output layer that is not the embedding.
        defaults: values that its ``text_config`` may omit.
    """
    # Files of transformers 4 may have the values of Qwen2-VL's text model among the others.
    config = thinking_part(config)
    kind = type_of_text(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        text = {name: value for name, value in config.items() if not isinstance(value, Mapping)}
        text |= {name: config[name] for name in ("rope_scaling",) if name in config}
    result = {name: config[name] for name in _OF_BOTH if name in config}
    result |= {**(defaults or {}), **text}
    result["model_type"] = kind
    if kind in _TEXT_TYPES:
        result["model_type"] = _TEXT_TYPES[kind]
        for name in ("rope_parameters", "rope_scaling"):
            result[name] = _plain_rope(result.get(name))
    if kind == _QWEN3_VL_MOE:  # its router knows no other way, whatever the configuration states
        result["norm_topk_prob"] = True
    # The complete model decides whether embedding and output layer are one tensor.
    declared = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    result["tie_word_embeddings"] = bool(declared) or not has_head
    family = find_family(result["model_type"])
    if family is not None:
        result["architectures"] = [family.architecture]
    return result


def has_text_family(config: Mapping[str, object]) -> bool:
    """Return whether the text model of a complete model's configuration is of a family."""
    return find_family(text_config_of(config, has_head=True)["model_type"]) is not None


def type_of_text(config: Mapping[str, object]) -> str:
    """Return the type of the text model that a configuration describes beside towers."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return str(text.get("model_type"))[:80]
    return f"{str(config['model_type'])[:80]}_text"


def _transposed_stacks(text: Catalog, config: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of the stacks of experts whose matrices are transposed.

    A square matrix looks the same either way; that of the same layer's other stack then decides.

    Raises:
        CorruptError: the shape of a stack does not fit the configuration.
    """
    hidden = count_of(config, "hidden_size")
    inner = count_of(config, "moe_intermediate_size")
    shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    stacks: dict[str, dict[str, bool]] = {}
    for key, tensor in text.tensors.items():
        if (match := _STACK.fullmatch(key)) is None:
            continue
        shape, plain = tensor.shape[1:], shapes[match[2]]
        if len(shape) != 2 or shape not in (plain, plain[::-1]):
            raise CorruptError(
                f"the tensor has shape {tensor.shape}, but {CONFIG} implies experts of shape "
                f"{plain}, possibly transposed",
                key=key,
                hint=f"check that this is the right {CONFIG} for these weights",
            )
        stacks.setdefault(match[1], {})[key] = shape != plain
    for layer in stacks.values():
        is_square = {key: len(set(text.tensors[key].shape[1:])) == 1 for key in layer}
        for key, is_transposed in layer.items():
            if is_transposed or (is_square[key] and any(layer.values())):
                yield key


def _with_single_experts(text: Catalog, transposed: Set[str]) -> Catalog:
    """Return the catalog with a tensor per matrix of an expert in place of the stacks.

    Args:
        text: tensors of the text model.
        transposed: names of the stacks whose matrices are transposed.
    """
    tensors: dict[str, Tensor] = {}
    for key, stack in text.tensors.items():
        if (match := _STACK.fullmatch(key)) is None:
            tensors[key] = stack
            continue
        kinds = match[2].split("_")
        for number in range(stack.shape[0]):
            expert = (
                transpose_matrix(text, key, number)
                if key in transposed
                else text.entry(key, number)
            )
            n_rows = expert.shape[0] // len(kinds)
            for part, kind in enumerate(kinds):
                name = f"{match[1]}.{number}.{kind}_proj.weight"
                tensors[name] = expert.narrow(0, part * n_rows, n_rows)
    return replace(text, tensors=tensors)


def _plain_rope(parameters: object) -> object:
    """Return rotary parameters without what concerns positions in images."""
    if not isinstance(parameters, Mapping):
        return parameters
    result = {name: value for name, value in parameters.items() if name not in _OF_IMAGES}
    for name in ("rope_type", "type"):
        if result.get(name) == "mrope":
            result[name] = "default"
    return result
