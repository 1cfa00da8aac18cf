"""Fold a LoRA adapter into the tensors of its base model.

Both have the names of transformers, the adapter those of peft (``core.hf.adapters.peft``);
``core.merge.adapter_forms`` brings Megatron's bases and adapters under these names. Every weight
with an adapter becomes an encoding (``core.merge.lora``); tensors of ``modules_to_save``, biases
and saved embeddings of the adapter replace those of the base.

Source: peft 0.21.2 ``tuners/lora/{layer,model}.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from core.arrays.box import Shape
from core.arrays.dtypes import dtype_of
from core.catalog.catalog import Catalog, Fragment
from core.catalog.key_patterns import listed_keys
from core.catalog.stored import Encoding
from core.changes.select import without_optimizer
from core.errors import CorruptError, UnsupportedError
from core.hf.adapters.peft import Adaptation, Config, check_config, sorted_tensors
from core.merge.combined import SUM, Combined
from core.merge.lora import Folded
from core.merge.merge import (
    MergeSource,
    computed_array,
    origin_note,
    refuse_quantized,
)
from core.quantize.source import source_of


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


def fold_adapter(base: MergeSource, adapter: Adapter) -> FoldedCatalog:
    """Return the base with the adapter folded in.

    Args:
        base: the base model under the names of transformers.
        adapter: the adapter.

    Raises:
        UnsupportedError: the adapter is not plain LoRA, or adapts something else than matrices.
        CorruptError: the adapter's tensors contradict its configuration or each other.
    """
    config = adapter.config
    check_config(config)
    refuse_quantized(base, None)

    # Sort the adapter's tensors into matrices and replacements, under the names of the base.
    adaptations, replacements = sorted_tensors(adapter.catalog, config)
    catalog = without_optimizer(base.catalog).catalog
    prefix = _prefix_in(catalog, (*adaptations, *replacements), adapter.label)
    adaptations = {prefix(name): item for name, item in adaptations.items()}
    replacements = {prefix(name): key for name, key in replacements.items()}
    _refuse_tied(catalog, (*adaptations, *replacements))

    # Check everything that is computed now, so that no error comes in the middle of copying.
    for name, key in replacements.items():
        _check_replacement(catalog, name, adapter.catalog, key)
    is_transposed = _orientations(catalog, adapter.catalog, adaptations, config)
    for name in (*adaptations, *replacements):
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
        return computed_array(meta, meta.dtype, encoding)

    def fragments_of(key: str) -> Sequence[Fragment]:
        is_computed = key in adaptations or key in replacements
        return computed(key) if is_computed else catalog.fragments(key)

    notes = [
        f"LoRA adapter {adapter.label} folded into {len(adaptations)} weights of {base.label}",
        origin_note(base),
    ]
    if replacements:
        notes.append(f"taken from the adapter: {listed_keys(replacements)}")
    changed = frozenset((*adaptations, *replacements))
    return FoldedCatalog(replace(catalog, fragments_of=fragments_of), changed, tuple(notes))


class _Prefix:
    """Function from an adapter's name for a tensor to the base's."""

    __slots__ = ("added",)

    def __init__(self, added: str) -> None:
        self.added = added

    def __call__(self, name: str) -> str:
        return self.added + name


def _prefix_in(catalog: Catalog, names: Sequence[str], label: str) -> _Prefix:
    """Find what the base puts before the adapter's names: nothing, or the name of its trunk.

    Raises:
        UnsupportedError: the base lacks a tensor under every prefix.
    """
    trunks = dict.fromkeys(key.partition(".")[0] + "." for key in catalog.tensors if "." in key)
    missing: list[str] = []
    for added in ("", *trunks):
        lacking = [name for name in names if added + name not in catalog.tensors]
        if not lacking:
            return _Prefix(added)
        missing = missing or lacking
    raise UnsupportedError(
        f"the adapter changes {len(missing)} tensors that the base does not have: "
        f"{listed_keys(missing)}",
        file=label,
        hint="is this the adapter's base model? A tied output layer has no tensor of its own",
    )


def _refuse_tied(catalog: Catalog, names: Sequence[str]) -> None:
    """Raise if a tensor that changes shares its bytes with another one.

    Raises:
        UnsupportedError: it does.
    """
    tied = {*catalog.aliases, *catalog.aliases.values()}
    for name in names:
        if name in tied:
            raise UnsupportedError(
                "the adapter changes a tensor that is tied to another one",
                key=name,
                hint="write a base without ties first: ckpt convert SRC DST --to safetensors",
            )


def _check_replacement(base: Catalog, name: str, adapter: Catalog, key: str) -> None:
    """Raise unless a tensor of the adapter can replace one of the base.

    Raises:
        UnsupportedError: the shapes differ, as after resizing an embedding, or it is not a float.
    """
    old, new = base.tensors[name], adapter.tensors[key]
    if old.shape != new.shape:
        raise UnsupportedError(
            f"the adapter's tensor has shape {new.shape}, that of the base {old.shape}",
            key=name,
            hint="resize the base's vocabulary first, as before training",
        )
    if dtype_of(old.dtype).kind != "float" or dtype_of(new.dtype).kind != "float":
        raise UnsupportedError(f"{new.dtype} cannot replace {old.dtype}", key=name)


def _orientations(
    base: Catalog, adapter: Catalog, adaptations: Mapping[str, Adaptation], config: Config
) -> dict[str, bool]:
    """Return for each weight whether it is stored as (in, out).

    The shape decides; peft goes by the class of the module, and its configuration records only
    one of both for all modules, which decides for square matrices.

    Raises:
        UnsupportedError: a weight is not a float matrix, or square in an adapter of both kinds.
        CorruptError: the matrices do not fit the weight.
    """
    default = bool(config.get("fan_in_fan_out"))
    result: dict[str, bool] = {}
    square: list[str] = []
    for name, item in adaptations.items():
        meta = base.tensors[name]
        n_out, n_in = adapter.tensors[item.b].shape[0], adapter.tensors[item.a].shape[1]
        kinds = {dtype_of(adapter.tensors[key].dtype).kind for key in (item.a, item.b)}
        if kinds | {dtype_of(meta.dtype).kind} != {"float"}:
            raise UnsupportedError(f"a weight of {meta.dtype} cannot be adapted", key=name)
        shapes: dict[bool, Shape] = {False: (n_out, n_in), True: (n_in, n_out)}
        fitting = [side for side in (False, True) if meta.shape == shapes[side]]
        if item.is_embedding:
            fitting = [True] if True in fitting else []
        if not fitting:
            raise CorruptError(
                f"LoRA matrices for a weight of shape {shapes[item.is_embedding or default]}, "
                f"but that of the base has shape {meta.shape}",
                key=name,
                hint="is this the adapter's base model?",
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
            "the adapter has linear layers of both orientations, and for square weights nothing "
            "tells which they have",
            key=square[0],
            hint="merge it with peft: PeftModel.merge_and_unload()",
        )
    return result
