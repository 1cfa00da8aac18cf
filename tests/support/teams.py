"""Teams of forked processes that talk through pipes: the engine's protocol without torch, so that
tests are quick.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from core.engine.team.protocol import StoppedError
from core.errors import WorkerError
from tests.dist_checkpointing.ranks import PRELOADED

TIMEOUT_S = 300
"""Guard against a hang, far above what any test takes."""


@dataclass
class PipeTeam:
    """See ``core.engine.team.protocol.Team``: pipes between the lead and each of the others.

    Args:
        rank, size: of the team.
        pipes: at the lead, by rank (its own place is None); elsewhere the one to the lead.
        alarmed: an event that all share.
    """

    rank: int
    size: int
    pipes: Sequence[Connection | None]
    alarmed: Any
    runtime_bytes: int = 0
    expected: list[int] = field(default_factory=list)
    done_bytes: int = 0
    sent_bytes: int = 0

    @property
    def hosts(self) -> Sequence[str]:
        return [f"host{rank}" for rank in range(self.size)]

    def gather(self, data: bytes) -> list[bytes] | None:
        if self.rank:
            self._send(self.pipes[0], data)
            return None
        return [data, *(self._received(pipe) for pipe in self.pipes[1:])]

    def broadcast(self, data: bytes) -> bytes:
        if self.rank:
            return self._received(self.pipes[0])
        for pipe in self.pipes[1:]:
            self._send(pipe, data)
        return data

    def expect(self, n_bytes: int) -> None:
        self.expected.append(n_bytes)

    def advance(self, n_bytes: int) -> None:
        self.done_bytes += n_bytes
        if self.alarmed.is_set():
            raise StoppedError

    def alarm(self) -> None:
        self.alarmed.set()

    def _send(self, pipe: Connection | None, data: bytes) -> None:
        assert pipe is not None
        self.sent_bytes += len(data)
        try:
            pipe.send_bytes(data)
        except OSError as err:
            raise WorkerError("a worker is gone") from err

    def _received(self, pipe: Connection | None) -> bytes:
        assert pipe is not None
        try:
            if not pipe.poll(TIMEOUT_S):
                raise WorkerError("a worker is silent")
            return pipe.recv_bytes()
        except (OSError, EOFError) as err:
            raise WorkerError("a worker is gone") from err


def run_team(
    n: int, function: Callable[..., Any], *args: Any, allow_failure: bool = False
) -> list[Any]:
    """What ``function(team, *args)`` returns on each of ``n`` ranks.

    Args:
        n: number of processes.
        function: at the top level of a module.
        args: picklable.
        allow_failure: return what a failed rank raised, or None for one that died, in place of
            failing.

    Raises:
        AssertionError: a rank raised (with its traceback), died, or did not end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.support.teams"])
    alarmed = context.Event()
    pairs = [context.Pipe() for _ in range(n)]
    results = [context.Pipe(duplex=False) for _ in range(n)]
    processes = []
    for rank in range(n):
        own_pipes = [None, *(end for end, _ in pairs[1:])] if rank == 0 else [pairs[rank][1]]
        team = PipeTeam(rank, n, own_pipes, alarmed)
        process = context.Process(target=_rank, args=(team, results[rank][1], function, args))
        process.start()
        processes.append(process)
    for pair in pairs:  # so that a process that dies closes its pipes
        for pipe in pair:
            pipe.close()
    for _, sender in results:
        sender.close()
    outcomes: list[tuple[str, Any, str]] = []
    for rank, (receiver, _) in enumerate(results):
        try:
            outcomes.append(receiver.recv() if receiver.poll(TIMEOUT_S) else ("hung", None, "hung"))
        except EOFError:
            outcomes.append(("died", None, "died"))
        receiver.close()
        if outcomes[-1][0] == "hung":
            processes[rank].kill()
    for process in processes:
        process.join(TIMEOUT_S)
    failed = [
        f"rank {rank}: {text}"
        for rank, (kind, _, text) in enumerate(outcomes)
        if kind != "returned"
    ]
    if failed and not allow_failure:
        raise AssertionError("\n".join(failed))
    return [value for _, value, _ in outcomes]


def _rank(
    team: PipeTeam, result: Connection, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    try:
        result.send(("returned", function(team, *args), ""))
    except BaseException as err:
        try:
            result.send(("raised", err, traceback.format_exc()))
        except Exception:
            result.send(("raised", None, traceback.format_exc()))
        os._exit(1)
