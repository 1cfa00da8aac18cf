"""Megatron's model, optimizer and schedule for a run, on this process's rank; and steps of
training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from tests.real_megatron import adam
from tests.real_megatron.cpu import called
from tests.real_megatron.setting import BATCH, LR, SEQUENCE, Run, padded_rows


@dataclass(slots=True)
class Training:
    """What a process holds while it trains.

    Args:
        run: what is trained.
        chunks: model chunks of this rank, wrapped for data parallelism.
        models: the same, bare.
    """

    run: Run
    config: Any
    chunks: list[Any]
    models: list[Any]
    optimizer: Any
    scheduler: Any


def started(run: Run) -> Training:
    """Megatron's objects for this rank; the default process group exists already."""
    layout = run.layout
    if run.optimizer.adam == "fused":
        adam.use()
    called(
        parallel_state.initialize_model_parallel,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    torch.manual_seed(1234)
    config = _config(run)
    models = [_model(run, config, vp_stage=stage) for stage in range(layout.vpp or 1)]
    chunks = _wrapped(run, config, models)
    optimizer = _optimizer(run, chunks)
    return Training(run, config, chunks, models, optimizer, _scheduler(optimizer))


def _config(run: Run) -> Any:
    model, layout = run.model, run.layout
    dtype = torch.bfloat16 if run.optimizer.is_bf16 else torch.float32
    options: dict[str, Any] = {}
    if layout.string is not None:
        options["pipeline_model_parallel_layout"] = layout.string
    if model.experts is not None:
        options |= {
            "num_moe_experts": model.experts,
            "moe_ffn_hidden_size": model.ffn,
            "moe_layer_freq": [int(n >= model.first_dense) for n in range(model.layers)]
            if model.first_dense
            else 1,
            "moe_shared_expert_intermediate_size": model.shared_ffn,
            "moe_router_enable_expert_bias": model.expert_bias,
            "moe_router_score_function": "sigmoid" if model.expert_bias else "softmax",
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": model.grouped,
            "moe_router_topk": 2,
        }
    if model.mtp is not None:
        options["mtp_num_layers"] = model.mtp
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        ffn_hidden_size=model.ffn,
        gated_linear_unit=model.is_gated,
        activation_func=torch.nn.functional.silu if model.is_gated else torch.nn.functional.gelu,
        add_bias_linear=model.has_bias,
        qk_layernorm=model.qk_layernorm,
        normalization=model.normalization,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
        num_layers_in_first_pipeline_stage=layout.first,
        num_layers_in_last_pipeline_stage=layout.last,
        account_for_embedding_in_pipeline_split=layout.counts_embedding,
        account_for_loss_in_pipeline_split=layout.counts_loss,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=run.optimizer.is_bf16,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=False,
        **options,
    )


def _model(run: Run, config: Any, *, vp_stage: int) -> Any:
    """One chunk, on the CPU."""
    model = run.model
    stage = {"vp_stage": vp_stage} if run.layout.vpp else {}
    if run.layout.vpp and "vp_stage" not in GPTModel.__init__.__code__.co_varnames:
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)
    if model.experts is None:
        spec = called(
            get_gpt_layer_local_spec,
            qk_layernorm=model.qk_layernorm,
            normalization=model.normalization,
        )
    else:
        spec = called(
            get_gpt_decoder_block_spec,
            config,
            use_transformer_engine=False,
            normalization=model.normalization,
            **stage,
        )
    extra = {}
    if model.mtp is not None:
        extra["mtp_block_spec"] = called(
            get_gpt_mtp_block_spec, config, spec, use_transformer_engine=False, **stage
        )
    gpt = called(
        GPTModel,
        config,
        spec,
        vocab_size=padded_rows(run),
        max_sequence_length=SEQUENCE,
        pre_process=called(parallel_state.is_pipeline_first_stage, ignore_virtual=False, **stage),
        post_process=called(parallel_state.is_pipeline_last_stage, ignore_virtual=False, **stage),
        share_embeddings_and_output_weights=model.is_tied,
        position_embedding_type=model.position,
        **extra,
        **stage,
    )
    gpt.model_type = _model_type()
    for name, parameter in gpt.named_parameters():
        if model.frozen is not None and re.search(model.frozen, name):
            parameter.requires_grad = False
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return gpt


def _model_type() -> Any:
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def _wrapped(run: Run, config: Any, models: list[Any]) -> list[Any]:
    """The chunks within what Megatron wraps them with; only the first has several buckets, as in
    its script.
    """
    inner = [Float16Module(config, model) for model in models] if run.optimizer.is_bf16 else models
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=run.optimizer.overlap,
        use_distributed_optimizer=run.optimizer.kind == "distributed",
        bucket_size=run.optimizer.bucket_size,
        check_for_nan_in_grad=False,
    )
    return [
        DistributedDataParallel(
            config=config, ddp_config=ddp, module=module, disable_bucketing=n > 0
        )
        for n, module in enumerate(inner)
    ]


def _optimizer(run: Run, chunks: list[Any]) -> Any:
    config = _optimizer_config(run)
    if not run.optimizer.name.endswith("muon"):
        return called(get_megatron_optimizer, config, chunks)
    from tests.real_megatron.muon import use

    use()
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    is_layer_wise = run.optimizer.name == "dist_muon"
    return get_megatron_muon_optimizer(
        config, chunks, layer_wise_distributed_optimizer=is_layer_wise
    )


def _optimizer_config(run: Run) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="sgd" if run.optimizer.name == "sgd" else "adam",
        lr=LR,
        min_lr=LR / 10,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=100.0,
        bf16=run.optimizer.is_bf16,
        params_dtype=torch.bfloat16 if run.optimizer.is_bf16 else torch.float32,
        use_distributed_optimizer=run.optimizer.kind == "distributed",
    )


def _scheduler(optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LR,
        min_lr=LR / 10,
        lr_warmup_steps=0,
        lr_decay_steps=100 * BATCH,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=100 * BATCH,
        wd_incr_style="constant",
    )


def trained(training: Training, steps: range) -> list[float]:
    """Trains; losses of every sample of every step that this rank computed, in the order of the
    samples; else [].
    """
    losses: list[float] = []
    for step in steps:
        losses += _step(training, step)
    return losses


def _step(training: Training, step: int) -> list[float]:
    # MoE with TP but without sequence parallelism (for which the norms need Transformer Engine)
    # runs in eval mode only.
    is_train = training.run.model.experts is None or training.run.layout.tp == 1
    for chunk in training.chunks:
        chunk.train(is_train)
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    config = training.config
    config.finalize_model_grads_func = finalize_model_grads
    if training.run.optimizer.overlap:
        functions = [chunk.no_sync for chunk in training.chunks]
        config.no_sync_func = functions[0] if len(functions) == 1 else functions
    config.grad_scale_func = training.optimizer.scale_loss
    dp, dp_rank = (
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_rank(),
    )
    samples = range(dp_rank, BATCH, dp)
    outputs = get_forward_backward_func()(
        forward_step_func=_forward,
        data_iterator=[_samples(training.run, step, samples) for _ in training.chunks],
        model=training.chunks,
        num_microbatches=len(samples),
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
    )
    is_done, _, _ = training.optimizer.step()
    assert is_done
    training.scheduler.step(increment=BATCH)
    return [float(output["loss"]) for output in outputs]


def _samples(run: Run, step: int, samples: range) -> Iterator[torch.Tensor]:
    """Token ids [1, SEQUENCE + 1] of each sample: a function of step and sample alone."""
    for sample in samples:
        generator = torch.Generator().manual_seed(1000 * step + sample)
        yield torch.randint(0, run.model.vocab, (1, SEQUENCE + 1), generator=generator)


def _forward(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    positions = torch.arange(SEQUENCE)[None]
    labels = tokens[:, 1:].contiguous()
    output = model(
        tokens[:, :-1].contiguous(),
        positions,
        mask,
        labels=labels,
        loss_mask=torch.ones(1, SEQUENCE),
    )
    return output, partial(_loss)


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output.float().mean()
    return loss, {"loss": float(loss.detach())}


def stop() -> None:
    """Ends Megatron's groups and the default one."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
