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
and value are one parameter, ``qkv_linear.wqkv``; the model saves three. The one has the rows of a
key-value head after those of the one before. With two query heads for each::

    q0 q1 k0 v0 | q2 q3 k1 v1 | …        each letter: the rows of one head

Rows are taken out and put into another order by fragments, which refer to the same arrays as
before.

Not supported, refused by name: other models, and states of another shape than their parameter. Not
carried, with a line in the summary: ``expert_bias``, which transformers' Qwen3-MoE does not have.

Source: torchtitan 0.3.0 and 0.2.0, ``state_dict_adapter.py`` of each model and
``models/common/attention.py`` (``FusedQKVLinear``); checkpoints of 0.3.0 with
what its adapters make of them, pinned in tests/golden/torchtitan.tar.xz.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from core.arrays.box import Box, Shape, c_strides
from core.engine.catalog.catalog import Catalog, StoredObject
from core.engine.catalog.dropped import Dropped, dropped_each
from core.engine.catalog.optimizer_keys import is_optimizer_key
from core.engine.catalog.stored import StoredArray, narrow_array
from core.engine.catalog.tensor import Fragment, Tensor, clip_fragment
from core.errors import CorruptError, UnsupportedError
from core.hf.values import count_of
from core.values import dataclass

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
_IN_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<name>.+)")
_STACK = re.compile(r"moe\.(?:routed_experts\.inner_experts|experts)\.w(?P<matrix>[123])(_E\w\w)?")
_BUFFER = re.compile(r"moe\.(expert_bias|tokens_per_expert)(_E)?")
_FUSED = "attention.qkv_linear."
_ATTENTION = re.compile(r"attention\.(qkv_linear\.)?(wq|wk|wqkv)\.weight")
_HINT = (
    "save the model with Hugging Face's names in torchtitan (checkpoint.last_save_in_hf or "
    "convert_to_hf.py), or keep torchtitan's names with --to safetensors, --to dcp or --to torch"
)
_IS_ROTATED_BY_NEIGHBOURS = {"llama": True, "qwen3": False, "qwen3_moe": False}
"""``model_type`` → whether torchtitan rotates neighbouring channels."""
_TRAINING_STATE = ("train_state.", "lr_scheduler.", "dataloader.")
_NOT_WEIGHTS = "torchtitan's training state"
_NOT_IN_MODEL = "the model in transformers has no such tensor"
_STATE = re.compile(r"(?P<head>optimizer\.state\.)(?P<name>.+)(?P<tail>\.[^.]+)")
_SETTING = re.compile(r"(?P<head>optimizer\.param_groups\.)(?P<name>.+)(?P<tail>\.[^.]+)")


@dataclass(frozen=True, slots=True)
class _TitanPart:
    """The part of a tensor of torchtitan that is a tensor of transformers.

    Args:
        shape: shape of the part, in elements.
        expert: its entry in a stack of experts; None if the tensor is no stack.
        rows: None if the tensor is no fused parameter; else the number of rows of one key-value
            head with its query heads, the first row of the part among these, and their number.
        n_heads: number of heads whose rows change their order; 0 if they keep it.
    """

    shape: Shape
    expert: int | None = None
    rows: tuple[int, int, int] | None = None
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
            f"ckpt does not convert torchtitan models with model_type {str(model_type)[:40]!r}; "
            f"supported: {', '.join(_IS_ROTATED_BY_NEIGHBOURS)}",
            hint=_HINT,
        )
    is_permuted = _IS_ROTATED_BY_NEIGHBOURS[str(model_type)]
    shapes = {key: tensor.shape for key, tensor in catalog.tensors.items()}
    tensors: dict[str, Tensor] = {}
    parts: dict[str, str] = {}
    dropped: list[Dropped] = []
    for key, tensor in catalog.tensors.items():
        match = _IN_LAYER.fullmatch(key)
        if match is not None and _BUFFER.fullmatch(match["name"]):
            dropped += dropped_each((key,), _NOT_IN_MODEL, catalog.tensors)
            continue
        if key.startswith(_TRAINING_STATE):
            dropped += dropped_each((key,), _NOT_WEIGHTS, catalog.tensors)
            continue
        # A weight, or a state of a parameter.
        head, name, tail, shape = "", key, "", tensor.shape
        if is_optimizer_key(key):
            state = None if has_no_optimizer else _STATE.fullmatch(key)
            if state is None:
                tensors[key] = tensor
                continue
            head, name, tail = state["head"], state["name"], state["tail"]
            shape = _shape_of_parameter(key, name, tensor, shapes)
        elif match is None and key not in _NAMES:
            tensors[key] = tensor
            continue
        for part_name, part in _parts_of(name, shape, config, is_permuted=is_permuted):
            new_key = f"{head}{part_name}{tail}"
            if new_key in parts:
                raise CorruptError(
                    f"the tensor would have the same name as {parts[new_key]}", key=key
                )
            tensors[new_key] = _part_of(catalog, key, part) if tensor.shape else tensor
            parts[new_key] = key

    # Settings of the optimizer are stored for each parameter.
    objects: dict[str, StoredObject] = {}
    for key, item in catalog.objects.items():
        setting = None if has_no_optimizer else _SETTING.fullmatch(key)
        shape_of = None if setting is None else _parameter_shape(setting["name"], shapes)
        if setting is None or shape_of is None:
            objects[key] = item
            continue
        for part_name, _ in _parts_of(setting["name"], shape_of, config, is_permuted=is_permuted):
            new_key = f"{setting['head']}{part_name}{setting['tail']}"
            objects[new_key] = replace(item, key=new_key)

    note = f"torchtitan's names were converted to those of {model_type}"
    if is_permuted:
        note += (
            ", and the rows of the query and key weights were reordered for its rotary embedding"
        )
    return replace(
        catalog,
        tensors=tensors,
        objects=objects,
        skeleton=None,
        dropped=(*catalog.dropped, *dropped),
    ).noted([note])


def _part_of(catalog: Catalog, key: str, part: _TitanPart) -> Tensor:
    """Return the tensor of transformers that a part of torchtitan's is."""
    if part.expert is not None:
        return catalog.entry(key, part.expert)
    stored = catalog.tensors[key]
    if part.rows is not None:
        stored = _take_rows(stored, part.rows, part.shape)
    if part.n_heads:
        stored = _halves_of_heads(stored, part.shape[0] // part.n_heads)
    return stored


def _shape_of_parameter(
    key: str, name: str, tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """Return the shape of the parameter that a state of the optimizer belongs to.

    Args:
        key, tensor: the state.
        name: name of the parameter.
        shapes: shapes of all tensors.

    Raises:
        UnsupportedError: the parameter is not in the model, or has another shape than the state.
    """
    shape = _parameter_shape(name, shapes)
    if shape is not None and tensor.shape in ((), shape):
        return shape
    text = "is not in the model" if shape is None else f"has shape {shape}"
    raise UnsupportedError(
        f"the optimizer state has shape {tensor.shape}, but its parameter {text}",
        key=key,
        hint="drop the optimizer with --no-optim, or keep torchtitan's names with --to dcp or --to "
        "torch",
    )


def _parts_of(
    name: str, shape: Shape, config: Mapping[str, object], *, is_permuted: bool
) -> Iterator[tuple[str, _TitanPart]]:
    """Yield the names of Hugging Face for a parameter, each with the part that has it.

    Args:
        name: name of the parameter, as in the model or as the optimizer trains it.
        shape: its shape, in elements.
        is_permuted: torchtitan rotates neighbouring channels of this model.

    Raises:
        UnsupportedError: the name is unknown.
        CorruptError: the shape does not fit the configuration.
    """
    match = _IN_LAYER.fullmatch(name)
    if match is None:
        if name not in _NAMES:
            raise _unknown(name)
        yield _NAMES[name], _TitanPart(shape)
        return
    prefix, own_name = f"model.layers.{match['layer']}.", match["name"]
    stack = _STACK.fullmatch(own_name)
    if stack is not None and len(shape) == 3:
        matrix = _EXPERT_MATRICES[stack["matrix"]]
        for expert in range(shape[0]):
            new_name = f"{prefix}mlp.experts.{expert}.{matrix}.weight"
            yield new_name, _TitanPart(shape[1:], expert)
        return

    # Query, key and value may be one parameter: one key-value head after the other.
    n_heads = n_groups = 0
    if _ATTENTION.fullmatch(own_name):
        n_heads = n_groups = count_of(config, "num_attention_heads")
        if config.get("num_key_value_heads") is not None:
            n_groups = count_of(config, "num_key_value_heads")
    if own_name == f"{_FUSED}wqkv.weight":
        head_dim = _rows_per_head(name, shape, n_heads + 2 * n_groups, is_permuted=is_permuted)
        if n_heads % n_groups:
            raise CorruptError(
                f"{n_heads} heads cannot be divided evenly into {n_groups} groups", key=name
            )
        n_rows, stride = n_heads // n_groups * head_dim, (n_heads // n_groups + 2) * head_dim
        for letter, first, n, n_of_letter in (
            ("q", 0, n_rows, n_heads),
            ("k", n_rows, head_dim, n_groups),
            ("v", n_rows + head_dim, head_dim, 0),
        ):
            part = _TitanPart(
                (n_groups * n, *shape[1:]),
                rows=(stride, first, n),
                n_heads=n_of_letter if is_permuted else 0,
            )
            yield f"{prefix}self_attn.{letter}_proj.weight", part
        return

    own_name = own_name.replace(_FUSED, "attention.", 1)
    if own_name not in _NAMES_IN_LAYER:
        raise _unknown(name)
    n_permuted = {"attention.wq.weight": n_heads, "attention.wk.weight": n_groups}.get(own_name, 0)
    if n_permuted and is_permuted:
        _rows_per_head(name, shape, n_permuted, is_permuted=True)
        yield prefix + _NAMES_IN_LAYER[own_name], _TitanPart(shape, n_heads=n_permuted)
    else:
        yield prefix + _NAMES_IN_LAYER[own_name], _TitanPart(shape)


def _parameter_shape(name: str, shapes: Mapping[str, Shape]) -> Shape | None:
    """Return the shape of a parameter that the optimizer trains; None if the model lacks it.

    Args:
        name: name of the parameter for the optimizer.
        shapes: the model's tensors, in which the fused parameter is three.
    """
    if not name.endswith(f"{_FUSED}wqkv.weight"):
        return shapes.get(name)
    start = name.removesuffix("wqkv.weight")
    parts = [shapes.get(f"{start}{part}.weight", ()) for part in ("wq", "wk", "wv")]
    if any(len(shape) != 2 or shape[1] != parts[0][1] for shape in parts):
        return None
    return (sum(shape[0] for shape in parts), parts[0][1])


def _rows_per_head(name: str, shape: Shape, n_heads: int, *, is_permuted: bool) -> int:
    """Return the number of rows of a head.

    Raises:
        CorruptError: the rows are not those of so many heads, or are odd and change their order.
    """
    n_rows = shape[0] if len(shape) == 2 else 0
    unit = n_heads * (2 if is_permuted else 1)
    if n_rows == 0 or n_rows % unit:
        even = " with an even number of rows" if is_permuted else ""
        raise CorruptError(
            f"the tensor has shape {shape}, but config.json implies {n_heads} heads{even}",
            key=name,
            hint="check that this is the right config.json for these weights",
        )
    return n_rows // n_heads


def _unknown(name: str) -> UnsupportedError:
    return UnsupportedError(
        "the tensor is not part of torchtitan's Llama 3 or Qwen3 models", key=name, hint=_HINT
    )


def _take_rows(fused: Tensor, rows: tuple[int, int, int], shape: Shape) -> Tensor:
    """Return some rows of a fused parameter, one below the other.

    Args:
        fused: the fused parameter.
        rows: as in ``_TitanPart``.
        shape: shape of the result.
    """
    stride, first, n_rows = rows

    def fragments() -> Iterator[Fragment]:
        for fragment in fused.fragments():
            box = fragment.box
            for group in range(box.offset[0] // stride, -(-box.end[0] // stride)):
                clipped = clip_fragment(
                    fragment,
                    start=group * stride + first,
                    extent=n_rows,
                    to=group * n_rows,
                )
                if clipped is not None:
                    yield clipped

    return Tensor(fused.dtype, shape, lambda: list(fragments()))


def _halves_of_heads(matrix: Tensor, head_dim: int) -> Tensor:
    """Return the rows of a matrix in the order of halves, a few fragments for each head.

    Args:
        matrix: torchtitan's matrix.
        head_dim: rows of a head, an even number.
    """
    return Tensor(
        matrix.dtype,
        matrix.shape,
        lambda: [
            moved for fragment in matrix.fragments() for moved in _in_halves(fragment, head_dim)
        ],
    )


def _in_halves(fragment: Fragment, head_dim: int) -> Iterator[Fragment]:
    """Yield the rows of a fragment in the order of halves."""
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
            yield _moved(fragment, start - first, to, 1)
            start += 1
            continue
        for half in (0, 1):
            to = head * head_dim + half * (head_dim // 2) + row // 2
            n_columns = pairs.shape[1] // 2
            half_box = Box((to, *box.offset[1:]), (n_pairs, *box.shape[1:]))
            at = ((start - first) // 2, half * n_columns + fragment.at[1])
            yield Fragment(half_box, pairs, at)
        start += 2 * n_pairs


def _moved(fragment: Fragment, n_skipped: int, to: int, n_rows: int) -> Fragment:
    """Return some rows of a fragment at another place of a tensor."""
    box, at = fragment.box, fragment.at
    # An array and its fragment are aligned at the last axis.
    row_axis = len(at) - box.rank
    if n_skipped and row_axis >= 0:
        at = (*at[:row_axis], at[row_axis] + n_skipped, *at[row_axis + 1 :])
    row_box = Box((to, *box.offset[1:]), (n_rows, *box.shape[1:]))
    return Fragment(row_box, fragment.array, at)


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
    return narrow_array(array, start, (n_pairs, 2 * n_columns))
