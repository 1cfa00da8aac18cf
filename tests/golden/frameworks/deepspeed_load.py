"""Loads a universal checkpoint into a DeepSpeed engine, and writes what the engine then holds.

    torchrun --nproc-per-node N deepspeed_load.py KIND STAGE FOLDER OUT [CONFIG]

KIND is the model: ``transformers`` (of CONFIG, a config.json), ``autotp`` (the same with two
tensor-parallel ranks), ``pipeline`` and ``pipeline_tp2`` (that of deepspeed_pipeline.py), or
``moe_…:EP`` (a case of deepspeed_moe.py, with that expert parallel size). STAGE is that of ZeRO.
OUT gets, for each rank, a file with the fp32 weights, the moments, the steps and the settings of
the groups, and the losses of training after loading. A FOLDER that is not universal is loaded as
the engine's own. Parameters of experts get their global numbers.
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
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

STATES = ("exp_avg", "exp_avg_sq")


def main(kind: str, stage: str, folder: str, out: str, config: str | None = None) -> None:
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile C++
    deepspeed.init_distributed("gloo")
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": int(stage), "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": Path(folder, "latest_universal").exists()},
    }
    if kind.startswith("pipeline"):
        from deepspeed_pipeline import pipeline  # which takes the TP size from argv

        net: Any = pipeline()
        settings |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    elif kind.startswith("moe"):
        from deepspeed_moe import CASES, ExpertNet

        kind, _, ep = kind.partition(":")
        layers = [(size, n, int(ep), residual) for size, n, _, residual in CASES[kind][1]]
        net = ExpertNet(layers)
    else:
        from transformers import AutoConfig, AutoModelForCausalLM

        assert config is not None
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
        if kind == "autotp":
            settings["tensor_parallel"] = {"autotp_size": 2}
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.4},
    ]
    if kind.startswith("moe"):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer(
            [group | {"name": str(number)} for number, group in enumerate(groups)]
        )
        groups = [group for group in groups if group["params"]]
    if kind == "autotp":  # as many groups as the run that saved, or DeepSpeed loads only the first
        groups = [{"params": list(net.parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=1e-9)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
    path, client = engine.load_checkpoint(folder)
    assert path is not None, "nothing was loaded"

    if not settings["checkpoint"]["load_universal"]:
        # The states that were loaded are linked to the parameters only by a step.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    # What the engine holds, of each parameter of this rank.
    values: dict[str, Any] = {}
    for name, parameter in engine.module.named_parameters():
        if kind.startswith("moe"):
            from deepspeed_moe import global_name

            name = global_name(net, name)
        values[name] = safe_get_full_fp32_param(parameter).detach().clone()
        for state in STATES:
            value = safe_get_full_optimizer_state(parameter, state)
            values[f"{name}/{state}"] = value.detach().clone()
    inner = engine.optimizer.optimizer
    steps = [float(state["step"]) for state in inner.state.values() if "step" in state]
    decay = [group["weight_decay"] for group in inner.param_groups]
    names = [group.get("name") for group in inner.param_groups]
    global_steps = engine.global_steps

    # Training goes on.
    losses: list[float] = []
    torch.manual_seed(7)
    if kind.startswith("pipeline"):
        tokens = torch.randint(0, 11, (4, 5))
        loss = engine.train_batch(iter([(tokens, tokens)] * 2))
    elif kind.startswith("moe"):
        for step in range(4):
            torch.manual_seed(70 + step * 10 + dist.get_rank())
            tokens = torch.randint(0, 11, (16, 7))
            logits = engine(tokens).float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens.flatten())
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.save_checkpoint(f"{out}/saved")
    else:
        tokens = torch.randint(0, engine.module.config.vocab_size, (2, 7))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    Path(out).mkdir(parents=True, exist_ok=True)
    content = {
        "values": values,
        "steps": steps,
        "decay": decay,
        "names": names,
        "global_steps": global_steps,
        "client": sorted(client),
        "loss": float(loss),
        "losses": losses,
    }
    torch.save(content, f"{out}/rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
