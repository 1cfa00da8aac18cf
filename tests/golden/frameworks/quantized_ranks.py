"""Make files of each rank with tensors of torchao: ``quantized_ranks.py OUT``, on four ranks.

``OUT/NAME/train_rank_N.pt`` are the training states of torchao's optimizers under FSDP2, and
``OUT/NAME.pt`` the states of a parameter, gathered by torch and dequantized by torchao.
``OUT/NAME_rep/m_rank_N.pt`` are replicated weights, ``OUT/NAME_rep.pt`` their ``dequantize()``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchao.quantization as tq
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torchao.optim import AdamW8bit


def save(content, folder, stem, rank):
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / f"{stem}_rank_{rank}.pt")


def states(name, kind, mesh, folder, rank):
    torch.manual_seed(2)
    layers = [torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 8, bias=False)]
    model = torch.nn.Sequential(*layers)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = kind(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 64)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optim": state}, folder / name, "train", rank)
    full = {
        key: value.full_tensor().dequantize() if isinstance(value, DTensor) else value
        for key, value in state["state"]["0.weight"].items()
    }
    if rank == 0:
        torch.save(full, folder / f"{name}.pt")


def weights(name, config, mesh, folder, rank):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(96, 40, bias=False)).to(torch.bfloat16)
    tq.quantize_(model, config)
    weight = model[0].weight
    if rank == 0:
        torch.save(weight.dequantize(), folder / f"{name}_rep.pt")
    replicated = DTensor.from_local(weight.data, mesh, [Replicate()], run_check=False)
    save({"model": {"0.weight": replicated}}, folder / f"{name}_rep", "m", rank)


def work(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29649")
    dist.init_process_group("gloo", rank=rank, world_size=4)
    names = ("replicate", "shard")
    both, flat = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=names),
        init_device_mesh("cpu", (4,)),
    )
    states("adamw8bit_hsdp", AdamW8bit, both, folder, rank)
    weights("float8", tq.Float8WeightOnlyConfig(), flat, folder, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    mp.spawn(work, (out,), nprocs=4)
