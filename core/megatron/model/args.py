"""The training arguments that a layout depends on.

``args`` is the inert ``argparse.Namespace`` of a Megatron checkpoint. ``parse_facts`` reads what
resharding needs from it; ``core.megatron.model.new_args`` writes it for new sizes. In torch_dist,
only ``padded_vocab_size`` changes: such a checkpoint loads at any sizes, and Megatron loads random
states from it exactly if its sizes equal those of the run. With new sizes, but no random states for
them, it could not be loaded.

Source: Megatron-LM d98e8a64 ``training/{arguments,checkpointing}.py``; arguments of the checkpoints
in tests/golden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from core.errors import CorruptError, UnsupportedError
from core.megatron.model.blocks import TEXT, WINDOWS, blocks_of
from core.megatron.model.facts import PREDICTION_STACK, ModelFacts
from core.megatron.model.hybrid import LayerPattern, parse_pattern
from core.megatron.model.pipeline_args import LAYOUT, is_v_shaped, pipeline_of
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import GPT, ModelKind, ModelNames
from core.pickle.equality import are_same
from core.pickle.fields import FieldReader, describe_value
from core.pickle.inert import Inert, as_mapping, attributes

ADAPTER_ARGUMENT = "peft_adapter_config"
"""Argument with the configuration of LoRA adapters, the text of peft's ``adapter_config.json``.

No version of Megatron reads it.
"""
SINCE_0_19 = "mamba_training_ssm_states_dtype"
"""An argument that Megatron's training script has since core 0.19."""
_GATED = ("swiglu", "quick_geglu", "gated_linear_unit", "glu_activation", "geglu", "reglu")
_NOOP_LAYERS, _TP_EXTENDS_EP = "noop_layers", "moe_tp_extend_ep"
"""Arguments of MindSpeed: layers that are skipped; experts that TP ranks do not cut."""
_REFUSED = {
    "pipeline_model_parallel_split_rank": "encoder-decoder pipelines",
    "encoder_pipeline_model_parallel_size": "encoder-decoder pipelines",
}
"""Argument → kind of model that cannot be resharded, if the argument is set."""


def fields_of(args: object, *, file: str | None = None) -> dict[str, object]:
    """Return the training arguments by name.

    Raises:
        UnsupportedError: the checkpoint has no arguments, or they are not a namespace.
    """
    fields = attributes(args)
    if fields is None:
        mapping = as_mapping(args)
        fields = None if mapping is None else {str(name): value for name, value in mapping.items()}
    if not fields:
        raise UnsupportedError(
            "the checkpoint has no training arguments (args), so its parallel layout is unknown",
            file=file,
            hint="use a checkpoint that Megatron's training script saved",
        )
    return fields


def topology_of(args: object, *, file: str | None = None) -> Topology:
    """Return the parallel sizes of the run that saved.

    Raises:
        UnsupportedError: the checkpoint has no arguments, or they have no tensor parallel size.
        CorruptError: a size is not a positive integer, or sizes and pipeline layout contradict each
            other.
    """
    fields = fields_of(args, file=file)
    tp = size_in(fields, "tensor_model_parallel_size", file=file)
    if tp is None:
        raise UnsupportedError(
            "the training arguments have no tensor_model_parallel_size",
            file=file,
            hint="if Megatron-LM before 2.0 wrote the checkpoint, load it with a newer version and "
            "save it again",
        )
    ep = size_in(fields, "expert_model_parallel_size", file=file) or 1
    etp = size_in(fields, "expert_tensor_parallel_size", file=file)
    pp = size_in(fields, "pipeline_model_parallel_size", file=file) or 1
    vpp = size_in(fields, "virtual_pipeline_model_parallel_size", file=file)

    # A pipeline layout has one part for each chunk, and may be the only argument that gives VPP.
    layout = pipeline_of(fields, file=file).layout
    if layout is not None:
        n_chunks, rest = divmod(len(layout), pp)
        if rest or n_chunks != (vpp or n_chunks):
            raise CorruptError(
                f"{LAYOUT} has {len(layout)} parts, but the arguments specify PP {pp} and "
                f"VPP {vpp or 1}",
                file=file,
            )
        vpp = n_chunks
    if pp > 1 and is_v_shaped(fields):
        vpp = vpp or 2  # a schedule with two chunks, which an argument need not say

    # An ETP that equals TP, or that no experts use, means the same as no ETP.
    if etp == tp or (ep == 1 and not fields.get("num_experts")):
        etp = None
    return Topology(tp=tp, pp=pp, vpp=vpp or 1, ep=ep, etp=etp)


def parse_facts(args: object, *, names: ModelNames | None = None) -> ModelFacts:
    """Parse everything that resharding needs to know from the training arguments.

    Args:
        names: facts from the tensors' names (``Rules.model_of``) that the arguments do not contain:
            GPT, BERT and T5 have the same arguments. None for a GPT model.

    Raises:
        UnsupportedError: an argument is missing, or the model is of a kind that cannot be
            resharded.
        CorruptError: an argument is invalid, or two arguments contradict each other.
    """
    fields = fields_of(args)
    for name, refused in _REFUSED.items():
        if fields.get(name) not in (None, False, 0, ""):
            raise UnsupportedError(
                f"{refused} cannot be resharded (argument {name} is set)",
                hint="convert a torch_dist checkpoint of the model to dcp or torch instead, which "
                "keeps the layout",
            )
    if fields.get(_TP_EXTENDS_EP) and fields.get("tensor_model_parallel_size") != 1:
        raise UnsupportedError(
            "rank files cannot be resharded if the TP ranks divide the experts like EP ranks "
            f"(MindSpeed's argument {_TP_EXTENDS_EP} is set)",
            hint="convert them with MindSpeed-LLM's convert_ckpt.py first",
        )
    topology = topology_of(args)
    kind, n_seen = (GPT, {}) if names is None else (names.kind, names.n_seen)

    # Number of layers in every stack; the pattern of a hybrid model wins over num_layers.
    hybrid = parse_pattern(fields)
    if hybrid is not None:
        fields = {**fields, "num_layers": len(hybrid.layers)}
    stacks = _stacks(fields, kind, n_seen)
    n_layers = next(iter(stacks.values()))
    n_predictions = _n_predictions(fields, hybrid)
    if n_predictions:
        stacks[PREDICTION_STACK] = n_predictions

    # Sizes of attention.
    n_heads = _required_size(fields, "num_attention_heads")
    is_mla = bool(fields.get("multi_latent_attention"))
    n_groups = (n_heads if is_mla else _n_groups(fields)) or n_heads
    hidden_size = size_in(fields, "hidden_size")
    head_dim = size_in(fields, "kv_channels")
    if head_dim is None and hidden_size is not None:
        head_dim = hidden_size // n_heads

    # Kinds of layers; torch_dist stacks layers only if all are alike.
    n_experts = size_in(fields, "num_experts")
    if n_experts is None and topology.ep > 1:
        raise UnsupportedError(
            f"the arguments specify EP {topology.ep}, but not the number of experts (num_experts)"
        )
    if n_experts is not None and n_experts % topology.ep:
        raise CorruptError(
            f"{n_experts} experts (num_experts) are not divisible by EP {topology.ep}"
        )
    moe_layers = read_moe_layers(fields, n_layers) if hybrid is None else hybrid.moe_layers
    linear = linear_layers(fields, n_layers)
    unindexed = find_layers_without_indexer(fields, n_layers)
    blocks = blocks_of(fields)
    if blocks is not None:
        groups = (block.n_groups for block in blocks if block.n_groups is not None)
        n_groups = min(groups, default=n_groups)
    is_allotted = any(
        isinstance(share, (int, float)) and share > 0 for share in map(fields.get, _SHARES)
    )
    is_alike = (
        fields.get("moe_layer_freq", 1) in (None, 1)
        and not linear
        and not unindexed
        and not is_allotted
        and hybrid is None
        and blocks is None
    )

    return ModelFacts(
        topology=topology,
        world_size=size_in(fields, "world_size"),
        cp=size_in(fields, "context_parallel_size") or 1,
        n_layers=n_layers,
        n_heads=n_heads,
        n_groups=n_groups,
        head_dim=head_dim,
        hidden_size=hidden_size,
        is_gated=any(bool(fields.get(name)) for name in _GATED),
        is_tied=not fields.get("untie_embeddings_and_output_weights"),
        is_local=fields.get("transformer_impl") == "local",
        is_mla=is_mla,
        vocab_size=_vocab_size(fields),
        divisible_by=_vocab_divisor(fields),
        pipeline=pipeline_of(fields),
        n_experts=n_experts,
        moe_layers=frozenset() if n_experts is None else moe_layers,
        is_stacked=is_alike,
        expert_names=None if n_experts is None else _expert_names(fields),
        linear_layers=linear,
        unindexed_layers=unindexed,
        is_allotted=is_allotted,
        is_prediction_renamed="mtp_hybrid_override_pattern" in fields
        or "hybrid_layer_pattern" in fields,
        pattern=hybrid,
        blocks=blocks,
        noop_layers=parse_noop_layers(fields),
        n_predictions=n_predictions,
        sizes=_named_sizes(fields, n_heads, head_dim, is_mla=is_mla),
        kind=kind,
        stacks=stacks,
    )


def is_multi_query(fields: Mapping[str, object]) -> bool:
    """Return whether heads share keys by the arguments of GLM's fork (``placement.qkv_order``)."""
    return bool(fields.get("multi_query_attention")) and "multi_query_group_num" in fields


def _n_groups(fields: Mapping[str, object]) -> int | None:
    """Return the number of heads of keys and values; None if each head has its own.

    Source: epfLLM/Megatron-LLM 0b9fc0e5 and bigcode-project/Megatron-LM 182df0c0
    ``megatron/model/transformer.py`` for the arguments of forks; ``configuration_chatglm.py``
    (THUDM/chatglm2-6b) for those of GLM's.
    """
    if fields.get("group_query_attention"):
        return size_in(fields, "num_query_groups")
    if fields.get("use_multiquery_attn"):
        return size_in(fields, "num_attention_heads_kv")
    if is_multi_query(fields):
        return size_in(fields, "multi_query_group_num")
    return 1 if fields.get("attention_head_type") == "multiquery" else None


def _named_sizes(
    fields: Mapping[str, object], n_heads: int, head_dim: int | None, *, is_mla: bool
) -> dict[str, int]:
    """Return the arguments that are positive integers, and others that rules may name."""
    sizes = {name: value for name, value in fields.items() if type(value) is int and value > 0}
    if head_dim is not None:
        sizes["kv_channels"] = head_dim
    value_dim = sizes.get("v_head_dim") if is_mla else head_dim
    # Layers with a window may have heads of their own.
    if value_dim is not None and fields.get(WINDOWS) is None:
        sizes["attention_inner"] = n_heads * value_dim
    if is_mla:
        checked = {name: size_in(fields, name) for name in _SIZES}
        sizes |= {name: size for name, size in checked.items() if size is not None}
    return sizes


_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _stacks(
    fields: Mapping[str, object], kind: ModelKind, n_seen: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of layers of every stack, the main one first.

    In a model of two stacks, the version decides which argument counts the decoder's layers:
    megatron-core's T5 has ``num_layers`` of them, whatever ``decoder_num_layers`` is. So
    ``num_layers`` counts if it equals the number of layers in the checkpoint.

    Args:
        n_seen: stack → highest layer number in the checkpoint, plus one.
    """
    n_layers = _required_size(fields, "num_layers")
    if len(kind.stacks) == 1:
        return {kind.stacks[0]: n_layers}
    counts = {}
    for stack in kind.stacks:
        count = size_in(fields, f"{'decoder' if 'decoder' in stack else 'encoder'}_num_layers")
        counts[stack] = n_layers if count is None or n_seen.get(stack) == n_layers else count
    return counts


def read_moe_layers(fields: Mapping[str, object], n_layers: int) -> frozenset[int]:
    """Return the numbers of the layers with experts: every n-th layer, or those of a list.

    Raises:
        CorruptError: ``moe_layer_freq`` is neither a positive number nor a list with 0 or 1 for
            each layer.
    """
    listed = _listed_layers(fields, "moe_layer_freq", n_layers)
    if listed is not None:
        return listed
    step = size_in(fields, "moe_layer_freq") or 1
    return frozenset(range(0, n_layers, step))


def linear_layers(fields: Mapping[str, object], n_layers: int) -> frozenset[int]:
    """Return the numbers of the layers with linear attention.

    These are all layers except every n-th one, or those of a list.

    Raises:
        CorruptError: ``linear_attention_freq`` is neither a positive number nor a list with 0 or 1
            for each layer.

    Source: megatron-core 0.16.1 ``models/gpt/experimental_attention_variant_module_specs.py``.
    """
    listed = _listed_layers(fields, "linear_attention_freq", n_layers)
    if listed is not None:
        return listed
    step = size_in(fields, "linear_attention_freq")
    if step is None:
        return frozenset()
    return frozenset(range(n_layers)) - frozenset(range(step - 1, n_layers, step))


def parse_noop_layers(fields: Mapping[str, object]) -> frozenset[int]:
    """Return the numbers of the layers that MindSpeed skips, from ``noop_layers``.

    The argument is a text such as ``"0,47"``, or the set that MindSpeed makes of it.

    Raises:
        CorruptError: it is neither.

    Source: MindSpeed ``features_manager/pipeline_parallel/noop_layers.py``.
    """
    value = fields.get(_NOOP_LAYERS)
    if value in (None, "", False):
        return frozenset()
    items = value.split(",") if isinstance(value, str) else value
    try:
        if not isinstance(items, Iterable):
            raise TypeError
        return frozenset(map(int, items))
    except (TypeError, ValueError):
        raise CorruptError(
            f"argument {_NOOP_LAYERS} is {describe_value(value)}, not a list of layer numbers"
        ) from None


def find_layers_without_indexer(fields: Mapping[str, object], n_layers: int) -> frozenset[int]:
    """Return the numbers of the layers of sparse attention without an indexer of their own.

    They use the choice of keys of an earlier layer.

    The first ``dsa_indexer_skip_topk_offset`` layers have an indexer of their own, at least one,
    and every ``dsa_indexer_topk_freq``-th layer from there.

    Raises:
        CorruptError: an argument is not a number.

    Source: Megatron-LM d98e8a64 ``transformer/experimental_attention_variant/dsa.py``.
    """
    every = size_in(fields, "dsa_indexer_topk_freq") or 1
    name = "dsa_indexer_skip_topk_offset"
    offset = FieldReader().read_int(fields.get(name) or 0, f"argument {name}")
    first = max(offset, 1) - 1
    return frozenset(layer for layer in range(first, n_layers) if (layer - first) % every)


def _listed_layers(fields: Mapping[str, object], name: str, n_layers: int) -> frozenset[int] | None:
    """Return the numbers of the layers with a 1 in a list; None if the argument is not a list.

    Raises:
        CorruptError: the list has other items, or another length.
    """
    items = fields.get(name)
    if not isinstance(items, list):
        return None
    flags = FieldReader().read_choices(items, f"argument {name}", (0, 1), n=n_layers)
    return frozenset(layer for layer, flag in enumerate(flags) if flag)


def _n_predictions(fields: Mapping[str, object], hybrid: LayerPattern | None) -> int:
    """Return the number of multi-token prediction layers; 1 if all predictions share a layer.

    Raises:
        CorruptError: the pattern and ``mtp_num_layers`` contradict each other.
    """
    value = fields.get("mtp_num_layers")
    n_set = None if value in (None, 0) else size_in(fields, "mtp_num_layers")
    in_pattern = 0 if hybrid is None else hybrid.n_predictions
    if n_set is not None and in_pattern not in (0, n_set):
        raise CorruptError(
            f"argument mtp_num_layers is {n_set}, but the pattern has {in_pattern} multi-token "
            "prediction layers"
        )
    n = n_set or in_pattern
    return 1 if n and fields.get("mtp_use_repeated_layer") else n


_SHARES = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
"""Arguments that give the share of a kind of layers, but not their numbers."""


def _expert_names(fields: Mapping[str, object]) -> str:
    """Return the naming of experts in the run's rank files (``core.megatron.rules.experts``).

    Source: Megatron-LM d98e8a64 and megatron-core 0.12.1 ``core/models/gpt/moe_module_specs.py``.
    """
    if not fields.get("moe_grouped_gemm"):
        return "sequential"
    is_legacy = fields.get("transformer_impl") == "local" or fields.get(
        "moe_use_legacy_grouped_gemm"
    )
    return "grouped" if is_legacy else "te_grouped"


def _vocab_size(fields: Mapping[str, object]) -> int | None:
    """Return the number of rows of the true vocabulary, or None if the arguments have none.

    Before ``null_tokenizer_eod_id``, the null tokenizer has one token more than its size: the end
    of a document.
    """
    size = size_in(fields, "vocab_size")
    is_null = str(fields.get("tokenizer_type") or "").startswith("Null")
    if size is not None and is_null and "null_tokenizer_eod_id" not in fields:
        return size + 1
    return size


def _vocab_divisor(fields: Mapping[str, object]) -> int | None:
    """Return the number that divides padded vocabulary sizes per TP rank; None without padding."""
    if fields.get("pad_vocab_size") is False:
        return None
    return size_in(fields, "make_vocab_size_divisible_by") or 128


def _required_size(fields: Mapping[str, object], name: str) -> int:
    """Return a positive integer argument that resharding requires.

    Raises:
        UnsupportedError: the argument is absent or None.
    """
    size = size_in(fields, name)
    if size is None:
        raise UnsupportedError(f"the training arguments have no {name}")
    return size


def size_in(fields: Mapping[str, object], name: str, *, file: str | None = None) -> int | None:
    """Return a positive integer argument; None if it is absent or None.

    Raises:
        CorruptError: the argument is not a positive integer.
    """
    value = fields.get(name)
    if value is None:
        return None
    return FieldReader(file).read_int(value, f"argument {name}", least=1)


LAYOUT_FIELDS = (
    # Parallel sizes.
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    # Sizes of the model.
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "group_query_attention",
    "kv_channels",
    "ffn_hidden_size",
    "padded_vocab_size",
    # Names and shapes of parameters.
    "untie_embeddings_and_output_weights",
    "swiglu",
    "transformer_impl",
    "vocab_size",
    "make_vocab_size_divisible_by",
    # Kinds of layers.
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "mtp_num_layers",
    TEXT,
    "linear_attention_freq",
    "dsa_indexer_topk_freq",
    "dsa_indexer_skip_topk_offset",
    "num_experts",
    "moe_layer_freq",
    "moe_grouped_gemm",
    "moe_ffn_hidden_size",
    "multi_latent_attention",
)
"""Arguments on which the ranks of one checkpoint must agree."""


def disagreements(
    args: object, other: object, *, rank: str, other_rank: str
) -> Iterator[CorruptError]:
    """Yield an error for every layout argument in which two ranks differ.

    Args:
        rank, other_rank: names of the rank directories, for messages.
    """
    fields, other_fields = fields_of(args), fields_of(other)
    for name in LAYOUT_FIELDS:
        value, other_value = fields.get(name), other_fields.get(name)
        if not are_same(value, other_value):
            yield CorruptError(
                f"argument {name} is {describe_value(value)}, but {describe_value(other_value)} in "
                f"{other_rank}",
                rank=rank,
                hint="check that all rank directories are from the same checkpoint",
            )
    if pipeline_of(fields, file=rank) != pipeline_of(other_fields, file=other_rank):
        yield CorruptError(
            "the arguments distribute layers over pipeline stages differently from the arguments "
            f"in {other_rank}",
            rank=rank,
            hint="check that all rank directories are from the same checkpoint",
        )


def with_vocab_size(args: object, n_rows: int) -> object:
    """Return a copy of the arguments with the true vocabulary size."""
    copy = replaced(args, {})
    fields_of(copy)["vocab_size"] = n_rows
    return copy


def replaced(
    args: object, changes: Mapping[str, object], *, added: Mapping[str, object] | None = None
) -> object:
    """Return a copy of the arguments with other values.

    Args:
        changes: new values of arguments, if the arguments exist.
        added: values of arguments to set in any case.
    """
    fields = fields_of(args)
    values = {name: changes.get(name, value) for name, value in fields.items()} | dict(added or {})
    if not isinstance(args, Inert):
        return values
    copy = Inert(args.how, args.fn, args.args, kwargs=args.kwargs, state=values)
    copy.items, copy.entries = list(args.items), list(args.entries)
    return copy
