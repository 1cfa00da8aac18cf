"""Make ZeRO checkpoints of other optimizers: ``deepspeed_optimizers.py OUT``, on two ranks.

``OUT/sgdS`` is of SGD with momentum, ``OUT/bnbS`` of bitsandbytes' AdamW8bit, with ZeRO stage S;
``OUT/NAME.pt`` are the masters and momenta that DeepSpeed itself gathers of the live engine. With
``deepspeed_optimizers.py OUT CHECKPOINT``, an engine of SGD loads a universal checkpoint, and
writes whether it has the numbers of ``OUT/sgd1.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.multiprocessing as mp
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

MOMENTUM = "momentum_buffer"


def engine_of(case, stage, is_universal):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 96), torch.nn.Linear(96, 64, bias=False)]
    model = torch.nn.Sequential(*layers)
    if case == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        import bitsandbytes as bnb

        optimizer = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if is_universal:
        config["checkpoint"] = {"load_universal": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return model, engine


def step(engine):
    loss = engine(torch.randn(2, 64, dtype=torch.bfloat16)).float().pow(2).mean()
    engine.backward(loss)
    engine.step()


def gathered(model, case):
    result = {}
    for name, parameter in model.named_parameters():
        result[name] = safe_get_full_fp32_param(parameter)
        if case == "sgd":
            result[f"{name}.{MOMENTUM}"] = safe_get_full_optimizer_state(parameter, MOMENTUM)
    return result


def work(rank, folder, case, stage, source, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    deepspeed.init_distributed("gloo")
    model, engine = engine_of(case, stage, source is not None)
    if source is not None:
        step(engine)
        engine.load_checkpoint(source)
        result, expected = gathered(model, case), torch.load(folder / "sgd1.pt")
        if rank == 0:
            is_equal = all(torch.equal(result[key], expected[key]) for key in expected)
            sys.stdout.write(f"equal: {is_equal}\n")
        return
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(str(folder / f"{case}{stage}"))
    result = gathered(model, case)
    if rank == 0:
        torch.save(result, folder / f"{case}{stage}.pt")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) > 2:
        mp.spawn(work, (out, "sgd", 2, sys.argv[2], 29660), nprocs=2)
        sys.exit()
    for number, (case, stage) in enumerate((("sgd", 1), ("sgd", 2), ("bnb", 1), ("bnb", 2))):
        mp.spawn(work, (out, case, stage, None, 29661 + number), nprocs=2)
