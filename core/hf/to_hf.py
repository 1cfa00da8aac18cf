"""Convert the global Megatron form to Hugging Face names: flat keys and a ``config.json``.

The result has ``documents`` (``config.json``), ``notes``, ``dropped`` and the facet
``HuggingFaceModel``. A Hugging Face directory can store nothing else of a Megatron checkpoint:
random states, schedulers, optimizer state and arguments are dropped, and listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from core.arrays.box import Shape
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.facets import HuggingFaceModel, MegatronModel
from core.changes.select import is_optimizer_key
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.hf import fuse
from core.hf.config import CONFIG, config_of, document
from core.hf.name_tables import Family, Pair, families, family_of, pairs_of
from core.hf.traits import FEATURES, model_of
from core.megatron.extras.common_state import common_of
from core.megatron.model.args import fields_of
from core.quantize.schemes import check_numbers

_EXTRA = "_extra_state"
_EMBEDDING = "embedding.word_embeddings.weight"
_VOCAB = ("embedding.word_embeddings.", "output_layer.")


@dataclass(frozen=True, slots=True)
class _HfTensor:
    """A tensor under its Hugging Face name, with a function that makes its fragments."""

    meta: TensorMeta
    fragments: Callable[[], list[Fragment]]


def to_hf(catalog: Catalog, *, model_type: str | None = None, has_config: bool = True) -> Catalog:
    """Return a flat catalog with Hugging Face names.

    Args:
        catalog: the global Megatron form (``core.megatron.reshard.reshard.unshard``).
        model_type: the family; None for the one that the training arguments describe.
        has_config: make a ``config.json``; destinations that cannot store one get the names alone.
            Its dtype is the embedding's.

    Raises:
        UnsupportedError: the model belongs to no supported family, or not to the requested one; or
            the number of vocabulary rows without padding is unknown.
        MissingShardError: a tensor is missing.
        CorruptError: shapes and arguments contradict each other.
    """
    fields = fields_of(catalog.args)
    weights = {
        key: meta
        for key, meta in catalog.tensors.items()
        if not is_optimizer_key(key) and _EXTRA not in key
    }

    # Find the family, and convert its tensors one by one.
    model = model_of(fields, n_rows=_true_rows(catalog), n_tensors=len(weights))
    family = _family(fields, model.features, model_type)
    tensors: dict[str, _HfTensor] = {}
    used: set[str] = set()
    for pair in pairs_of(family, model):
        name = next((name for name in pair.names if name in weights), None)
        if name is None:
            raise MissingShardError("the tensor is not in the checkpoint", key=pair.names[0])
        used.add(name)
        tensors |= _hf_tensors(catalog, name, pair)
    _refuse_leftover([key for key in weights if key not in used], family)

    # Add what describes the model, and list what cannot be stored.
    documents: dict[str, bytes] = {}
    notes = [*catalog.notes]
    if has_config:
        documents[CONFIG] = document(
            config_of(fields, family, model, dtype=weights[_EMBEDDING].dtype)
        )
        notes.append(f"{CONFIG} was made from the training arguments; add the tokenizer's files")

    def fragments_of(key: str) -> Sequence[Fragment]:
        tensor = tensors.get(key)
        return catalog.fragments(key) if tensor is None else tuple(tensor.fragments())

    return Catalog(
        format=catalog.format,
        version=None,
        tensors={key: tensors[key].meta for key in sorted(tensors, key=_natural_order)},
        fragments_of=fragments_of,
        bind=catalog.bind,
        documents=documents,
        notes=tuple(notes),
        dropped=tuple(_dropped(catalog, has_config=has_config)),
    ).with_facet(HuggingFaceModel(family.model_type))


def _true_rows(catalog: Catalog) -> int:
    """Return the number of vocabulary rows without padding.

    Raise UnsupportedError if it is unknown.
    """
    model = catalog.facet(MegatronModel)
    if model is not None and model.vocab_size is not None and model.vocab_size > 0:
        return model.vocab_size
    stored = catalog.tensors[_EMBEDDING].shape[:1] if _EMBEDDING in catalog.tensors else ()
    raise UnsupportedError(
        f"unknown vocabulary size: some of the {stored[0] if stored else 'stored'} rows may be padding",
        key=_EMBEDDING,
        hint="give the true vocabulary size with --vocab-size, or --keep-padded-vocab to keep every row",
    )


def _family(
    fields: Mapping[str, object], features: frozenset[str], model_type: str | None
) -> Family:
    """Return the family of a model.

    Raises:
        UnsupportedError: no family, or not the requested one, has these features; the message names
            the arguments.
    """
    if model_type is None:
        family = min(families().values(), key=lambda family: len(family.misfits(features)))
    else:
        family = family_of(model_type)
    misfits = family.misfits(features)
    if misfits:
        values = ", ".join(
            f"argument {FEATURES[name]} is {fields.get(FEATURES[name])!r}" for name in misfits
        )
        raise UnsupportedError(
            f"the model is not of family {family.model_type}: {values}",
            hint=f"supported families: {', '.join(families())}",
        )
    return family


def _hf_tensors(catalog: Catalog, name: str, pair: Pair) -> dict[str, _HfTensor]:
    """Return the Hugging Face tensors that one of Megatron's becomes."""
    meta = catalog.tensors[name]
    check_numbers(meta)
    is_vocab = name.startswith(_VOCAB)
    _check_shape(meta, pair.shape, has_padding=is_vocab)
    is_padded = is_vocab and meta.shape != pair.shape

    def pieces() -> Sequence[Fragment]:
        fragments = catalog.fragments(name)
        return fuse.first_rows(name, fragments, pair.shape[0]) if is_padded else fragments

    strips = fuse.interleave_by_group([part.shape[0] for part in pair.parts], pair.n_groups)

    def maker(key: str, part: int) -> Callable[[], list[Fragment]]:
        return lambda: fuse.take_apart(key, strips, part, pieces())

    keys = [(part.names[0], number, part.shape) for number, part in enumerate(pair.parts)]
    keys += [(key, 0, pair.shape) for key in pair.twins]
    return {
        key: _HfTensor(TensorMeta(key, meta.dtype, shape), maker(key, number))
        for key, number, shape in keys
    }


def _check_shape(meta: TensorMeta, shape: Shape, *, has_padding: bool) -> None:
    """Raise CorruptError unless a tensor has a shape, or with padding more rows."""
    actual = meta.shape
    if actual == shape:
        return
    if (
        has_padding
        and len(actual) == len(shape)
        and actual[1:] == shape[1:]
        and actual[0] > shape[0]
    ):
        return
    raise CorruptError(
        f"shape {actual}, but the training arguments imply {shape} (elements)", key=meta.key
    )


def _refuse_leftover(keys: Sequence[str], family: Family) -> None:
    """Raise UnsupportedError if there are tensors that the family does not have."""
    if keys:
        suffix = f", nor {len(keys) - 1} others" if len(keys) > 1 else ""
        raise UnsupportedError(
            f"{family.model_type} models of transformers do not have this tensor{suffix}",
            key=keys[0],
            hint="drop it with --exclude if the model does not need it",
        )


def _dropped(catalog: Catalog, *, has_config: bool) -> list[str]:
    """Return what Hugging Face directories cannot store, as ``entries (reason)``."""
    dropped = [*catalog.dropped]
    # Details of an optimizer that was dropped before mean nothing outside Megatron.
    if any(text.startswith("optimizer") for text in dropped):
        dropped = [
            "optimizer (dropped)",
            *(text for text in dropped if not text.startswith("optimizer")),
        ]
    n_states = sum(map(is_optimizer_key, catalog.tensors))
    if n_states:
        dropped.append(f"optimizer ({n_states} tensors)")
    names = _other_entries(catalog)
    if has_config and "args" in names:
        names.remove("args")
        dropped.append(f"args ({CONFIG} describes the model)")
    return (
        [*dropped, f"{', '.join(names)} (Hugging Face checkpoints cannot store these)"]
        if names
        else dropped
    )


def _other_entries(catalog: Catalog) -> list[str]:
    """Return the names of everything that is neither a weight nor optimizer state."""
    empty = (None, [None])
    extra_states = [key for key in catalog.tensors if _EXTRA in key and not is_optimizer_key(key)]
    extra_states += [
        key for key, item in catalog.objects.items() if _EXTRA in key and item.value not in empty
    ]
    # Objects may be stored in shards, which have one name.
    objects = dict.fromkeys(key.partition("/")[0] for key in catalog.objects if _EXTRA not in key)
    names = [*extra_states, *objects]
    return names + [str(name) for name in common_of(catalog) if name not in names]


def _natural_order(key: str) -> tuple[tuple[int, object], ...]:
    """Return a sort key that puts layer 2 before layer 10."""
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in key.split("."))
