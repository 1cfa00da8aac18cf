"""The training arguments that a layout depends on.

``args`` is the inert ``argparse.Namespace`` of a Megatron checkpoint. ``facts_of`` reads what resharding needs from it;
``core.megatron.model.new_args`` writes it for new sizes. In torch_dist only ``padded_vocab_size`` changes: such a
checkpoint loads at any sizes, and Megatron asks it for random states exactly if its sizes equal those of the run; new
sizes without new random states would make a checkpoint that cannot be loaded.

Source: Megatron-LM d98e8a64 ``training/{arguments,checkpointing}.py``; arguments of the checkpoints in tests/golden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from core.errors import CorruptError, UnsupportedError
from core.megatron.model.facts import PREDICTION_STACK, Facts
from core.megatron.model.hybrid import Pattern, pattern_of
from core.megatron.model.pipeline_args import LAYOUT, pipeline_of
from core.megatron.model.topology import Topology
from core.megatron.rules.rules import GPT, ModelKind, ModelNames
from core.pickle.inert import Inert, as_mapping, attributes

_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")
_REFUSED = {
    "heterogeneous_layers_config_path": "heterogeneous layers",
    "heterogeneous_layers_config_encoded_json": "heterogeneous layers",
    "pipeline_model_parallel_split_rank": "encoder-decoder pipelines",
    "encoder_pipeline_model_parallel_size": "encoder-decoder pipelines",
}
"""Arguments that, if set, make a model that is not resharded."""


def fields_of(args: object, *, file: str | None = None) -> dict[str, object]:
    """The arguments by name.

    Raises:
        UnsupportedError: there are none, or they are not a namespace.
    """
    found = attributes(args)
    if found is None:
        mapping = as_mapping(args)
        found = None if mapping is None else {str(name): value for name, value in mapping.items()}
    if not found:
        raise UnsupportedError(
            "the checkpoint holds no training arguments (args), so its parallel layout is not known",
            file=file,
            hint="use a checkpoint that Megatron's training script saved",
        )
    return found


def topology_of(args: object, *, file: str | None = None) -> Topology:
    """The parallel sizes of the run that saved.

    Raises:
        UnsupportedError: no arguments, or no tensor parallel size in them.
        CorruptError: a size is not a positive integer.
    """
    fields = fields_of(args, file=file)
    tp = size_in(fields, "tensor_model_parallel_size", file=file)
    if tp is None:
        raise UnsupportedError(
            "the training arguments have no tensor_model_parallel_size",
            file=file,
            hint="checkpoints from before Megatron-LM 2.0 are not read",
        )
    ep = size_in(fields, "expert_model_parallel_size", file=file) or 1
    etp = size_in(fields, "expert_tensor_parallel_size", file=file)
    pp = size_in(fields, "pipeline_model_parallel_size", file=file) or 1
    return Topology(
        tp=tp,
        pp=pp,
        vpp=_vpp(fields, pp, file=file),
        ep=ep,
        etp=None if etp == tp or (ep == 1 and not fields.get("num_experts")) else etp,
    )


def _vpp(fields: Mapping[str, object], pp: int, *, file: str | None) -> int:
    """Model chunks a stage: what the arguments say, else what their pipeline layout has.

    Raises:
        CorruptError: they contradict each other.
    """
    vpp = size_in(fields, "virtual_pipeline_model_parallel_size", file=file)
    layout = pipeline_of(fields, file=file).layout
    if layout is None:
        return vpp or 1
    n_chunks, rest = divmod(len(layout), pp)
    if rest or n_chunks != (vpp or n_chunks):
        raise CorruptError(
            f"{LAYOUT} has {len(layout)} parts, but the arguments say PP {pp} and VPP {vpp or 1}", file=file
        )
    return n_chunks


def facts_of(args: object, *, names: ModelNames | None = None) -> Facts:
    """Everything that resharding needs to know.

    Args:
        names: what the tensors' names tell (``Rules.model_of``), which the arguments do not: GPT, BERT and T5 have the
            same ones. None for a GPT model.

    Raises:
        UnsupportedError: an argument is absent, or says that the model is of a kind that is not resharded.
        CorruptError: an argument makes no sense.
    """
    fields = fields_of(args)
    for name, what in _REFUSED.items():
        if fields.get(name) not in (None, False, 0, ""):
            raise UnsupportedError(
                f"{what} cannot be resharded (argument {name} is set)",
                hint="its torch_dist checkpoints can be converted to dcp and torch, with the layout they have",
            )
    topology = topology_of(args)
    kind = GPT if names is None else names.kind
    hybrid = pattern_of(fields)
    if hybrid is not None:
        fields = {**fields, "num_layers": len(hybrid.layers)}
    stacks = _stacks(fields, kind, {} if names is None else names.n_seen)
    n_layers = next(iter(stacks.values()))
    n_predictions = _n_predictions(fields, hybrid)
    if n_predictions:
        stacks[PREDICTION_STACK] = n_predictions
    n_heads = _needed(fields, "num_attention_heads")
    is_mla = bool(fields.get("multi_latent_attention"))
    has_groups = fields.get("group_query_attention") and not is_mla
    n_groups = size_in(fields, "num_query_groups") if has_groups else n_heads
    hidden_size = size_in(fields, "hidden_size")
    head_dim = size_in(fields, "kv_channels")
    if head_dim is None and hidden_size is not None:
        head_dim = hidden_size // n_heads
    n_experts = _n_experts(fields, topology)
    moe = _numbers(_moe_pattern(fields, n_layers)) if hybrid is None else hybrid.moe_layers
    linear = _linear_layers(fields, n_layers)
    shares = [value for name in _SHARES if isinstance(value := fields.get(name), (int, float)) and value > 0]
    return Facts(
        topology=topology,
        world_size=size_in(fields, "world_size"),
        cp=size_in(fields, "context_parallel_size") or 1,
        n_layers=n_layers,
        n_heads=n_heads,
        n_groups=n_groups or n_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        is_gated=any(bool(fields.get(name)) for name in _GATED),
        is_tied=not fields.get("untie_embeddings_and_output_weights"),
        is_local=fields.get("transformer_impl") == "local",
        is_mla=is_mla,
        vocab_size=_vocab_size(fields),
        divisible_by=(
            None if fields.get("pad_vocab_size") is False else size_in(fields, "make_vocab_size_divisible_by") or 128
        ),
        pipeline=pipeline_of(fields),
        n_experts=n_experts,
        moe_layers=frozenset() if n_experts is None else moe,
        is_stacked=fields.get("moe_layer_freq", 1) in (None, 1) and not linear and not shares and hybrid is None,
        expert_names=None if n_experts is None else _expert_names(fields),
        linear_layers=linear,
        is_allotted=bool(shares),
        is_prediction_renamed="mtp_hybrid_override_pattern" in fields or "hybrid_layer_pattern" in fields,
        pattern=hybrid,
        n_predictions=n_predictions,
        sizes={
            **{name: value for name, value in fields.items() if type(value) is int and value > 0},
            **{name: size for name in _SIZES if is_mla and (size := size_in(fields, name)) is not None},
        },
        kind=kind,
        stacks=stacks,
    )


_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _stacks(fields: Mapping[str, object], kind: ModelKind, n_seen: Mapping[str, int]) -> dict[str, int]:
    """Layers of every stack, that of the main one first.

    Which argument counts the decoder's layers depends on the version: Megatron-core's T5 has ``num_layers`` of them,
    whatever ``decoder_num_layers`` says. So where there are two stacks, a count that is there decides among the two.
    """
    n_layers = _needed(fields, "num_layers")
    if len(kind.stacks) == 1:
        return {kind.stacks[0]: n_layers}
    found = {}
    for stack in kind.stacks:
        own = size_in(fields, f"{'decoder' if 'decoder' in stack else 'encoder'}_num_layers")
        found[stack] = n_layers if own is None or n_seen.get(stack) == n_layers else own
    return found


def _n_experts(fields: Mapping[str, object], topology: Topology) -> int | None:
    """Experts of a layer, or None.

    Raises:
        UnsupportedError: there is expert parallelism, but no experts.
        CorruptError: the experts do not divide over the expert parallel ranks.
    """
    found = size_in(fields, "num_experts")
    if found is None and topology.ep > 1:
        raise UnsupportedError(f"the arguments say EP {topology.ep}, but not how many experts (num_experts)")
    if found is not None and found % topology.ep:
        raise CorruptError(f"{found} experts (num_experts) do not divide over EP {topology.ep}")
    return found


def _moe_pattern(fields: Mapping[str, object], n_layers: int) -> list[bool]:
    """Which layers have experts, where the model has any: every n-th, or those of a list.

    Raises:
        CorruptError: ``moe_layer_freq`` is neither a positive number nor a list of 0 and 1, one a layer.
    """
    found = _pattern(fields, "moe_layer_freq", n_layers)
    if found is not None:
        return found
    step = size_in(fields, "moe_layer_freq") or 1
    return [layer % step == 0 for layer in range(n_layers)]


def _linear_layers(fields: Mapping[str, object], n_layers: int) -> frozenset[int]:
    """Numbers of the layers with linear attention: all but every n-th, or those of a list.

    Raises:
        CorruptError: ``linear_attention_freq`` is neither a positive number nor a list of 0 and 1, one a layer.

    Source: megatron-core 0.16.1 ``models/gpt/experimental_attention_variant_module_specs.py``.
    """
    found = _pattern(fields, "linear_attention_freq", n_layers)
    if found is not None:
        return _numbers(found)
    step = size_in(fields, "linear_attention_freq")
    return frozenset() if step is None else _numbers([(layer + 1) % step != 0 for layer in range(n_layers)])


def _pattern(fields: Mapping[str, object], name: str, n_layers: int) -> list[bool] | None:
    """An argument that is a list of 0 and 1, one a layer; None where it is no list.

    Raises:
        CorruptError: it is another list.
    """
    found = fields.get(name)
    if not isinstance(found, list):
        return None
    if len(found) != n_layers or not all(item in (0, 1) for item in found):
        raise CorruptError(f"argument {name} is a list of {len(found)}, not of 0 or 1 for each of {n_layers} layers")
    return [bool(item) for item in found]


def _numbers(pattern: list[bool]) -> frozenset[int]:
    return frozenset(layer for layer, is_one in enumerate(pattern) if is_one)


def _n_predictions(fields: Mapping[str, object], hybrid: Pattern | None) -> int:
    """Layers of multi-token prediction; one where all predictions share it.

    Raises:
        CorruptError: the pattern and ``mtp_num_layers`` contradict each other.
    """
    said = fields.get("mtp_num_layers")
    found = None if said in (None, 0) else size_in(fields, "mtp_num_layers")
    drawn = 0 if hybrid is None else hybrid.n_predictions
    if found is not None and drawn not in (0, found):
        raise CorruptError(f"argument mtp_num_layers is {found}, but the pattern has {drawn} multi-token predictions")
    n = found or drawn
    return 1 if n and fields.get("mtp_use_repeated_layer") else n


_SHARES = ("hybrid_attention_ratio", "hybrid_mlp_ratio")


def _expert_names(fields: Mapping[str, object]) -> str:
    """How the rank files of the run name experts.

    Source: Megatron-LM d98e8a64 and megatron-core 0.12.1 ``core/models/gpt/moe_module_specs.py``.
    """
    if not fields.get("moe_grouped_gemm"):
        return "sequential"
    is_legacy = fields.get("transformer_impl") == "local" or fields.get("moe_use_legacy_grouped_gemm")
    return "grouped" if is_legacy else "te_grouped"


def _vocab_size(fields: Mapping[str, object]) -> int | None:
    """True rows of the vocabulary, or None.

    The null tokenizer of before ``null_tokenizer_eod_id`` has one token more than its size says: the end of a document.
    """
    found = size_in(fields, "vocab_size")
    is_null = str(fields.get("tokenizer_type") or "").startswith("Null")
    return found + 1 if found is not None and is_null and "null_tokenizer_eod_id" not in fields else found


def _needed(fields: Mapping[str, object], name: str) -> int:
    found = size_in(fields, name)
    if found is None:
        raise UnsupportedError(f"the training arguments do not say {name}")
    return found


def size_in(fields: Mapping[str, object], name: str, *, file: str | None = None) -> int | None:
    """A positive integer argument, or None if it is absent or None.

    Raises:
        CorruptError: it is something else.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CorruptError(f"argument {name} is {value!r}, not a positive integer", file=file)
    return value


LAYOUT_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_layers", "hidden_size", "num_attention_heads"),
    *("num_query_groups", "group_query_attention", "kv_channels", "ffn_hidden_size", "padded_vocab_size"),
    *("untie_embeddings_and_output_weights", "swiglu", "transformer_impl"),
    *("vocab_size", "make_vocab_size_divisible_by"),
    *("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_num_layers", "linear_attention_freq"),
    *("num_experts", "moe_layer_freq", "moe_grouped_gemm", "moe_ffn_hidden_size", "multi_latent_attention"),
)
"""Arguments on which the ranks of one checkpoint must agree."""


def disagreements(args: object, other: object, *, rank: str, other_rank: str) -> Iterator[CorruptError]:
    """What the layout arguments of two ranks differ in: names the argument and both values."""
    mine, theirs = fields_of(args), fields_of(other)
    for name in LAYOUT_FIELDS:
        if mine.get(name) != theirs.get(name):
            yield CorruptError(
                f"argument {name} is {mine.get(name)!r} here and {theirs.get(name)!r} in {other_rank}",
                rank=rank,
                hint="the rank directories are not of one checkpoint",
            )
    if pipeline_of(mine, file=rank) != pipeline_of(theirs, file=other_rank):
        yield CorruptError(
            f"the arguments distribute layers over pipeline stages otherwise than in {other_rank}",
            rank=rank,
            hint="the rank directories are not of one checkpoint",
        )


def with_vocab_size(args: object, n_rows: int) -> object:
    """A copy of the arguments that states the true vocabulary size, whether they did so before or not."""
    made = replaced(args, {})
    fields_of(made)["vocab_size"] = n_rows
    return made


def replaced(args: object, changes: Mapping[str, object], *, added: Mapping[str, object] | None = None) -> object:
    """A copy of a namespace in which those of the ``changes`` are made whose names it has, and ``added`` set."""
    fields = fields_of(args)
    made = {name: changes.get(name, value) for name, value in fields.items()} | dict(added or {})
    if not isinstance(args, Inert):
        return made
    copy = Inert(args.how, args.fn, args.args, kwargs=args.kwargs, state=made)
    copy.items, copy.entries = list(args.items), list(args.entries)
    return copy
