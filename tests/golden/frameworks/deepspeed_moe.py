"""Saves the state of a DeepSpeed engine after two steps of a small model with experts.

    PYTHONHASHSEED=0 torchrun --nproc-per-node 4 deepspeed_moe.py CASE FOLDER

CASE is a key of ``CASES``. Writes FOLDER/truth.pt as well: what the live engine has, by name, with
the experts' global numbers. The hash seed is needed, as DeepSpeed 0.19.8 orders the groups of
experts by a set of names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

EXPERTS = "deepspeed_moe.experts.deepspeed_experts."
CASES = {
    # stage, (size, experts, ep_size, residual) of each layer, data before expert parallelism
    "moe_zero0": (0, [(6, 4, 2, False)], False),
    "moe_zero1": (1, [(6, 4, 2, False), (5, 2, 2, True)], False),
    "moe_zero1_data_first": (1, [(6, 4, 2, False)], True),
    "moe_zero2_two_sizes": (2, [(6, 4, 2, False), (5, 4, 4, False), (3, 3, 1, False)], False),
}


class Expert(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.up = nn.Linear(8, size)
        self.down = nn.Linear(size, 8, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(self.up(hidden)))
        return result


class ExpertNet(nn.Module):
    def __init__(self, layers: list[tuple[int, int, int, bool]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.ModuleList(
            MoE(
                8,
                Expert(size),
                num_experts=n_experts,
                ep_size=ep_size,
                k=1,
                min_capacity=0,
                drop_tokens=False,
                use_residual=is_residual,
            )
            for size, n_experts, ep_size, is_residual in layers
        )
        self.register_buffer("scale", torch.full((3,), 0.3))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.body:
            hidden = hidden + layer(hidden)[0]
        logits: torch.Tensor = self.head(hidden)
        return logits


def global_name(net: Any, name: str) -> str:
    """Return the name of a parameter with the global number of its expert, if it has one."""
    if EXPERTS not in name:
        return name
    layer = net.body[int(name.split(".")[1])]
    head, tail = name.split(EXPERTS)
    local, rest = tail.split(".", 1)
    first = groups._get_expert_parallel_rank(layer.expert_group_name)
    return f"{head}{EXPERTS}{first * layer.num_local_experts + int(local)}.{rest}"


def main(case: str, folder: str) -> None:
    stage, layers, is_data_first = CASES[case]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    net = ExpertNet(layers)
    # Every rank has other experts.
    torch.manual_seed(100 + dist.get_rank())
    for name, parameter in net.named_parameters():
        if EXPERTS in name:
            nn.init.normal_(parameter, std=0.2)
    decayed = {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1}
    undecayed = {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0}
    param_groups = split_params_into_different_moe_groups_for_optimizer(
        [decayed | {"name": "decay"}, undecayed | {"name": "rest"}]
    )
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "use_data_before_expert_parallelism": is_data_first,
    }
    optimizer = torch.optim.AdamW([group for group in param_groups if group["params"]], lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    for step in range(2):
        torch.manual_seed(step * 10 + dist.get_rank())
        tokens = torch.randint(0, 11, (16, 7))
        logits = engine(tokens).float().flatten(0, 1)
        engine.backward(nn.functional.cross_entropy(logits, tokens.flatten()))
        engine.step()

    if stage:
        # 0.19.8 links the states after the step of the first group, when the others have none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states = {}
    for name, parameter in net.named_parameters():
        entry = {"bf16": parameter.detach()}
        if stage:
            entry = {"fp32": safe_get_full_fp32_param(parameter)}
            for state in ("exp_avg", "exp_avg_sq"):
                entry[state] = safe_get_full_optimizer_state(parameter, state)
        states[global_name(net, name)] = {key: value.clone() for key, value in entry.items()}
    gathered: list[dict[str, dict[str, torch.Tensor]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, states)
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True)
        truth = {name: entry for rank in gathered for name, entry in rank.items()}
        torch.save(truth, Path(folder) / "truth.pt")
    dist.barrier()
    engine.save_checkpoint(folder, client_state={"iteration": 7})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
