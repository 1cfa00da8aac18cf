"""Fold a LoRA adapter into the tensors of its base model.

Both have the names of transformers, the adapter those of peft (``core.hf.adapters.peft``);
``core.verbs.merge.adapter_forms`` brings Megatron's bases and adapters under these names. Every
weight with an adapter becomes an encoding (``core.verbs.merge.lora``); tensors of
``modules_to_save``, biases and saved embeddings of the adapter replace those of the base, also
where its vocabulary was resized before training. The adapter has the names of modules, the base
those of its files (``core.hf.tensors.spelling``).

An output layer that is tied to the embedding gets a tensor of its own where the adapter changes
only one of them. The model with the adapter computes so; ``merge_and_unload`` of peft changes both
where one is adapted, and gives another model.

Source: peft 0.21.2 ``tuners/lora/{layer,model}.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from core.arrays.box import Shape
from core.arrays.dtypes import dtype_of
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.decoded import DecodedStore
from core.engine.catalog.removal import record_replaced
from core.engine.catalog.stored import Encoding
from core.engine.catalog.tensor import Fragment, Tensor
from core.engine.changes.select import without_optimizer
from core.engine.quantize.source import source_of
from core.errors import CorruptError, UnsupportedError, list_some
from core.files.store import ReadStore
from core.hf.adapters.peft import Adaptation, Config, check_config, sorted_tensors
from core.hf.tensors.spelling import match_names
from core.hf.ties import (
    TEXT_CONFIG,
    TIE,
    TiePair,
    edit_tie,
    find_tie_pair,
    is_tied,
    with_config,
    with_own_head,
)
from core.values import dataclass, n_text
from core.verbs.merge.combined import SUM, Combined
from core.verbs.merge.lora import Folded
from core.verbs.merge.merge import (
    MergeSource,
    computed_array,
    hold_same_bytes,
    origin_note,
    refuse_quantized,
)

_BASE_HINT = "is this the adapter's base model{}?"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter under peft's names.

    Args:
        label: its path, for people.
        catalog: its tensors; the files have the names of the joined store.
        config: its parsed ``adapter_config.json``.
    """

    label: str
    catalog: Catalog
    config: Config


@dataclass(frozen=True, slots=True)
class FoldedCatalog:
    """A base model with an adapter folded in.

    Args:
        catalog: the base's tensors, without optimizer states.
        changed: the tensors that are computed from the adapter, or taken from it.
        notes: notes for the user.
    """

    catalog: Catalog
    changed: frozenset[str]
    notes: tuple[str, ...]


def fold_adapter(
    base: MergeSource,
    adapter: Adapter,
    *,
    store: ReadStore,
    config: Mapping[str, object] | None = None,
) -> FoldedCatalog:
    """Return the base with the adapter folded in.

    Args:
        base: the base model under the names of transformers.
        adapter: the adapter.
        store: the files of both; replacements of both sides of a tie are compared.
        config: the ``config.json`` of the base, or None.

    Raises:
        UnsupportedError: the adapter is not plain LoRA, or adapts something else than matrices.
        CorruptError: the adapter's tensors contradict its configuration or each other.
    """
    check_config(adapter.config)
    refuse_quantized(base, None)

    # Sort the adapter's tensors into matrices and replacements, under the names of the base.
    adaptations, replacements = sorted_tensors(adapter.catalog, adapter.config)
    catalog = without_optimizer(base.catalog).catalog
    tie = find_tie_pair(catalog.tensors, config)
    if tie is not None and config is not None:
        is_both = is_tied(config, has_head=tie.head in catalog.tensors)
    else:
        is_both = False
    keys = {*catalog.tensors, *((tie.embedding, tie.head) if tie is not None and is_both else ())}
    key_of = _match_base((*adaptations, *replacements), keys, adapter)
    adaptations = {key_of[name]: item for name, item in adaptations.items()}
    replacements = {key_of[name]: key for name, key in replacements.items()}

    # What changes one tensor of a tie, or both differently, makes two of it.
    notes: list[str] = []
    edited = dict(config or {})
    changed = {*adaptations, *replacements}
    if tie is not None and is_both and changed & {tie.embedding, tie.head}:
        if _stays_tied(tie, adaptations, replacements, adapter.catalog, store):
            if tie.head not in catalog.tensors:
                del replacements[tie.head]
        else:
            catalog = with_own_head(catalog, tie)
            edited |= edit_tie(edited, is_tied=False)
            notes.append(
                f"the base ties {tie.head} to {tie.embedding}, but the adapter changes only one of "
                f"them or changes them differently, so both are written and {TIE} becomes false"
            )

    changed = {*adaptations, *replacements}

    # Replaced tensors have the adapter's shape if its vocabulary was resized before training.
    resized = _resized_vocabulary(catalog, tie, replacements, adapter)
    catalog = replace(catalog, tensors={**catalog.tensors, **resized})
    if resized:
        n_rows = next(iter(resized.values())).shape[0]
        edited |= _edit_vocabulary(edited, n_rows)
        notes.append(
            f"the vocabulary has {n_rows:,} rows, like the adapter's, but the tokenizer files are "
            f"still those of {base.label}; replace them with the files used in training"
        )

    # Check everything that is computed now, so that no error comes in the middle of copying.
    for name, key in replacements.items():
        _check_replacement(catalog, name, adapter, key)
    is_transposed = _orientations(catalog, adapter, adaptations)
    for name in changed:
        if name not in replacements:
            source_of(catalog, name)
    for key in adapter.catalog.tensors:
        source_of(adapter.catalog, key)

    @lru_cache(maxsize=64)
    def computed(name: str) -> Sequence[Fragment]:
        meta = catalog.tensors[name]
        replacement = replacements.get(name)
        weight = (
            source_of(catalog, name)
            if replacement is None
            else source_of(adapter.catalog, replacement)
        )
        item = adaptations.get(name)
        encoding: Encoding
        if item is None:
            encoding = Combined((weight,), SUM, (1.0,), 1.0, meta.dtype)
        else:
            a, b = source_of(adapter.catalog, item.a), source_of(adapter.catalog, item.b)
            encoding = Folded(
                weight, a, b, item.scaling, is_transposed[name], item.is_embedding, meta.dtype
            )
        # Rounded here, not by the copy: fused tensors need one type for all of their parts.
        return computed_array(name, meta, meta.dtype, encoding)

    tensors = {
        key: replace(tensor, tiling=partial(computed, key)) if key in changed else tensor
        for key, tensor in catalog.tensors.items()
    }
    replaced = [name for name in replacements if name in base.catalog.tensors]
    folded = record_replaced(replace(catalog, tensors=tensors), base.catalog, replaced)
    if config is not None and edited != config:
        folded = with_config(folded, edited)
    n_weights = n_text(len(adaptations), "weight")
    texts = [
        f"LoRA adapter {adapter.label} folded into {n_weights} of {base.label}",
        origin_note(base),
        *notes,
    ]
    if replacements:
        texts.append(f"taken from the adapter: {list_some(replacements)}")
    return FoldedCatalog(folded, frozenset(changed), tuple(texts))


def _match_base(names: Sequence[str], keys: Collection[str], adapter: Adapter) -> dict[str, str]:
    """Match the adapter's names, which are those of modules, with those of the base.

    Raises:
        UnsupportedError: the base lacks a tensor.
    """
    key_of = match_names(names, keys)
    missing = [name for name in dict.fromkeys(names) if name not in key_of]
    if not missing:
        return key_of
    hint = (
        "merge the adapter with peft, which matches it by module instead of by stored tensor name: "
        "PeftModel.merge_and_unload()"
        if key_of
        else _BASE_HINT.format(_trained_on(adapter))
    )
    raise UnsupportedError(
        f"the adapter changes {n_text(len(missing), 'tensor')} that the base does not have "
        f"(and {len(key_of)} that it does have): {list_some(missing)}",
        file=adapter.label,
        hint=hint,
    )


def _trained_on(adapter: Adapter) -> str:
    """Describe the base model that the adapter's configuration names; empty if it names none."""
    name = adapter.config.get("base_model_name_or_path")
    return f", {str(name)[:200]!r}" if isinstance(name, str) and name else ""


def _stays_tied(
    tie: TiePair,
    adaptations: Mapping[str, Adaptation],
    replacements: Mapping[str, str],
    adapter: Catalog,
    store: ReadStore,
) -> bool:
    """Return whether the adapter replaces both tensors of a tie by equal ones."""
    pair = (tie.embedding, tie.head)
    if any(name in adaptations or name not in replacements for name in pair):
        return False
    first, second = (replacements[name] for name in pair)
    return hold_same_bytes(
        source_of(adapter, first), source_of(adapter, second), DecodedStore(store)
    )


def _resized_vocabulary(
    catalog: Catalog, tie: TiePair | None, replacements: Mapping[str, str], adapter: Adapter
) -> dict[str, Tensor]:
    """Return the replaced embedding and output layer with the adapter's number of rows.

    Raises:
        UnsupportedError: the adapter has only one of them, or the base another tensor of that many
            rows, so that the model would have two vocabularies.
    """
    if tie is None or tie.embedding not in catalog.tensors:
        return {}
    old = catalog.tensors[tie.embedding].shape
    resized = {}
    for name in (tie.embedding, tie.head):
        new = adapter.catalog.tensors.get(replacements.get(name, ""))
        stored = catalog.tensors.get(name)
        if new is not None and stored is not None and len(new.shape) == 2:
            if new.shape[0] != stored.shape[0] and new.shape[1:] == stored.shape[1:]:
                resized[name] = replace(stored, shape=new.shape)
    if not resized:
        return {}
    rest = [
        name
        for name, tensor in catalog.tensors.items()
        if name not in resized
        and (name == tie.embedding or name.startswith(tie.head.removesuffix("weight")))
        and tensor.shape[:1] == old[:1]
    ]
    n_rows = {tensor.shape[0] for tensor in resized.values()}
    if rest or len(n_rows) > 1:
        raise UnsupportedError(
            f"the adapter's vocabulary has {', '.join(map(str, sorted(n_rows)))} rows, but the "
            f"base's has {old[0]}" + (f", and the adapter lacks {list_some(rest)}" if rest else ""),
            key=next(iter(resized)),
            file=adapter.label,
            hint="resize the base as you did before training, with transformers' "
            "resize_token_embeddings(), and use the result as the base",
        )
    return resized


def _edit_vocabulary(config: Mapping[str, object], n_rows: int) -> dict[str, object]:
    """Return the entries of a configuration that state the size of the vocabulary."""
    edits: dict[str, object] = {}
    text = config.get(TEXT_CONFIG)
    if isinstance(text, Mapping) and "vocab_size" in text:
        edits[TEXT_CONFIG] = {**text, "vocab_size": n_rows}
    if "vocab_size" in config or not edits:
        edits["vocab_size"] = n_rows
    return edits


def _check_replacement(base: Catalog, name: str, adapter: Adapter, key: str) -> None:
    """Raise unless a tensor of the adapter can replace one of the base.

    Raises:
        UnsupportedError: the shapes differ, or it is not a float.
    """
    old, new = base.tensors[name], adapter.catalog.tensors[key]
    if old.shape != new.shape:
        raise UnsupportedError(
            f"the adapter's tensor has shape {new.shape}, but the base's has shape {old.shape}",
            key=name,
            hint=_BASE_HINT.format(_trained_on(adapter)),
        )
    if dtype_of(old.dtype).kind != "float" or dtype_of(new.dtype).kind != "float":
        raise UnsupportedError(
            f"a {new.dtype} tensor cannot replace a {old.dtype} tensor", key=name
        )


def _orientations(
    base: Catalog, adapter: Adapter, adaptations: Mapping[str, Adaptation]
) -> dict[str, bool]:
    """Return for each weight whether it is stored as (in, out).

    The shape decides; peft goes by the class of the module, and its configuration records only
    one of both for all modules, which decides for square matrices.

    Raises:
        UnsupportedError: a weight is not a float matrix, or square in an adapter of both kinds.
        CorruptError: the matrices do not fit the weight.
    """
    default = bool(adapter.config.get("fan_in_fan_out"))
    matrices = adapter.catalog.tensors
    result: dict[str, bool] = {}
    square: list[str] = []
    for name, item in adaptations.items():
        tensor = base.tensors[name]
        n_out, n_in = matrices[item.b].shape[0], matrices[item.a].shape[1]
        kinds = {dtype_of(matrices[key].dtype).kind for key in (item.a, item.b)}
        if kinds | {dtype_of(tensor.dtype).kind} != {"float"}:
            raise UnsupportedError(
                f"an adapter cannot be folded into a {tensor.dtype} weight", key=name
            )
        shapes: dict[bool, Shape] = {False: (n_out, n_in), True: (n_in, n_out)}
        fitting = [side for side in (False, True) if tensor.shape == shapes[side]]
        if item.is_embedding:
            fitting = [True] if True in fitting else []
        if not fitting:
            raise CorruptError(
                "the LoRA matrices are for a weight of shape "
                f"{shapes[item.is_embedding or default]}, but the base's weight has shape "
                f"{tensor.shape}",
                key=name,
                hint=_BASE_HINT.format(_trained_on(adapter)),
            )
        if len(fitting) == 2:
            square.append(name)
        result[name] = default if len(fitting) == 2 else fitting[0]
    others = {
        result[name]
        for name, item in adaptations.items()
        if name not in square and not item.is_embedding
    }
    if square and others - {default}:
        raise UnsupportedError(
            "the adapter has linear layers of both orientations, so the orientation of square "
            "weights cannot be determined",
            key=square[0],
            hint="merge it with peft: PeftModel.merge_and_unload()",
        )
    return result
