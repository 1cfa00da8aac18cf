"""Runs a function on several ranks: processes that talk through torch.distributed with gloo.

Importing takes seconds, so the processes are forked from a server that has imported already what
tests use.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = """
    torch torch.distributed.checkpoint torch.distributed.tensor torch.distributed.fsdp numpy
    core.dist_checkpointing.storage_reader core.dist_checkpointing.storage_writer
    core.dist_checkpointing.strategies.zarr core.dist_checkpointing.strategies.tensorstore
    core.dist_checkpointing.strategies.fully_parallel core.dist_checkpointing.strategies.two_stage
    pytest hypothesis megatron.core.dist_checkpointing tests.dist_checkpointing.ranks
    """.split()
"""What cannot be imported is passed over."""
TIMEOUT_S = 300
"""Guard against a hang, far above what any test takes."""


def run_ranks(
    n: int, function: Callable[..., Any], *args: Any, allow_failure: bool = False
) -> list[Any]:
    """What ``function(rank, world_size, *args)`` returns on each of ``n`` ranks.

    Args:
        n: number of processes.
        function: at the top level of a module.
        args: picklable.
        allow_failure: return what a failed rank raised, as ``(type name, text)``, in place of
            failing.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or did not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(number, n, folder, results, function, args))
            for number in range(n)
        ]
        for process in processes:
            process.start()
        outcomes: dict[int, tuple[str, Any, str]] = {}
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=TIMEOUT_S)
        try:
            while len(outcomes) < n and datetime.datetime.now() < deadline:
                if not results.empty():
                    number, *outcome = results.get()
                    outcomes[number] = tuple(outcome)
                elif all(not process.is_alive() for process in processes) and results.empty():
                    break
                else:
                    processes[min(set(range(n)) - set(outcomes))].join(0.02)
            for process in processes:
                process.join(5)
        finally:
            for process in processes:  # they are no daemons, for these may not start writers
                if process.is_alive():
                    process.kill()
    missing = sorted(set(range(n)) - set(outcomes))
    failed = {number: outcome for number, outcome in outcomes.items() if outcome[0] == "raised"}
    if missing or (failed and not allow_failure):
        texts = [f"rank {number}: {outcome[2]}" for number, outcome in sorted(failed.items())]
        if missing:
            texts.append(f"ranks {missing} died or hung")
        raise AssertionError("\n".join(texts))
    return [outcomes[number][1] for number in range(n)]


def _rank(
    number: int, n: int, folder: str, results: Any, function: Callable[..., Any], args: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), WORLD_SIZE=str(n), LOCAL_RANK=str(number))
    try:
        dist.init_process_group(
            "gloo",
            init_method=Path(folder, "rendezvous").as_uri(),
            rank=number,
            world_size=n,
            timeout=datetime.timedelta(seconds=120),
        )
        value = function(number, n, *args)
        results.put((number, "returned", value, ""))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as err:
        results.put((number, "raised", (type(err).__name__, str(err)), traceback.format_exc()))
        sys.stdout.flush()
        os._exit(1)
