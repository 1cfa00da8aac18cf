"""Read a LoRA adapter that peft wrote, and fold it into the tensors of its base model.

::

    adapter/
    ├── adapter_config.json          r, lora_alpha, use_rslora, rank_pattern, modules_to_save …
    └── adapter_model.safetensors    (or .bin)
          base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   (r, in)
          base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   (out, r)
          base_model.model.model.embed_tokens.lora_embedding_A, …_B        (r, rows), (width, r)
          base_model.model.score.weight                                    of modules_to_save
          base_model.model.….q_proj.base_layer.bias                        bias = "all", "lora_only"

``scaling`` is alpha / r, or alpha / √r with ``use_rslora``; ``rank_pattern`` and ``alpha_pattern``
give modules other numbers. Tensors of ``modules_to_save``, biases and saved embeddings replace
those of the base.

Versions: what peft 0.4 to 0.21 write for plain LoRA.

Not supported, refused by name: DoRA and other variants, adapters of other kinds than LoRA,
initialisations that change the base (PiSSA, OLoRA, CorDA, LoftQ …), convolutions, stacked expert
parameters (``target_parameters``), trained tokens, biases of ``lora_B``; bases with Megatron's
names.

Source: peft 0.21.2 ``tuners/lora/{config,layer,model}.py``, ``utils/{other,save_and_load}.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from core.arrays.box import Shape
from core.arrays.dtypes import dtype_of
from core.catalog.catalog import Catalog, Fragment
from core.catalog.facets import MegatronModel
from core.catalog.key_patterns import listed_keys
from core.catalog.stored import Encoding
from core.changes.select import without_optimizer
from core.errors import CorruptError, UnsupportedError, UsageError
from core.files.json_object import read_json_object
from core.files.store import ReadStore
from core.merge.combined import SUM, Combined
from core.merge.lora import Folded
from core.merge.merge import (
    MergedCatalog,
    MergeSource,
    computed_array,
    origin_note,
    refuse_quantized,
)
from core.quantize.source import source_of

CONFIG = "adapter_config.json"
_MAX_CONFIG_BYTES = 16 << 20
_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<name>[AB])(\.weight)?")
_PLAIN_FIELDS = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "eva_config"),
        *("exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
        *("layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
        *("megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size"),
        *("r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type"),
        "use_rslora",
    }
)
"""Entries of the configuration that plain LoRA may have; any other one must be empty or false."""
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base model as it is."""
_RISKY_PATTERN = re.compile(r"\)[*+{?]")

Config: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The adapter of one weight.

    Args:
        a, b: keys of its matrices in the adapter.
        is_embedding: the weight is that of an embedding, stored as (in, out).
        scaling: factor of the product.
    """

    a: str
    b: str
    is_embedding: bool
    scaling: float


def fold_adapter(base: MergeSource, adapter: MergeSource, store: ReadStore) -> MergedCatalog:
    """Return the base with the adapter folded in.

    Args:
        base: the base model.
        adapter: the adapter's tensors under their own names.
        store: the files of the adapter under their own names.

    Raises:
        UnsupportedError: the adapter is not plain LoRA, or adapts something else than matrices.
        CorruptError: the adapter's tensors contradict its configuration or each other.
    """
    if base.catalog.facet(MegatronModel) is not None:
        raise UnsupportedError(
            "--lora: the base has Megatron's tensor names, the adapter those of transformers",
            file=base.label,
            hint="convert the base first: ckpt convert SRC DST --to hf",
        )
    if not store.exists(CONFIG):
        raise UsageError(
            f"--lora: there is no {CONFIG}, so this is not an adapter that peft wrote",
            file=adapter.label,
            hint="give the directory that save_pretrained wrote",
        )
    config = read_json_object(store, CONFIG, max_bytes=_MAX_CONFIG_BYTES)
    check_config(config)
    refuse_quantized(base, None)

    # Sort the adapter's tensors into matrices and replacements, under the names of the base.
    adaptations, replacements = _sorted_tensors(adapter.catalog, config)
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
    return MergedCatalog(replace(catalog, fragments_of=fragments_of), tuple(notes))


def check_config(config: Config) -> None:
    """Raise unless a configuration describes plain LoRA.

    Raises:
        UnsupportedError: another kind of adapter, a variant of LoRA, or an initialisation that
            changed the base model.
        CorruptError: a number is missing or no number.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(
            f"the adapter is {kind!r}, not LoRA",
            file=CONFIG,
            hint="merge it with peft: PeftModel.merge_and_unload()",
        )
    variants = [name for name, value in config.items() if value and name not in _PLAIN_FIELDS]
    if variants:
        raise UnsupportedError(
            f"the adapter is not plain LoRA: it uses {', '.join(sorted(variants))}",
            file=CONFIG,
            hint="merge it with peft: PeftModel.merge_and_unload()",
        )
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_INITS:
        raise UnsupportedError(
            f"init_lora_weights {start!r} changed the base model before training, so the adapter "
            "does not belong to the base as it is stored",
            file=CONFIG,
            hint="save the adapter with path_initial_model_for_weight_conversion, or merge it "
            "with peft",
        )
    for name in ("r", "lora_alpha"):
        if not isinstance(config.get(name), (int, float)) or isinstance(config.get(name), bool):
            raise CorruptError(f"{name} is {config.get(name)!r}, not a number", file=CONFIG)


def _sorted_tensors(
    catalog: Catalog, config: Config
) -> tuple[dict[str, Adaptation], dict[str, str]]:
    """Sort an adapter's tensors.

    Returns:
        The adaptations by the name of the weight, and the keys of tensors that replace one of the
        base, by its name.

    Raises:
        UnsupportedError: a tensor belongs to a variant of LoRA.
        CorruptError: one of two matrices is missing, or the ranks contradict each other.
    """
    matrices: dict[str, dict[str, str]] = {}
    embeddings: set[str] = set()
    replacements: dict[str, str] = {}
    for key in catalog.tensors:
        name = key.removeprefix(_PREFIX)
        match = _MATRIX.fullmatch(name)
        if match is not None:
            matrices.setdefault(match["module"], {})[match["name"]] = key
            if match["embedding"]:
                embeddings.add(match["module"])
        elif ".lora_" in name:
            raise UnsupportedError(
                "the tensor belongs to a variant of LoRA",
                key=key,
                hint="merge it with peft: PeftModel.merge_and_unload()",
            )
        else:
            replacements[name.replace(".base_layer.", ".")] = key

    adaptations: dict[str, Adaptation] = {}
    for module, keys in matrices.items():
        if keys.keys() != {"A", "B"}:
            raise CorruptError(
                "one of the two LoRA matrices is missing", key=next(iter(keys.values()))
            )
        a, b = (catalog.tensors[keys[name]] for name in "AB")
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise UnsupportedError(
                f"LoRA of a convolution (matrices of shapes {a.shape} and {b.shape})",
                key=a.key,
                hint="merge it with peft: PeftModel.merge_and_unload()",
            )
        rank = _number_of(config, "rank_pattern", module, config["r"])
        if not a.shape[0] == b.shape[1] == rank:
            raise CorruptError(
                f"matrices of shapes {a.shape} and {b.shape}, but {CONFIG} gives rank {rank:g}",
                key=a.key,
            )
        alpha = _number_of(config, "alpha_pattern", module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        adaptations[f"{module}.weight"] = Adaptation(a.key, b.key, module in embeddings, scaling)
    if not adaptations and not replacements:
        raise CorruptError("the adapter has no tensors", file=CONFIG)
    return adaptations, replacements


def _number_of(config: Config, field: str, module: str, default: object) -> float:
    """Return the rank or alpha of a module: that of the first pattern that matches its name.

    Raises:
        UnsupportedError: matching a pattern might take forever.
        CorruptError: the patterns are malformed.
    """
    patterns = config.get(field) or {}
    number = default
    if not isinstance(patterns, Mapping):
        raise CorruptError(f"{field} is not a mapping", file=CONFIG)
    for pattern, value in patterns.items():
        # Repeated groups can make matching exponential.
        if _RISKY_PATTERN.search(pattern):
            raise UnsupportedError(f"the pattern {pattern!r} in {field}", file=CONFIG)
        try:
            is_match = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as err:
            raise CorruptError(f"{field}: {pattern!r}: {err}", file=CONFIG) from err
        if is_match:
            number = value
            break
    if not isinstance(number, (int, float)) or number <= 0:
        raise CorruptError(f"{field} of {module} is {number!r}, not a positive number", file=CONFIG)
    return float(number)


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
