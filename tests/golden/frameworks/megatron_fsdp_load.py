"""Loads ``fsdp_dtensor`` checkpoints into Megatron-FSDP strictly, and trains on.

    PYTHONPATH=. python …/megatron_fsdp_load.py RUN CHECKPOINT OUT [--no-optim]

Needs einops beside the packages of the tests. RUN is what ``Run.as_json`` says, as a JSON file;
CHECKPOINT the folder of an iteration. As for writing (``megatron_fsdp.py``), what Megatron-LM
d98e8a64 ``training/checkpointing.py`` does (``_load_base_checkpoint``, ``load_checkpoint``, with
``--strict-fsdp-dtensor-load``) is put together here of megatron-core's parts. OUT gets the live
run's tensors by name (``before``), the losses of two steps, and the tensors after these.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import megatron_fsdp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing

from tests.real_megatron.setting import ITERATION, Run, arguments, run_of

STEPS = 2
STRICT = dcp.DefaultLoadPlanner(allow_partial_load=False)


def _state(run: Run, chunk: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """The state dict into which Megatron's script loads: the optimizer's has dummy values."""
    return {
        "args": arguments(run),
        "checkpoint_version": None,
        "iteration": None,
        "model": chunk.module.state_dict_for_save_checkpoint(),
        **(
            {}
            if optimizer is None
            else {
                "optimizer": optimizer.sharded_state_dict(
                    {}, is_loading=True, metadata=megatron_fsdp.NAMES
                ),
                "opt_param_scheduler": scheduler.state_dict(),
            }
        ),
    }


def _load(run: Run, chunk: Any, optimizer: Any, scheduler: Any, folder: Path) -> None:
    """Load model, optimizer (unless None) and schedule from the folder of an iteration."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )
    from megatron.core.transformer import fsdp_dtensor_checkpoint as fsdp

    raw = _state(run, chunk, optimizer, scheduler)
    state = dict(raw)
    fsdp.handle_fp8_extra_state_case(state["model"])
    raw_model, raw_optimizer = state["model"].copy(), dict(raw.get("optimizer") or {})
    if run.model.is_gated:
        state["model"], halved = fsdp.handle_swiglu_in_state_dict(
            chunk.module, state["model"], state.get("optimizer")
        )
        if optimizer is not None:
            state["optimizer"] = halved
    if run.model.experts is not None:
        state["model"] = fsdp.handle_experts_in_state_dict(state["model"], run.model.experts)
    preprocess_state_dict_for_uneven_dtensor(state)
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), planner=STRICT)
    assert state["iteration"] == ITERATION
    assert state["args"].use_megatron_fsdp and state["args"].ckpt_format == "fsdp_dtensor"

    # The tensors were filled in place; settings and counters are in the loaded dicts.
    chunk.load_state_dict(raw_model, strict=True)
    if optimizer is not None:
        raw_optimizer["param_to_group_meta"] = state["optimizer"]["param_to_group_meta"]
        optimizer.load_state_dict(raw_optimizer)
        scheduler.load_state_dict(state["opt_param_scheduler"])


def _rank(rank: int, run_file: Path, folder: Path, out: Path, meeting: str, optim: bool) -> None:
    run = run_of(json.loads(run_file.read_text()))
    layout = run.layout
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(layout.world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(meeting, layout.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world)
    megatron_fsdp._use_cpu()
    from megatron.core import parallel_state

    from tests.real_megatron import training

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    torch.manual_seed(1)
    config = training._config(run)
    chunk, optimizer = megatron_fsdp._wrapped(run, config)
    scheduler = training._scheduler(optimizer)
    _load(run, chunk, optimizer if optim else None, scheduler, folder)
    result: dict[str, Any] = {"before": megatron_fsdp._truth(optimizer)}

    bare = chunk.module.module
    bare.train()
    live = training.Training(run, config, [chunk], [bare], optimizer, scheduler)
    losses = training.trained(live, range(ITERATION, ITERATION + STEPS))
    shards: list[Any] = [None] * layout.world
    dist.all_gather_object(shards, losses)
    result |= {"losses": shards, "after": megatron_fsdp._truth(optimizer)}
    if rank == 0:
        torch.save(result, out)
    dist.barrier()
    dist.destroy_process_group()


def main(run_file: Path, folder: Path, out: Path, *, optim: bool) -> None:
    """Load and train in as many processes as the run has."""
    world = run_of(json.loads(run_file.read_text())).layout.world
    with tempfile.TemporaryDirectory() as meeting_dir:
        arguments = (run_file, folder, out, f"{meeting_dir}/store", optim)
        torch.multiprocessing.spawn(_rank, arguments, nprocs=world)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), optim="--no-optim" not in sys.argv)
