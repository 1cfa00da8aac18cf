"""Match the names that versions of transformers give to the same tensor.

A file keeps the names of the version that wrote it, or of the hub; a module has those of the
version that runs. Adapters have the names of modules, so theirs and their base model's may differ::

    in files                              module of transformers 5          plain
    model.layers.0…, lm_head              model.language_model.layers.0…    layers.0…
    language_model.model.layers.0…        model.language_model.layers.0…    layers.0…
    language_model.lm_head                lm_head                           lm_head
    visual.blocks.0…                      model.visual.blocks.0…            visual.blocks.0…
    vision_tower.vision_model.encoder…    model.vision_tower.encoder…       vision_tower.encoder…
    h.0.attn… (GPT-2 on the hub)          transformer.h.0.attn…             h.0.attn…
    embed_out (GPT-NeoX)                  lm_head                           lm_head

Models without a head have no trunk: ``encoder.layer.0…`` is BERT's ``bert.encoder.layer.0…``.

Source: transformers 5.23.0 ``conversion_mapping.py``; files that 4.x and 5.x wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable

from core.engine.catalog.catalog import Catalog
from core.engine.changes.rename import rename_entries

_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"^(?:model\.)?language_model\.(?:model\.)?|^(?:model|transformer|gpt_neox)\."),
        "",
    ),
    (re.compile(r"^((?:vision|image|video)_tower)\.vision_model\."), r"\1."),
    (re.compile(r"^embed_out\."), "lm_head."),
)
"""Beginnings of names → what they are without the modules that only hold the others, in order."""

_MOST_TRUNKS = 8


def make_plain_name(name: str) -> str:
    """Return a name without the modules that only some versions put around the others."""
    for pattern, replacement in _PLAIN:
        name = pattern.sub(replacement, name)
    return name


def match_names(names: Iterable[str], keys: Collection[str]) -> dict[str, str]:
    """Match names with the keys of a checkpoint that mean the same tensors.

    Args:
        names: names of tensors, from any version.
        keys: names of the tensors that a checkpoint has.

    Returns:
        Key by name, for the names that match exactly one key which no other name matches.
    """
    # Names that become equal are ambiguous, as the layers of two towers without their trunks.
    plain: dict[str, list[str]] = {}
    for key in keys:
        plain.setdefault(make_plain_name(key), []).append(key)
    # A trunk holds most of a model, so the first names with the most keys are enough.
    firsts = Counter(key.partition(".")[0] for key in keys if "." in key)
    trunks = [name for name, _ in firsts.most_common(_MOST_TRUNKS)]
    present = frozenset(keys)

    def find_key(name: str) -> str | None:
        if name in present:
            return name
        short = make_plain_name(name)
        _, _, without_trunk = short.partition(".")
        spellings = [short, *(f"{trunk}.{short}" for trunk in trunks)]
        if "." in without_trunk:
            spellings.append(without_trunk)
        return next((plain[each][0] for each in spellings if len(plain.get(each, ())) == 1), None)

    matches = [
        (name, match) for name in dict.fromkeys(names) if (match := find_key(name)) is not None
    ]
    counts = Counter(match for _, match in matches)
    return {name: match for name, match in matches if name == match or counts[match] == 1}


def name_like(catalog: Catalog, first: Catalog) -> tuple[Catalog, dict[str, str]]:
    """Give the tensors of a model the names that they have in another one.

    Args:
        catalog: a model.
        first: the model with the wanted names, which another version may have written.

    Returns:
        The model, and new name by old name of the tensors that have another one.
    """
    names = [key for key in catalog.tensors if key not in first.tensors]
    keys = [key for key in first.tensors if key not in catalog.tensors]
    new_of = {
        name: key
        for name, key in match_names(names, keys).items()
        if catalog.tensors[name].shape == first.tensors[key].shape
    }
    if not new_of:
        return catalog, {}
    entries = (*catalog.tensors, *catalog.objects)
    return rename_entries(catalog, {key: new_of.get(key, key) for key in entries}), new_of
