"""The training arguments that a layout depends on.

``args`` is the inert ``argparse.Namespace`` of a Megatron checkpoint. ``facts_of`` reads what resharding needs from it;
``core.layout_new_args`` writes it for new sizes. In torch_dist only ``padded_vocab_size`` changes: such a checkpoint
loads at any sizes, and Megatron asks it for random states exactly if its sizes equal those of the run; new sizes
without new random states would make a checkpoint that cannot be loaded.

Source: Megatron-LM d98e8a64 ``training/{arguments,checkpointing}.py``; arguments of the checkpoints in tests/golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from core.errors import CorruptError, UnsupportedError, UsageError
from core.inert import Inert, as_mapping, attributes
from core.layout_hybrid import Pattern, pattern_of
from core.layout_pipeline import LAYOUT, pipeline_of
from core.layout_rules import GPT, ModelKind, ModelNames
from core.pipeline import LayerSplit, Pipeline, split_layers
from core.placement import padded_vocab_size
from core.stages import Stages
from core.topology import Topology

_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")
_NOT_YET = {
    "heterogeneous_layers_config_path": "heterogeneous layers",
    "heterogeneous_layers_config_encoded_json": "heterogeneous layers",
    "pipeline_model_parallel_split_rank": "encoder-decoder pipelines",
    "encoder_pipeline_model_parallel_size": "encoder-decoder pipelines",
}
"""Arguments that, if set, make a model that is not resharded yet."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the training arguments say about the model and its layout.

    Args:
        topology: parallel sizes of the run that saved.
        world_size: its ranks, or None.
        cp: its context parallel size.
        n_layers: layers of the main stack.
        n_heads, n_groups: attention heads, and groups of them that share keys and values.
        head_dim: channels of one head, or None.
        hidden_size: channels of the residual stream, or None.
        is_gated: the MLP has a gate.
        is_tied: input and output embeddings are one tensor.
        is_local: the parameters have the names of the local implementation, not Transformer Engine's.
        is_mla: multi-latent attention.
        vocab_size: true rows of the vocabulary, or None where the run did not say.
        divisible_by: padded vocabulary sizes are multiples of this times TP; None if the vocabulary is not padded.
        pipeline: how the run distributes its layers over the pipeline stages.
        n_experts: routed experts of a layer that has them, or None.
        moe_layers: global numbers of the layers that have them.
        is_stacked: torch_dist stacks the layers, because they are alike.
        expert_names: how rank files name experts (``core.layout_experts``), or None without experts.
        linear_layers: global numbers of the layers with linear attention.
        is_allotted: the arguments give shares of the kinds of layers, without saying which is which.
        is_prediction_renamed: rank files call the layer of a multi-token prediction ``mtp_model_layer``.
        pattern: the kinds of layers of a hybrid model, or None.
        n_predictions: layers of multi-token prediction.
        sizes: the arguments that are positive numbers; rules name some of them as sizes of parameters.
        kind: what kind of model it is.
        stacks: what stands before the layers' numbers → layers, for every stack that the model has.
    """

    topology: Topology
    world_size: int | None
    cp: int
    n_layers: int
    n_heads: int
    n_groups: int
    head_dim: int | None
    hidden_size: int | None
    is_gated: bool
    is_tied: bool
    is_local: bool
    is_mla: bool
    vocab_size: int | None
    divisible_by: int | None
    pipeline: Pipeline
    n_experts: int | None = None
    moe_layers: frozenset[int] = frozenset()
    is_stacked: bool = True
    expert_names: str | None = None
    linear_layers: frozenset[int] = frozenset()
    is_allotted: bool = False
    is_prediction_renamed: bool = False
    pattern: Pattern | None = None
    n_predictions: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)
    kind: ModelKind = GPT
    stacks: Mapping[str, int] = field(default_factory=dict)

    @property
    def fuses_names(self) -> bool:
        """Whether torch_dist has other names than rank files: the local implementation's norms, but not with MLA."""
        return self.is_local and not self.is_mla

    def padded_rows(self, n_rows: int, *, tp: int) -> int:
        """Rows that a vocabulary of ``n_rows`` has at a TP size."""
        return n_rows if self.divisible_by is None else padded_vocab_size(n_rows, divisible_by=self.divisible_by, tp=tp)

    def pipeline_at(self, pp: int, vpp: int = 1) -> Pipeline:
        """How layers are distributed over so many stages and chunks, where nobody says it: what of the run's own way
        still means something there, and evenly for the rest."""
        own = self.topology
        return self.pipeline.at(has_pp=pp == own.pp and pp > 1, has_vpp=vpp == own.vpp)

    def stages(self, pp: int, vpp: int = 1, *, pipeline: Pipeline | None = None) -> Stages:
        """Where the model lives in ``pp`` stages of ``vpp`` chunks.

        Args:
            pipeline: how layers are distributed; None for ``pipeline_at``.

        Raises:
            UnsupportedError: the layers do not divide, or a model of two stacks is to have several stages.
            UsageError: ``pipeline`` does not fit them.
            CorruptError: the run's own way does not fit them.
        """
        if len(self.kind.stacks) > 1 and pp > 1:
            raise UnsupportedError(
                f"{self.kind.kind} models cannot be cut into {pp} pipeline stages: Megatron-LM refuses it",
                hint="use --pp-new 1",
            )
        how = self.pipeline_at(pp, vpp) if pipeline is None else pipeline
        n_mtp = self.n_predictions
        try:
            if self.is_cut_by_pattern(pp, vpp) and how.is_even:
                split = _cut_layers(self.pattern.cuts if self.pattern else (), pp, vpp)
            else:
                split = split_layers(self.n_layers, pp=pp, vpp=vpp, pipeline=how, n_mtp=n_mtp)
        except UsageError as err:
            if how != self.pipeline or (pp, vpp) != (self.topology.pp, self.topology.vpp):
                raise
            hint = "the training arguments of this checkpoint contradict each other"
            raise CorruptError(err.message, hint=hint) from err
        mtp = next((divmod(n, pp) for n, part in enumerate(how.layout or ()) if "m" in part), None)
        main = self.kind.stacks[0]
        stages = Stages(pp, vpp, {main: split}, mtp)
        others = {
            stack: split_layers(n, pp=1, vpp=1) for stack, n in self.stacks.items() if stack in self.kind.stacks[1:]
        }
        predictions = {PREDICTION_STACK: stages.in_one_chunk(n_mtp, stages.chunk_at("mtp"))} if n_mtp else {}
        return replace(stages, splits={main: split, **others, **predictions})

    def is_cut_by_pattern(self, pp: int, vpp: int = 1) -> bool:
        """Whether the pattern of a hybrid model says which layers so many chunks have."""
        is_own = (pp, vpp) == (self.topology.pp, self.topology.vpp)
        return is_own and pp > 1 and self.pattern is not None and bool(self.pattern.cuts)

    def has_experts(self, stack: str, layer: int) -> bool:
        """Whether a layer has experts: predictions are like the last layer, or as the pattern says."""
        if stack != PREDICTION_STACK:
            return layer in self.moe_layers
        if self.pattern is not None:
            return "E" in self.pattern.prediction
        return self.n_layers - 1 in self.moe_layers

    def kind_of(self, stack: str, layer: int) -> object:
        """What kind of layer it is, for comparison; None where the arguments do not say."""
        if stack == PREDICTION_STACK:
            return stack
        if self.pattern is not None:
            return self.pattern.layers[layer]
        return None if self.is_allotted else (stack, layer in self.moe_layers, layer in self.linear_layers)


def pipeline_notes(facts: Facts, pipeline: Pipeline) -> list[str]:
    """What the user should know about a new distribution of layers: that the run's own way has gone."""
    if facts.pipeline.is_even or pipeline == facts.pipeline:
        return []
    now = "evenly" if pipeline.is_even else str(pipeline)
    return [f"layers were distributed over pipeline stages by {facts.pipeline}; now {now}"]


PREDICTION_STACK = "mtp.layers."
"""What stands before the numbers of the layers of multi-token prediction."""


def _cut_layers(cuts: tuple[int, ...], pp: int, vpp: int) -> LayerSplit:
    """The layers of chunks in order, virtual stages outermost.

    Raises:
        CorruptError: there are not as many chunks.
    """
    if len(cuts) != pp * vpp:
        raise CorruptError(f"the pattern of layers has {len(cuts)} chunks, but there are {pp} stages of {vpp} chunks")
    return LayerSplit(tuple(cuts[first : first + pp] for first in range(0, pp * vpp, pp)))


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
    tp = _size(fields, "tensor_model_parallel_size", file=file)
    if tp is None:
        raise UnsupportedError(
            "the training arguments have no tensor_model_parallel_size",
            file=file,
            hint="checkpoints from before Megatron-LM 2.0 are not read",
        )
    ep = _size(fields, "expert_model_parallel_size", file=file) or 1
    etp = _size(fields, "expert_tensor_parallel_size", file=file)
    pp = _size(fields, "pipeline_model_parallel_size", file=file) or 1
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
    vpp = _size(fields, "virtual_pipeline_model_parallel_size", file=file)
    layout = pipeline_of(fields, file=file).layout
    if layout is None:
        return vpp or 1
    n_chunks, rest = divmod(len(layout), pp)
    if rest or n_chunks != (vpp or n_chunks):
        raise CorruptError(
            f"{LAYOUT} has {len(layout)} parts, but the arguments say PP {pp} and VPP {vpp or 1}", file=file
        )
    return n_chunks


def facts_of(args: object, *, names: ModelNames | None = None, file: str | None = None) -> Facts:
    """Everything that resharding needs to know.

    Args:
        names: what the tensors' names tell (``Rules.model_of``), which the arguments do not: GPT, BERT and T5 have the
            same ones. None for a GPT model.

    Raises:
        UnsupportedError: an argument is absent, or says that the model is of a kind that is not resharded yet.
        CorruptError: an argument makes no sense.
    """
    fields = fields_of(args, file=file)
    for name, what in _NOT_YET.items():
        if fields.get(name) not in (None, False, 0, ""):
            raise UnsupportedError(
                f"{what} cannot be resharded yet (argument {name} is set)",
                file=file,
                hint="its torch_dist checkpoints can be converted to dcp and torch, with the layout they have",
            )
    topology = topology_of(args, file=file)
    kind = GPT if names is None else names.kind
    hybrid = pattern_of(fields, file=file)
    if hybrid is not None:
        fields = {**fields, "num_layers": len(hybrid.layers)}
    stacks = _stacks(fields, kind, {} if names is None else names.n_seen, file=file)
    n_layers = next(iter(stacks.values()))
    n_predictions = _n_predictions(fields, hybrid, file=file)
    if n_predictions:
        stacks[PREDICTION_STACK] = n_predictions
    n_heads = _needed(fields, "num_attention_heads", file=file)
    is_mla = bool(fields.get("multi_latent_attention"))
    has_groups = fields.get("group_query_attention") and not is_mla
    n_groups = _size(fields, "num_query_groups", file=file) if has_groups else n_heads
    hidden_size = _size(fields, "hidden_size", file=file)
    head_dim = _size(fields, "kv_channels", file=file)
    if head_dim is None and hidden_size is not None:
        head_dim = hidden_size // n_heads
    n_experts = _n_experts(fields, topology, file=file)
    moe = _numbers(_moe_pattern(fields, n_layers, file=file)) if hybrid is None else hybrid.moe_layers
    linear = _linear_layers(fields, n_layers, file=file)
    shares = [value for name in _SHARES if isinstance(value := fields.get(name), (int, float)) and value > 0]
    return Facts(
        topology=topology,
        world_size=_size(fields, "world_size", file=file),
        cp=_size(fields, "context_parallel_size", file=file) or 1,
        n_layers=n_layers,
        n_heads=n_heads,
        n_groups=n_groups or n_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        is_gated=any(bool(fields.get(name)) for name in _GATED),
        is_tied=not fields.get("untie_embeddings_and_output_weights"),
        is_local=fields.get("transformer_impl") == "local",
        is_mla=is_mla,
        vocab_size=_vocab_size(fields, file=file),
        divisible_by=(
            None
            if fields.get("pad_vocab_size") is False
            else _size(fields, "make_vocab_size_divisible_by", file=file) or 128
        ),
        pipeline=pipeline_of(fields, file=file),
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
            **{name: size for name in _SIZES if is_mla and (size := _size(fields, name, file=file)) is not None},
        },
        kind=kind,
        stacks=stacks,
    )


_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")


def _stacks(
    fields: Mapping[str, object], kind: ModelKind, n_seen: Mapping[str, int], *, file: str | None
) -> dict[str, int]:
    """Layers of every stack, that of the main one first.

    Which argument counts the decoder's layers depends on the version: Megatron-core's T5 has ``num_layers`` of them,
    whatever ``decoder_num_layers`` says. So where there are two stacks, a count that is there decides among the two.
    """
    n_layers = _needed(fields, "num_layers", file=file)
    if len(kind.stacks) == 1:
        return {kind.stacks[0]: n_layers}
    found = {}
    for stack in kind.stacks:
        own = _size(fields, f"{'decoder' if 'decoder' in stack else 'encoder'}_num_layers", file=file)
        found[stack] = n_layers if own is None or n_seen.get(stack) == n_layers else own
    return found


def _n_experts(fields: Mapping[str, object], topology: Topology, *, file: str | None) -> int | None:
    """Experts of a layer, or None.

    Raises:
        UnsupportedError: there is expert parallelism, but no experts.
        CorruptError: the experts do not divide over the expert parallel ranks.
    """
    found = _size(fields, "num_experts", file=file)
    if found is None and topology.ep > 1:
        raise UnsupportedError(f"the arguments say EP {topology.ep}, but not how many experts (num_experts)", file=file)
    if found is not None and found % topology.ep:
        raise CorruptError(f"{found} experts (num_experts) do not divide over EP {topology.ep}", file=file)
    return found


def _moe_pattern(fields: Mapping[str, object], n_layers: int, *, file: str | None) -> list[bool]:
    """Which layers have experts, where the model has any.

    Raises:
        CorruptError: ``moe_layer_freq`` is neither a positive number nor a list of 0 and 1, one a layer.
    """
    found = fields.get("moe_layer_freq")
    if not isinstance(found, list):
        step = _size(fields, "moe_layer_freq", file=file) or 1
        return [layer % step == 0 for layer in range(n_layers)]
    if len(found) != n_layers or not all(item in (0, 1) for item in found):
        raise CorruptError(
            f"argument moe_layer_freq is a list of {len(found)}, not of 0 or 1 for each of {n_layers} layers", file=file
        )
    return [bool(item) for item in found]


def _numbers(pattern: list[bool]) -> frozenset[int]:
    return frozenset(layer for layer, is_one in enumerate(pattern) if is_one)


def _linear_layers(fields: Mapping[str, object], n_layers: int, *, file: str | None) -> frozenset[int]:
    """Numbers of the layers with linear attention: all but every n-th, or those of a list.

    Raises:
        CorruptError: ``linear_attention_freq`` is neither a positive number nor a list of 0 and 1, one a layer.

    Source: megatron-core 0.16.1 ``models/gpt/experimental_attention_variant_module_specs.py``.
    """
    found = fields.get("linear_attention_freq")
    if not isinstance(found, list):
        step = _size(fields, "linear_attention_freq", file=file)
        return frozenset() if step is None else _numbers([(layer + 1) % step != 0 for layer in range(n_layers)])
    if len(found) != n_layers or not all(item in (0, 1) for item in found):
        raise CorruptError(
            f"argument linear_attention_freq is a list of {len(found)}, not of 0 or 1 for each of {n_layers} layers",
            file=file,
        )
    return _numbers([bool(item) for item in found])


def _n_predictions(fields: Mapping[str, object], hybrid: Pattern | None, *, file: str | None) -> int:
    """Layers of multi-token prediction; one where all predictions share it.

    Raises:
        CorruptError: the pattern and ``mtp_num_layers`` contradict each other.
    """
    said = fields.get("mtp_num_layers")
    found = None if said in (None, 0) else _size(fields, "mtp_num_layers", file=file)
    drawn = 0 if hybrid is None else hybrid.n_predictions
    if found is not None and drawn not in (0, found):
        raise CorruptError(
            f"argument mtp_num_layers is {found}, but the pattern has {drawn} multi-token predictions", file=file
        )
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


def _vocab_size(fields: Mapping[str, object], *, file: str | None) -> int | None:
    """True rows of the vocabulary, or None.

    The null tokenizer of before ``null_tokenizer_eod_id`` has one token more than its size says: the end of a document.
    """
    found = _size(fields, "vocab_size", file=file)
    is_null = str(fields.get("tokenizer_type") or "").startswith("Null")
    return found + 1 if found is not None and is_null and "null_tokenizer_eod_id" not in fields else found


def _needed(fields: Mapping[str, object], name: str, *, file: str | None) -> int:
    found = _size(fields, name, file=file)
    if found is None:
        raise UnsupportedError(f"the training arguments do not say {name}", file=file)
    return found


def _size(fields: Mapping[str, object], name: str, *, file: str | None) -> int | None:
    """A positive integer argument, or None if it is absent or None."""
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


def check_agree(args: object, other: object, *, rank: str, other_rank: str) -> None:
    """Compares the layout arguments of two ranks.

    Raises:
        CorruptError: they differ; names the argument and both values.
    """
    mine, theirs = fields_of(args), fields_of(other)
    for name in LAYOUT_FIELDS:
        if mine.get(name) != theirs.get(name):
            raise CorruptError(
                f"argument {name} is {mine.get(name)!r} here and {theirs.get(name)!r} in {other_rank}",
                rank=rank,
                hint="the rank directories are not of one checkpoint",
            )
    if pipeline_of(mine, file=rank) != pipeline_of(theirs, file=other_rank):
        raise CorruptError(
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
