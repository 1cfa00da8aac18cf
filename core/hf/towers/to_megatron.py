"""Take the towers off a composite model before its text model is converted, and put them beside it.

::

    model.layers.…  visual.… ─┬─ text model ─ core.hf.to_megatron ─▶ decoder.layers.… ─┬─▶ joined
                              └─ towers ──────── other names ──────▶ visual.…         ─┘

The result has Megatron's global form; the text model's names get their beginning
(``language_model.``) where they are written (``MegatronModel.wrapper``). The names of the Hugging
Face model travel in the argument ``huggingface_names``, as files differ in them.

Not supported: see ``models.toml``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.facets import MegatronModel
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.errors import MissingShardError, UnknownTensorError, UnsupportedError
from core.hf.detection import refused_types
from core.hf.text_model import (
    has_text_family,
    text_model_of,
    thinking_part,
    towers_text,
    type_of_text,
)
from core.hf.towers.models import CompositeModel, TowerTensor, composite_models, refused_composites
from core.hf.towers.tensors import megatron_tensor
from core.megatron.extras.extra_states import requested_states
from core.megatron.model.args import replaced
from core.pickle.fields import mapping_or_empty
from core.pickle.inert import as_mapping
from core.values import dataclass

NAMES_ARGUMENT = "huggingface_names"
"""Name of the argument with the beginnings of names in the Hugging Face model, as JSON."""
EXPERTS_ARGUMENT = "huggingface_experts"
"""Name of the argument that says how matrices lie in tensors of all experts: ``TRANSPOSED``, as in
published files, or ``PLAIN``, as transformers 5 writes them."""
TRANSPOSED, PLAIN = "transposed", "plain"
TEXT_MODEL_HINT = "convert only the text model with --text-model"
_UNKNOWN = "and ckpt does not know the names of these parts in Megatron"


@dataclass(frozen=True, slots=True)
class SeparatedModel:
    """A composite model in two parts.

    Args:
        model: its entry in the table.
        complete: the catalog with all tensors.
        text: the text model's tensors, named as in a text model.
        config: the text model's parsed ``config.json``.
        towers: Megatron's name → the tensor and its name in ``complete``.
        beginnings: beginning of names in a text model, or of towers in Megatron → in ``complete``.
        mrope_section: channels that positions in time, height and width turn, or None.
        is_transposed: tensors of all experts hold transposed matrices.
    """

    model: CompositeModel
    complete: Catalog
    text: Catalog
    config: Mapping[str, object]
    towers: Mapping[str, TowerTensor]
    beginnings: Mapping[str, str]
    mrope_section: Sequence[object] | None
    is_transposed: bool

    def joined(self, text: Catalog) -> Catalog:
        """Return Megatron's global form of the complete model.

        Args:
            text: that of the text model.
        """
        tensors = {
            name: megatron_tensor(self.complete, tensor).tensor
            for name, tensor in self.towers.items()
        }
        changes: dict[str, object] = {NAMES_ARGUMENT: json.dumps(self.beginnings)}
        if self.model.has_expert_stacks:
            changes[EXPERTS_ARGUMENT] = TRANSPOSED if self.is_transposed else PLAIN
        if self.mrope_section is not None:
            changes["position_embedding_type"] = "mrope"
            changes["mrope_section"] = list(self.mrope_section)
        args = replaced(text.args, {}, added=changes)
        described = text.facet(MegatronModel)
        assert described is not None, "to_megatron describes the model"
        states = [*self.model.extra_states, *_extra_states(self.towers.values())]
        order = (*tensors, *states, *(described.order or ()))
        note = (
            f"Megatron's training script cannot build {self.model.name}, but Megatron-Bridge's "
            f"{self.model.builder} can"
        )
        return replace(
            text,
            tensors={**tensors, **text.tensors},
            objects={
                **{
                    key: StoredObject(key, value=[None] if "/shard_" in key else None)
                    for key in states
                },
                **text.objects,
            },
            args=args,
            common={**(text.common or {}), "args": args},
            notes=(*(item for item in text.notes if "training script cannot" not in item), note),
        ).with_facet(replace(described, wrapper=self.model.wrapper, order=order))


def separate_model(catalog: Catalog, config: Mapping[str, object]) -> SeparatedModel:
    """Separate the towers of a composite model from its text model.

    Args:
        catalog: flat keys, as transformers names them.
        config: parsed ``config.json``.

    Raises:
        UnsupportedError: Megatron has no such model, or the checkpoint has optimizer states.
        UnknownTensorError: Megatron's model does not have a tensor.
        MissingShardError: a tower lacks a tensor.
        CorruptError: ``config.json`` has no number of layers.
    """
    model_type = str(config.get("model_type"))[:80]
    model = composite_models().get(model_type)
    if model is None:
        starts = towers_text(catalog, config)
        parts = f"other parts ({starts})" if starts else "other parts"
        text_type = type_of_text(thinking_part(config))
        refused = refused_types().get(text_type)
        also = (
            ""
            if refused is None
            else (f"; its text model ({text_type}) is not supported either: {refused}")
        )
        raise UnsupportedError(
            f"models of type {model_type!r} combine a text model with {parts}, "
            f"{_reason(model_type)}{also}",
            hint=TEXT_MODEL_HINT if has_text_family(config) else None,
        )
    state = next((key for key in catalog.tensors if is_optimizer_key(key)), None)
    if state is not None:
        raise UnsupportedError(
            f"optimizer states of {model.name} models under Hugging Face's names are not supported",
            key=state,
            hint="drop the optimizer with --no-optim",
        )

    text = text_model_of(catalog, config, defaults=model.text_defaults)
    in_text = set(text.name_of.values())
    beginnings = _beginnings_of_text(text.name_of, model)

    # The towers, which must be complete; a name that is left over is no tensor of theirs.
    keys = [key for key in catalog.tensors if key not in in_text]
    part = thinking_part(config)
    towers: dict[str, TowerTensor] = {}
    for tower in model.towers:
        start = next(
            (item for item in tower.hf if any(key.startswith(item) for key in keys)), tower.hf[0]
        )
        beginnings[tower.megatron] = start
        for tensor in tower.tensors(part, start):
            missing = next((name for name in tensor.names() if name not in catalog.tensors), None)
            if missing is None:
                towers[tensor.megatron] = tensor
            elif not tensor.is_optional:
                raise MissingShardError("the tensor is not in the checkpoint", key=missing)
    used = {name for tensor in towers.values() for name in tensor.names()}
    surplus = next((key for key in keys if key not in used), None)
    if surplus is not None and surplus.startswith(model.not_built):
        raise UnsupportedError(
            f"Megatron-Bridge's {model.name} has no tensors "
            + " or ".join(f"{start}*" for start in model.not_built),
            key=surplus,
            hint="drop them with " + " ".join(f"--exclude '{start}*'" for start in model.not_built),
        )
    if surplus is not None:
        raise UnknownTensorError(
            f"Megatron-Bridge's {model.name} has no such tensor",
            key=surplus,
            hint="drop it with --exclude if the model does not need it, or " + TEXT_MODEL_HINT,
        )
    text_values = mapping_or_empty(part.get("text_config")) or part
    rope = as_mapping(text_values.get("rope_parameters") or text_values.get("rope_scaling")) or {}
    section = rope.get("mrope_section")
    return SeparatedModel(
        model,
        catalog,
        replace(text.catalog, dropped=catalog.dropped),
        text.config,
        towers,
        beginnings,
        section if isinstance(section, list) else None,
        bool(text.transposed),
    )


def _extra_states(tensors: Iterable[TowerTensor]) -> Iterator[str]:
    """Yield the keys of the extra states of towers that consist of Megatron's modules."""
    for tensor in tensors:
        if tensor.has_extra_state:
            for state in requested_states([tensor.megatron]):
                n_layers = tensor.n_layers
                if n_layers is None:
                    yield state
                else:
                    yield from (f"{state}/shard_{number}_{n_layers}" for number in range(n_layers))


def _reason(model_type: str) -> str:
    """Return why the towers of a model type are not carried."""
    reason = refused_composites().get(model_type)
    return _UNKNOWN if reason is None else f"and {reason}"


def _beginnings_of_text(name_of: Mapping[str, str], model: CompositeModel) -> dict[str, str]:
    """Return beginning of names in a text model → in the complete model of these files."""
    result: dict[str, str] = {}
    for start in model.text:
        name = next((name for name in name_of if name.startswith(start)), None)
        if name is not None:
            result[start] = name_of[name].removesuffix(name.removeprefix(start))
    return result
