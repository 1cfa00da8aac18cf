"""Describe the model in a checkpoint: its family, its sizes and the number of its parameters.

The sizes come from Megatron's training arguments, or else from a ``config.json`` (that of the
language model, where it has several). What neither of them contains is None: nothing is guessed
from tensors, except that a gated MLP is told from its gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from core.engine.catalog.catalog import Catalog
from core.engine.catalog.tensor import Tensor
from core.engine.quantize.schemes import quantized_weights
from core.errors import CheckpointingException, UnsupportedError
from core.megatron.optimizer.form import role_of
from core.pickle.fields import find_size, text_or_none
from core.values import dataclass

if TYPE_CHECKING:
    from core.hf.family import Family

_IN_CONFIG: Mapping[str, tuple[str, ...]] = {
    "n_layers": ("num_hidden_layers", "num_layers", "n_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "n_groups": ("num_key_value_heads", "n_kv_heads"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "n_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "n_experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "expert_ffn_size": ("moe_intermediate_size",),
    "vocab_size": ("vocab_size",),
}
"""Field → its names in the configurations of transformers' model families."""
_IN_ARGS: Mapping[str, tuple[str, ...]] = {
    "n_layers": ("num_layers",),
    "hidden_size": ("hidden_size",),
    "n_heads": ("num_attention_heads",),
    "n_groups": ("num_query_groups",),
    "ffn_size": ("ffn_hidden_size",),
    "n_experts": ("num_experts",),
    "n_experts_per_token": ("moe_router_topk",),
    "expert_ffn_size": ("moe_ffn_hidden_size",),
    "vocab_size": ("vocab_size",),
    "padded_vocab_size": ("padded_vocab_size",),
}
"""Field → its names in Megatron's training arguments."""
_GATES = (".gate_proj.", ".gate_up_proj.")
_VOCAB = ("embedding.word_embeddings.", "output_layer.")
"""Beginnings of the names of Megatron's tensors that have a row for each token."""
_OPTAX = "opt_state"
"""Part of the keys of optax's states, which the groups of tensors count as the model's."""
_UNPACKED = {"int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
"""Dtypes of quantized weights with one element for each parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """The model in a checkpoint; None is unknown.

    Args:
        family: ``model_type`` of the ``config.json``.
        n_parameters: elements of the model, without the optimizer, padding of the vocabulary,
            scales of quantized weights, and second copies of tied weights.
        n_groups: number of query groups (key and value heads).
        ffn_size: inner channels of a dense MLP.
        is_swiglu: MLPs are SwiGLU.
        n_experts_per_token: experts that a token is routed to.
        expert_ffn_size: inner channels of an expert.
        vocab_size, padded_vocab_size: rows of the vocabulary, without and with padding.
        is_tied: the embedding is also the output layer.
    """

    family: str | None = None
    n_parameters: int | None = None
    n_layers: int | None = None
    hidden_size: int | None = None
    n_heads: int | None = None
    n_groups: int | None = None
    ffn_size: int | None = None
    is_swiglu: bool | None = None
    n_experts: int | None = None
    n_experts_per_token: int | None = None
    expert_ffn_size: int | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    is_tied: bool | None = None


def describe_model(
    view: Catalog,
    *,
    args: Mapping[str, object],
    config: Mapping[str, object] | None,
    unsharded: Catalog | None,
) -> ModelDescription:
    """Describe the model in a checkpoint.

    Args:
        view: the catalog to show.
        args: Megatron's training arguments; {} without any.
        config: parsed ``config.json``; None if there is none.
        unsharded: the global Megatron form of the model; None if there is none.
    """
    if args:
        vocab_size = None
        if unsharded is not None:
            from core.megatron.model.args import parse_facts

            # The number of tokens may differ from the argument (null tokenizers).
            with suppress(CheckpointingException):
                vocab_size = parse_facts(args).vocab_size
        sizes = _sizes(args, _IN_ARGS)
        sizes["vocab_size"] = vocab_size or sizes["vocab_size"]
        # Without grouped attention, the number of groups is only a default.
        if args.get("group_query_attention") is False:
            sizes["n_groups"] = sizes["n_heads"]
        untied = args.get("untie_embeddings_and_output_weights")
        return ModelDescription(
            n_parameters=_count_parameters(view, unsharded, None, vocab_size=vocab_size),
            is_swiglu=args.get("swiglu") is True,
            is_tied=not untied if isinstance(untied, bool) else None,
            **sizes,
        )
    if config is None:
        return ModelDescription(n_parameters=_count_parameters(view, unsharded, None))
    text = config.get("text_config")
    fields = {**config, **text} if isinstance(text, Mapping) else dict(config)
    family = config.get("model_type")
    table = _family_of(family)
    defaults: Mapping[str, object] = {} if table is None else table.defaults
    # Families with a table of names are untied by default, unless the table states otherwise.
    if table is None:
        is_gated = any(gate in key for key in view.tensors for gate in _GATES)
    else:
        is_gated = table.fixed_args.get("swiglu") is True
        defaults = {"tie_word_embeddings": False, **defaults}
    is_tied = fields.get("tie_word_embeddings", defaults.get("tie_word_embeddings"))
    is_tied = is_tied if isinstance(is_tied, bool) else None
    return ModelDescription(
        family=text_or_none(family),
        n_parameters=_count_parameters(view, unsharded, config, is_tied=is_tied is True),
        is_swiglu=is_gated and fields.get("hidden_act", "silu") == "silu",
        is_tied=is_tied,
        **_sizes({**defaults, **fields}, _IN_CONFIG),
    )


def _sizes(fields: Mapping[str, object], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return each field's first value that is a positive integer, or None."""
    return {field: find_size((fields,), aliases) for field, aliases in names.items()}


def _family_of(model_type: object) -> Family | None:
    """Return the family of a model type, if it has a table."""
    from core.hf.family import family_of

    try:
        return family_of(model_type)
    except UnsupportedError:
        return None


def _count_parameters(
    view: Catalog,
    unsharded: Catalog | None,
    config: Mapping[str, object] | None,
    *,
    vocab_size: int | None = None,
    is_tied: bool = False,
) -> int | None:
    """Return the number of parameters; None if ranks hold copies, or weights are packed.

    Args:
        vocab_size: rows of the vocabulary without padding; None to count all rows.
        is_tied: the output layer repeats the embedding, if both are stored.
    """
    # Megatron's global form has every parameter once, dequantized, except for padding.
    if unsharded is not None:
        return _sum_elements(unsharded.tensors, vocab_size)
    if view.is_rank_local:
        return None
    # Scales are not parameters, and several parameters may be packed into an element.
    weights = quantized_weights(view.tensors, config)
    if any(view.tensors[weight.key].dtype not in _UNPACKED for weight in weights):
        return None
    skipped = {key for weight in weights for key in (*weight.scales, *weight.others)}
    skipped |= _second_copies(view, is_tied=is_tied)
    return _sum_elements(
        {key: tensor for key, tensor in view.tensors.items() if key not in skipped}
    )


def _sum_elements(tensors: Mapping[str, Tensor], vocab_size: int | None = None) -> int | None:
    """Return the number of elements of the model's tensors; None if there is no model."""
    n_elements = 0
    for key, tensor in tensors.items():
        if role_of(key) != "model" or _OPTAX in key.split("."):
            continue
        n_rows = tensor.shape[0] if tensor.shape else 1
        if vocab_size is not None and n_rows > vocab_size and key.startswith(_VOCAB):
            n_elements += tensor.n_elements // n_rows * vocab_size
        else:
            n_elements += tensor.n_elements
    return n_elements or None


def _second_copies(view: Catalog, *, is_tied: bool) -> set[str]:
    """Return the matrices outside the layers that repeat another one (tied embeddings).

    Two names of one tensor in a ``torch.save`` file have the same bytes.
    """
    matrices = {
        key: tensor
        for key, tensor in view.tensors.items()
        if len(tensor.shape) > 1
        and role_of(key) == "model"
        and not any(part.isdigit() for part in key.split("."))
    }
    copies: set[str] = set()
    owners: dict[object, str] = {}
    for key, tensor in matrices.items():
        fragments = tensor.fragments()
        array = fragments[0].array if len(fragments) == 1 else None
        if array is not None:
            place = (array.extent, array.shape, array.dtype, fragments[0].at, tensor.shape)
            if owners.setdefault(place, key) != key:
                copies.add(key)
    # The output layer of a tied model may be stored as well.
    shapes = {
        tensor.shape for key, tensor in matrices.items() if not key.endswith("lm_head.weight")
    }
    if is_tied:
        copies |= {
            key
            for key, tensor in matrices.items()
            if key.endswith("lm_head.weight") and tensor.shape in shapes
        }
    return copies
