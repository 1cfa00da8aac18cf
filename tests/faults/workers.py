"""A command of ``ckpt`` by several workers: forks of this process that talk through pipes
(``tests.support.teams``).
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from tests.faults.disturb import nothing
from tests.faults.operations import Disturb, read_trace, watch
from tests.faults.process import Ended
from tests.support.teams import PipeTeam

PATIENCE_S = 120
_PAUSE_S = 0.005


class _Flag:
    """An event that processes share, and that the death of one of them leaves in order."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._memory[0] = 1

    def is_set(self) -> bool:
        return self._memory[0] == 1


class Workers:
    """Workers that run.

    Args:
        work: what each of them does, once it is one of the team; returns the exit code.
        n: how many.
        root: the directory whose operations are watched.
        notes_dir: an existing directory elsewhere, for what is noted about each.
        disturbs: what happens at the file operations of some of them, by rank.
    """

    def __init__(
        self,
        work: Callable[[], int],
        n: int,
        *,
        root: Path,
        notes_dir: Path,
        disturbs: Mapping[int, Disturb] | None = None,
    ) -> None:
        self._notes_dir = notes_dir
        self._codes: dict[int, int | None] = {}
        pairs = [Pipe() for _ in range(n)]
        flag = _Flag()
        self._pids: list[int] = []
        for rank in range(n):
            self._trace_path(rank).unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                own_pipes = (
                    [None, *(pipe for pipe, _ in pairs[1:])] if rank == 0 else [pairs[rank][1]]
                )
                _close(pairs, own_pipes)
                team = PipeTeam(rank, n, own_pipes, flag)
                self._be(team, work, root, (disturbs or {}).get(rank, nothing))
            with suppress(OSError):  # whoever comes first, it or its parent
                os.setpgid(pid, self._pids[0] if self._pids else pid)
            self._pids.append(pid)
        _close(pairs, [])

    def kill(self, ranks: Collection[int]) -> None:
        """SIGKILL, and waits for their end."""
        for rank in ranks:
            if rank not in self._codes:
                os.kill(self._pids[rank], signal.SIGKILL)
        for rank in ranks:
            self._wait_for(rank, time.monotonic() + PATIENCE_S)

    def is_running(self, rank: int) -> bool:
        """Whether a worker has not ended."""
        self._look(rank)
        return rank not in self._codes

    def ended(self) -> list[Ended]:
        """How each of them ended, by rank; one that hangs is killed, and its code is None."""
        until = time.monotonic() + PATIENCE_S
        for rank in range(len(self._pids)):
            self._wait_for(rank, until)
        return [
            Ended(
                self._codes[rank],
                self._output_path(rank).read_text(errors="replace"),
                read_trace(self._trace_path(rank)) if self._trace_path(rank).exists() else [],
            )
            for rank in range(len(self._pids))
        ]

    def _be(self, team: PipeTeam, work: Callable[[], int], root: Path, disturb: Disturb) -> None:
        from ckpt_cli.workers import current_team as teamwork

        code = 99
        try:
            os.setpgid(0, self._pids[0] if self._pids else 0)
            fd = os.open(self._output_path(team.rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            sys.stdout = open(1, "w", closefd=False)
            sys.stderr = open(2, "w", closefd=False, buffering=1)
            teamwork.join(team)
            watch(root, self._trace_path(team.rank), disturb)
            code = work()
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _look(self, rank: int) -> None:
        if rank not in self._codes:
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid:
                self._codes[rank] = os.waitstatus_to_exitcode(status)

    def _wait_for(self, rank: int, until: float) -> None:
        while self.is_running(rank) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        if rank not in self._codes:
            os.kill(self._pids[rank], signal.SIGKILL)
            os.waitpid(self._pids[rank], 0)
            self._codes[rank] = None

    def _trace_path(self, rank: int) -> Path:
        return self._notes_dir / f"trace-{rank}"

    def _output_path(self, rank: int) -> Path:
        return self._notes_dir / f"output-{rank}"


def _close(pairs: list[tuple[Connection, Connection]], own: list[Connection | None]) -> None:
    """Closes what belongs to others, so that the death of a worker closes its pipes."""
    for pair in pairs:
        for pipe in pair:
            if not any(pipe is own_pipe for own_pipe in own):
                pipe.close()
