"""Take the towers off a Megatron model before its text model is converted, and put them beside it.

The reverse of ``core.hf.towers.to_megatron``. ``config.json`` is the one that the complete model
was converted from; values of the text model that training has changed are replaced in it. Names are
those of the argument ``huggingface_names``, else the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, MissingShardError, UnknownTensorError, UnsupportedError
from core.files.json_object import parse_json_object
from core.hf.config_json.config import document
from core.hf.config_json.origin import ConfigOrigin
from core.hf.tensors.packed import stack_experts, transpose_stacks
from core.hf.text_model import THINKER, text_config_of, thinking_part
from core.hf.towers.models import CompositeModel, composite_models
from core.hf.towers.tensors import hf_tower_tensors
from core.hf.values import CONFIG
from core.megatron.rules.tables import load_rules
from core.pickle.fields import FieldReader
from core.values import dataclass

_MROPE = "mrope"
_SPEAKS = "enable_audio_output"
"""Name in ``config.json`` of whether a model speaks; by default, it does."""


@dataclass(frozen=True, slots=True)
class SeparatedTowers:
    """The towers of a Megatron model, and its text model.

    Args:
        model: its entry in the table.
        text: that of the text model.
        fields: training arguments of the text model.
        complete_origin: ``config.json`` of the complete model.
        origin: that of its text model.
        towers: Hugging Face name → the tensor.
        beginnings: beginning of names in a text model → in the complete one.
    """

    model: CompositeModel
    text: Catalog
    fields: Mapping[str, object]
    complete_origin: ConfigOrigin
    origin: ConfigOrigin
    towers: Mapping[str, Tensor]
    beginnings: Mapping[str, str]

    def joined(self, text: Catalog) -> Catalog:
        """Return the complete model under Hugging Face's names.

        Args:
            text: the text model under these.

        Raises:
            CorruptError: two tensors would have the same name.
        """
        from core.hf.towers.to_megatron import NAMES_ARGUMENT

        towers = self.towers
        if self.model.has_expert_stacks:
            text = self._with_stacks(text)
        in_text = {self._name_of(key): key for key in text.tensors}
        if len(in_text) < len(text.tensors) or in_text.keys() & towers.keys():
            raise CorruptError(f"argument {NAMES_ARGUMENT} gives several tensors the same name")

        tensors = {name: text.tensors[key] for name, key in in_text.items()} | dict(towers)
        files = {**text.files}
        document = files.get(CONFIG)
        if isinstance(document, bytes):
            files[CONFIG] = self._config_document(document)
        notes = text.notes
        if self.model.not_built and self.complete_origin.config.get(_SPEAKS) is not False:
            parts = " and ".join(f"{start}*" for start in self.model.not_built)
            note = (
                f"the result has no {parts}, and transformers would initialize them randomly, so "
                f"load the result with {_SPEAKS}=False"
            )
            notes = (*notes, note)
        result = replace(text, tensors=tensors, files=files, notes=notes)
        return result.with_facet(HuggingFaceModel(self.model.model_type))

    def _name_of(self, key: str) -> str:
        """Return the name in the complete model of a tensor of the text model."""
        for start, complete in self.beginnings.items():
            if key.startswith(start):
                return complete + key.removeprefix(start)
        raise UnknownTensorError(
            f"{self.model.name} models in transformers have no such tensor", key=key
        )

    def _with_stacks(self, text: Catalog) -> Catalog:
        """Return the text model with the experts of a layer in two tensors.

        Raises:
            CorruptError: the argument that says how their matrices lie has another value.
        """
        from core.hf.towers.to_megatron import EXPERTS_ARGUMENT, PLAIN, TRANSPOSED

        form = self.fields.get(EXPERTS_ARGUMENT)
        notes = text.notes
        if form is None:
            form = TRANSPOSED
            notes = (
                *notes,
                "expert tensors are written transposed, as in published checkpoints",
            )
        if form not in (TRANSPOSED, PLAIN):
            expected = f"{TRANSPOSED} or {PLAIN}"
            raise FieldReader().build_error(form, f"argument {EXPERTS_ARGUMENT}", expected)
        stacked = stack_experts(text)
        if form == TRANSPOSED:
            stacked = transpose_stacks(stacked, stacked.tensors.keys() - text.tensors.keys())
        return replace(stacked, notes=notes)

    def _config_document(self, text: bytes) -> bytes:
        """Return the ``config.json`` of the complete model for that of the text model."""
        if text == self.origin.text:
            return self.complete_origin.text
        now, before = parse_json_object(text, file=CONFIG), self.origin.config
        complete = dict(self.complete_origin.config)
        section = complete.get(THINKER)
        part = dict(section) if isinstance(section, Mapping) else complete
        own = part.get("text_config")
        target = dict(own) if isinstance(own, Mapping) else part
        for name in sorted(now.keys() | before.keys()):
            if now.get(name) == before.get(name):
                continue
            value, old = now.get(name), target.get(name)
            # The text model's rotary parameters lack what concerns images.
            if isinstance(value, Mapping) and isinstance(old, Mapping):
                value = {**old, **value}
            target[name] = value
            for values in (complete, part):
                if name in values and not isinstance(values[name], Mapping):
                    values[name] = value
        if isinstance(own, Mapping):
            part["text_config"] = target
        if isinstance(section, Mapping):
            complete[THINKER] = part
        return document(complete)


_PROJECTION = "vision_projection"
_LLAVA = {"vision_model", _PROJECTION}
"""What Megatron-LM's LLaVA has beside its language model."""


def separate_towers(
    catalog: Catalog, fields: Mapping[str, object], origin: ConfigOrigin | None
) -> SeparatedTowers | None:
    """Separate the towers of a model from its text model; None if it has none.

    Args:
        catalog: Megatron's global form.
        fields: training arguments by name.
        origin: ``config.json`` of the complete model.

    Raises:
        UnsupportedError: ``config.json`` is unknown, or not that of a composite model of Megatron;
            or the optimizer is to be converted.
        CorruptError: the names in the arguments are no names.
        MissingShardError: a tower lacks a tensor.
    """
    described = catalog.facet(MegatronModel)
    if described is None or described.wrapper is None:
        return None
    model = None if origin is None else composite_models().get(str(origin.model_type))
    wrapper = load_rules().wrapper_in(described.wrapper)
    assert wrapper is not None, "the rules know every wrapper of a model"
    if origin is None or model is None or model.wrapper != described.wrapper:
        problem = f"; its {CONFIG} is needed to name the towers' tensors"
        if origin is not None:
            problem = f", which models of type {str(origin.model_type)[:80]!r} are not"
        names = {key.partition(".")[0] for key in catalog.tensors}
        if _PROJECTION in names:
            beside = sorted(names & _LLAVA)
            raise UnsupportedError(
                "the checkpoint is Megatron-LM's LLaVA, but transformers has no model with its "
                f"tower and projection ({', '.join(beside)})",
                hint="to convert only the language model, drop them with "
                + " ".join(f"--exclude '{tower}.*'" for tower in beside),
            )
        if not any(key.startswith(wrapper.towers) for key in catalog.tensors):
            return None  # they were excluded
        raise UnsupportedError(
            f"the checkpoint is a text model with towers{problem}",
            hint=f"pass the complete model's {CONFIG} with --config FILE (supported types: "
            f"{', '.join(composite_models())})",
        )
    if catalog.optimizer is not None:
        raise UnsupportedError(
            f"ckpt cannot convert the optimizer of {model.name} models to Hugging Face's names",
            hint="drop it with --no-optim",
        )

    # Select the towers' tensors, and give them the names of the model that they came from.
    beginnings = _beginnings_of(fields, model)
    part = thinking_part(origin.config)
    towers: dict[str, Tensor] = {}
    used: set[str] = set()
    for tower in model.towers:
        # One by one: a damaged configuration may describe more tensors than memory can hold.
        for tensor in tower.tensors(part, beginnings[tower.megatron]):
            if tensor.megatron in catalog.tensors:
                used.add(tensor.megatron)
                towers |= hf_tower_tensors(catalog, tensor)
            elif not tensor.is_optional:
                raise MissingShardError("the tensor is not in the checkpoint", key=tensor.megatron)
    for key in catalog.tensors:
        is_state = key.endswith("_extra_state")
        if key.startswith(wrapper.towers) and key not in used and not is_state:
            raise UnsupportedError(
                f"{model.name} models in transformers have no such tensor",
                key=key,
                hint=f"check that this is the right {CONFIG} for these weights",
            )

    # What is left is a text model, which turns text as ordinary ones do.
    text = replace(
        catalog,
        tensors={
            k: tensor for k, tensor in catalog.tensors.items() if not k.startswith(wrapper.towers)
        },
        objects={
            k: item for k, item in catalog.objects.items() if not k.startswith(wrapper.towers)
        },
    )
    text_fields = {key: value for key, value in fields.items() if key != "mrope_section"}
    if text_fields.get("position_embedding_type") == _MROPE:
        text_fields["position_embedding_type"] = "rope"
    has_head = bool(fields.get("untie_embeddings_and_output_weights"))
    config = text_config_of(origin.config, has_head=has_head, defaults=model.text_defaults)
    return SeparatedTowers(
        model,
        text,
        text_fields,
        origin,
        ConfigOrigin(document(config), config, origin.is_passed),
        towers,
        {start: beginnings[start] for start in model.text},
    )


def _beginnings_of(fields: Mapping[str, object], model: CompositeModel) -> dict[str, str]:
    """Return the beginnings of names in the Hugging Face model.

    Raises:
        CorruptError: the argument with the names is malformed.
    """
    from core.hf.towers.to_megatron import NAMES_ARGUMENT

    result = {**model.text, **{tower.megatron: tower.hf[0] for tower in model.towers}}
    text = fields.get(NAMES_ARGUMENT)
    if text is None:
        return result
    text = FieldReader().read_text(text, f"argument {NAMES_ARGUMENT}")
    names = parse_json_object(text.encode(), file=f"the argument {NAMES_ARGUMENT}")
    if any(key not in result or not isinstance(value, str) for key, value in names.items()):
        raise CorruptError(
            f"argument {NAMES_ARGUMENT} has entries that are not names of {model.name}: "
            f"{json.dumps(names)[:200]}"
        )
    return result | {key: str(value) for key, value in names.items()}
