"""Megatron's names in the keys of global tensors, and the prefix that other software gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.errors import UnsupportedError
from core.megatron.rules.rules import Layer

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog
    from core.megatron.rules.rules import Rules

OUTER_PREFIXES = ("model.", "module.")
"""What comes before Megatron's names in the keys of other software than its training script."""
_PREFIXES = ("", *OUTER_PREFIXES, "model.module.")


def has_megatron_names(catalog: Catalog, rules: Rules) -> bool:
    """Return whether tensors have Megatron's names for attention.

    Unlike the names of layers alone, no other family of models uses them.
    """
    attention = [key for key in catalog.tensors if ".self_attention." in key]
    return any(
        rules.has_main_stack(key.removeprefix(prefix))
        for prefix in list_prefixes(rules)
        for key in attention
    )


def prefix_of(catalog: Catalog, rules: Rules) -> str:
    """Return the prefix of Megatron's names in the keys, such as ``model.``.

    Raises:
        UnsupportedError: the keys are not Megatron's.
    """
    for prefix in list_prefixes(rules):
        if any(
            key.startswith(prefix) and rules.has_main_stack(key[len(prefix) :])
            for key in catalog.tensors
        ):
            return prefix
    example = next((key for key in catalog.tensors if not is_optimizer_key(key)), "")
    raise UnsupportedError(
        f"the tensor names are not Megatron's (for example, {example!r})",
        hint="ckpt can apply a parallel layout only to checkpoints of Megatron models",
    )


def without_prefix(prefix: str, key: str, rules: Rules) -> str:
    """Return a key without the prefix that all keys of the model have.

    The names of towers beside a text model lack the last part of its prefix.

    Raises:
        UnsupportedError: the key does not have the prefix.
    """
    if key.startswith(prefix):
        return key[len(prefix) :]
    wrapper = rules.wrapper_in(prefix)
    name = "" if wrapper is None else key.removeprefix(prefix.removesuffix(wrapper.text))
    if wrapper is not None and name.startswith(wrapper.towers):
        return name
    raise UnsupportedError(
        f"the other tensors' names have the prefix {prefix!r}, but this name does not",
        key=key,
        hint="drop the tensor with --exclude",
    )


def numbered_names(catalog: Catalog, prefix: str, rules: Rules) -> Iterator[str]:
    """Yield the tensors' names without prefix; for a stack of layers, the name of its last one.

    So the names show how many layers each stack has.
    """
    for key, tensor in catalog.tensors.items():
        name = key.removeprefix(prefix)
        stacked = rules.stacked_of(name)
        yield (
            str(Layer(stacked[0], tensor.shape[0] - 1, stacked[1]))
            if stacked and tensor.shape
            else name
        )


def list_prefixes(rules: Rules) -> list[str]:
    """Return the prefixes that Megatron's names may have in keys."""
    wrapped = [prefix + wrapper.text for wrapper in rules.wrappers for prefix in _PREFIXES]
    return [*_PREFIXES, *wrapped]
