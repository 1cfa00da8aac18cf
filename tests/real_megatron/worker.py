"""Runs trainings in real megatron-core: ``python -m tests.real_megatron.worker`` with one job a
line on standard input.

It imports torch and megatron-core once and forks one process per rank for every job; they talk
through gloo. It answers each job with a line: ``{}``, or what went wrong by rank. With ``--ours``,
megatron-core saves and loads through this project (``as_megatron``). A job is an object:

- ``run``: what ``Run.as_json`` says; ``out``: a folder;
- ``load``: ``form``, ``dir``, ``sharding``, ``way``, ``optim`` (whether with the optimizer), or
  null;
- ``steps``: how many are trained before saving; ``fill``: whether all values are replaced by known
  ones then;
- ``save``: a list of ``form`` (rank_files, torch_dist, zarr), ``dir``, ``sharding``, ``way``;
- ``more``: how many steps are trained after that.

Every rank writes ``out/before/rank<r>.pt`` (its pieces of all tensors when all was saved or loaded)
and ``out/after/…`` (the same after the last steps, with their losses).
"""

from __future__ import annotations

import json
import multiprocessing.util
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 240


def _rank(job: dict[str, Any], rank: int, meeting: Path) -> None:
    """What one process does."""
    import torch
    import torch.distributed as dist

    from tests.real_megatron.checkpoints import (
        load_distributed,
        load_rank_files,
        save_distributed,
        save_rank_files,
    )
    from tests.real_megatron.setting import ITERATION, run_of
    from tests.real_megatron.snapshot import pieces
    from tests.real_megatron.training import started, stop, trained
    from tests.real_megatron.values import clear_padding, fill

    torch.set_num_threads(1)
    run = run_of(job["run"])
    store = dist.FileStore(str(meeting), run.layout.world)
    os.environ["WORLD_SIZE"], os.environ["RANK"] = str(run.layout.world), str(rank)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=run.layout.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    training = started(run)
    fill(training, salt="loaded over" if job["load"] else "")
    load = job["load"]
    if load is not None and load["optim"]:
        trained(training, range(1))  # so that there are states to load over
        training.scheduler.num_steps = 0  # loading adds to it
    if load is not None and load["form"] == "rank_files":
        load_rank_files(training, Path(load["dir"]), optim=load["optim"])
    elif load is not None:
        load_distributed(
            training,
            Path(load["dir"]),
            sharding=load["sharding"],
            way=load["way"],
            optim=load["optim"],
        )
    trained(training, range(job["steps"]))
    if job["fill"]:
        fill(training, salt="", states=True)
    if job["save"]:
        clear_padding(training)
    for save in job["save"]:
        if save["form"] == "rank_files":
            save_rank_files(training, Path(save["dir"]))
        else:
            place, backend = Path(save["dir"]), save["form"]
            save_distributed(
                training, place, sharding=save["sharding"], backend=backend, way=save["way"]
            )
    out = Path(job["out"])
    _write(out / "before" / f"rank{rank}.pt", {"pieces": pieces(training), "losses": []})
    if job["more"]:
        losses = trained(training, range(ITERATION, ITERATION + job["more"]))
        _write(out / "after" / f"rank{rank}.pt", {"pieces": pieces(training), "losses": losses})
    dist.barrier()
    stop()


def _write(path: Path, value: object) -> None:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def _forked(job: dict[str, Any], rank: int, meeting: Path, report: Path) -> int:
    """Starts one process; its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        _rank(job, rank, meeting)
        status = 0
    except BaseException:
        report.write_text(traceback.format_exc())
    finally:
        multiprocessing.util._exit_function()  # ends what 0.12.1 starts for its results
        os._exit(status)


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job; what went wrong, by rank."""
    from tests.real_megatron.setting import run_of

    world = run_of(job["run"]).layout.world
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder) / f"report{rank}" for rank in range(world)]
        running = {
            _forked(job, rank, Path(folder) / "meeting", reports[rank]): rank
            for rank in range(world)
        }
        failed = _waited(running)
        texts = {
            str(rank): reports[rank].read_text() for rank in range(world) if reports[rank].exists()
        }
        return texts or {str(rank): "ended without a word" for rank in failed}


def _waited(running: dict[int, int]) -> list[int]:
    """Waits for all processes; once one has failed, or none answers, the others are ended. Ranks
    that failed.
    """
    failed = []
    end = time.monotonic() + TIMEOUT_S
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            rank = running.pop(process)
            if status:
                failed.append(rank)
                end = min(end, time.monotonic() + 5)
        elif time.monotonic() > end:
            for other, rank in running.items():
                os.kill(other, 9)
                failed.append(rank)
            end = float("inf")
        else:
            time.sleep(0.01)
    return failed


def main() -> None:
    """Answers jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tests.real_megatron.cpu import install

    if "--ours" in sys.argv[1:]:
        from core.dist_checkpointing import as_megatron

        as_megatron()
    install()
    # All that ranks import, before they are forked: a third of the time of a short training.
    import megatron.core.optimizer
    import megatron.core.transformer.transformer_config  # noqa: F401

    import tests.real_megatron.checkpoints
    import tests.real_megatron.snapshot
    import tests.real_megatron.values  # noqa: F401

    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
