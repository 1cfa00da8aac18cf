"""What one rank of scripts/bench api does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

ROWS, COLUMNS = 4096, 1024
State = dict[str, torch.Tensor]
Tool = tuple[Callable[[State, Path], object], Callable[[State, Path], State]]


def tools() -> dict[str, Tool]:
    """Name → how to save a state dict of local tensors, and how to fill one."""
    return {
        "ckpt": _sharded("core.dist_checkpointing"),
        "torch dcp": _torch(),
        "megatron-core": _megatron(),
    }


def _megatron() -> Tool:
    install_megatron()
    return _sharded("megatron.core.dist_checkpointing")


def install_megatron() -> None:
    """Makes megatron-core work without an accelerator."""
    from tests.real_megatron import cpu

    with contextlib.redirect_stdout(io.StringIO()):
        cpu.install()


def sharded(package: str) -> tuple[Any, Any, Callable[[State], dict[str, Any]]]:
    """A package like ``core.dist_checkpointing``, its async_utils, and what makes its sharded state
    dicts.
    """
    library = import_module(package)
    sharded_tensor = import_module(f"{package}.mapping").ShardedTensor
    rank, world = dist.get_rank(), dist.get_world_size()

    def wrapped(state: State) -> dict[str, Any]:
        return {
            key: sharded_tensor.from_rank_offsets(key, data, (0, rank, world))
            for key, data in state.items()
        }

    return library, import_module(f"{package}.strategies.async_utils"), wrapped


def _sharded(package: str) -> Tool:
    library, _, wrapped = sharded(package)

    def save(state: State, path: Path) -> None:
        library.save(wrapped(state), str(path))

    def load(state: State, path: Path) -> State:
        return library.load(wrapped(state), str(path))

    return save, load


def torch_state() -> Callable[[State], dict[str, Any]]:
    """What makes a state dict of DTensors of local tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def wrapped(state: State) -> dict[str, Any]:
        return {
            key: DTensor.from_local(data, mesh, [Shard(0)], run_check=False)
            for key, data in state.items()
        }

    return wrapped


def _torch() -> Tool:
    wrapped = torch_state()

    def save(state: State, path: Path) -> None:
        dcp.save(wrapped(state), checkpoint_id=path)

    def load(state: State, path: Path) -> State:
        dcp.load(wrapped(state), checkpoint_id=path)
        return state

    return save, load


def measured(work: Callable[[], None]) -> dict[str, float]:
    """Seconds of the slowest rank, and the most bytes that the work took beyond what was there."""
    os.sync()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    found = torch.tensor(
        [time.perf_counter() - began, float(_status("VmHWM") - before)], dtype=torch.float64
    )
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {"seconds": found[0].item(), "extra_bytes": found[1].item()}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def begun(size: float) -> State:
    """Joins the ranks; returns this one's share of a state dict of ``size`` GiB."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    n_tensors = max(1, round(size * (1 << 30) / (ROWS * COLUMNS * 4)))
    return {
        f"layers.{n}.weight": torch.randn(ROWS // dist.get_world_size(), COLUMNS)
        for n in range(n_tensors)
    }


def main(scratch_dir: Path, size: float, n_runs: int) -> None:
    state = begun(size)
    rank = dist.get_rank()
    other = {key: torch.empty_like(data).fill_(-1) for key, data in state.items()}
    known = tools()
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        "save": {name: [] for name in known},
        "load": {},
    }
    found["load"] = {name: [] for name in known}
    for run in range(n_runs):
        names = [*known][run % len(known) :] + [*known][: run % len(known)]
        for name in names:
            save, load = known[name]
            path = scratch_dir / f"{name.replace(' ', '_')}-{run}"
            if rank == 0:
                path.mkdir()
            dist.barrier()
            found["save"][name].append(measured(lambda save=save, path=path: save(state, path)))
            for data in other.values():
                data.fill_(-1)
            loaded: State = {}
            found["load"][name].append(
                measured(
                    lambda load=load, path=path, loaded=loaded: loaded.update(load(other, path))
                )
            )
            if not all(torch.equal(data, loaded[key]) for key, data in state.items()):
                raise SystemExit(f"{name} did not load what it had saved")
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
    if rank == 0:
        (scratch_dir / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
