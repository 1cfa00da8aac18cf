"""Saves a Llama of transformers after three steps, and what the same run makes of two more.

    torchrun --nproc-per-node 2 llama_runs.py CASE FOLDER

CASE is ``zero1``, ``zero2`` or ``zero3`` (DeepSpeed), or ``fsdp2`` (FSDP2, saved as DCP by an
application's own state). Batches are those of tests/real_megatron, so that Megatron can go on in
place of the run. Writes FOLDER/truth.pt as well: ``states``, the fp32 weights and the moments when
the run was saved, by name, and ``losses``, the mean losses of the two steps that followed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

N_SAVED, N_MORE = 3, 2
BATCH, SEQUENCE, VOCABULARY = 4, 8, 32
STATES = ("exp_avg", "exp_avg_sq")


def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
            rms_norm_eps=1e-5,
            initializer_range=0.1,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def adam(net: torch.nn.Module) -> torch.optim.AdamW:
    """The optimizer, with the groups that Megatron makes: vectors have no weight decay."""
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def tokens_of(step: int) -> torch.Tensor:
    """Return this rank's samples of a step: those of tests/real_megatron/training.py."""
    samples = range(dist.get_rank(), BATCH, dist.get_world_size())
    rows = []
    for sample in samples:
        generator = torch.Generator().manual_seed(1000 * step + sample)
        rows.append(torch.randint(0, VOCABULARY, (1, SEQUENCE + 1), generator=generator))
    return torch.cat(rows)


def trained(steps: range, net: Any, update: Callable[[torch.Tensor], None]) -> list[float]:
    """Train, and return the mean loss of each step over all ranks."""
    losses = []
    for step in steps:
        tokens = tokens_of(step)
        loss = net(input_ids=tokens, labels=tokens).loss
        update(loss)
        mean = loss.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def deepspeed_run(stage: int, folder: str) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # would compile C++
    deepspeed.init_distributed("gloo")
    net = model()
    settings = {
        "train_micro_batch_size_per_gpu": BATCH // 2,
        "bf16": {"enabled": stage > 1},
        "gradient_clipping": 100.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=net, optimizer=adam(net), config=settings)

    def update(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    trained(range(N_SAVED), engine, update)
    engine.save_checkpoint(folder)
    if stage < 3:
        # 0.19.8 links the states after the step of the first group, when the second has none.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    states = {}
    for name, parameter in net.named_parameters():
        states[name] = {"fp32": safe_get_full_fp32_param(parameter).clone()}
        for state in STATES:
            states[name][state] = safe_get_full_optimizer_state(parameter, state).clone()
    losses = trained(range(N_SAVED, N_SAVED + N_MORE), engine, update)
    if dist.get_rank() == 0:
        net.config.save_pretrained(folder)
    return {"states": states, "losses": losses}


def fsdp2_run(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = adam(net)

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trained(range(N_SAVED), net, update)
    weights, optim = get_state_dict(net, optimizer)
    dcp.save({"app": {"model": weights, "optim": optim}}, checkpoint_id=f"{folder}/step-3")
    weights, optim = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))
    states = {
        name: {"fp32": weight.clone(), **{s: optim["state"][name][s].clone() for s in STATES}}
        for name, weight in weights.items()
    }
    losses = trained(range(N_SAVED, N_SAVED + N_MORE), net, update)
    if dist.get_rank() == 0:
        net.config.save_pretrained(folder)
    return {"states": states, "losses": losses}


def main(case: str, folder: str) -> None:
    truth = fsdp2_run(folder) if case == "fsdp2" else deepspeed_run(int(case[-1]), folder)
    if dist.get_rank() == 0:
        torch.save(truth, Path(folder) / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
