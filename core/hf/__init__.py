"""Convert between Hugging Face models and the global Megatron form, on metadata only.

::

    safetensors, .bin ─▶ flat keys + config.json ─ to_megatron ─▶ global per-layer form ─▶ shard …
                                                 ◀─ to_hf ─

The names are data: ``hf/tables/*.toml``, one file per family (``core.hf.family``). Sizes and
features of a model come from the training arguments (``core.hf.traits``), which
``core.hf.config_json`` converts from and to a ``config.json``. Fused tensors consist of boxes
(``core.hf.tensors.fuse``).

The family of a model follows from its ``model_type``, or from its tensors (``core.hf.detection``);
that of a Megatron model from its arguments (``core.hf.choice``). What arguments cannot express
stays with the checkpoint (``core.hf.config_json.origin``). LoRA adapters have a package
of their own (``core.hf.adapters``).

Models of torchtitan get Hugging Face's names first (``core.hf.torchtitan``).

What versions of transformers call the same tensor is in ``core.hf.tensors.spelling``, and whether
the output layer is the embedding in ``core.hf.ties``.

States of an optimizer follow their parameters (``core.hf.optimizer``).

The vision and audio towers of some composite models stay beside the text model
(``core.hf.towers``); of the others the text model alone is converted (``core.hf.text_model``).

A critic or reward model has a value head in place of its output layer (``core.hf.value_head``).

Not supported: quantized weights (they are dequantized first), other heads than these two.
"""

from __future__ import annotations

from collections.abc import Mapping

from core.catalog.catalog import Catalog
from core.hf.family import Family, families, read_family
from core.hf.name_tables import LAYERS
from core.hf.optimizer.states import with_masters
from core.hf.proof.proof import check_model
from core.hf.text_model import text_model_of
from core.hf.to_hf import to_hf
from core.hf.to_megatron import OptimizerTarget, to_megatron
from core.hf.towers.models import composite_models
from core.megatron.reshard.from_global import has_megatron_names
from core.megatron.rules.tables import load_rules

__all__ = [
    "Family",
    "OptimizerTarget",
    "check_model",
    "composite_types",
    "is_hf",
    "model_types",
    "read_family",
    "text_model_of",
    "to_hf",
    "to_megatron",
    "with_masters",
]


def is_hf(catalog: Catalog, config: Mapping[str, object] | None) -> bool:
    """Return whether a catalog has Hugging Face names.

    It has if the configuration contains a ``model_type`` and no layer has a Megatron name. The
    family may be an unsupported one, which ``to_megatron`` refuses by name.
    """
    if config is None or not isinstance(config.get("model_type"), str) or catalog.is_rank_local:
        return False
    rules = load_rules()
    layers = (LAYERS, *(wrapper.text + LAYERS for wrapper in rules.wrappers))
    has_layers = any(key.startswith(layers) for key in catalog.tensors)
    return bool(catalog.tensors) and not has_layers and not has_megatron_names(catalog, rules)


def model_types() -> tuple[str, ...]:
    """Return the model types of the supported families."""
    return tuple(families())


def composite_types() -> tuple[str, ...]:
    """Return the model types of the composite models whose towers are carried."""
    return tuple(composite_models())
