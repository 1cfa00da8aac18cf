"""torchtitan's names of parameters, and the tensors of Hugging Face that each of them contains.

Source: torchtitan 0.3.0 and 0.2.0, ``state_dict_adapter.py`` of each model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from core.errors import CorruptError, UnsupportedError
from core.hf.torchtitan.rows import FusedRows
from core.hf.values import count_of
from core.values import dataclass

if TYPE_CHECKING:
    from core.arrays.box import Shape

NAMES = {
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
IN_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<name>.+)")
_STACK = re.compile(r"moe\.(?:routed_experts\.inner_experts|experts)\.w(?P<matrix>[123])(_E\w\w)?")
BUFFER = re.compile(r"moe\.(expert_bias|tokens_per_expert)(_E)?")
_FUSED = "attention.qkv_linear."
_ATTENTION = re.compile(r"attention\.(qkv_linear\.)?(wq|wk|wqkv)\.weight")
HINT = (
    "let torchtitan write Hugging Face's names (checkpoint.last_save_in_hf, or its "
    "convert_to_hf.py), or keep the names: --to safetensors, dcp or torch"
)


@dataclass(frozen=True, slots=True)
class TitanPart:
    """The part of a tensor of torchtitan that is a tensor of transformers.

    Args:
        shape: shape of the part, in elements.
        expert: its entry in a stack of experts; None if the tensor is no stack.
        rows: its rows in a fused parameter; None if the tensor is no such parameter.
        n_heads: number of heads whose rows change their order; 0 if they keep it.
    """

    shape: Shape
    expert: int | None = None
    rows: FusedRows | None = None
    n_heads: int = 0


def parts_of(
    name: str, shape: Shape, config: Mapping[str, object], *, is_permuted: bool
) -> Iterator[tuple[str, TitanPart]]:
    """Yield the names of Hugging Face for a parameter, each with the part that has it.

    Args:
        name: name of the parameter, as in the model or as the optimizer trains it.
        shape: its shape, in elements.
        is_permuted: torchtitan rotates neighbouring channels of this model.

    Raises:
        UnsupportedError: the name is unknown.
        CorruptError: the shape does not fit the configuration.
    """
    match = IN_LAYER.fullmatch(name)
    if match is None:
        if name not in NAMES:
            raise _unknown(name)
        yield NAMES[name], TitanPart(shape)
        return
    prefix, own_name = f"model.layers.{match['layer']}.", match["name"]
    stack = _STACK.fullmatch(own_name)
    if stack is not None and len(shape) == 3:
        matrix = _EXPERT_MATRICES[stack["matrix"]]
        for expert in range(shape[0]):
            new_name = f"{prefix}mlp.experts.{expert}.{matrix}.weight"
            yield new_name, TitanPart(shape[1:], expert)
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
            raise CorruptError(f"{n_heads} heads are not divided among {n_groups}", key=name)
        n_rows, stride = n_heads // n_groups * head_dim, (n_heads // n_groups + 2) * head_dim
        for letter, first, n, n_of_letter in (
            ("q", 0, n_rows, n_heads),
            ("k", n_rows, head_dim, n_groups),
            ("v", n_rows + head_dim, head_dim, 0),
        ):
            part = TitanPart(
                (n_groups * n, *shape[1:]),
                rows=FusedRows(stride, first, n),
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
        yield prefix + _NAMES_IN_LAYER[own_name], TitanPart(shape, n_heads=n_permuted)
    else:
        yield prefix + _NAMES_IN_LAYER[own_name], TitanPart(shape)


def parameter_shape(name: str, shapes: Mapping[str, Shape]) -> Shape | None:
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
            f"shape {shape}, but config.json implies {n_heads} heads{even} (elements)",
            key=name,
            hint="is this the configuration of these weights?",
        )
    return n_rows // n_heads


def _unknown(name: str) -> UnsupportedError:
    return UnsupportedError(
        "the tensor is none of torchtitan's Llama 3 and Qwen3", key=name, hint=HINT
    )
