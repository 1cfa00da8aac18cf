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

Not supported, refused by name: other models, and states of the optimizer, in which query, key and
value of 0.3.0 are one parameter. Not carried, with a line in the summary: ``expert_bias``, which
transformers' Qwen3-MoE does not have.

Source: torchtitan 0.3.0 and 0.2.0, ``state_dict_adapter.py`` of each model; checkpoints of 0.3.0
with what its adapters make of them, pinned in tests/golden/torchtitan.tar.xz.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from core.arrays.box import Box, c_strides
from core.catalog.catalog import Catalog, Fragment, TensorMeta
from core.catalog.stored import StoredArray, part_of
from core.changes.rename import is_optimizer_key
from core.errors import CorruptError, UnsupportedError
from core.hf.tensors.fuse import take_from_stack
from core.hf.values import count_of

_IS_ROTATED_BY_NEIGHBOURS = {"llama": True, "qwen3": False, "qwen3_moe": False}
"""``model_type`` → whether torchtitan rotates neighbouring channels."""
_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "output.weight": "lm_head.weight",
}
_NAMES_IN_LAYER = {
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "moe.router.gate.weight": "mlp.gate.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}
_EXPERT_MATRICES = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}
_TRAINING_STATE = ("train_state.", "lr_scheduler.", "dataloader.")
_NOT_WEIGHTS = "torchtitan's training state"
_NOT_IN_MODEL = "transformers' model has no such tensor"
_IN_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<name>.+)")
_STACK = re.compile(r"moe\.(?:routed_experts\.inner_experts|experts)\.w(?P<matrix>[123])(_E\w\w)?")
_BUFFER = re.compile(r"moe\.(expert_bias|tokens_per_expert)(_E)?")
_FUSED = "attention.qkv_linear."
_HINT = (
    "let torchtitan write Hugging Face's names (checkpoint.last_save_in_hf, or its "
    "convert_to_hf.py), or keep the names: --to safetensors, dcp or torch"
)


@dataclass(frozen=True, slots=True)
class _TitanPart:
    """The tensor of torchtitan that a tensor of transformers is made of.

    Args:
        key: its name.
        expert: its entry in a stack of experts; None if it is no stack.
        n_heads: number of heads whose rows change their order; 0 if they keep it.
    """

    key: str
    expert: int | None = None
    n_heads: int = 0


def is_torchtitan(catalog: Catalog) -> bool:
    """Return whether the tensors of a catalog have torchtitan's names."""
    has_embedding = "tok_embeddings.weight" in catalog.tensors
    return has_embedding and any(_IN_LAYER.fullmatch(key) for key in catalog.tensors)


def from_torchtitan(
    catalog: Catalog, config: Mapping[str, object], *, has_no_optimizer: bool
) -> Catalog:
    """Give a model of torchtitan Hugging Face's names, and its rows the order of transformers.

    Args:
        catalog: the checkpoint; states of an optimizer and other entries keep their names.
        config: the parsed ``config.json`` of the model.
        has_no_optimizer: the result will not have the states of the optimizer.

    Raises:
        UnsupportedError: the model is of another family, a tensor has an unknown name, or the
            states of the optimizer cannot go along.
        CorruptError: the shapes do not fit the configuration.
    """
    state = next(filter(is_optimizer_key, catalog.tensors), None)
    if state is not None and not has_no_optimizer:
        raise UnsupportedError(
            "torchtitan's optimizer cannot get Hugging Face's names: its query, key and value are "
            "one parameter",
            key=state,
            hint="leave it out with --no-optim, or keep torchtitan's names: --to dcp or torch",
        )
    model_type = config.get("model_type")
    if model_type not in _IS_ROTATED_BY_NEIGHBOURS:
        raise UnsupportedError(
            f"models of torchtitan with the model_type {str(model_type)[:40]!r} are not converted; "
            f"known: {', '.join(_IS_ROTATED_BY_NEIGHBOURS)}",
            hint=_HINT,
        )
    is_permuted = _IS_ROTATED_BY_NEIGHBOURS[str(model_type)]
    tensors: dict[str, TensorMeta] = {}
    parts: dict[str, _TitanPart] = {}
    dropped = []
    for key, meta in catalog.tensors.items():
        match = _IN_LAYER.fullmatch(key)
        if match is not None and _BUFFER.fullmatch(match["name"]):
            dropped.append(f"{key} ({_NOT_IN_MODEL})")
            continue
        if key.startswith(_TRAINING_STATE):
            dropped.append(f"{key} ({_NOT_WEIGHTS})")
            continue
        if match is None and (is_optimizer_key(key) or key not in _NAMES):
            tensors[key] = meta
            continue
        for name, part in _parts_of(key, match, meta, config, is_permuted=is_permuted):
            if name in parts:
                raise CorruptError(f"the tensor has the same place as {parts[name].key}", key=key)
            part_shape = meta.shape if part.expert is None else meta.shape[1:]
            tensors[name] = TensorMeta(name, meta.dtype, part_shape)
            parts[name] = part

    def fragments_of(key: str) -> Sequence[Fragment]:
        part = parts.get(key)
        if part is None:
            return catalog.fragments(key)
        fragments = catalog.fragments(part.key)
        if part.expert is not None:
            return list(take_from_stack(key, fragments, part.expert))
        if part.n_heads:
            n_rows = tensors[key].shape[0]
            return list(_halves_of_heads(key, fragments, n_rows // part.n_heads))
        return [replace(fragment, key=key) for fragment in fragments]

    note = f"torchtitan's names were converted to those of {model_type}"
    if is_permuted:
        note += ", and the rows of the query and key weights to the order of its rotary embedding"
    return replace(
        catalog,
        tensors=tensors,
        fragments_of=fragments_of,
        skeleton=None,
        dropped=(*catalog.dropped, *dropped),
    ).noted([note])


def _parts_of(
    key: str,
    match: re.Match[str] | None,
    meta: TensorMeta,
    config: Mapping[str, object],
    *,
    is_permuted: bool,
) -> Iterator[tuple[str, _TitanPart]]:
    """Yield the names of a tensor in Hugging Face's model, and what each is made of.

    Args:
        key, meta: the tensor.
        match: its name as that of a tensor in a layer; None if it is in none.
        is_permuted: torchtitan rotates neighbouring channels of this model.

    Raises:
        UnsupportedError: the name is unknown.
        CorruptError: the shape does not fit the configuration.
    """
    if match is None:
        yield _NAMES[key], _TitanPart(key)
        return
    prefix = f"model.layers.{match['layer']}."
    stack = _STACK.fullmatch(match["name"])
    if stack is not None and len(meta.shape) == 3:
        for expert in range(meta.shape[0]):
            matrix = _EXPERT_MATRICES[stack["matrix"]]
            yield f"{prefix}mlp.experts.{expert}.{matrix}.weight", _TitanPart(key, expert)
        return
    name = match["name"].replace(_FUSED, "attention.", 1)
    if name not in _NAMES_IN_LAYER:
        raise UnsupportedError(
            "the tensor is none of torchtitan's Llama 3 and Qwen3", key=key, hint=_HINT
        )
    n_heads = 0
    if is_permuted and name in ("attention.wq.weight", "attention.wk.weight"):
        n_heads = count_of(config, "num_attention_heads")
        if name == "attention.wk.weight" and config.get("num_key_value_heads") is not None:
            n_heads = count_of(config, "num_key_value_heads")
        n_rows = meta.shape[0] if len(meta.shape) == 2 else 0
        if n_rows == 0 or n_rows % (2 * n_heads):
            raise CorruptError(
                f"shape {meta.shape}, but config.json implies {n_heads} heads with an even number "
                "of rows (elements)",
                key=key,
                hint="is this the configuration of these weights?",
            )
    yield f"{prefix}{_NAMES_IN_LAYER[name]}", _TitanPart(key, n_heads=n_heads)


def _halves_of_heads(key: str, fragments: Sequence[Fragment], head_dim: int) -> Iterator[Fragment]:
    """Yield the rows of a matrix in the order of halves, a few fragments for each head.

    Args:
        key: name of the result.
        fragments: the fragments of torchtitan's matrix.
        head_dim: rows of a head, an even number.
    """
    for fragment in fragments:
        box = fragment.box
        first, stop = box.offset[0], box.end[0]
        pairs = _in_pairs(fragment, skipped=first % 2)
        start = first
        while start < stop:
            # Complete pairs of rows of one head; a single row where a fragment cuts a pair.
            head, row = divmod(start, head_dim)
            n_pairs = (min(stop, (head + 1) * head_dim) - start) // 2
            if pairs is None or row % 2 or n_pairs == 0:
                to = head * head_dim + row % 2 * (head_dim // 2) + row // 2
                yield _moved(fragment, key, start - first, to, 1)
                start += 1
                continue
            for half in (0, 1):
                to = head * head_dim + half * (head_dim // 2) + row // 2
                n_columns = pairs.shape[1] // 2
                half_box = Box((to, *box.offset[1:]), (n_pairs, *box.shape[1:]))
                at = ((start - first) // 2, half * n_columns + fragment.at[1])
                yield Fragment(key, half_box, pairs, at)
            start += 2 * n_pairs


def _moved(fragment: Fragment, key: str, n_skipped: int, to: int, n_rows: int) -> Fragment:
    """Return some rows of a fragment at another place of a tensor."""
    box, at = fragment.box, fragment.at
    # An array and its fragment are aligned at the last axis.
    row_axis = len(at) - box.rank
    if n_skipped and row_axis >= 0:
        at = (*at[:row_axis], at[row_axis] + n_skipped, *at[row_axis + 1 :])
    row_box = Box((to, *box.offset[1:]), (n_rows, *box.shape[1:]))
    return Fragment(key, row_box, fragment.array, at)


def _in_pairs(fragment: Fragment, *, skipped: int) -> StoredArray | None:
    """Return the array of a fragment with two rows of it side by side in each row.

    Args:
        fragment: a part of a matrix.
        skipped: rows of the fragment before the first pair.

    Returns:
        The array, whose first pair is that of the fragment; None if the array is not a dense
        matrix, or there is no pair.
    """
    array = fragment.array
    if array is None or len(array.shape) != 2 or len(fragment.box.shape) != 2:
        return None
    extent = array.extent
    is_dense = extent.strides in (None, c_strides(array.shape))
    n_pairs = (fragment.box.shape[0] - skipped) // 2
    if extent.encoding is not None or extent.axes is not None or not is_dense or n_pairs == 0:
        return None
    n_columns = array.shape[1]
    start = (fragment.at[0] + skipped) * n_columns
    return part_of(array, start, (n_pairs, 2 * n_columns))
