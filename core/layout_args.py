"""The training arguments that a layout depends on, and their policy on write.

``args`` is the inert ``argparse.Namespace`` of a Megatron checkpoint. ``facts_of`` reads what resharding needs from it;
``updated`` returns a changed copy, for the new sizes, with every other argument as it was.

Changed on write to rank files: the sizes and what follows from them (``tensor_model_parallel_size``, ``world_size``,
``padded_vocab_size`` …). In torch_dist only ``padded_vocab_size`` changes: such a checkpoint loads at any sizes, and
Megatron asks it for random states exactly if its sizes equal those of the run; new sizes without new random states
would make a checkpoint that cannot be loaded.

Source: Megatron-LM d98e8a64 ``training/{arguments,checkpointing}.py``; arguments of the checkpoints in tests/golden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from core.errors import CorruptError, UnsupportedError
from core.inert import Inert, as_mapping, attributes
from core.placement import padded_vocab_size
from core.topology import LayerSplit, Topology, split_layers

_GATED = ("swiglu", "quick_geglu", "gated_linear_unit")
_NOT_YET = {
    "num_experts": "mixture-of-experts models",
    "heterogeneous_layers_config_path": "heterogeneous layers",
    "heterogeneous_layers_config_encoded_json": "heterogeneous layers",
    "pipeline_model_parallel_layout": "pipeline layout strings",
    "pipeline_model_parallel_split_rank": "encoder-decoder pipelines",
    "hybrid_layer_pattern": "hybrid models",
    "hybrid_override_pattern": "hybrid models",
    "mtp_num_layers": "multi-token prediction",
    "multi_latent_attention": "multi-latent attention",
    "standalone_embedding_stage": "a pipeline stage for the embedding alone",
}
"""Arguments that, if set, make a model that is not resharded yet."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the training arguments say about the model and its layout.

    Args:
        topology: parallel sizes of the run that saved.
        world_size: its ranks, or None.
        cp: its context parallel size.
        n_layers: layers of the model.
        n_heads, n_groups: attention heads, and groups of them that share keys and values.
        head_dim: channels of one head, or None.
        hidden_size: channels of the residual stream, or None.
        is_gated: the MLP has a gate.
        is_tied: input and output embeddings are one tensor.
        is_local: the parameters have the names of the local implementation, not Transformer Engine's.
        vocab_size: true rows of the vocabulary, or None where the run did not say.
        divisible_by: padded vocabulary sizes are multiples of this times TP; None if the vocabulary is not padded.
        first, last: layers of the first and last pipeline stage, where set.
        counts_embedding, counts_loss: the embedding (the loss) counts as a layer of its stage.
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
    vocab_size: int | None
    divisible_by: int | None
    first: int | None
    last: int | None
    counts_embedding: bool
    counts_loss: bool

    def padded_rows(self, n_rows: int, *, tp: int) -> int:
        """Rows that a vocabulary of ``n_rows`` has at a TP size."""
        return n_rows if self.divisible_by is None else padded_vocab_size(n_rows, divisible_by=self.divisible_by, tp=tp)

    def split(self, pp: int, vpp: int = 1) -> LayerSplit:
        """How the layers lie in ``pp`` stages; the uneven counts apply only to the run's own number of stages."""
        is_own = pp == self.topology.pp and pp > 1
        return split_layers(
            self.n_layers,
            pp=pp,
            vpp=vpp,
            first=self.first if is_own else None,
            last=self.last if is_own else None,
            counts_embedding=self.counts_embedding,
            counts_loss=self.counts_loss,
        )


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
    return Topology(
        tp=tp,
        pp=_size(fields, "pipeline_model_parallel_size", file=file) or 1,
        vpp=_size(fields, "virtual_pipeline_model_parallel_size", file=file) or 1,
        ep=ep,
        etp=None if etp == tp or (ep == 1 and not fields.get("num_experts")) else etp,
    )


def facts_of(args: object, *, file: str | None = None) -> Facts:
    """Everything that resharding needs to know.

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
    if topology.ep > 1:
        raise UnsupportedError(f"expert parallel checkpoints (EP {topology.ep}) cannot be resharded yet", file=file)
    n_layers = _needed(fields, "num_layers", file=file)
    n_heads = _needed(fields, "num_attention_heads", file=file)
    n_groups = _size(fields, "num_query_groups", file=file) if fields.get("group_query_attention") else n_heads
    hidden_size = _size(fields, "hidden_size", file=file)
    head_dim = _size(fields, "kv_channels", file=file)
    if head_dim is None and hidden_size is not None:
        head_dim = hidden_size // n_heads
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
        vocab_size=_vocab_size(fields, file=file),
        divisible_by=(
            None
            if fields.get("pad_vocab_size") is False
            else _size(fields, "make_vocab_size_divisible_by", file=file) or 128
        ),
        first=_either(fields, "decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage", file=file),
        last=_either(fields, "decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage", file=file),
        counts_embedding=bool(fields.get("account_for_embedding_in_pipeline_split")),
        counts_loss=bool(fields.get("account_for_loss_in_pipeline_split")),
    )


def _vocab_size(fields: Mapping[str, object], *, file: str | None) -> int | None:
    """True rows of the vocabulary, or None.

    The null tokenizer of before ``null_tokenizer_eod_id`` has one token more than its size says: the end of a document.
    """
    found = _size(fields, "vocab_size", file=file)
    is_null = str(fields.get("tokenizer_type") or "").startswith("Null")
    return found + 1 if found is not None and is_null and "null_tokenizer_eod_id" not in fields else found


def _either(fields: Mapping[str, object], name: str, other: str, *, file: str | None) -> int | None:
    found = _size(fields, name, file=file)
    return _size(fields, other, file=file) if found is None else found


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
    *("untie_embeddings_and_output_weights", "swiglu", "transformer_impl", "decoder_first_pipeline_num_layers"),
    *("decoder_last_pipeline_num_layers", "vocab_size", "make_vocab_size_divisible_by"),
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


def updated(args: object, *, topology: Topology, padded_vocab_size: int | None) -> object:
    """A copy of the arguments for rank files with new sizes; arguments that the run did not have are not added.

    Args:
        args: those of the source.
        topology: sizes to write.
        padded_vocab_size: rows of the embedding, or None to leave that argument.
    """
    fields = fields_of(args)
    own = topology_of(args)
    dp = fields.get("data_parallel_size")
    cp = fields.get("context_parallel_size")
    n_replicas = (dp if isinstance(dp, int) else 1) * (cp if isinstance(cp, int) else 1)
    changes: dict[str, object] = {"ckpt_format": "torch", "use_dist_ckpt": False}
    if padded_vocab_size is not None:
        changes["padded_vocab_size"] = padded_vocab_size
    if (topology.tp, topology.pp, topology.vpp) != (own.tp, own.pp, own.vpp):
        world_size = topology.tp * topology.pp * n_replicas
        changes |= {
            "tensor_model_parallel_size": topology.tp,
            "tensor_parallel_num_weight_shards": topology.tp,
            "pipeline_model_parallel_size": topology.pp,
            "transformer_pipeline_model_parallel_size": topology.pp,
            "virtual_pipeline_model_parallel_size": topology.vpp if topology.vpp > 1 else None,
            "num_virtual_stages_per_pipeline_rank": topology.vpp if topology.vpp > 1 else None,
            "num_layers_per_virtual_pipeline_stage": None,
            "world_size": world_size,
            "inprocess_active_world_size": world_size,
        }
        if topology.vpp == 1 and own.vpp > 1:
            changes |= {"overlap_p2p_comm": False, "align_param_gather": False}
        if fields.get("expert_tensor_parallel_size") == own.tp:
            changes |= {
                "expert_tensor_parallel_size": topology.tp,
                "expert_tensor_parallel_num_weight_shards": topology.tp,
            }
        if topology.tp == 1:
            changes["sequence_parallel"] = False
        if topology.pp != own.pp:
            changes |= {
                "decoder_first_pipeline_num_layers": None,
                "decoder_last_pipeline_num_layers": None,
                "num_layers_in_first_pipeline_stage": None,
                "num_layers_in_last_pipeline_stage": None,
            }
    return replaced(args, changes)


def with_vocab_size(args: object, n_rows: int) -> object:
    """A copy of the arguments that states the true vocabulary size, whether they did so before or not."""
    made = replaced(args, {})
    fields_of(made)["vocab_size"] = n_rows
    return made


def replaced(args: object, changes: Mapping[str, object]) -> object:
    """A copy of a namespace in which those of the ``changes`` are made whose names it has."""
    fields = fields_of(args)
    made = {name: changes.get(name, value) for name, value in fields.items()}
    if not isinstance(args, Inert):
        return made
    copy = Inert(args.how, args.fn, args.args, kwargs=args.kwargs, state=made)
    copy.items, copy.entries = list(args.items), list(args.entries)
    return copy
