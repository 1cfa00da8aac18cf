"""torchtitan's names of a model, converted to Hugging Face's.

::

    layers.3.attention.qkv_linear.wq.weight       model.layers.3.self_attn.q_proj.weight
    layers.3.feed_forward.w1.weight               model.layers.3.mlp.gate_proj.weight
    layers.3.moe.routed_experts.inner_experts.w1_EFD, for all experts
                                                  model.layers.3.mlp.experts.E.gate_proj.weight

Llama of torchtitan rotates neighbouring channels of a head, that of transformers its halves, so the
rows of the query and key weights have another order. In each head of D rows::

    torchtitan    0  1  2  3  4  5 …
    transformers  0  2  4 … | 1  3  5 …     (row i of the first half: 2 i, of the second: 2 i + 1)

Qwen3 rotates halves in both. Which one a model is, and the number of its heads, are not in the
checkpoint: they are read from a ``config.json``.

Versions: torchtitan 0.3.0, and the names of 0.2.0 (``attention.wq``, ``moe.experts.w1``,
``output``), of Llama 3, Qwen3 and Qwen3-MoE.

The optimizer's states and settings follow their parameters. To the optimizer of 0.3.0, query, key
and value are one parameter, ``qkv_linear.wqkv`` (``core.hf.torchtitan.rows``); the model saves
three.

Not supported, refused by name: other models, and states of another shape than their parameter. Not
carried, with a line in the summary: ``expert_bias``, which transformers' Qwen3-MoE does not have.

Source: torchtitan 0.3.0 and 0.2.0, ``state_dict_adapter.py`` of each model and
``models/common/attention.py``; checkpoints of 0.3.0 with what its adapters make of them, pinned in
tests/golden/torchtitan.tar.xz.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from core.catalog.catalog import Catalog, StoredObject
from core.catalog.dropped import Dropped, dropped_each
from core.catalog.optimizer_keys import is_optimizer_key
from core.catalog.tensor import Tensor
from core.errors import CorruptError, UnsupportedError
from core.hf.torchtitan.names import (
    BUFFER,
    HINT,
    IN_LAYER,
    NAMES,
    TitanPart,
    parameter_shape,
    parts_of,
)
from core.hf.torchtitan.rows import halves_of_heads, take_rows

_IS_ROTATED_BY_NEIGHBOURS = {"llama": True, "qwen3": False, "qwen3_moe": False}
"""``model_type`` → whether torchtitan rotates neighbouring channels."""
_TRAINING_STATE = ("train_state.", "lr_scheduler.", "dataloader.")
_NOT_WEIGHTS = "torchtitan's training state"
_NOT_IN_MODEL = "transformers' model has no such tensor"
_STATE = re.compile(r"(?P<head>optimizer\.state\.)(?P<name>.+)(?P<tail>\.[^.]+)")
_SETTING = re.compile(r"(?P<head>optimizer\.param_groups\.)(?P<name>.+)(?P<tail>\.[^.]+)")


def is_torchtitan(catalog: Catalog) -> bool:
    """Return whether the tensors of a catalog have torchtitan's names."""
    has_embedding = "tok_embeddings.weight" in catalog.tensors
    return has_embedding and any(IN_LAYER.fullmatch(key) for key in catalog.tensors)


def from_torchtitan(
    catalog: Catalog, config: Mapping[str, object], *, has_no_optimizer: bool
) -> Catalog:
    """Give a model of torchtitan Hugging Face's names, and its rows the order of transformers.

    Args:
        catalog: the checkpoint; entries that are none of the model or its optimizer keep their
            names.
        config: the parsed ``config.json`` of the model.
        has_no_optimizer: the result will not have an optimizer, whose entries keep their names.

    Raises:
        UnsupportedError: the model is of another family, a tensor has an unknown name, or a state
            of the optimizer another shape than its parameter.
        CorruptError: the shapes do not fit the configuration.
    """
    model_type = config.get("model_type")
    if model_type not in _IS_ROTATED_BY_NEIGHBOURS:
        raise UnsupportedError(
            f"models of torchtitan with the model_type {str(model_type)[:40]!r} are not converted; "
            f"known: {', '.join(_IS_ROTATED_BY_NEIGHBOURS)}",
            hint=HINT,
        )
    is_permuted = _IS_ROTATED_BY_NEIGHBOURS[str(model_type)]
    shapes = {key: meta.shape for key, meta in catalog.tensors.items()}
    tensors: dict[str, Tensor] = {}
    parts: dict[str, str] = {}
    dropped: list[Dropped] = []
    for key, meta in catalog.tensors.items():
        match = IN_LAYER.fullmatch(key)
        if match is not None and BUFFER.fullmatch(match["name"]):
            dropped += dropped_each((key,), _NOT_IN_MODEL, catalog.tensors)
            continue
        if key.startswith(_TRAINING_STATE):
            dropped += dropped_each((key,), _NOT_WEIGHTS, catalog.tensors)
            continue
        # A weight, or a state of a parameter.
        head, name, tail, shape = "", key, "", meta.shape
        if is_optimizer_key(key):
            state = None if has_no_optimizer else _STATE.fullmatch(key)
            if state is None:
                tensors[key] = meta
                continue
            head, name, tail = state["head"], state["name"], state["tail"]
            shape = _shape_of_parameter(key, name, meta, shapes)
        elif match is None and key not in NAMES:
            tensors[key] = meta
            continue
        for part_name, part in parts_of(name, shape, config, is_permuted=is_permuted):
            new_key = f"{head}{part_name}{tail}"
            if new_key in parts:
                raise CorruptError(f"the tensor has the same place as {parts[new_key]}", key=key)
            tensors[new_key] = _part_of(catalog, key, part) if meta.shape else meta
            parts[new_key] = key

    # Settings of the optimizer are stored for each parameter.
    objects: dict[str, StoredObject] = {}
    for key, item in catalog.objects.items():
        setting = None if has_no_optimizer else _SETTING.fullmatch(key)
        shape_of = None if setting is None else parameter_shape(setting["name"], shapes)
        if setting is None or shape_of is None:
            objects[key] = item
            continue
        for part_name, _ in parts_of(setting["name"], shape_of, config, is_permuted=is_permuted):
            new_key = f"{setting['head']}{part_name}{setting['tail']}"
            objects[new_key] = replace(item, key=new_key)

    note = f"torchtitan's names were converted to those of {model_type}"
    if is_permuted:
        note += ", and the rows of the query and key weights to the order of its rotary embedding"
    return replace(
        catalog,
        tensors=tensors,
        objects=objects,
        skeleton=None,
        dropped=(*catalog.dropped, *dropped),
    ).noted([note])


def _part_of(catalog: Catalog, key: str, part: TitanPart) -> Tensor:
    """Return the tensor of transformers that a part of torchtitan's is."""
    if part.expert is not None:
        return catalog.entry(key, part.expert)
    stored = catalog.tensors[key]
    if part.rows is not None:
        stored = take_rows(stored, part.rows, part.shape)
    if part.n_heads:
        stored = halves_of_heads(stored, part.shape[0] // part.n_heads)
    return stored


def _shape_of_parameter(
    key: str, name: str, meta: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the shape of the parameter that a state of the optimizer belongs to.

    Args:
        key, meta: the state.
        name: name of the parameter.
        shapes: shapes of all tensors.

    Raises:
        UnsupportedError: the parameter is not in the model, or has another shape than the state.
    """
    shape = parameter_shape(name, shapes)
    if shape is not None and meta.shape in ((), shape):
        return shape
    text = "is not in the model" if shape is None else f"has shape {shape}"
    raise UnsupportedError(
        f"the optimizer state has shape {meta.shape}, but its parameter {text}",
        key=key,
        hint="leave the optimizer out with --no-optim, or keep the names: --to dcp or torch",
    )
