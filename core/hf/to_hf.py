"""Convert the global Megatron form to Hugging Face names: flat keys and a ``config.json``.

The result has ``documents`` (``config.json``), ``notes``, ``dropped`` and the facet
``HuggingFaceModel``. A Hugging Face directory stores weights and a configuration only: random
states, schedulers, optimizer state and arguments are dropped, and listed in ``dropped``. For other
destinations, DeepSpeed's, the optimizer gets the same names (``core.hf.optimizer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from core.catalog.catalog import Catalog, Fragment, StoredObject, TensorMeta
from core.catalog.facets import HuggingFaceModel, MegatronModel
from core.catalog.key_patterns import natural_order
from core.catalog.optimizer_keys import MASTER, NOT_IN_HF, Optimizer
from core.changes.select import is_optimizer_key
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.hf import fuse
from core.hf.choice import choose_family
from core.hf.config_json.config import config_of, document
from core.hf.config_json.origin import ConfigOrigin, origin_of, parse_origin, restore
from core.hf.family import Family
from core.hf.name_tables import Pair, pairs_of
from core.hf.optimizer.groups import torch_groups
from core.hf.optimizer.states import named_state_key, states_in_global_form, view_of_global_state
from core.hf.optimizer.steps import step_of_megatron
from core.hf.packed import pack_experts
from core.hf.shifted import shifted_fragments
from core.hf.traits import Model, model_of
from core.hf.values import CONFIG
from core.megatron.extras.common_state import common_of
from core.megatron.model.args import fields_of
from core.megatron.optimizer.groups import is_muon
from core.quantize.schemes import check_numbers

_EXTRA = "_extra_state"
_EMBEDDING = "embedding.word_embeddings.weight"
_VOCAB = ("embedding.word_embeddings.", "output_layer.")


@dataclass(frozen=True, slots=True)
class _HfTensor:
    """A tensor under its Hugging Face name, with a function that returns its fragments."""

    meta: TensorMeta
    fragments: Callable[[], list[Fragment]]


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
        catalog: the global Megatron form (``core.megatron.reshard.reshard.unshard``).
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
    fields = fields_of(catalog.args)
    weights = _weights(catalog)

    # Derive the model from the arguments and choose its family.
    model = model_of(fields, n_rows=_true_vocab_size(catalog), n_tensors=len(weights))
    origin = origin_of(fields) if config is None else parse_origin(config, file=CONFIG)
    family = choose_family(
        fields,
        model.features,
        requested=family or model_type,
        origin=None if origin is None else origin.model_type,
    )

    # Find the weight of every pair. Every weight must be used, so that none is lost silently.
    pairs: dict[str, Pair] = {}
    for pair in pairs_of(family, model):
        name = next((name for name in pair.names if name in weights), None)
        if name is None:
            raise MissingShardError("the tensor is not in the checkpoint", key=pair.names[0])
        pairs[name] = pair
    tensors = _convert(catalog, pairs)
    unused = [key for key in weights if key not in pairs]
    if unused:
        suffix = f", nor {len(unused) - 1} others" if len(unused) > 1 else ""
        raise UnsupportedError(
            f"{family.model_type} models of transformers do not have this tensor{suffix}",
            key=unused[0],
            hint="drop it with --exclude if the model does not need it",
        )

    # Convert the optimizer's states like the weights.
    objects: Mapping[str, StoredObject] = {}
    if catalog.optimizer is not None:
        states = _states(catalog, catalog.optimizer, pairs)
        tensors |= states.tensors
        objects = states.objects

    # Describe the model in config.json, and list the entries that cannot be stored.
    documents: dict[str, bytes] = {}
    notes = [*catalog.notes]
    if has_config:
        values = config_of(fields, family, model, dtype=weights[_EMBEDDING].dtype)
        documents[CONFIG], note = _config_document(
            origin, values, fields=fields, family=family, model=model
        )
        notes.append(note)

    def fragments_of(key: str) -> Sequence[Fragment]:
        tensor = tensors.get(key)
        return catalog.fragments(key) if tensor is None else tuple(tensor.fragments())

    return Catalog(
        format=catalog.format,
        version=None,
        tensors={key: tensors[key].meta for key in sorted(tensors, key=natural_order)},
        fragments_of=fragments_of,
        objects=objects,
        bind=catalog.bind,
        iteration=None if catalog.optimizer is None else catalog.iteration,
        documents=documents,
        notes=tuple(notes),
        dropped=tuple(_dropped(catalog, has_config=has_config)),
    ).with_facet(HuggingFaceModel(family.model_type))


def weights_of(catalog: Catalog) -> Iterator[tuple[str, Pair]]:
    """Yield Megatron's name of every weight, and the Hugging Face tensors that it consists of.

    Args:
        catalog: the global Megatron form of a model that ``to_hf`` converts.
    """
    fields, weights = fields_of(catalog.args), _weights(catalog)
    model = model_of(fields, n_rows=_true_vocab_size(catalog), n_tensors=len(weights))
    origin = origin_of(fields)
    family = choose_family(
        fields,
        model.features,
        requested=None,
        origin=None if origin is None else origin.model_type,
    )
    for pair in pairs_of(family, model):
        yield next(name for name in pair.names if name in weights), pair


def _weights(catalog: Catalog) -> dict[str, TensorMeta]:
    """Return the tensors that are neither optimizer states nor extra states."""
    return {
        key: meta
        for key, meta in catalog.tensors.items()
        if not is_optimizer_key(key) and _EXTRA not in key
    }


def _convert(catalog: Catalog, pairs: Mapping[str, Pair]) -> dict[str, _HfTensor]:
    """Return the Hugging Face tensors that Megatron's tensors consist of.

    Args:
        catalog: tensors under Megatron's names.
        pairs: Megatron's name of each tensor → its pair.
    """
    tensors: dict[str, _HfTensor] = {}
    experts: dict[str, list[tuple[str, Pair]]] = {}
    for name, pair in pairs.items():
        if pair.packed is not None:
            experts.setdefault(pair.packed.key, []).append((name, pair))
        else:
            tensors |= _hf_tensors(catalog, name, pair)
    return tensors | {
        key: _packed_tensor(catalog, key, members) for key, members in experts.items()
    }


@dataclass(frozen=True, slots=True)
class _HfStates:
    """The optimizer under Hugging Face's names: its states, and its groups as objects."""

    tensors: dict[str, _HfTensor]
    objects: Mapping[str, StoredObject]


def _states(catalog: Catalog, optimizer: Optimizer, pairs: Mapping[str, Pair]) -> _HfStates:
    """Convert the states and groups of the optimizer.

    Raises:
        UnsupportedError: Muon trains some of the parameters, only some experts of a tensor have
            states, or the groups have different numbers of steps.
    """
    if any(is_muon(group.settings) for group in optimizer.groups):
        raise UnsupportedError(
            "Muon's momentum has no counterpart among the optimizers of Hugging Face models",
            hint="drop the optimizer with --no-optim",
        )
    tensors: dict[str, _HfTensor] = {}
    names_of: dict[str, list[str]] = {}
    for state in states_in_global_form(catalog):
        # A moment is not shifted with its weight; a master weight is.
        view = view_of_global_state(catalog, state)
        used = {
            name: pair if state == MASTER else replace(pair, shift=None)
            for name, pair in pairs.items()
            if name in view.tensors
        }
        _check_experts(pairs, used, state)
        for key, tensor in _convert(view, used).items():
            state_key = named_state_key(key, state)
            tensors[state_key] = _renamed(tensor, state_key)
        for name, pair in used.items():
            keys = [tensor.names[0] for tensor in pair.tensors] if pair.packed is None else []
            names_of[name] = keys or [pair.packed.key if pair.packed else name]

    # Every trained parameter has the number of steps.
    step = step_of_megatron(catalog, optimizer)
    if step is not None:
        for number, key in enumerate(dict.fromkeys(chain.from_iterable(names_of.values()))):
            meta, fragments = step.of(key, is_first=number == 0)
            tensors[meta.key] = _HfTensor(meta, partial(list, fragments))
    objects = torch_groups(optimizer, names_of)
    samples = fields_of(catalog.args).get("consumed_train_samples")
    if type(samples) is int and samples > 0:
        objects["global_samples"] = StoredObject("global_samples", value=samples)
    return _HfStates(tensors, objects)


def _renamed(tensor: _HfTensor, key: str) -> _HfTensor:
    """Return a tensor under another key."""
    return _HfTensor(
        replace(tensor.meta, key=key),
        lambda: [replace(fragment, key=key) for fragment in tensor.fragments()],
    )


def _check_experts(all_pairs: Mapping[str, Pair], used: Mapping[str, Pair], state: str) -> None:
    """Raise unless all or none of the experts of a packed tensor have a state.

    Raises:
        UnsupportedError: only some have it.
    """
    packed = {pair.packed.key for pair in used.values() if pair.packed is not None}
    for name, pair in all_pairs.items():
        if pair.packed is not None and pair.packed.key in packed and name not in used:
            raise UnsupportedError(
                f"the expert has no {state}, but others of {pair.packed.key} have",
                key=name,
                hint="drop the optimizer with --no-optim",
            )


def _config_document(
    origin: ConfigOrigin | None,
    config: Mapping[str, object],
    *,
    fields: Mapping[str, object],
    family: Family,
    model: Model,
) -> tuple[bytes, str]:
    """Return the content of ``config.json``, and a note on where it comes from."""
    if origin is None:
        return document(config), f"{CONFIG} was created from the training arguments"
    restored = restore(origin, config, fields=fields, family=family, model=model)
    if restored is None:
        return origin.text, f"{CONFIG} is the one that the model was converted from"
    return document(restored), (
        f"{CONFIG} is the one that the model was converted from, "
        "with the values that the training arguments have changed"
    )


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
        "unknown vocabulary size: some of the "
        f"{stored[0] if stored else 'stored'} rows may be padding",
        key=_EMBEDDING,
        hint="give the true vocabulary size with --vocab-size, "
        "or --keep-padded-vocab to keep every row",
    )


def _hf_tensors(catalog: Catalog, name: str, pair: Pair) -> dict[str, _HfTensor]:
    """Return the Hugging Face tensors that a Megatron tensor is split into."""
    meta = catalog.tensors[name]
    check_numbers(meta)
    is_vocab = name.startswith(_VOCAB)
    # Only the tensors of the vocabulary may have more rows than the arguments imply: padding.
    is_padded = (
        is_vocab
        and len(meta.shape) == len(pair.shape)
        and meta.shape[1:] == pair.shape[1:]
        and meta.shape[0] > pair.shape[0]
    )
    if meta.shape != pair.shape and not is_padded:
        raise CorruptError(
            f"shape {meta.shape}, but the training arguments imply {pair.shape} (elements)",
            key=meta.key,
        )

    def true_fragments() -> Sequence[Fragment]:
        fragments = catalog.fragments(name)
        if pair.is_swapped:
            fragments = fuse.swap_halves(fragments, pair.shape[1])
        return fuse.first_rows(name, fragments, pair.shape[0]) if is_padded else fragments

    if (shift := pair.shift) is not None:
        key = pair.tensors[0].names[0]
        return {
            key: _HfTensor(
                TensorMeta(key, meta.dtype, pair.shape),
                lambda: shifted_fragments(catalog, name, key, shift),
            )
        }
    strips = pair.strips

    # Bound to its arguments by a function of its own: a lambda in the loop would see the last ones.
    def take(key: str, part: int) -> Callable[[], list[Fragment]]:
        return lambda: fuse.take_apart(key, strips, part, true_fragments())

    # Copies that transformers expects under a second name are written as part 0, which is all of
    # it.
    keys = [(tensor.names[0], number, tensor.shape) for number, tensor in enumerate(pair.tensors)]
    keys += [(key, 0, pair.shape) for key in pair.twins]
    return {
        key: _HfTensor(TensorMeta(key, meta.dtype, shape), take(key, number))
        for key, number, shape in keys
    }


def _packed_tensor(catalog: Catalog, key: str, pairs: Sequence[tuple[str, Pair]]) -> _HfTensor:
    """Return the tensor that holds the matrices of all experts of a layer.

    Args:
        pairs: Megatron's name of each expert's tensor, and its pair.

    Raises:
        CorruptError: the experts' tensors differ in dtype, or in shape from the arguments.
    """
    shape = pairs[0][1].shape
    metas = [catalog.tensors[name] for name, _ in pairs]
    for meta in metas:
        check_numbers(meta)
        if meta.shape != shape:
            raise CorruptError(
                f"shape {meta.shape}, but the training arguments imply {shape} (elements)",
                key=meta.key,
            )
        if meta.dtype != metas[0].dtype:
            raise CorruptError(
                f"{meta.key} is {meta.dtype} and {metas[0].key} is {metas[0].dtype}, "
                "but they are one tensor in Hugging Face models",
                key=key,
            )
    experts = [(name, pair.packed) for name, pair in pairs if pair.packed is not None]
    return _HfTensor(
        TensorMeta(key, metas[0].dtype, experts[0][1].tensor_shape(shape)),
        lambda: pack_experts(catalog, experts, shape),
    )


def _dropped(catalog: Catalog, *, has_config: bool) -> list[str]:
    """List the entries that Hugging Face directories cannot store, as ``entries (reason)``."""
    dropped = [*catalog.dropped]
    # Details of an optimizer that was dropped before mean nothing outside Megatron: one line for
    # all.
    has_optimizer = any(text.startswith("optimizer") for text in dropped)
    if catalog.optimizer is not None:
        dropped += [
            f"{name} of the optimizer (not stored under Hugging Face's names)"
            for name in catalog.optimizer.entries
        ]
    elif has_optimizer or any(map(is_optimizer_key, catalog.tensors)):
        dropped = [
            f"optimizer ({NOT_IN_HF})",
            *(text for text in dropped if not text.startswith("optimizer")),
        ]
    names = _other_entries(catalog)
    if has_config and "args" in names:
        names.remove("args")
        dropped.append(f"args ({CONFIG} describes the model)")
    place = "in Hugging Face checkpoints" if has_config else "under Hugging Face's names"
    return dropped + [f"{name} (not stored {place})" for name in names]


def _other_entries(catalog: Catalog) -> list[str]:
    """Return the names of all entries that are neither a weight nor optimizer state."""
    # The local implementation saves extra states without content; they are not worth a line.
    empty = (None, [None])
    extra_states = [key for key in catalog.tensors if _EXTRA in key and not is_optimizer_key(key)]
    extra_states += [
        key for key, item in catalog.objects.items() if _EXTRA in key and item.value not in empty
    ]
    # The shards of one object share the name before the slash.
    objects = dict.fromkeys(key.partition("/")[0] for key in catalog.objects if _EXTRA not in key)
    names = [*extra_states, *objects]
    return names + [str(name) for name in common_of(catalog) if name not in names]
