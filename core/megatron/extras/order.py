"""The order of names in a rank file, for sources that are not rank files."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

from core.megatron.extras.common_state import EXTRA_STATE
from core.megatron.rules.rules import LLAVA_PROJECTION, Rules, tower_layer_of

_FIELDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")
_MODULES = tuple(
    """
    word_embeddings position_embeddings tokentype_embeddings encoder_relative_pos_emb
    decoder_relative_pos_emb lm_head.dense lm_head.layer_norm lm_head output_layer
    binary_head pooler
    """.split()
)
_IN_TOWER = tuple(
    f"vision_model.{name}"
    for name in (
        "mask_token",
        "class_token",
        "ln_pre.",
        "ln_post.",
        "conv1.",
        "position_embeddings",
        "embedder.",
    )
)
"""Beginnings of names in LLaVA's tower before its layers, in the order of ``CLIPViTModel``.

That of ``RADIOViTModel`` is the same but for norms, which come last (``check_towers``).
"""
Place = tuple[int, int, int, int, int, str, int]


def by_place(rules: Rules) -> Callable[[str], Place]:
    """Return a key function that sorts global names into the order of a rank file.

    It keeps the places within a layer, because the names in one layer are those in the others.
    """
    within_layer = lru_cache(maxsize=4096)(partial(_place_within_layer, rules))
    return lambda name: place_of(name, rules, within_layer)


def _place_within_layer(rules: Rules, sub: str) -> tuple[int, int]:
    """Return the number of the inner layer of a name within a layer, and its position there."""
    return rules.inner_number(sub), rules.position(sub)


def place_of(
    name: str, rules: Rules, within_layer: Callable[[str], tuple[int, int]] | None = None
) -> Place:
    """Return a sort key that puts a global name at its place in a rank file.

    The embedding comes first, then every stack of layers with its final norm, then the rest; last,
    the tower and the projection of LLaVA. The experts of a layer come one after the other,
    parameters before extra states.
    """
    # In a module, parameters come in the order in which torch registers them.
    module, _, last = name.rpartition(".")
    field = _FIELDS.index(last) if last in _FIELDS else len(_FIELDS) + (last == EXTRA_STATE)

    # LLaVA's tower has what comes before its layers, and then those.
    behind = 2 + 2 * len(rules.stacks)
    places = within_layer or partial(_place_within_layer, rules)
    layer = tower_layer_of(name)
    if layer is not None:
        return behind, layer.number, *places(layer.sub), 0, module, field
    if name.startswith(LLAVA_PROJECTION):
        return behind + 1, 0, 0, 0, 0, module, field
    of_tower = next((i for i, start in enumerate(_IN_TOWER) if name.startswith(start)), None)
    if of_tower is not None:
        return behind, -1, 0, of_tower, 0, module, field

    # Stacks have the odd first numbers, and their final norms the even ones that follow.
    layer = rules.layer_of(name)
    if layer is not None:
        expert = rules.expert_of(name)
        number = 0 if expert is None or expert.number is None else expert.number
        stack = 1 + 2 * rules.stacks.index(layer.stack)
        return stack, layer.number, *places(layer.sub), number, module, field
    for number, stack_name in enumerate(rules.stacks):
        if name.startswith(stack_name.removesuffix("layers.")):
            return 2 + 2 * number, 0, 0, 0, 0, module, field

    # Other modules of the first stage come before all stacks, those of the last after them.
    position = next((i for i, word in enumerate(_MODULES) if word in module), len(_MODULES))
    first = 0 if rules.stage_of(name) == "first" else 1 + 2 * len(rules.stacks)
    return first, 0, 0, position, 0, module, field
