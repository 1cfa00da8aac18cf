"""Recognise Hugging Face's names, and list the model types that this package knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from core.engine.catalog.catalog import Catalog


def is_hf(catalog: Catalog, config: Mapping[str, object] | None) -> bool:
    """Return whether a catalog has Hugging Face names.

    It has if the configuration contains a ``model_type`` and no layer has a Megatron name. The
    family may be an unsupported one, which ``to_megatron`` refuses by name.
    """
    if config is None or not isinstance(config.get("model_type"), str) or catalog.is_rank_local:
        return False
    from core.hf.values import LAYERS
    from core.megatron.rules.prefixes import has_megatron_names
    from core.megatron.rules.tables import load_rules

    rules = load_rules()
    layers = (LAYERS, *(wrapper.text + LAYERS for wrapper in rules.wrappers))
    has_layers = any(key.startswith(layers) for key in catalog.tensors)
    return bool(catalog.tensors) and not has_layers and not has_megatron_names(catalog, rules)


def model_types() -> tuple[str, ...]:
    """Return the model types of the supported families."""
    from core.hf.family import families

    return tuple(families())


def composite_types() -> tuple[str, ...]:
    """Return the model types of the composite models whose towers are carried."""
    from core.hf.towers.models import composite_models

    return tuple(composite_models())
