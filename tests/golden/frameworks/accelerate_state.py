"""Saves the state of accelerate after two steps of a small model.

    torchrun --nproc-per-node 2 accelerate_state.py CASE FOLDER      (fsdp1_full: 1 process)

CASE is ddp, ddp_bin, fsdp1_full, fsdp1_sharded, fsdp2_full or fsdp2_sharded. Writes FOLDER/state,
and FOLDER/truth.pt: the state dicts that torch gathers from the live model and optimizer, by name.

accelerate takes FSDP for a matter of GPUs, so the script wraps the model, and tells accelerate's
state that it is one of FSDP.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim.lr_scheduler import StepLR


class Net(nn.Module):
    """A model of no known family. Its head and its embedding have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 20, bias=False)
        self.norm = nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.body:
            hidden = torch.relu(layer(hidden))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Counter:
    def state_dict(self) -> dict[str, int]:
        return {"n": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def main(case: str, folder: str) -> None:
    kind, _, form = case.partition("_")
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=True)
    net: nn.Module = Net()
    if kind == "ddp":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        net, optimizer, schedule = accelerator.prepare(net, optimizer, StepLR(optimizer, 1))
    else:
        if kind == "fsdp1":
            policy = ModuleWrapPolicy({nn.Linear})
            net = FullyShardedDataParallel(
                net, use_orig_params=True, auto_wrap_policy=policy, device_id=torch.device("cpu")
            )
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in net.body:
                fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        plain = torch.optim.AdamW(net.parameters(), lr=1e-2)
        optimizer = AcceleratedOptimizer(plain)
        schedule = AcceleratedScheduler(StepLR(plain, 1), optimizer, step_with_optimizer=False)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[-1]),
            state_dict_type=f"{form.upper()}_STATE_DICT",
            reshard_after_forward="FULL_SHARD" if kind == "fsdp1" else True,
        )
        for state in (AcceleratorState, PartialState):
            state._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        accelerator._models.append(net)
        accelerator._optimizers.append(optimizer)
        accelerator._schedulers.append(schedule)

    for step in range(2):
        torch.manual_seed(step * 10 + accelerator.process_index)
        tokens = torch.randint(0, 20, (4, 3))
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.register_for_checkpointing(Counter())

    # The truth. FSDP1 does not gather in several processes on a CPU (torch 2.13).
    if case != "fsdp1_sharded":
        options = StateDictOptions(full_state_dict=True)
        inner = accelerator.unwrap_model(net) if kind == "ddp" else net
        model, states = get_state_dict(inner, optimizer.optimizer, options=options)
        if accelerator.is_main_process:
            Path(folder).mkdir(parents=True)
            truth = {"model": dict(model), "optimizer": states}
            torch.save(truth, Path(folder) / "truth.pt")
    accelerator.wait_for_everyone()
    accelerator.save_state(f"{folder}/state", safe_serialization=form != "bin")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
