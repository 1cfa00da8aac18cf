"""From the global Megatron form to Hugging Face's names: flat keys and a ``config.json``.

The result has ``documents`` (``config.json``), ``notes``, ``dropped`` and the facet ``HuggingFaceModel``. Nothing else
of a Megatron checkpoint has a place in such a directory: random states, schedulers, optimizer state and arguments are
dropped, and listed.
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
class _Made:
    """A tensor under Hugging Face's name, and what makes its fragments."""

    meta: TensorMeta
    fragments: Callable[[], list[Fragment]]


def to_hf(catalog: Catalog, *, model_type: str | None = None, has_config: bool = True) -> Catalog:
    """A flat catalog with Hugging Face's names; see the module's docstring.

    Args:
        catalog: the global Megatron form (``core.megatron.reshard.reshard.unshard``).
        model_type: the family; None takes the one that the training arguments describe.
        has_config: make a ``config.json``; a destination that has no place for one gets the names alone. Its dtype is
            the embedding's.

    Raises:
        UnsupportedError: the model is of no family that is mapped, or not of the one that was asked for; or nothing
            says how many rows of the vocabulary are true ones.
        MissingShardError: a tensor is absent.
        CorruptError: shapes and arguments contradict each other.
    """
    fields = fields_of(catalog.args)
    notes, dropped = [*catalog.notes], [*catalog.dropped]
    weights = {key: meta for key, meta in catalog.tensors.items() if not is_optimizer_key(key) and _EXTRA not in key}
    n_rows = _true_rows(catalog)
    model = model_of(fields, n_rows=n_rows, n_tensors=len(weights))
    family = _family(fields, model.features, model_type)
    made: dict[str, _Made] = {}
    used: set[str] = set()
    for pair in pairs_of(family, model):
        name = next((name for name in pair.names if name in weights), None)
        if name is None:
            raise MissingShardError("the tensor is not in the checkpoint", key=pair.names[0])
        used.add(name)
        made |= _parts(catalog, name, pair)
    _refuse_leftover([key for key in weights if key not in used], family)
    if any(text.startswith("optimizer") for text in dropped):  # in words for those who go on with Megatron
        dropped = ["optimizer (left out)", *(text for text in dropped if not text.startswith("optimizer"))]
    dropped += _left_out(catalog, has_config=has_config)
    documents: dict[str, bytes] = {}
    if has_config:
        documents[CONFIG] = document(config_of(fields, family, model, dtype=weights[_EMBEDDING].dtype))
        notes.append(f"{CONFIG} is made of the training arguments; it needs the tokenizer's files beside it")
    order = sorted(made, key=_natural)

    def fragments_of(key: str) -> Sequence[Fragment]:
        one = made.get(key)
        return catalog.fragments(key) if one is None else tuple(one.fragments())

    return Catalog(
        format=catalog.format,
        version=None,
        tensors={key: made[key].meta for key in order},
        fragments_of=fragments_of,
        bind=catalog.bind,
        documents=documents,
        notes=tuple(notes),
        dropped=tuple(dropped),
    ).with_facet(HuggingFaceModel(family.model_type))


def _true_rows(catalog: Catalog) -> int:
    model = catalog.facet(MegatronModel)
    if model is not None and model.vocab_size is not None and model.vocab_size > 0:
        return model.vocab_size
    stored = catalog.tensors[_EMBEDDING].shape[:1] if _EMBEDDING in catalog.tensors else ()
    raise UnsupportedError(
        f"how many of the {stored[0] if stored else 'stored'} rows of the vocabulary are padding is not known",
        key=_EMBEDDING,
        hint="give the true vocabulary size with --vocab-size, or --keep-padded-vocab to keep every row",
    )


def _family(fields: Mapping[str, object], features: frozenset[str], model_type: str | None) -> Family:
    """The family of a model.

    Raises:
        UnsupportedError: no family, or not the given one, has these features; names the argument.
    """
    if model_type is not None:
        wanted = family_of(model_type)
        _refuse_misfits(fields, features, wanted)
        return wanted
    for family in families().values():
        if not family.misfits(features):
            return family
    nearest = min(families().values(), key=lambda family: len(family.misfits(features)))
    _refuse_misfits(fields, features, nearest)
    raise AssertionError("a family without misfits fits")


def _refuse_misfits(fields: Mapping[str, object], features: frozenset[str], family: Family) -> None:
    misfits = family.misfits(features)
    if misfits:
        values = ", ".join(f"argument {FEATURES[name]} is {fields.get(FEATURES[name])!r}" for name in misfits)
        raise UnsupportedError(
            f"the model is not of family {family.model_type}: {values}",
            hint=f"families that are mapped: {', '.join(families())}",
        )


def _parts(catalog: Catalog, name: str, pair: Pair) -> dict[str, _Made]:
    """The tensors that one of Megatron's becomes."""
    meta = catalog.tensors[name]
    check_numbers(meta)
    is_vocab = name.startswith(_VOCAB)
    _check_shape(meta, pair.shape, has_padding=is_vocab)
    if is_vocab and meta.shape != pair.shape:

        def whole() -> Sequence[Fragment]:
            return fuse.first_rows(name, catalog.fragments(name), pair.shape[0])
    else:

        def whole() -> Sequence[Fragment]:
            return catalog.fragments(name)

    strips = fuse.by_groups([part.shape[0] for part in pair.parts], pair.n_groups)

    def maker(key: str, part: int) -> Callable[[], list[Fragment]]:
        return lambda: fuse.taken_apart(key, strips, part, whole())

    keys = [(part.names[0], number, part.shape) for number, part in enumerate(pair.parts)]
    keys += [(key, 0, pair.shape) for key in pair.twins]
    return {key: _Made(TensorMeta(key, meta.dtype, shape), maker(key, number)) for key, number, shape in keys}


def _check_shape(meta: TensorMeta, shape: Shape, *, has_padding: bool) -> None:
    found = meta.shape
    if found == shape:
        return
    if has_padding and len(found) == len(shape) and found[1:] == shape[1:] and found[0] > shape[0]:
        return
    raise CorruptError(f"shape {found}, but the training arguments make it {shape} (elements)", key=meta.key)


def _refuse_leftover(left: Sequence[str], family: Family) -> None:
    if left:
        more = f", nor for {len(left) - 1} others" if len(left) > 1 else ""
        raise UnsupportedError(
            f"{family.model_type} models of transformers have no place for this tensor{more}",
            key=left[0],
            hint="leave it out with --exclude if the model does not need it",
        )


def _left_out(catalog: Catalog, *, has_config: bool) -> list[str]:
    """What has no place under Hugging Face's names, as ``entries (reason)``."""
    found: list[str] = []
    optimizer = [key for key in catalog.tensors if is_optimizer_key(key)]
    if optimizer:
        found.append(f"optimizer ({len(optimizer)} tensors)")
    names = [key for key in catalog.tensors if _EXTRA in key and key not in optimizer]
    names += [key for key, item in catalog.objects.items() if _EXTRA in key and _holds_something(item.value)]
    names += dict.fromkeys(key.partition("/")[0] for key in catalog.objects if _EXTRA not in key)
    names += [str(name) for name in common_of(catalog) if name not in names]
    if has_config and "args" in names:
        names.remove("args")
        found.append(f"args ({CONFIG} has what describes the model)")
    return [*found, f"{', '.join(names)} (no place under Hugging Face's names)"] if names else found


def _holds_something(value: object) -> bool:
    return value not in (None, [None])


def _natural(key: str) -> tuple[tuple[int, object], ...]:
    """Sorts keys as people do: layer 2 before layer 10."""
    return tuple((0, int(word)) if word.isdigit() else (1, word) for word in key.split("."))
