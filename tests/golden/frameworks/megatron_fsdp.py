"""Writes the checkpoints of tests/golden/megatron_fsdp.tar.xz: Megatron-FSDP, megatron-core 0.16.1.

    PYTHONPATH=. python tests/golden/frameworks/megatron_fsdp.py DIR
    PYTHONPATH=. python tests/golden/frameworks/megatron_fsdp.py DIR RUN

With RUN, what ``Run.as_json`` says as a JSON file, DIR gets the checkpoint of that run only.

Needs einops beside the packages of the tests. megatron-core's wheels do not contain the training
script, so what ``--ckpt-format fsdp_dtensor`` does (Megatron-LM d98e8a64
``training/checkpointing.py``: ``generate_state_dict``, ``preprocess_fsdp_dtensor_state_dict``) is
put together here of its parts.
Every case is a folder of a run: two AdamW steps, then the checkpoint. ``truth.pt`` has the masters
and moments of the live optimizer by name, gathered from all ranks, gated layers whole with the gate
rows of all TP ranks first.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from tests.real_megatron.setting import ITERATION, SEQUENCE, Layout, Model, Optimizer, Run, run_of

DENSE = Model(layers=2, hidden=16, ffn=24, vocab=60, divisible_by=16)
MOE = Model(layers=2, hidden=16, ffn=24, vocab=60, divisible_by=16, experts=4, first_dense=1)
TIED = replace(DENSE, is_tied=True)
BIASES = replace(DENSE, is_gated=False, has_bias=True, normalization="LayerNorm")
BF16, FP32 = Optimizer(kind="distributed"), Optimizer(kind="fp32")
CASES = {
    "dense_dp2": Run(model=DENSE, layout=Layout(dp=2), optimizer=BF16),
    "experts": Run(model=MOE, optimizer=BF16),
    "experts_ep2": Run(model=MOE, layout=Layout(ep=2, dp=2), optimizer=BF16),
    "tied_tp2": Run(model=TIED, layout=Layout(tp=2), optimizer=BF16),
    "fp32_dp2": Run(model=BIASES, layout=Layout(dp=2), optimizer=FP32),
}
NAMES = {"distrib_optim_sharding_type": "fsdp_dtensor"}


class _DeviceIsCpu(TorchFunctionMode):
    """Devices asked for as a GPU are the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device and args and str(args[0]).startswith("cuda"):
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


def _use_cpu() -> None:
    """Answer the further calls that Megatron-FSDP takes a GPU for."""
    from tests.real_megatron import adam, cpu

    cpu.install()
    _DeviceIsCpu().__enter__()
    of_groups = DeviceMesh.from_group
    DeviceMesh.from_group = staticmethod(  # type: ignore[method-assign]
        lambda group, device_type, *args, **kwargs: of_groups(group, "cpu", *args, **kwargs)
    )
    # With TP, megatron-core asks whether modules are of this class even without Transformer Engine.
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    mcore_fsdp_adapter.TELinear = type("TELinear", (), {})
    torch.cuda.empty_cache = lambda: None
    torch.cuda.get_rng_state = lambda *args: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *args: None
    adam.use()


def _wrapped(run: Run, config: Any) -> tuple[Any, Any]:
    """Return the model within Megatron-FSDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    from tests.real_megatron import training

    model = training._model(run, config, vp_stage=0)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        check_for_nan_in_grad=False,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=False,  # only NCCL has it
    )
    inner = Float16Module(config, model) if config.bf16 else model
    chunk = FullyShardedDataParallel(config, ddp, inner, device=torch.device("cpu"))
    settings = OptimizerConfig(
        optimizer=run.optimizer.name,
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        use_distributed_optimizer=True,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(settings, [chunk])
    # Ranks without a part of a parameter have an empty state, at the same place of the order.
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in member.optimizer.param_groups:
            for parameter in group["params"]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                member.optimizer.state[parameter] = zeros
    return chunk, optimizer


def _train(run: Run, chunk: Any, optimizer: Any) -> None:
    """Do two steps, on other tokens on every data parallel rank."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    # Experts with TP need sequence parallelism to train, for which norms need Transformer Engine.
    chunk.train(run.model.experts is None or run.layout.tp == 1)
    for _ in range(2):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        tokens = torch.randint(0, DENSE.vocab, (1, SEQUENCE + 1), generator=generator)
        positions = torch.arange(SEQUENCE)[None]
        labels = tokens[:, 1:].contiguous()
        loss = chunk(tokens[:, :-1].contiguous(), positions, mask, labels=labels).float().mean()
        loss.backward()
        chunk.finish_grad_sync()
        optimizer.step()


def _truth(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return the masters and moments of the live optimizer as whole tensors."""
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        gather_and_compute_chunk_metadata,
    )

    # Every rank tells where in the whole tensor its own elements lie.
    shards = []
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, state in member.optimizer.state.items():
            name = member._param_name(parameter).replace("module.", "")
            for kind, tensor in {"fp32_param": parameter.detach(), **state}.items():
                chunk = gather_and_compute_chunk_metadata(tensor)
                place = tuple(
                    slice(start, start + n)
                    for start, n in zip(chunk.offsets, chunk.sizes, strict=True)
                )
                shards.append((f"{kind}.{name}", tensor.shape, place, tensor.to_local()))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, shards)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape, place, shard in (entry for entries in gathered for entry in entries):
        tensors.setdefault(name, torch.full(shape, torch.nan))[place] = shard

    # A TP rank's rows of a gated layer are gate and up.
    n = parallel_state.get_tensor_model_parallel_world_size()
    for name, tensor in tensors.items():
        assert not tensor.isnan().any(), f"{name} is not covered"
        if n > 1 and ".linear_fc1." in name:
            parts = tensor.chunk(2 * n)
            tensors[name] = torch.cat([*parts[::2], *parts[1::2]])
    return tensors


def _save(run: Run, chunk: Any, optimizer: Any, folder: Path) -> None:
    """Save as ``--ckpt-format fsdp_dtensor``."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )
    from megatron.core.transformer import fsdp_dtensor_checkpoint as fsdp

    from tests.real_megatron import training
    from tests.real_megatron.setting import arguments

    args = arguments(run)
    args.use_megatron_fsdp, args.ckpt_format = True, "fsdp_dtensor"
    args.use_distributed_optimizer = True
    args.layernorm_epsilon, args.rotary_base, args.rotary_percent = 1e-5, 10000, 1.0
    model = chunk.module
    weights = model.state_dict_for_save_checkpoint()
    states = optimizer.sharded_state_dict({}, is_loading=False, metadata=NAMES)
    if run.model.is_gated:
        weights, states = fsdp.handle_swiglu_in_state_dict(model, weights, states)
    if run.model.experts is not None:
        weights = fsdp.handle_experts_in_state_dict(weights, run.model.experts)
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": weights,
        "optimizer": states,
        "opt_param_scheduler": training._scheduler(optimizer).state_dict(),
        "num_floating_point_operations_so_far": 1,
    }
    fsdp.handle_fp8_extra_state_case(state["model"])
    preprocess_state_dict_for_uneven_dtensor(state)
    writer = dcp.FileSystemWriter(folder / f"iter_{ITERATION:07d}")
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def _rank(rank: int, run: Run, folder: Path, meeting: str) -> None:
    layout = run.layout
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": str(layout.world), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(meeting, layout.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world)
    _use_cpu()
    from megatron.core import parallel_state

    from tests.real_megatron import training

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    torch.manual_seed(1)
    chunk, optimizer = _wrapped(run, training._config(run))
    _train(run, chunk, optimizer)
    _save(run, chunk, optimizer, folder)
    truth = _truth(optimizer)  # saving has put the parameters of the optimizer into the model
    if rank == 0:
        torch.save(truth, folder / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def save(run: Run, folder: Path) -> None:
    """Train a run in as many processes as it has, and save it."""
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as meeting_dir:
        arguments = (run, folder, f"{meeting_dir}/store")
        torch.multiprocessing.spawn(_rank, arguments, nprocs=run.layout.world)


def main(out_dir: Path, run_file: Path | None = None) -> None:
    """Write every case into a folder of its own, or one run."""
    if run_file is not None:
        save(run_of(json.loads(run_file.read_text())), out_dir)
        return
    for name, run in CASES.items():
        save(run, out_dir / name)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
