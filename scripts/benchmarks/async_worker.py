"""What one rank of scripts/bench api --async does: saves a state dict asynchronously, by several
tools in turn.
"""

from __future__ import annotations

import json
import multiprocessing
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
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from scripts.benchmarks.api_worker import State, begun, install_megatron, sharded, torch_state

STEP_SIZE = 256
"""A step of the training that goes on beside: a product of square matrices of that many rows, and
Python around it.
"""

Begin = Callable[[State, Path], Callable[[], object]]
"""Begins an asynchronous save; what it returns waits for its end."""


def tools() -> dict[str, tuple[Begin, Callable[[State, Path], object]]]:
    """Name → how to begin an asynchronous save, and how to save synchronously."""
    install_megatron()
    import_module(
        "megatron.core.dist_checkpointing.strategies.filesystem_async"
    )._results_queue = None  # its own one
    return {
        "ckpt": _sharded("core.dist_checkpointing", persistent=False),
        "ckpt, persistent": _sharded("core.dist_checkpointing", persistent=True),
        "megatron-core": _sharded("megatron.core.dist_checkpointing", persistent=False),
        "torch dcp, thread": _torch(AsyncCheckpointerType.THREAD),
        "torch dcp, process": _torch(AsyncCheckpointerType.PROCESS),
    }


def _sharded(package: str, *, persistent: bool) -> tuple[Begin, Callable[[State, Path], object]]:
    library, utils, wrapped = sharded(package)
    queue = utils.AsyncCallsQueue(persistent)

    def begin(state: State, path: Path) -> Callable[[], object]:
        queue.schedule_async_request(
            library.save(wrapped(state), str(path), async_sharded_save=True)
        )
        return lambda: queue.maybe_finalize_async_calls(blocking=True)

    return begin, lambda state, path: library.save(wrapped(state), str(path))


def _torch(kind: AsyncCheckpointerType) -> tuple[Begin, Callable[[State, Path], object]]:
    wrapped = torch_state()

    def begin(state: State, path: Path) -> Callable[[], object]:
        future: Any = dcp.async_save(
            wrapped(state), checkpoint_id=path, async_checkpointer_type=kind
        )
        return getattr(future, "upload_completion", future).result

    return begin, lambda state, path: dcp.save(wrapped(state), checkpoint_id=path)


def steps(seconds: float) -> float:
    """Seconds of a training step, the mean over about so many seconds."""
    a, n = torch.rand(STEP_SIZE, STEP_SIZE), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            a = torch.nn.functional.normalize(a @ a)
            sum(range(1000))
        n += 10
    return (time.perf_counter() - began) / n


def slowest(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def one_save(begin: Begin, state: State, path: Path) -> dict[str, float]:
    """Times of one asynchronous save, those of the slowest rank."""
    alone = steps(0.5)
    dist.barrier()
    began = time.perf_counter()
    wait = begin(state, path)
    blocks = time.perf_counter() - began
    beside = steps(0.5)
    wait()
    ends = time.perf_counter() - began
    return {"blocks": slowest(blocks), "ends": slowest(ends), "step": slowest(beside / alone)}


def one_sync(save: Callable[[State, Path], object], state: State, path: Path) -> float:
    dist.barrier()
    began = time.perf_counter()
    save(state, path)
    return slowest(time.perf_counter() - began)


def main(scratch_dir: Path, size: float, n_runs: int) -> None:
    state = begun(size)
    rank = dist.get_rank()
    known = tools()
    found: dict[str, dict[str, list[float]]] = {
        name: {"blocks": [], "ends": [], "step": [], "sync": []} for name in known
    }
    for run in range(n_runs + 1):
        for name, (begin, save) in known.items():
            path = scratch_dir / f"{''.join(filter(str.isalnum, name))}-{run}"
            for is_async in (True, False):
                _fresh(path, rank)
                if is_async:
                    for key, value in one_save(begin, state, path).items():
                        found[name][key].append(value)
                else:
                    found[name]["sync"].append(one_sync(save, state, path))
            dist.barrier()
            shutil.rmtree(path, ignore_errors=True)
    if rank == 0:
        (scratch_dir / "result.json").write_text(json.dumps(found))
    dist.barrier()
    for process in multiprocessing.active_children():  # torch's keeps this one from ending
        process.kill()
    dist.destroy_process_group()


def _fresh(path: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        os.sync()
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
