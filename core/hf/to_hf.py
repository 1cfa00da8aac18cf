"""Convert the global Megatron form to Hugging Face names: flat keys and a ``config.json``.

The result has ``documents`` (``config.json``), ``notes``, ``dropped`` and the facet
``HuggingFaceModel``. A Hugging Face directory stores weights and a configuration only: random
states, schedulers, optimizer state and arguments are dropped, and listed in ``dropped``. For other
destinations, DeepSpeed's, the optimizer gets the same names (``core.hf.optimizer``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped, dropped_each, dropped_unlisted
from core.engine.catalog.facets import HuggingFaceModel, MegatronModel
from core.engine.catalog.key_patterns import natural_order, some_of
from core.engine.catalog.optimizer_keys import NOT_IN_HF, is_optimizer_key
from core.engine.catalog.tensor import Tensor
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.hf.choice import choose_family, list_fitting_families
from core.hf.config_json.config import build_config, document
from core.hf.config_json.origin import ConfigOrigin, origin_of, parse_origin, restore
from core.hf.config_json.rope import list_unsaid_rope
from core.hf.family import Family
from core.hf.name_tables import Pair, pairs_of
from core.hf.notes import list_model_notes
from core.hf.tensors.hf_tensor import hf_tensors, list_padding, weights_in
from core.hf.ties import TIE
from core.hf.towers.to_hf import separate_towers
from core.hf.traits import Model, model_of
from core.hf.value_head import ValueHead, choose_value_head
from core.hf.values import CONFIG, UNUSED_WEIGHT_HINT
from core.megatron.extras.common_state import get_common_state
from core.megatron.model.args import fields_of
from core.megatron.model.vocabulary import PADDING

_EXTRA = "_extra_state"
_EMBEDDING = "embedding.word_embeddings.weight"


def to_hf(
    catalog: Catalog,
    *,
    model_type: str | None = None,
    family: Family | None = None,
    config: bytes | None = None,
    has_config: bool = True,
) -> Catalog:
    """Return a flat catalog with Hugging Face names.

    An optimizer is converted too (``core.hf.optimizer``) if ``catalog.optimizer`` describes one,
    whose groups list their parameters.

    Args:
        catalog: the global Megatron form (``core.megatron.reshard.unshard.unshard``).
        model_type: the family; None for the one that the training arguments describe.
        family: the family, in place of ``model_type``.
        config: content of the ``config.json`` that the model was converted from, for what the
            arguments do not express; None for the one in the arguments, if they have one.
        has_config: add a ``config.json`` with the embedding's dtype; False for destinations that
            cannot store one.

    Raises:
        UnsupportedError: the model belongs to no supported family, or not to the requested one; it
            has tensors that the family does not have; or the number of vocabulary rows without
            padding is unknown.
        UsageError: the requested family is unknown.
        MissingShardError: a tensor is missing.
        CorruptError: shapes and arguments contradict each other, or an argument is invalid.
    """
    fields: Mapping[str, object] = fields_of(catalog.args)
    origin = (
        origin_of(fields) if config is None else parse_origin(config, file=CONFIG, is_passed=True)
    )
    towers = separate_towers(catalog, fields, origin)
    if towers is not None:
        catalog, fields, origin = towers.text, towers.fields, towers.origin
    weights = weights_in(catalog)

    # Derive the model from the arguments and choose its family.
    model = model_of(fields, n_rows=_true_vocab_size(catalog), n_tensors=len(weights))
    requested = family or model_type
    family = choose_family(
        fields,
        model.features,
        requested=requested,
        origin=origin,
    )
    classified = family
    if towers is not None:  # no class of transformers has towers and such a head
        classified = replace(family, model_type=towers.model.model_type, classifiers=())
    head = choose_value_head(weights, classified, None if origin is None else origin.config)

    # Find the weight of every pair. Every weight must be used, so that none is lost silently.
    # A family that the arguments alone suggested may be the wrong one.
    others: list[Family] = []
    if requested is None and origin is None:
        others = [f for f in list_fitting_families(fields, model.features) if f is not family]
    try:
        pairs, tensors = _convert_weights(catalog, weights, family, model, head)
    except (CorruptError, MissingShardError, UnsupportedError) as err:
        fitting = _keep_fitting(others, catalog, weights, model, head)
        names = [other.model_type for other in fitting]
        if names:
            err.hint = (
                f"the arguments and tensors fit these families: {', '.join(names)}; specify the "
                f"right family, for example --names hf:{names[0]}"
            )
        raise
    padding = list_padding(catalog.tensors, pairs)

    # Convert the optimizer's states like the weights.
    objects: Mapping[str, StoredObject] = {}
    if catalog.optimizer is not None:
        from core.hf.optimizer.to_named import hf_states

        states, objects, rows = hf_states(catalog, catalog.optimizer, pairs)
        tensors |= states
        padding |= rows

    # Describe the model in config.json, and list the entries that cannot be stored.
    files: dict[str, bytes] = {}
    notes = [*catalog.notes, *list_model_notes(family, fields)]
    if has_config:
        values = build_config(fields, family, model, dtype=weights[_EMBEDDING].dtype)
        if head is not None:
            notes.append(f"the value head is written as {head.weight} of a {head.architecture}")
        files[CONFIG], note = _config_document(
            origin, values, fields=fields, family=family, model=model, head=head
        )
        notes.append(note)
        if origin is None:
            likely = [other for other in others if list_unsaid_rope([other])]
            fitting = _keep_fitting(likely, catalog, weights, model, head)
            unsaid = list_unsaid_rope([family, *fitting])
            if unsaid:
                notes.append(
                    f"the arguments do not record whether the model has {' or '.join(unsaid)}; if "
                    f"it does, pass its {CONFIG} with --config"
                )

    result = Catalog(
        format=catalog.format,
        version=None,
        tensors={key: tensors[key] for key in sorted(tensors, key=natural_order)},
        objects=objects,
        iteration=None if catalog.optimizer is None else catalog.iteration,
        files=files,
        notes=tuple(notes),
        dropped=(*_dropped(catalog, has_config=has_config), *dropped_unlisted(padding, PADDING)),
    ).with_facet(HuggingFaceModel(family.model_type))
    return result if towers is None else towers.joined(result)


def weights_of(catalog: Catalog) -> Mapping[str, Pair]:
    """Return Megatron's name of every weight, and the Hugging Face tensors that it consists of.

    Args:
        catalog: the global Megatron form of a model that ``to_hf`` converts.

    Raises:
        UnsupportedError: the model belongs to no supported family.
        MissingShardError: a tensor is missing.
    """
    fields, weights = fields_of(catalog.args), weights_in(catalog)
    model = model_of(fields, n_rows=_true_vocab_size(catalog), n_tensors=len(weights))
    origin = origin_of(fields)
    family = choose_family(
        fields,
        model.features,
        requested=None,
        origin=origin,
    )
    head = choose_value_head(weights, family, None if origin is None else origin.config)
    return _pairs_by_name(family if head is None else head.add_to(family), model, weights)


def _convert_weights(
    catalog: Catalog,
    weights: Mapping[str, Tensor],
    family: Family,
    model: Model,
    head: ValueHead | None,
) -> tuple[dict[str, Pair], dict[str, Tensor]]:
    """Return the pairs of a family by Megatron's names, and the Hugging Face tensors.

    Raises:
        MissingShardError: a tensor is missing.
        CorruptError: a tensor has another shape than the arguments imply.
        UnsupportedError: the family does not have one of the tensors.
    """
    pairs = _pairs_by_name(family if head is None else head.add_to(family), model, weights)
    tensors = dict(hf_tensors(catalog, pairs))
    unused = [key for key in weights if key not in pairs]
    if unused:
        suffix = f" (and {len(unused) - 1} more like it)" if len(unused) > 1 else ""
        raise UnsupportedError(
            f"{family.model_type} models in transformers have no such tensor{suffix}",
            key=unused[0],
            hint=UNUSED_WEIGHT_HINT,
        )
    return pairs, tensors


def _keep_fitting(
    candidates: Iterable[Family],
    catalog: Catalog,
    weights: Mapping[str, Tensor],
    model: Model,
    head: ValueHead | None,
) -> Iterator[Family]:
    """Yield the families that have exactly the tensors of a model."""
    for family in candidates:
        try:
            _convert_weights(catalog, weights, family, model, head)
        except (CorruptError, MissingShardError, UnsupportedError):
            continue
        yield family


def _pairs_by_name(family: Family, model: Model, weights: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Return Megatron's name of every tensor of the family, and its pair.

    Raises:
        MissingShardError: a tensor is missing.
    """
    pairs: dict[str, Pair] = {}
    for pair in pairs_of(family, model):
        name = next((name for name in pair.names if name in weights), None)
        if name is None:
            raise MissingShardError("the tensor is not in the checkpoint", key=pair.names[0])
        pairs[name] = pair
    return pairs


def _config_document(
    origin: ConfigOrigin | None,
    config: Mapping[str, object],
    *,
    fields: Mapping[str, object],
    family: Family,
    model: Model,
    head: ValueHead | None,
) -> tuple[bytes, str]:
    """Return the content of ``config.json``, and a note on where it comes from."""
    if origin is None:
        values = config if head is None else head.edit_config(config)
        return document(values), f"{CONFIG} was created from the training arguments"
    restored = restore(origin, config, fields=fields, family=family, model=model)
    values = origin.config if restored is None else restored
    if head is not None:
        tie = {name: origin.config[name] for name in (TIE,) if name in origin.config}
        values = head.edit_config({**values, **tie})
    source = "the one passed with --config" if origin.is_passed else "the model's original file"
    if values == origin.config:
        return origin.text, f"{CONFIG} is {source}"
    if origin.model_type not in (family.model_type, *family.aliases):
        note = f"{CONFIG} was created from the training arguments"
        return document(values), f"{note}, with further values from {source}"
    changed = [
        name
        for name in sorted(values.keys() | origin.config.keys())
        if values.get(name, ...) != origin.config.get(name, ...)
    ]
    causes = ["the training arguments"] * (restored is not None) + ["the value head"] * bool(head)
    note = f"{CONFIG} is {source}, except for values from {' and '.join(causes)}"
    return document(values), f"{note}: {some_of(changed)}"


def _true_vocab_size(catalog: Catalog) -> int:
    """Return the number of vocabulary rows without padding.

    Raises:
        UnsupportedError: the number is unknown. Guessing could keep padding rows as tokens.
    """
    model = catalog.facet(MegatronModel)
    if model is not None and model.vocab_size is not None and model.vocab_size > 0:
        return model.vocab_size
    stored = catalog.tensors[_EMBEDDING].shape[:1] if _EMBEDDING in catalog.tensors else ()
    raise UnsupportedError(
        f"the vocabulary size is unknown, so some of the {stored[0] if stored else 'stored'} rows "
        "may be padding",
        key=_EMBEDDING,
        hint="pass the true vocabulary size with --vocab-size, "
        "or --keep-padded-vocab to keep every row",
    )


def _dropped(catalog: Catalog, *, has_config: bool) -> list[Dropped]:
    """Return the record of the entries that Hugging Face directories cannot store."""
    dropped = [*catalog.dropped]
    # Details of an optimizer that was dropped before mean nothing outside Megatron: one line for
    # all.
    of_optimizer = [entry for entry in dropped if entry.is_listed and entry.is_of_optimizer]
    states = [tensor for key, tensor in catalog.tensors.items() if is_optimizer_key(key)]
    states += [tensor for entry in of_optimizer for tensor in entry.tensors]
    if catalog.optimizer is not None:
        parts = (f"{name} of the optimizer" for name in catalog.optimizer.entries)
        dropped += dropped_each(parts, "not stored under Hugging Face's names")
    elif of_optimizer or states:
        dropped = [
            Dropped(("optimizer",), NOT_IN_HF, tensors=tuple(states)),
            *(entry for entry in dropped if entry not in of_optimizer),
        ]
    # The local implementation saves extra states without content; they are not worth a line.
    empty = (None, [None])
    extra_states = [key for key in catalog.tensors if _EXTRA in key and not is_optimizer_key(key)]
    extra_states += [
        key for key, item in catalog.objects.items() if _EXTRA in key and item.value not in empty
    ]
    # The shards of one object share the name before the slash.
    objects = dict.fromkeys(key.partition("/")[0] for key in catalog.objects if _EXTRA not in key)
    names = [*extra_states, *objects]
    names = names + [str(name) for name in get_common_state(catalog) if name not in names]
    if has_config and "args" in names:
        names.remove("args")
        dropped += dropped_each(("args",), f"{CONFIG} describes the model")
    place = "in Hugging Face checkpoints" if has_config else "under Hugging Face's names"
    return [*dropped, *dropped_each(names, f"not stored {place}", catalog.tensors)]
