"""Teams of forked processes that talk through torch.distributed, as workers do, but without the 3 s
of importing it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ckpt_cli.host.rank_env import WorkerIdentity
from tests.dist_checkpointing.ranks import PRELOADED

TIMEOUT_S = 120
"""Guard against a hang, far above what any test takes."""


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def place(rank: int, size: int, port: int, *, has_store: bool = False) -> WorkerIdentity:
    """A worker's place on this host."""
    return WorkerIdentity("a test", rank, size, rank, size, "127.0.0.1", port, has_store=has_store)


def joined(
    where: WorkerIdentity, *, timeout_s: float = 60.0, facts: dict[str, Any] | None = None
) -> Any:
    """The ``TorchTeam`` of a place."""
    from ckpt_cli.workers.rendezvous import meet_workers
    from ckpt_cli.workers.torch_team import TorchTeam

    meeting = meet_workers(
        where, facts or {}, lambda members: None, timeout_s=timeout_s, join_timeout_s=TIMEOUT_S
    )
    return TorchTeam(
        where, meeting, backend="gloo", device="cpu", data_device="cpu", timeout_s=timeout_s
    )


def run_torch_team(
    n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """What ``function(team, *args)`` returns or raises on each of ``n`` ranks; None for a rank that
    died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(n)]
    processes = [
        context.Process(
            target=_rank, args=(place(rank, n, port), timeout_s, pipes[rank][1], function, args)
        )
        for rank in range(n)
    ]
    results: list[Any] = []
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        for receiver, _ in pipes:
            try:
                assert receiver.poll(TIMEOUT_S), "a rank hung"
                results.append(receiver.recv())
            except EOFError:
                results.append(None)
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    return results


def _rank(
    where: WorkerIdentity,
    timeout_s: float,
    result: Connection,
    function: Callable[..., Any],
    args: Any,
) -> None:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    team = None
    try:
        team = joined(where, timeout_s=timeout_s)
        result.send(function(team, *args))
    except BaseException as err:
        try:
            result.send(err)
        except Exception:
            result.send(AssertionError(traceback.format_exc()))
    if team is not None:
        team.end()
    os._exit(0)
