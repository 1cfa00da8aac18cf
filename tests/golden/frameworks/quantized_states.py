"""Make states of bitsandbytes' and torchao's optimizers: ``quantized_states.py OUT``.

``OUT/adamw8bit.pt`` is a training state by parameter name, ``OUT/dequantized.pt`` what bitsandbytes
itself makes of its 8-bit states; ``OUT/ademamix.pt`` and ``OUT/lion.pt`` have other forms.
``OUT/fsdp1_full.pt`` is what FSDP gathers of two ranks. ``OUT/trainer/NAME`` are checkpoints of
transformers' Trainer, each with the names of the parameters by group in ``names.json``.
``OUT/torchao/NAME.pt`` are quantized models, ``NAME.wide.pt`` what torchao's ``dequantize()`` makes
of their weights; ``OUT/torchao/int8_fp16.dcp`` is the same in DCP. ``OUT/fsdp2/NAME`` is what torch
saves of torchao's optimizers on two ranks, ``OUT/fsdp2/NAME.pt`` their full states, dequantized.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import torchao.quantization as tq
from bitsandbytes.functional import dequantize_blockwise
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torchao.optim import AdamW4bit, AdamW8bit
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

WRAPPER = "__bnb_optimizer_quant_state__"


def trained(optimizer, model, n_steps=3):
    for _ in range(n_steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    state = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    group = {k: v for k, v in state["param_groups"][0].items() if k != "param_names"}
    return {
        "state": {names[number]: item for number, item in state["state"].items()},
        "param_groups": [{**group, "params": names}],
    }


def blocks(folder):
    class Block(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.w = torch.nn.Linear(width, width, bias=False)
            self.b = torch.nn.Linear(3, 5)

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([Block(64), Block(64)])
    model.odd = torch.nn.Linear(65, 65, bias=False)
    states = trained(bnb.optim.AdamW8bit(model.parameters(), lr=1e-2), model)
    torch.save({"model": model.state_dict(), "optimizer": states}, folder / "adamw8bit.pt")
    wide = {}
    for name, item in states["state"].items():
        state = item[WRAPPER]
        for number, moment in (("1", "exp_avg"), ("2", "exp_avg_sq")):
            codes = state[f"state{number}"]
            wide[f"{name}.{moment}"] = (
                dequantize_blockwise(
                    codes,
                    absmax=state[f"absmax{number}"],
                    code=state[f"qmap{number}"],
                    blocksize=256,
                )
                if codes.dtype == torch.uint8
                else codes
            )
    torch.save(wide, folder / "dequantized.pt")
    small = torch.nn.Linear(64, 64, bias=False)
    for name, kind in (("ademamix", bnb.optim.AdEMAMix8bit), ("lion", bnb.optim.Lion8bit)):
        states = trained(kind(small.parameters(), lr=1e-3), small)
        torch.save({"model": small.state_dict(), "optimizer": states}, folder / f"{name}.pt")


def gathered(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29647")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-2)
    model(torch.randn(4, 64)).pow(2).sum().backward()
    optimizer.step()
    states = FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        weights = {key: value.clone() for key, value in model.state_dict().items()}
    if rank == 0:
        torch.save({"model": weights, "optimizer": states}, folder / "fsdp1_full.pt")
    dist.destroy_process_group()


def by_trainer(folder, optim):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    tokens = torch.randint(0, 256, (8, 8))
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        save_steps=2,
        per_device_train_batch_size=2,
        optim=optim,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        weight_decay=0.1,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[name_of[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups]
    checkpoint = folder / "checkpoint-2"
    for name in ("config.json", "model.safetensors", "optimizer.pt"):
        (checkpoint / name).rename(folder / name)
    (folder / "names.json").write_text(json.dumps(groups))
    for path in checkpoint.iterdir():
        path.unlink()
    checkpoint.rmdir()


def weights_of_torchao(folder):
    folder.mkdir()
    cases = {
        "float8_e5m2": (tq.Float8WeightOnlyConfig(torch.float8_e5m2), torch.float32),
        "int8_fp16": (tq.Int8WeightOnlyConfig(version=2), torch.float16),
        "int8_group_fp32": (
            tq.Int8WeightOnlyConfig(version=2, granularity=tq.PerGroup(32)),
            torch.float32,
        ),
        "intx3_group": (
            tq.IntxWeightOnlyConfig(
                weight_dtype=torch.int3,
                granularity=tq.PerGroup(32),
                mapping_type=tq.quant_primitives.MappingType.ASYMMETRIC,
                version=2,
            ),
            torch.bfloat16,
        ),
    }
    for name, (config, dtype) in cases.items():
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(96, 40), torch.nn.Linear(40, 8, bias=False))
        model = model.to(dtype)
        with torch.no_grad():
            model[0].weight.mul_(torch.logspace(-3, 2, 40, dtype=torch.float32)[:, None])
        tq.quantize_(model[0], config)
        torch.save(model.state_dict(), folder / f"{name}.pt")
        torch.save(model[0].weight.dequantize(), folder / f"{name}.wide.pt")
        if name == "int8_fp16":
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder / f"{name}.dcp")


def sharded(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29648")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for name, kind in (("adamw8bit", AdamW8bit), ("adamw4bit", AdamW4bit)):
        torch.manual_seed(2)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(128, 8))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = kind(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(torch.randn(4, 64)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = get_optimizer_state_dict(model, optimizer)
        full = {
            key: value.full_tensor().dequantize()
            for key, value in states["state"]["0.weight"].items()
            if key != "step"
        }
        if rank == 0:
            torch.save(full, folder / f"{name}.pt")
        dcp.save({"optim": states}, checkpoint_id=folder / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    blocks(out)
    weights_of_torchao(out / "torchao")
    mp.spawn(gathered, (out,), nprocs=2)
    (out / "fsdp2").mkdir()
    mp.spawn(sharded, (out / "fsdp2",), nprocs=2)
    for optim in ("adamw_bnb_8bit", "lion_8bit", "adamw_torch_8bit"):
        by_trainer(out / "trainer" / optim, optim)
