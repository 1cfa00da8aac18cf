"""The tie between the input embedding of a language model and its output layer.

If ``config.json`` ties them, transformers makes one parameter of both, and files may hold
only the embedding. What changes one of them, or both differently, makes two parameters of it: the
output layer needs a tensor of its own then, and ``tie_word_embeddings`` must be false.

Source: transformers 5.23.0 ``modeling_utils.py`` (``get_expanded_tied_weights_keys``), and the
configurations of composite models, which tie if the value is true at the top or in ``text_config``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.changes.rename import rename_entries
from core.engine.changes.tie import INPUT, OUTPUT, untie
from core.hf.values import CONFIG
from core.pickle.fields import mapping_or_empty
from core.values import dataclass

TIE = "tie_word_embeddings"
TEXT_CONFIG = "text_config"
_REPEATED = re.compile(r"(^|\.)(layers|mtp)\.")
"""Part of the names of layers, of which those that predict further tokens may have copies."""


@dataclass(frozen=True, slots=True)
class TiePair:
    """The names of a language model's embedding and output layer.

    Args:
        embedding: name of the embedding.
        head: name of the output layer, which may not be stored.
    """

    embedding: str
    head: str


def find_tie_pair(
    keys: Collection[str], config: Mapping[str, object] | None = None
) -> TiePair | None:
    """Find the embedding of a language model and its output layer.

    Args:
        keys: names of a model's tensors.
        config: parsed ``config.json``, or None.

    Returns:
        None if no tensor, or more than one, can be the embedding or the output layer.
    """
    from core.hf.proof.expected import find_model_class
    from core.hf.tensors.spelling import match_names

    described = None if config is None else find_model_class(config)
    if described is not None:
        (embedding,) = described.family.first[0].hf
        names = (embedding, described.family.head)
        tails = (embedding.partition(".")[2], names[1])
        key_of = match_names(
            names, [key for key in keys if key.endswith(tails) and not _REPEATED.search(key)]
        )
        if key_of:
            return TiePair(*(key_of.get(name, name) for name in names))
    embeddings, heads = (
        [key for key in keys if pattern.search(key) and not _REPEATED.search(key)]
        for pattern in (INPUT, OUTPUT)
    )
    if len(heads) > 1 or len(embeddings) != 1:
        return None
    (embedding,) = embeddings
    if heads:
        return TiePair(embedding, heads[0])
    # The output layer stands beside the trunk: language_model.lm_head, language_model.model.….
    parts = embedding.split(".")
    n_outer = parts.index("model") if "model" in parts else 0
    return TiePair(embedding, ".".join([*parts[:n_outer], "lm_head.weight"]))


def is_tied(config: Mapping[str, object], *, has_head: bool) -> bool:
    """Return whether a configuration ties the output layer to the embedding.

    Args:
        config: parsed ``config.json``.
        has_head: the output layer is stored; without it, a model whose defaults are unknown is
            tied.
    """
    from core.hf.proof.expected import find_model_class

    parts = (config, mapping_or_empty(config.get(TEXT_CONFIG)))
    stated = [part[TIE] for part in parts if part.get(TIE) is not None]
    if stated:
        return any(value is True for value in stated)
    described = find_model_class(config)
    return not has_head if described is None else bool(described.family.defaults.get(TIE, False))


def edit_tie(config: Mapping[str, object], *, is_tied: bool) -> dict[str, object]:
    """Return the entries of a configuration that change when the tie does, with their values.

    The text model of a composite one states it too, as its class may tie by default.
    """
    edits: dict[str, object] = {TIE: is_tied}
    text = config.get(TEXT_CONFIG)
    if isinstance(text, Mapping):
        edits[TEXT_CONFIG] = {**text, TIE: is_tied}
    return edits


def with_own_head(catalog: Catalog, pair: TiePair) -> Catalog:
    """Return a catalog in which the output layer is a tensor of its own, a copy if it was none."""
    if pair.head not in catalog.tensors:
        return untie(catalog, [(pair.head, pair.embedding)])
    if pair.embedding not in catalog.tensors:
        return untie(catalog, [(pair.embedding, pair.head)])
    is_shared = catalog.tensors[pair.head] is catalog.tensors[pair.embedding]
    return untie(catalog, [(pair.head, pair.embedding)]) if is_shared else catalog


def with_embedding(catalog: Catalog, config: Mapping[str, object]) -> Catalog:
    """Return a catalog in which the one stored tensor of a tie is the embedding.

    transformers loads a tied model whose files have only the output layer.
    """
    pair = find_tie_pair(catalog.tensors, config)
    if pair is None or pair.embedding in catalog.tensors or pair.head not in catalog.tensors:
        return catalog
    if not is_tied(config, has_head=True):
        return catalog
    entries = (*catalog.tensors, *catalog.objects)
    return rename_entries(
        catalog, {key: pair.embedding if key == pair.head else key for key in entries}
    )


def with_config(catalog: Catalog, config: Mapping[str, object]) -> Catalog:
    """Return a catalog with another ``config.json``."""
    data = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
    return replace(catalog, files={**catalog.files, CONFIG: data.encode()})
