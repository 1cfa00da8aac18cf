"""The conversions that are possible for a checkpoint, told from its metadata where that decides.

``core.verbs.inspect.capabilities`` plans every conversion, for which it imports every format. Two
kinds of checkpoints need no plan, as the rows of ``core.formats.registry`` say what is possible:

* a plain state dict: its names, element types and values are such that each format can store them;
* the weights of a dense model under Hugging Face's names, which are such a state dict. That they
  have a Megatron form is known, and all of its tensors are of kinds that every layout has.

What is not certain is planned.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from core.arrays.box import full_box
from core.arrays.coverage import is_tiled
from core.engine.catalog.catalog import Catalog
from core.engine.catalog.facets import DcpFacts, TorchFileFacts, WeightFileFacts, ZarrFacts
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.tensor import Tensor
from core.errors import CheckpointingException
from core.formats.registry import BUILT_IN, Stores, has_plug_ins
from core.opening.objects import with_objects_loaded
from core.opening.open import Checkpoint
from core.pickle.inert import ObjectLeaf, TensorLeaf, attributes
from core.pickle.noted import gc_paused
from core.values import dataclass

if TYPE_CHECKING:
    from core.pickle.uses import Use

MANY = 32
"""Of more tensors than this, representatives are looked at."""
_DIGITS = re.compile(r"\d+")

HF = "hf"
"""The value of ``--to`` for the safetensors format with Hugging Face's names."""
FSDP_DTENSOR = "fsdp_dtensor"
"""The value of ``--to`` for Megatron-FSDP's form of DCP."""
NEEDS_LAYOUT = "into a format with a parallel layout: --to megatron or --to torch_dist"
WITHOUT_OPTIM = "without the optimizer: --no-optim"
WITH_FLOAT32 = "with the weights cast: --dtype float32"

_MOST_TENSORS = 2_000
_MOST_VALUES = 20_000
_MOST_FRAGMENTS = 256
_NAME = re.compile(r"(?!__)[A-Za-z0-9_-]{1,80}(\.[A-Za-z0-9_-]{1,80}){0,15}")
"""A name that is a key, a path of a dict, and the name of a file, in every format."""
_MOST_NAME_BYTES = 200
_TAKEN = frozenset({
    "args", "buffer_names", "c", "checkpoint.pt", "checkpoint_parallel_dimensions",
    "ckpt-objects.pt", "common.pt", "dp_world_size", "frozen_param_fragments",
    "frozen_param_shapes", "metadata.json", "module", "mp_world_size", "optimizer",
    "optimizer_state.pt", "param_shapes", "shared_params", "universal_checkpoint_info", "value",
    "zarr.json",
})  # fmt: skip
"""Names that some format uses for another purpose."""
_DTYPES = frozenset({
    "bfloat16", "bool", "float16", "float32", "int16", "int32", "int64", "int8", "uint8",
})  # fmt: skip
"""Element types that every format has."""
_CAST = frozenset({"bfloat16", "float16"})
_FACETS = frozenset({DcpFacts, TorchFileFacts, WeightFileFacts, ZarrFacts})
"""Facets that no conversion of a plain state dict fails for."""
_MODEL_FILES = re.compile(
    r"(generation_)?config\.json|tokenizer[^/]*|(special_tokens_map|added_tokens|vocab)\.json"
    r"|merges\.txt|chat_template\.[a-z]+|(README|LICENSE|NOTICE)[^/]*"
)
"""Files beside the weights that each format copies or leaves out."""
_DENSE = re.compile(
    r"embedding\.word_embeddings\.weight|output_layer\.weight|decoder\.final_layernorm\.weight"
    r"|decoder\.layers\.\d+\.(self_attention\.[qk]_layernorm\.weight"
    r"|(self_attention\.linear_(qkv|proj)|mlp\.linear_fc[12])\.(weight|bias|layer_norm_weight))"
)
"""Names in Megatron's global form of the tensors of Llama, Mistral, Qwen and their like."""
_USUAL_ARGS = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}
_UNUSUAL_ARGS = (
    "num_experts", "mtp_num_layers", "multi_latent_attention", "hybrid_override_pattern",
    "heterogeneous_layers_config_encoded_json", "linear_attention_freq", "window_size",
)  # fmt: skip
"""Training arguments of models whose layers are not all alike, or not dense."""
_STATE = re.compile(r"optimizer\.state\.(?P<parameter>.+)\.(?P<state>[^.]+)")
_GROUPS = "optimizer.param_groups."
_MASTER, _STEP = "fp32_param", "step"
_STATES = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", _MASTER, _STEP})


@dataclass(frozen=True, slots=True)
class Capability:
    """An action that can or cannot be done.

    Args:
        action: ``convert`` or ``reshard``.
        is_possible: ckpt can perform the action.
        targets: format names, for ``convert``.
        why: the reason if it is not possible, or the condition if there is one.
    """

    action: str
    is_possible: bool
    targets: tuple[str, ...] = ()
    why: str | None = None


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Facts about the model in a checkpoint that decide what can be done.

    Args:
        layout_refusal: reason why there is no parallel layout to change; None if there is one.
        is_hf: the tensors have Hugging Face's names.
        has_optimizer: the checkpoint has optimizer states.
        has_scales: weights have scales of their own.
        is_undescribed: neither training arguments nor a configuration describe the model.
    """

    layout_refusal: str | None
    is_hf: bool
    has_optimizer: bool
    has_scales: bool
    is_undescribed: bool = False

    @property
    def has_layout(self) -> bool:
        """The tensor names are known, so the model may have a parallel layout."""
        return self.layout_refusal is None or self.is_hf


class _MastersCondition(NamedTuple):
    """The condition under which a checkpoint can be written as float32 weights with their states.

    Args:
        leaves_optim_out: the optimizer has to be left out.
        why: the options that are needed, for users; None if none is.
    """

    leaves_optim_out: bool
    why: str | None


def list_plain_capabilities(
    checkpoint: Checkpoint, model: ModelTraits
) -> tuple[Capability, ...] | None:
    """Return the possible and impossible conversions of a plain state dict, which need no plan.

    Formats under the same condition, or with the same reason against them, share an entry.

    Returns:
        None if only plans can tell: ``core.verbs.inspect.capabilities``.
    """
    # Plans refuse damaged objects and dangerous pickles, and say why.
    if not model.is_undescribed or model.is_hf or model.has_scales or has_plug_ins():
        return None
    try:
        with gc_paused():
            catalog = with_objects_loaded(checkpoint).catalog
            if not _is_plain(catalog) or not _are_known(checkpoint.uses):
                return None
    except CheckpointingException:
        return None
    if model.has_optimizer != any(map(is_optimizer_key, catalog.tensors)):
        return None
    masters = _condition_of_masters(catalog)
    if masters is None or (masters.leaves_optim_out and not model.has_optimizer):
        return None

    possible: dict[str | None, list[str]] = {}
    refused = []
    for row in BUILT_IN:
        name = row.names[0]
        if row.stores is None or name == checkpoint.format.name:
            continue
        if row.stores is Stores.LAYOUTS:
            refused.append(name)
            continue
        why = masters.why if row.stores is Stores.MASTERS else None
        possible.setdefault(why, []).append(name)
    # A format under a name that asks for Hugging Face's names as well.
    refused += [HF for row in BUILT_IN if HF in row.names]
    reason = model.layout_refusal
    return (
        *(Capability("convert", True, tuple(names), why) for why, names in possible.items()),
        Capability("convert", False, tuple(refused), reason),
        Capability("reshard", False, (), reason),
    )


def list_dense_capabilities(
    checkpoint: Checkpoint, model: ModelTraits, unsharded: Catalog
) -> tuple[Capability, ...] | None:
    """Return the possible conversions of the weights of a dense model, which need no plan.

    Args:
        unsharded: the model's global Megatron form.

    Returns:
        None if only plans can tell: ``core.verbs.inspect.capabilities``.
    """
    if not model.is_hf or model.layout_refusal is not None or checkpoint.format.has_layout:
        return None
    if model.has_optimizer or model.has_scales or has_plug_ins():
        return None
    if not _are_known(checkpoint.uses):
        return None
    arguments = attributes(unsharded.args) or {}
    if any(arguments.get(name) != value for name, value in _USUAL_ARGS.items()):
        return None
    if any(map(arguments.get, _UNUSUAL_ARGS)) or not all(map(_DENSE.fullmatch, unsharded.tensors)):
        return None
    catalog = checkpoint.catalog
    if catalog.objects or not all(map(_MODEL_FILES.fullmatch, catalog.files)):
        return None
    if not _is_plain(replace(catalog, files={})):
        return None
    masters = _condition_of_masters(catalog)
    if masters is None or masters.leaves_optim_out:
        return None

    possible: dict[str | None, list[str]] = {}
    for row in BUILT_IN:
        if row.stores is not None and row.names[0] != checkpoint.format.name:
            why = masters.why if row.stores is Stores.MASTERS else None
            possible.setdefault(why, []).append(row.names[0])
    possible.setdefault(None, []).append(FSDP_DTENSOR)
    return (
        *(Capability("convert", True, tuple(names), why) for why, names in possible.items()),
        Capability("reshard", True, (), NEEDS_LAYOUT),
    )


def _are_known(uses: Collection[Use]) -> bool:
    """Return whether pickles only make plain data."""
    if not uses:
        return True
    from core.pickle.names import judge

    return all(judge(use) == "known" for use in uses)


def _is_plain(catalog: Catalog) -> bool:
    """Return whether every format can store a catalog, whose objects are loaded, as it is."""
    is_small = 0 < len(catalog.tensors) <= _MOST_TENSORS and len(catalog.objects) <= _MOST_TENSORS
    if (
        not is_small
        or not _FACETS.issuperset(catalog.facets)
        or catalog.is_rank_local
        or catalog.common is not None
        or catalog.args is not None
        or catalog.optimizer is not None
    ):
        return False
    if catalog.refused or catalog.hidden or catalog.files:
        return False
    return (
        _has_plain_names([*catalog.tensors, *catalog.objects])
        and all(_has_plain_data(catalog, key) for key in list_representatives(catalog.tensors))
        and _are_plain(
            [
                *(item.value for item in catalog.objects.values()),
                catalog.skeleton,
                *catalog.attributes.values(),
                *(tensor.attributes for tensor in catalog.tensors.values()),
            ]
        )
        and (catalog.skeleton is None or type(catalog.skeleton) is dict)
    )


def _has_plain_names(keys: Collection[str]) -> bool:
    """Return whether keys can name files, and paths in nested dicts, side by side."""
    names = {*keys}
    if len(names) != len(keys) or len({name.lower() for name in names}) != len(names):
        return False
    for name in names:
        parts = name.split(".")
        if not _NAME.fullmatch(name) or len(name) > _MOST_NAME_BYTES or name in _TAKEN:
            return False
        # A dict cannot have an entry and, under the same name, a dict of further entries.
        if any(".".join(parts[:depth]) in names for depth in range(1, len(parts))):
            return False
    return True


def list_representatives(tensors: Mapping[str, Tensor]) -> Iterable[str]:
    """Return the keys of the first of tensors whose names differ in their numbers.

    Each represents those of its dtype and number of axes. Of a few tensors, each represents itself.
    """
    if len(tensors) <= MANY:
        return tensors
    first_of: dict[object, str] = {}
    for key, tensor in tensors.items():
        # An empty tensor does not represent one with data.
        kind = (_DIGITS.sub("0", key), tensor.dtype, len(tensor.shape), tensor.n_elements > 0)
        first_of.setdefault(kind, key)
    return first_of.values()


def _has_plain_data(catalog: Catalog, key: str) -> bool:
    """Return whether the arrays of a tensor hold each element, in the tensor's own type."""
    tensor, fragments = catalog.tensors[key], catalog.fragments(key)
    if tensor.dtype not in _DTYPES or not tensor.n_elements or len(fragments) > _MOST_FRAGMENTS:
        return False
    if any(
        fragment.array is None or fragment.array.dtype != tensor.dtype or fragment.box.is_empty
        for fragment in fragments
    ):
        return False
    boxes = list(dict.fromkeys(fragment.box for fragment in fragments))
    return is_tiled(full_box(tensor.shape), boxes)


def _are_plain(values: list[object]) -> bool:
    """Return whether values are numbers, text, and dicts and lists of them, none too large."""
    stack = values
    n_values = 0
    while stack:
        value = stack.pop()
        n_values += 1
        if n_values > _MOST_VALUES:
            return False
        if value is None or isinstance(value, (TensorLeaf, ObjectLeaf)):
            continue
        kind = type(value)
        if kind is dict and isinstance(value, dict):
            if not all(type(key) is str and _NAME.fullmatch(key) for key in value):
                return False
            stack.extend(value.values())
        elif kind in (list, tuple) and isinstance(value, (list, tuple)):
            stack.extend(value)
        elif kind is int and isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                return False
        elif kind is str and isinstance(value, str):
            if not value.isascii():
                return False
        elif kind not in (bool, float):
            return False
    return True


def _condition_of_masters(catalog: Catalog) -> _MastersCondition | None:
    """Return what a format of float32 weights and states by parameter needs; None if uncertain.

    ``core.formats.deepspeed.universal.write`` has the rules.
    """
    weights = {key: tensor for key, tensor in catalog.tensors.items() if not is_optimizer_key(key)}
    if not weights:
        return None
    dtype_of = {key: tensor.dtype for key, tensor in weights.items()}
    leaves_optim_out = False
    for key, tensor in catalog.tensors.items():
        if key in weights:
            continue
        match = _STATE.fullmatch(key)
        weight = None if match is None else weights.get(match["parameter"])
        if match is None or weight is None:
            leaves_optim_out = True
        elif match["state"] not in _STATES:
            return None
        elif match["state"] == _STEP:
            leaves_optim_out |= tensor.n_elements != 1
        else:
            leaves_optim_out |= tensor.shape != weight.shape
            if match["state"] == _MASTER:
                dtype_of[match["parameter"]] = tensor.dtype
    for key in catalog.objects:
        owner = key.removeprefix(_GROUPS).rpartition(".")[0]
        if key.startswith(_GROUPS) and owner and not (owner in weights or owner.isdigit()):
            leaves_optim_out = True
    if leaves_optim_out:
        dtype_of = {key: tensor.dtype for key, tensor in weights.items()}
    is_cast = not _CAST.isdisjoint(dtype_of.values())
    texts = [
        text
        for text, is_needed in ((WITHOUT_OPTIM, leaves_optim_out), (WITH_FLOAT32, is_cast))
        if is_needed
    ]
    return _MastersCondition(leaves_optim_out, "; ".join(texts) or None)
