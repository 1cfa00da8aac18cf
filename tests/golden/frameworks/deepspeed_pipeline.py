"""Saves a pipeline of DeepSpeed after two steps, and DeepSpeed's universal form of it.

    torchrun --nproc-per-node 4 deepspeed_pipeline.py CASE FOLDER

CASE is pipeline_zero1 (two stages, two data-parallel ranks) or pipeline_tp2_zero1 (two stages, two
tensor-parallel ranks).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed_universal import write_truth
from torch import nn

TP = 2 if "tp2" in sys.argv[1] else 1
TP_RANK = int(os.environ["RANK"]) % TP
GROUPS: list[Any] = []
"""The group of the tensor-parallel ranks."""

REPLICATED = [r"\d+.norm.weight", r"\d+.norm.bias", r"\d+.bias", r"4.weight"]
PATTERNS = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 11,
    "padded_vocab_size": 12,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.weight"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules.embed.weight"],
    "tp_replicated_parameter_patterns": REPLICATED,
    "parameter_with_row_parallelism_patterns": [r"\d+.down.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.gate_up.weight", r"\d+.gate_up.bias"],
}


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over the tensor-parallel ranks."""
    result = tensor.contiguous().float()
    if TP > 1:
        dist.all_reduce(result, group=GROUPS[0])
    return result.bfloat16()


class Copy(torch.autograd.Function):
    """Identity, whose gradients are summed."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _sum(grad)


class Reduce(torch.autograd.Function):
    """Sum, whose gradients are copied."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return _sum(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Block(nn.Module):
    """A gated MLP: each rank has its part of gate and up, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate_up = nn.Linear(8, 24 // TP)
        self.down = nn.Linear(12 // TP, 8, bias=False)
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(Copy.apply(self.norm(hidden))).chunk(2, dim=-1)
        result: torch.Tensor = hidden + Reduce.apply(self.down(torch.relu(gate) * up)) + self.bias
        return result


class Embed(nn.Module):
    """An embedding of 11 words, padded to 12 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12 // TP, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = self.weight.shape[0]
        local = tokens - n * TP_RANK
        rows = nn.functional.embedding(local.clamp(0, n - 1), self.weight)
        result: torch.Tensor = Reduce.apply(rows * ((local >= 0) & (local < n))[..., None])
        return result


def head(embed: Embed, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of the rank's own words."""
    result: torch.Tensor = Copy.apply(hidden) @ embed.weight.T
    return result


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    wanted = (tokens % logits.shape[-1]).flatten()
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted)


def pipeline() -> PipelineModule:
    """Build the model: an embedding, three blocks, and a norm, with the embedding as its head."""
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    if TP > 1:
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
        for ranks in topology.get_axis_comm_lists("model"):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                GROUPS.append(group)
    layers = [
        TiedLayerSpec("embed", Embed),
        *(LayerSpec(Block) for _ in range(3)),
        LayerSpec(nn.LayerNorm, 8),
        TiedLayerSpec("embed", Embed, forward_fn=head),
    ]
    net = PipelineModule(layers, topology=topology, loss_fn=loss, partition_method="uniform")
    net.universal_checkpoint_info = dict(PATTERNS)
    for name, parameter in net.named_parameters():
        is_replicated = any(re.match(pattern, name) for pattern in REPLICATED)
        torch.manual_seed(sum(map(ord, name)) + (0 if is_replicated else 1000 * TP_RANK))
        nn.init.normal_(parameter, std=0.3)
    return net


def main(case: str, folder: str) -> None:
    deepspeed.init_distributed("gloo")
    net = pipeline()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number in range(4):
            torch.manual_seed(number * 10 + engine.grid.get_data_parallel_rank())
            tokens = torch.randint(0, 11, (4, 5))
            yield tokens, tokens

    data = batches()
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder, client_state={"iteration": 7})
    is_first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    if is_first:
        write_truth(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
