"""What is trained, in which layout and with which optimizer: plain values that both sides of the
tests know.

The tests' process describes a run with these and sends it as JSON to
``tests.real_megatron.worker``, whose Python may be another one with another megatron-core. Nothing
here imports torch or megatron-core.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

SEQUENCE = 8
"""Tokens of a sample."""
BATCH = 4
"""Samples of a global batch."""
ITERATION = 3
"""Steps trained before the checkpoint is saved, and its iteration."""
LR = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GPT small enough to train on a CPU within a second; sizes in elements, vocabulary in rows.

    Args:
        vocab, divisible_by: true rows, and what the padded ones times TP are a multiple of.
        first_dense: layers with a dense MLP before those with experts.
        mtp: multi-token prediction layers.
        frozen: pattern of the names of parameters that are not trained.
    """

    layers: int = 4
    hidden: int = 32
    heads: int = 4
    groups: int = 2
    ffn: int = 48
    vocab: int = 64
    divisible_by: int = 16
    is_tied: bool = False
    is_gated: bool = True
    has_bias: bool = False
    qk_layernorm: bool = False
    normalization: str = "RMSNorm"
    position: str = "rope"
    experts: int | None = None
    first_dense: int = 0
    shared_ffn: int | None = None
    expert_bias: bool = False
    grouped: bool = False
    mtp: int | None = None
    frozen: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Parallel sizes of a run; ``dp`` counts the replicas of the dense parameters."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    first: int | None = None
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False
    string: str | None = None

    @property
    def world(self) -> int:
        """Processes of the run."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Megatron's optimizer.

    Args:
        kind: ``fp32``, ``float16`` (bf16 model, fp32 masters) or ``distributed`` (the same, sharded
            over DP).
        overlap: gradients are reduced while the rest is computed, in buckets of ``bucket_size``
            elements or more. Where parameters or buckets do not end at multiples of 128 elements,
            megatron-core 0.16.1 warns that it pads states with zeros when it saves torch_dist
            (``fully_reshardable``), or fails to save (``dp_reshardable``): the tests save such ones
            as rank files.
        adam: ``fused``, which counts steps like Apex and Transformer Engine, or ``torch``.
        name: ``--optimizer``: ``adam``, ``sgd``, ``muon`` or ``dist_muon``.
    """

    kind: str = "float16"
    adam: str = "fused"
    overlap: bool = False
    bucket_size: int | None = None
    name: str = "adam"

    @property
    def is_bf16(self) -> bool:
        """Whether the model's parameters are bfloat16."""
        return self.kind != "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: a model, where it lives and how it is optimized."""

    model: Model = Model()
    layout: Layout = Layout()
    optimizer: Optimizer = Optimizer()

    def at(self, layout: Layout) -> Run:
        """The same training at another layout."""
        return replace(self, layout=layout)

    def as_json(self) -> dict[str, Any]:
        """Plain values; ``run_of`` makes the run of them again."""
        return asdict(self)


def run_of(value: dict[str, Any]) -> Run:
    """The run that ``as_json`` described."""
    kinds = {"model": Model, "layout": Layout, "optimizer": Optimizer}
    assert set(value) == {field.name for field in fields(Run)}
    return Run(**{name: kinds[name](**part) for name, part in value.items()})


def padded_rows(run: Run) -> int:
    """Rows of the vocabulary with padding, by Megatron's formula."""
    unit = run.model.divisible_by * run.layout.tp
    return -(-run.model.vocab // unit) * unit


def arguments(run: Run) -> Namespace:
    """The arguments that Megatron's training script would store for this run; its names, plain
    values only.
    """
    model, layout, optimizer = run.model, run.layout, run.optimizer
    frequency: object = (
        1 if not model.first_dense else [int(n >= model.first_dense) for n in range(model.layers)]
    )
    return Namespace(
        # sizes of the model
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        group_query_attention=True,
        num_query_groups=model.groups,
        kv_channels=model.hidden // model.heads,
        ffn_hidden_size=model.ffn,
        vocab_size=model.vocab,
        padded_vocab_size=padded_rows(run),
        make_vocab_size_divisible_by=model.divisible_by,
        max_position_embeddings=SEQUENCE,
        seq_length=SEQUENCE,
        # kind of the model
        swiglu=model.is_gated,
        add_bias_linear=model.has_bias,
        add_qkv_bias=False,
        qk_layernorm=model.qk_layernorm,
        normalization=model.normalization,
        position_embedding_type=model.position,
        untie_embeddings_and_output_weights=not model.is_tied,
        transformer_impl="local",
        multi_latent_attention=False,
        mtp_num_layers=model.mtp,
        num_experts=model.experts,
        moe_layer_freq=frequency,
        moe_ffn_hidden_size=model.ffn if model.experts else None,
        moe_shared_expert_intermediate_size=model.shared_ffn,
        moe_router_enable_expert_bias=model.expert_bias,
        moe_grouped_gemm=model.grouped,
        # layout
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        transformer_pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=layout.vpp,
        pipeline_model_parallel_layout=layout.string,
        decoder_first_pipeline_num_layers=layout.first,
        decoder_last_pipeline_num_layers=layout.last,
        account_for_embedding_in_pipeline_split=layout.counts_embedding,
        account_for_loss_in_pipeline_split=layout.counts_loss,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        context_parallel_size=1,
        data_parallel_size=layout.dp,
        world_size=layout.world,
        sequence_parallel=False,
        # optimizer
        bf16=optimizer.is_bf16,
        fp16=False,
        optimizer=optimizer.name,
        sgd_momentum=0.9,
        lr=LR,
        min_lr=LR / 10,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=100.0,
        decoupled_lr=None,
        use_distributed_optimizer=optimizer.kind == "distributed",
        overlap_grad_reduce=optimizer.overlap,
        overlap_param_gather=False,
        ddp_bucket_size=optimizer.bucket_size,
        ddp_num_buckets=None,
        ddp_pad_buckets_for_high_nccl_busbw=False,
        accumulate_allreduce_grads_in_fp32=True,
        # checkpoint
        iteration=ITERATION,
        consumed_train_samples=ITERATION * BATCH,
        consumed_valid_samples=0,
        micro_batch_size=1,
        global_batch_size=BATCH,
        ckpt_format="torch",
        auto_detect_ckpt_format=False,
        no_save_rng=False,
        no_save_optim=False,
    )
