"""What every ``config.json`` of a language model states: the vocabulary, the hidden size, the number of layers.

For families whose names are not known. Only what is certain counts: one embedding of tokens with fewer rows than the
vocabulary (more are usual: audio, images, padding) or a width that the configuration names nowhere, and one stack of
layers of which there is another number than any that it states. A model with several stacks (encoder and decoder,
vision and text) is not judged by its layers, and neither is one without a vocabulary.

Source: names of embeddings and layers in transformers 5.23.0 ``models/*/modeling_*.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from core.catalog import TensorMeta
from core.dtypes import dtype_of, itemsize
from core.hf.problem import Problem

_EMBEDDING = re.compile(r"(?:.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
_LAYER = re.compile(r"((?:[^.]+\.)*?(?:layers|h|blocks|layer))\.(\d{1,6})\.")
_VOCABULARY = ("vocab_size", "n_vocab")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_COUNTS_LAYERS = re.compile(r".*(layer|depth|block|mtp|nextn).*", re.IGNORECASE)


def contradictions(tensors: Mapping[str, TensorMeta], config: Mapping[str, object]) -> Iterator[Problem]:
    """Yield what contradicts the sizes that the configuration of a model of transformers states.

    Args:
        tensors: the tensors of the checkpoint, by key.
        config: the parsed ``config.json``; of other software, which names no ``model_type``, nothing is known.
    """
    if not isinstance(config.get("model_type"), str):
        return
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    yield from _of_embedding(tensors, config, parts)
    yield from _of_layers(tensors, config, parts)


def _of_embedding(
    tensors: Mapping[str, TensorMeta], config: Mapping[str, object], parts: tuple[Mapping[str, object], ...]
) -> Iterator[Problem]:
    """Yield a problem if the one embedding has an extent that the configuration does not state anywhere."""
    embeddings = [meta for key, meta in tensors.items() if _EMBEDDING.fullmatch(key)]
    if len(embeddings) != 1:
        return
    (meta,) = embeddings
    rows, hidden = _stated(parts, _VOCABULARY), _stated(parts, _HIDDEN)
    is_wide = dtype_of(meta.dtype).kind == "float" and itemsize(meta.dtype) > 1  # packed ones have other extents
    if rows is None or hidden is None or len(meta.shape) != 2 or not is_wide:
        return
    numbers = {number for _, number in _numbers(config)}
    if (meta.shape[0] < rows and meta.shape[0] not in numbers) or meta.shape[1] not in numbers:
        yield Problem(
            kind="shape",
            message=f"shape {meta.shape}, but config.json makes it {(rows, hidden)} (elements)",
            key=meta.key,
            expected=str((rows, hidden)),
            found=str(meta.shape),
        )


def _of_layers(
    tensors: Mapping[str, TensorMeta], config: Mapping[str, object], parts: tuple[Mapping[str, object], ...]
) -> Iterator[Problem]:
    """Yield a problem if the one stack has a number of layers that the configuration does not state anywhere."""
    count = None if _stated(parts, _VOCABULARY) is None else _stated(parts, _LAYERS)
    last_of: dict[str, int] = {}
    for key in tensors:
        match = _LAYER.match(key)
        if match is not None:
            last_of[match[1]] = max(last_of.get(match[1], 0), int(match[2]))
    if count is None or len(last_of) != 1:
        return
    ((stack, last),) = last_of.items()
    stated = {number for name, number in _numbers(config) if _COUNTS_LAYERS.fullmatch(name)}
    if last + 1 not in stated | {count + number for number in stated}:  # behind the others may lie those for drafts
        yield Problem(
            kind="layers",
            message=f"config.json says {count} layers, there are tensors of {last + 1}",
            key=f"{stack}.{last}",
            expected=f"{count} layers",
            found=f"{last + 1}",
            is_lack=last + 1 < count,
        )


def _stated(parts: tuple[Mapping[str, object], ...], names: tuple[str, ...]) -> int | None:
    """Return the first positive number that is stated under one of the names."""
    values = (part.get(name) for part in parts for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer of a configuration, at any depth, and the name it stands under."""
    if type(value) is int:
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, str(key))
    elif isinstance(value, list):
        yield name, len(value)  # a list says something of each layer
        for item in value:
            yield from _numbers(item, name)
