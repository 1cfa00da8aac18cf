"""Derive the sizes, features and traits of a model that the tables ``hf/tables`` refer to.

All are read from Megatron's training arguments in both directions (``core.hf.config_json`` first
converts a ``config.json`` to arguments), so that the two directions agree.

=============  ====================================================================================
size           meaning
=============  ====================================================================================
one, heads     a single row; query heads
vocab, hidden  rows of the embedding without padding; channels of the residual stream
q, kv, head    channels of all query heads; of all key heads; of one head
qkv            channels of all query, key and value heads
positions      positions that have an embedding of their own
o              channels of all value heads, for latent attention
ffn            inner channels of a dense MLP
experts        number of experts in a layer
moe_ffn        inner channels of one expert
moe_ffn2       twice ``moe_ffn``
shared_ffn     inner channels of all shared experts together
q_lora, q_b    channels that queries are compressed to; channels of all query heads (both latent)
kv_lora, kv_a  channels that keys and values are compressed to; these and those of the rotated key
window_heads   query heads of a layer with a window, where it has others than the rest;
               ``window_q`` channels of these
kv_b           channels of all keys, without the rotated ones, and all values
index_heads    heads of the indexer of sparse attention; ``index_head`` channels of one of them;
               ``index_q`` of all
hidden2        twice ``hidden``
moe_in         channels that an expert sees: ``hidden``, or those that they are compressed to
mamba_heads    heads of a Mamba-2 layer
mamba_inner    channels of all these heads
mamba_conv     channels that its convolution sees: ``mamba_inner``, and B and C of all groups
mamba_in       rows of its input projection: z, x, B, C and dt
mamba_kernel   positions that its convolution sees, always 4
lin_k, lin_v   channels of all key heads, and of all value heads, of linear attention
lin_conv       channels of its convolution: queries, keys and values
lin_kernel     positions that the convolution covers
lin_head       channels of one of its value heads
lin_heads      number of its value heads; ``lin_groups`` of its key heads
=============  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.megatron.model.blocks import TEXT, Kind, LayerBlocks, blocks_of, window_layers_of
from core.pickle.fields import FieldReader, describe_value
from core.values import dataclass

FEATURES: Mapping[str, str] = {
    "tied": "untie_embeddings_and_output_weights",
    "linear_bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "qk_norm": "qk_layernorm",
    "latent": "multi_latent_attention",
    "sparse": "experimental_attention_variant",
    "moe": "num_experts",
    "dense_layers": "moe_layer_freq",
    "shared_expert": "moe_shared_expert_intermediate_size",
    "shared_gate": "moe_shared_expert_gate",
    "expert_bias": "moe_router_enable_expert_bias",
    "sigmoid": "moe_router_score_function",
    "pre_softmax": "moe_router_pre_softmax",
    "topk_scaling": "moe_router_topk_scaling_factor",
    "router_groups": "moe_router_num_groups",
    "moe_latent": "moe_latent_size",
    "mtp": "mtp_num_layers",
    "parallel_mamba": "falconh1_ratio",
    "mamba_norm": "rmsnorm",
    "hybrid": "hybrid_override_pattern",
    "hybrid_attention": "hybrid_override_pattern",
    "hybrid_mlp": "hybrid_override_pattern",
    "linear_attention": "linear_attention_freq",
    "output_gate": "attention_output_gate",
    "head_gate": "head_wise_attn_gate",
    "blocks": TEXT,
}
"""Feature that a family may have → the argument that enables it."""
_KINDS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Symbol of a layer in the pattern of a hybrid model → kind of the layer."""
_BLOCKS: Mapping[Kind, tuple[str, str]] = {
    "usual": ("full", "dense"),
    "linear": ("one_linear_attention", "one_linear_mlp"),
    "none": ("no_attention", "no_mlp"),
}
"""Kind of a block of a heterogeneous model → kind of the layer with such attention, such an MLP."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its training arguments describe it.

    Args:
        n_layers: number of decoder layers.
        n_mtp: number of multi-token prediction layers.
        n_experts: number of experts in a layer with experts.
        n_groups: number of query groups.
        dense: numbers of the layers without experts; None if no layer has experts.
        linear: numbers of the layers with linear attention; None if no layer has it.
        window: numbers of the layers with a window that have heads of their own, those of
            multi-token prediction counted on from the decoder's; None if no layer has them.
        unindexed: numbers of the decoder's layers of sparse attention that have no indexer and use
            the choice of an earlier layer's.
        sizes: extents by name, see the module's table.
        features: names of ``FEATURES`` that the model has; they distinguish families.
        traits: conditions under which tensors exist, except the kinds of layers (``kinds_of``).
        is_local: parameters have the names of the local implementation, not Transformer Engine's.
        kinds: kind of each layer of a hybrid model: mamba, attention, mlp or moe; None for other
            models.
        blocks: attention and MLP of each layer of a heterogeneous model; None for other models.
        prediction: the same for the layers of a multi-token prediction; None if a hybrid model has
            none.
    """

    n_layers: int
    n_mtp: int
    n_experts: int
    n_groups: int
    dense: frozenset[int] | None
    sizes: Mapping[str, int]
    features: frozenset[str]
    traits: frozenset[str]
    is_local: bool
    kinds: tuple[str, ...] | None = None
    prediction: tuple[str, ...] | None = None
    linear: frozenset[int] | None = None
    window: frozenset[int] | None = None
    unindexed: frozenset[int] = frozenset()
    blocks: tuple[LayerBlocks, ...] | None = None

    def sizes_of(self, layer: int | None) -> Mapping[str, int]:
        """Return the extents by name, with those of a heterogeneous model's layer."""
        if self.blocks is None or layer is None:
            return self.sizes
        block, head = self.blocks[layer], self.sizes["head"]
        groups = self.n_groups_of(layer)
        inner = {} if block.n_inner is None else {"ffn": block.n_inner}
        qkv = self.sizes["q"] + 2 * groups * head
        return {**self.sizes, "kv": groups * head, "qkv": qkv, **inner}

    def n_groups_of(self, layer: int | None) -> int:
        """Return the number of query groups of a layer."""
        if self.blocks is None or layer is None:
            return self.n_groups
        return self.blocks[layer].n_groups or self.n_groups

    def kinds_of(self, layer: int) -> frozenset[str]:
        """Return the kinds of a layer: ``dense`` or ``moe``, ``linear``, ``window`` or ``full``
        attention, ``indexer`` unless it uses an earlier layer's; or the one kind of a hybrid
        model's layer.
        """
        if self.kinds is not None:
            return frozenset((self.kinds[layer],))
        if self.blocks is not None:
            block = self.blocks[layer]
            return frozenset((_BLOCKS[block.attention][0], _BLOCKS[block.mlp][1]))
        mlp = "dense" if self.dense is None or layer in self.dense else "moe"
        if self.linear is not None and layer in self.linear:
            return frozenset((mlp, "linear"))
        has_window = self.window is not None and layer in self.window
        indexer = () if layer in self.unindexed else ("indexer",)
        return frozenset((mlp, "window" if has_window else "full", *indexer))

    def prediction_kinds_of(self, number: int, *, is_dense: bool) -> frozenset[str]:
        """Return the kinds of a layer of multi-token prediction: those of the decoder's last one.

        A layer whose window depends on its number is counted on from the decoder's. Indexers are
        counted anew: these layers have one of their own.

        Args:
            number: number of the layer among those of multi-token prediction.
            is_dense: it has no experts, even where the decoder's last layer has.
        """
        kinds = self.kinds_of(self.n_layers - 1) | {"indexer"}
        if is_dense:
            kinds = kinds - {"moe"} | {"dense"}
        if self.window is not None:
            has_window = self.n_layers + number in self.window
            kinds = kinds - {"window", "full"} | {"window" if has_window else "full"}
        return kinds


def model_of(fields: Mapping[str, object], *, n_rows: int, n_tensors: int) -> Model:
    """Return the model that training arguments describe.

    Args:
        fields: arguments by name.
        n_rows: rows of the vocabulary, without padding.
        n_tensors: number of tensors in the checkpoint; a model with more layers is refused.

    Raises:
        MissingShardError: there are fewer tensors than layers.
        UnsupportedError: an argument is missing.
        CorruptError: an argument is invalid.
    """
    from core.megatron.model.args import find_layers_without_indexer, linear_layers, read_moe_layers
    from core.megatron.model.hybrid import parse_pattern

    if fields.get("noop_layers"):
        raise UnsupportedError(
            f"layers {describe_value(fields['noop_layers'])} are empty (MindSpeed's argument "
            "noop_layers), but models in transformers have no empty layers",
            hint="keep Megatron's names with --to safetensors, --to dcp or --to torch",
        )

    # Count heads, layers and experts. The limit on layers bounds the work that a damaged argument
    # can cause: every layer has at least one tensor.
    heads, hidden = size_of(fields, "num_attention_heads"), size_of(fields, "hidden_size")
    groups = size_of(fields, "num_query_groups") if fields.get("group_query_attention") else heads
    if heads % groups:
        raise CorruptError(
            f"{heads} attention heads cannot be divided evenly into {groups} query groups"
        )
    head = size_of(fields, "kv_channels", default=max(hidden // heads, 1))
    n_layers = size_of(fields, "num_layers")
    if n_layers > n_tensors:
        raise MissingShardError(
            f"the model has {n_layers} layers, but the checkpoint has only {n_tensors} tensors"
        )
    n_experts = size_of(fields, "num_experts", default=0)
    # Megatron-Bridge writes 0 for a model without these layers.
    n_mtp = size_of(fields, "mtp_num_layers") if fields.get("mtp_num_layers") else 0
    pattern = parse_pattern(fields)
    kinds = None if pattern is None else kinds_of(pattern.layers)
    prediction = None
    if pattern is not None and (n_mtp := n_mtp or pattern.n_predictions):
        if not pattern.prediction:
            raise UnsupportedError(
                f"the kinds of the {n_mtp} multi-token prediction layers are unknown, because the "
                "argument mtp_hybrid_override_pattern is missing"
            )
        prediction = kinds_of(pattern.prediction)
        n_mtp = 1 if fields.get("mtp_use_repeated_layer") else n_mtp
    if kinds is not None:
        dense = dense_kinds(kinds)
        n_experts = 0 if dense is None else n_experts
    else:
        dense = (
            frozenset(range(n_layers)) - read_moe_layers(fields, n_layers) if n_experts else None
        )
    features = _features(
        fields,
        has_experts=n_experts > 0,
        has_dense_layers=kinds is None and bool(dense),
        has_mtp=n_mtp > 0,
    )

    # Derive the sizes of the layers that the model has.
    ffn = size_of(fields, "ffn_hidden_size", default=4 * hidden)
    sizes = {"one": 1, "vocab": n_rows, "hidden": hidden, "hidden2": 2 * hidden, "ffn": ffn}
    sizes |= {"heads": heads, "head": head, "q": heads * head, "kv": groups * head}
    sizes |= {
        "qkv": (heads + 2 * groups) * head,
        "positions": size_of(fields, "max_position_embeddings", default=1),
    }
    if "latent" in features:
        sizes |= _latent_sizes(fields, heads)
    if "sparse" in features:
        sizes |= indexer_sizes(
            heads=size_of(fields, "dsa_indexer_n_heads"),
            head_dim=size_of(fields, "dsa_indexer_head_dim"),
        )
    if n_experts:
        sizes |= {
            "experts": n_experts,
            "moe_ffn2": 2 * size_of(fields, "moe_ffn_hidden_size", default=ffn),
            "moe_ffn": size_of(fields, "moe_ffn_hidden_size", default=ffn),
            "moe_in": size_of(fields, "moe_latent_size", default=hidden),
        }
    if kinds is not None:
        features |= hybrid_features(kinds)
    if kinds is not None or "parallel_mamba" in features:
        sizes |= mamba_sizes(
            heads=size_of(fields, "mamba_num_heads"),
            head_dim=size_of(fields, "mamba_head_dim"),
            groups=size_of(fields, "mamba_num_groups"),
            state=size_of(fields, "mamba_state_dim"),
        )
    if "shared_expert" in features:
        sizes["shared_ffn"] = size_of(fields, "moe_shared_expert_intermediate_size")
    if "linear_attention" in features:
        sizes |= linear_sizes(fields)
    window = window_layers_of(fields) if "head_gate" in features else None
    if window is not None:
        if (window.n_groups, window.head_dim) != (groups, head):
            raise UnsupportedError(
                f"sliding-window layers have {window.n_groups} query groups of {window.head_dim} "
                f"channels, but the other layers have {groups} of {head}; only the number of heads "
                "may differ"
            )
        sizes |= {"window_heads": window.n_heads, "window_q": window.n_heads * head}

    # Derive the traits: the features, and the conditions that follow from them.
    traits = features - {"moe"} | {"tied" if "tied" in features else "untied"}
    if "linear_bias" in features:
        traits |= {"attention_bias", "mlp_bias"}
    if "latent" in features:
        traits |= {"q_lora" if "q_lora" in sizes else "no_q_lora"}
    return Model(
        n_layers=n_layers,
        n_mtp=n_mtp,
        n_experts=n_experts,
        n_groups=groups,
        dense=dense,
        sizes=sizes,
        features=features,
        traits=traits,
        is_local=fields.get("transformer_impl") == "local",
        kinds=kinds,
        prediction=prediction,
        linear=linear_layers(fields, n_layers) if "linear_attention" in features else None,
        window=None if window is None else window.layers,
        unindexed=find_layers_without_indexer(fields, n_layers)
        if "sparse" in features
        else frozenset(),
        blocks=blocks_of(fields),
    )


def kinds_of(pattern: str) -> tuple[str, ...]:
    """Return the kind of each layer of a hybrid model.

    Args:
        pattern: a symbol for each layer (``core.megatron.model.hybrid``).

    Raises:
        UnsupportedError: transformers has no such layers.
    """
    for symbol in pattern:
        if symbol not in _KINDS:
            raise UnsupportedError(
                f"layers of kind {symbol!r} in a hybrid model have no Hugging Face names",
                hint=f"kinds that have Hugging Face names: {' '.join(_KINDS)}",
            )
    return tuple(_KINDS[symbol] for symbol in pattern)


def dense_kinds(kinds: Sequence[str]) -> frozenset[int] | None:
    """Return the numbers of the layers without experts of a hybrid model; None if none has any."""
    dense = frozenset(number for number, kind in enumerate(kinds) if kind != "moe")
    return None if len(dense) == len(kinds) else dense


def hybrid_features(kinds: Sequence[str]) -> frozenset[str]:
    """Return the features of a hybrid model that follow from the kinds of its layers."""
    others = {"attention": "hybrid_attention", "mlp": "hybrid_mlp"}
    return frozenset({"hybrid", *(others[kind] for kind in others if kind in kinds)})


def mamba_sizes(*, heads: int, head_dim: int, groups: int, state: int) -> dict[str, int]:
    """Return the sizes of a Mamba-2 layer, see the module's table.

    Args:
        heads, head_dim: number of heads, and of channels of each.
        groups: number of groups of heads that share B and C.
        state: channels of B and of C of each group.
    """
    inner, conv = heads * head_dim, heads * head_dim + 2 * groups * state
    return {
        "mamba_heads": heads,
        "mamba_inner": inner,
        "mamba_conv": conv,
        "mamba_in": inner + conv + heads,
        "mamba_kernel": 4,
    }


def indexer_sizes(*, heads: int, head_dim: int) -> dict[str, int]:
    """Return the sizes of the indexer of sparse attention, see the module's table."""
    return {"index_heads": heads, "index_head": head_dim, "index_q": heads * head_dim}


def _features(
    fields: Mapping[str, object], *, has_experts: bool, has_dense_layers: bool, has_mtp: bool
) -> frozenset[str]:
    """Return the features of a model, names of ``FEATURES``."""
    conditions = {
        "tied": not fields.get("untie_embeddings_and_output_weights"),
        "linear_bias": fields.get("add_bias_linear", True),
        "qkv_bias": fields.get("add_qkv_bias"),
        "qk_norm": fields.get("qk_layernorm"),
        "latent": fields.get("multi_latent_attention"),
        "sparse": fields.get("experimental_attention_variant") == "dsa",
        "moe": has_experts,
        "dense_layers": has_dense_layers,
        "mtp": has_mtp,
        "linear_attention": fields.get("linear_attention_freq"),
        "output_gate": fields.get("attention_output_gate"),
        "head_gate": fields.get("head_wise_attn_gate"),
        "blocks": fields.get(TEXT),
        "parallel_mamba": fields.get("falconh1_ratio"),
        "mamba_norm": fields.get("falconh1_ratio") and fields.get("rmsnorm", True),
    }
    features = {name for name, condition in conditions.items() if condition}
    return frozenset(features | _moe_features(fields) if has_experts else features)


def _latent_sizes(fields: Mapping[str, object], heads: int) -> dict[str, int]:
    """Return the sizes of latent attention."""
    kv_lora, rotated = size_of(fields, "kv_lora_rank"), size_of(fields, "qk_pos_emb_head_dim")
    plain, value = size_of(fields, "qk_head_dim"), size_of(fields, "v_head_dim")
    sizes = {
        "o": heads * value,
        "q_b": heads * (plain + rotated),
        "kv_lora": kv_lora,
        "kv_a": kv_lora + rotated,
        "kv_b": heads * (plain + value),
    }
    if fields.get("q_lora_rank") is not None:
        sizes["q_lora"] = size_of(fields, "q_lora_rank")
    return sizes


def linear_sizes(fields: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes of linear attention.

    Args:
        fields: training arguments, or a ``config.json``, which has the same names for them.

    Raises:
        UnsupportedError: an argument is missing.
        CorruptError: an argument is invalid, or the heads do not divide.
    """
    groups, heads = (
        size_of(fields, "linear_num_key_heads"),
        size_of(fields, "linear_num_value_heads"),
    )
    if heads % groups:
        raise CorruptError(
            f"{heads} linear value heads cannot be divided evenly into {groups} key heads"
        )
    head = size_of(fields, "linear_value_head_dim")
    key, value = groups * size_of(fields, "linear_key_head_dim"), heads * head
    return {
        "lin_k": key,
        "lin_v": value,
        "lin_conv": 2 * key + value,
        "lin_kernel": size_of(fields, "linear_conv_kernel_dim"),
        "lin_head": head,
        "lin_heads": heads,
        "lin_groups": groups,
    }


def _moe_features(fields: Mapping[str, object]) -> set[str]:
    """Return the features of the experts and their router."""
    is_sigmoid = fields.get("moe_router_score_function") == "sigmoid"
    conditions = {
        "shared_expert": fields.get("moe_shared_expert_intermediate_size"),
        "shared_gate": fields.get("moe_shared_expert_gate"),
        "expert_bias": fields.get("moe_router_enable_expert_bias"),
        "sigmoid": is_sigmoid,
        "pre_softmax": not is_sigmoid and fields.get("moe_router_pre_softmax"),
        "topk_scaling": fields.get("moe_router_topk_scaling_factor") not in (None, 1, 1.0),
        "router_groups": fields.get("moe_router_num_groups") not in (None, 1),
        "moe_latent": fields.get("moe_latent_size"),
    }
    return {name for name, condition in conditions.items() if condition}


def size_of(fields: Mapping[str, object], name: str, *, default: int | None = None) -> int:
    """Return a positive integer argument.

    Raises:
        UnsupportedError: the argument is missing, and there is no ``default``.
        CorruptError: the argument is not a positive integer.
    """
    value = fields.get(name)
    if value is None:
        if default is None:
            raise UnsupportedError(f"the training argument {name} is missing")
        return default
    return FieldReader().read_int(value, f"argument {name}", least=1)
