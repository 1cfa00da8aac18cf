"""LoRA adapters as peft writes them.

::

    adapter/
    ├── adapter_config.json          r, lora_alpha, use_rslora, rank_pattern, modules_to_save …
    └── adapter_model.safetensors    (or .bin)
          base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   (r, in)
          base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   (out, r)
          base_model.model.model.embed_tokens.lora_embedding_A, …_B        (r, rows), (width, r)
          base_model.model.score.weight                                    of modules_to_save
          base_model.model.….q_proj.base_layer.bias                        bias = "all", "lora_only"
          base_model.model.model.embed_tokens.weight                       of a resized vocabulary

``scaling`` is alpha / r, or alpha / √r with ``use_rslora``; ``rank_pattern`` and ``alpha_pattern``
give modules other numbers. Tensors of ``modules_to_save``, biases and saved embeddings replace
those of the base.

State dicts that peft's functions did not write have the name of the adapter behind the matrices and
``modules_to_save`` (``lora_A.default.weight``), and peft's files of a resized vocabulary have
``modules_to_save`` twice, and ``original_module``, which is the base's.

Versions: what peft 0.4 to 0.21 write for plain LoRA.

Not supported, refused by name: DoRA and other variants, adapters of other kinds than LoRA,
initialisations that change the base (PiSSA, OLoRA, CorDA, LoftQ …), convolutions, stacked expert
parameters (``target_parameters``), trained tokens, biases of ``lora_B``.

Source: peft 0.21.2 ``tuners/lora/{config,layer,model}.py``, ``utils/{other,save_and_load}.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TypeAlias

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.dropped import ADAPTER_CONFIG
from core.errors import CorruptError, UnsupportedError, list_some
from core.files.json_object import parse_json_object, read_small_file
from core.files.store import ReadStore
from core.pickle.fields import FieldReader
from core.values import dataclass

_MAX_CONFIG_BYTES = 16 << 20
_FIELDS = FieldReader(ADAPTER_CONFIG)
PREFIX = "base_model.model."
"""What peft puts before the names of the base model."""
_MATRIX = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<name>[AB])"
    r"(\.(?P<adapter>(?!weight$|bias$)[^.]+))?(\.weight)?"
)
_SAVED = re.compile(
    r"(?P<module>.+)\.modules_to_save\.((?P<adapter>(?!weight$|bias$)[^.]+)\.)?(?P<rest>.+)"
)
_PLAIN_FIELDS = frozenset(
    """
    alpha_pattern auto_mapping base_model_name_or_path bias eva_config
    ensure_weight_tying exclude_modules fan_in_fan_out inference_mode
    init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout
    megatron_core modules_to_save peft_type peft_version qalora_group_size r
    rank_pattern revision runtime_config target_modules task_type use_rslora
    """.split()
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
        rank: the extent between the matrices.
        scaling: factor of the product.
    """

    a: str
    b: str
    is_embedding: bool
    rank: int
    scaling: float


def is_peft(catalog: Catalog, store: ReadStore) -> bool:
    """Return whether a checkpoint is an adapter that peft wrote."""
    return store.exists(ADAPTER_CONFIG) and any(
        ".lora_" in key or key.startswith(PREFIX) for key in catalog.tensors
    )


def read_config_text(store: ReadStore) -> bytes:
    """Read the content of ``adapter_config.json``.

    Raises:
        MissingShardError, StorageError: the file cannot be read.
        CorruptError: the file is too large.
    """
    return read_small_file(store, ADAPTER_CONFIG, max_bytes=_MAX_CONFIG_BYTES)


def parse_config(text: bytes) -> dict[str, object]:
    """Parse the content of ``adapter_config.json``.

    Raises:
        CorruptError: it is not a JSON object.
    """
    return parse_json_object(text, file=ADAPTER_CONFIG)


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
            file=ADAPTER_CONFIG,
            hint="merge it with peft: PeftModel.merge_and_unload()",
        )
    variants = [name for name, value in config.items() if value and name not in _PLAIN_FIELDS]
    if variants:
        raise UnsupportedError(
            f"the adapter is not plain LoRA, because it uses {', '.join(sorted(variants))}",
            file=ADAPTER_CONFIG,
            hint="merge it with peft: PeftModel.merge_and_unload()",
        )
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_INITS:
        raise UnsupportedError(
            f"init_lora_weights {start!r} changed the base model before training, so the adapter "
            "does not fit the stored base model",
            file=ADAPTER_CONFIG,
            hint="save the adapter with path_initial_model_for_weight_conversion, or merge it "
            "with peft",
        )
    for name in ("r", "lora_alpha"):
        _FIELDS.read_number(config.get(name), name)


def sorted_tensors(
    catalog: Catalog, config: Config
) -> tuple[dict[str, Adaptation], dict[str, str]]:
    """Sort an adapter's tensors.

    Returns:
        The adaptations by the name of the weight, and the keys of tensors that replace one of the
        base, by its name.

    Raises:
        UnsupportedError: a tensor belongs to a variant of LoRA, or there are several adapters.
        CorruptError: one of two matrices is missing, or the ranks contradict each other.
    """
    matrices: dict[str, dict[str, str]] = {}
    embeddings: set[str] = set()
    replacements: dict[str, str] = {}
    trained: dict[str, str] = {}
    adapters: dict[str, str] = {}
    for key in catalog.tensors:
        name = key.removeprefix(PREFIX)
        if ".original_module." in name:
            continue
        match = _MATRIX.fullmatch(name)
        saved = _SAVED.fullmatch(name)
        for each in (match, saved):
            if each is not None and each["adapter"]:
                adapters.setdefault(each["adapter"], key)
        if match is not None:
            matrices.setdefault(match["module"], {})[match["name"]] = key
            if match["embedding"]:
                embeddings.add(match["module"])
        elif saved is not None:
            trained[f"{saved['module']}.{saved['rest']}"] = key
        elif ".lora_" in name:
            raise UnsupportedError(
                "the tensor belongs to a LoRA variant that ckpt does not convert",
                key=key,
                hint="merge it with peft: PeftModel.merge_and_unload()",
            )
        else:
            replacements[name.replace(".base_layer.", ".")] = key
    # Where peft wrote a module twice, both are the trained one.
    replacements = {**trained, **replacements}
    if len(adapters) > 1:
        raise UnsupportedError(
            f"ckpt can convert only one adapter, but the checkpoint has {len(adapters)}: "
            f"{list_some(adapters)}",
            key=list(adapters.values())[1],
            hint="save a single adapter: PeftModel.save_pretrained(DIR, selected_adapters=[NAME])",
        )

    adaptations: dict[str, Adaptation] = {}
    for module, keys in matrices.items():
        if keys.keys() != {"A", "B"}:
            raise CorruptError(
                "one of the two LoRA matrices is missing", key=next(iter(keys.values()))
            )
        key_a, key_b = keys["A"], keys["B"]
        a, b = catalog.tensors[key_a], catalog.tensors[key_b]
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise UnsupportedError(
                f"LoRA on a convolution is not supported (the matrices have shapes {a.shape} and "
                f"{b.shape})",
                key=key_a,
                hint="merge it with peft: PeftModel.merge_and_unload()",
            )
        rank = _number_of(config, "rank_pattern", module, config["r"])
        if not a.shape[0] == b.shape[1] == rank:
            raise CorruptError(
                f"the LoRA matrices have shapes {a.shape} and {b.shape}, but {ADAPTER_CONFIG} "
                f"specifies rank {rank:g}",
                key=key_a,
            )
        alpha = _number_of(config, "alpha_pattern", module, config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        adaptations[f"{module}.weight"] = Adaptation(
            key_a, key_b, module in embeddings, int(rank), scaling
        )
    if not adaptations and not replacements:
        raise CorruptError("the adapter has no tensors", file=ADAPTER_CONFIG)
    return adaptations, replacements


def _number_of(config: Config, field: str, module: str, default: object) -> float:
    """Return the rank or alpha of a module: that of the first pattern that matches its name.

    Raises:
        UnsupportedError: matching a pattern might take forever.
        CorruptError: the patterns are malformed.
    """
    patterns = _FIELDS.read_names(config.get(field) or {}, field)
    number = default
    for pattern, value in patterns.items():
        # Repeated groups can make matching exponential.
        if _RISKY_PATTERN.search(pattern):
            raise UnsupportedError(
                f"the pattern {pattern!r} in {field} has a repeated group, which can take forever "
                "to match",
                file=ADAPTER_CONFIG,
            )
        try:
            is_match = re.match(rf"(.*\.)?({pattern})$", module) is not None
        except re.error as err:
            raise CorruptError(
                f"the pattern {pattern!r} in {field} is not a valid regular expression: {err}",
                file=ADAPTER_CONFIG,
            ) from err
        if is_match:
            number = value
            break
    if not isinstance(number, (int, float)) or number <= 0:
        raise CorruptError(
            f"{field} for {module} is {number!r}, not a positive number", file=ADAPTER_CONFIG
        )
    return float(number)
