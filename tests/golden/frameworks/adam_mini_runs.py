"""Save a Llama that Adam-mini trained, or load one: ``adam_mini_runs.py save|load FOLDER``.

``save`` writes, after three steps each, ``state.pt`` (one process), ``state`` (accelerate's
``save_state`` of the same), ``fsdp2`` (DCP of two processes) and ``ranks`` (their own torch files);
``truth.pt`` has the states by name, and the losses of two further steps.

``load`` takes ``FOLDER/named`` (``state.pt`` as DCP, with names) into FSDP2 on two processes, and
``FOLDER/full.pt`` (``fsdp2`` as a torch file) into one process, and compares states and losses.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from accelerate import Accelerator
from adam_mini import Adam_mini
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

PORT = 29911
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def build(*, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


def optimizer_of(model):
    named = model.named_parameters()
    return Adam_mini(
        named, lr=1e-2, weight_decay=0.1, dim=8, n_heads=4, n_kv_heads=2, verbose=False
    )


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        tokens = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def sharded(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = build(seed=0)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model)


def save_rank(rank, folder):
    model, optimizer = sharded(rank)
    train(model, optimizer, range(3))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "fsdp2")
    (folder / "ranks").mkdir(exist_ok=True)
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, folder / "ranks" / f"state_rank_{rank}.pt")
    full = copy.deepcopy(get_state_dict(model, optimizer, options=FULL))
    losses = train(model, optimizer, (3, 4))
    if rank == 0:
        torch.save({"optimizer": full[1], "losses": losses}, folder / "fsdp2_truth.pt")
    dist.destroy_process_group()


def save(folder):
    folder.mkdir()
    model = build()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, folder / "state.pt")
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.save_state(str(folder / "state"))
    model.config.save_pretrained(folder / "state")
    before = torch.load(folder / "state.pt")["optimizer"]["state"].values()
    names = [name for name, _ in model.named_parameters()]
    truth = {"one": dict(zip(names, before, strict=True))}
    truth["losses"] = train(model, optimizer, (3, 4))
    mp.spawn(save_rank, (folder,), nprocs=2)
    gathered = torch.load(folder / "fsdp2_truth.pt")
    (folder / "fsdp2_truth.pt").unlink()
    truth |= {"two": gathered["optimizer"]["state"], "two_losses": gathered["losses"]}
    torch.save(truth, folder / "truth.pt")


def check(states, losses, truth, expected, *, tolerance):
    assert states.keys() == truth.keys()
    for name, state in truth.items():
        for kind, value in state.items():
            same = torch.equal(states[name][kind], value) if torch.is_tensor(value) else True
            assert same and type(states[name][kind]) is type(value), (name, kind)
            assert torch.is_tensor(value) or states[name][kind] == value, (name, kind)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)


def load_rank(rank, folder):
    model, optimizer = sharded(rank)
    train(model, optimizer, (7,))
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder / "named")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    full = get_state_dict(model, optimizer, options=FULL)[1].get("state")  # on rank 0
    full = copy.deepcopy(full)
    truth = torch.load(folder / "truth.pt")
    losses = train(model, optimizer, (3, 4))
    if rank == 0:
        check(full, losses, truth["one"], truth["losses"], tolerance=1e-5)
    dist.destroy_process_group()


def load(folder):
    mp.spawn(load_rank, (folder,), nprocs=2)
    model = build(seed=1)
    optimizer = optimizer_of(model)
    content = torch.load(folder / "full.pt", weights_only=True)
    loaded = copy.deepcopy(content["optimizer"]["state"])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
    )
    states = get_state_dict(model, optimizer)[1]["state"]
    truth = torch.load(folder / "truth.pt")
    losses = train(model, optimizer, (3, 4))
    check(loaded, losses, truth["two"], truth["two_losses"], tolerance=1e-5)
    assert states.keys() == truth["two"].keys()


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))
