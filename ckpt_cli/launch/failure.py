"""From workers that ended to one error: which of them failed first, why, where its log is, and how to go on.

When one worker fails the others do as well, because it is gone or because they are stopped; the one that is told about
is the one that did not fail because of another.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli.host.results import WorkerResult
from core.errors import WorkerError

_STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP}
_WORKER_FAILED = WorkerError.exit_code
_MEMORY = "often it is the kernel that kills, for want of memory: fewer workers, or a lower --memory, need less"
_FROZEN = (
    "the others had given it up, as it gave no sign: it was stopped, or waited for a disk or a network that does "
    "not answer (--timeout SECONDS waits longer)"
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker process of this host that did not end with 0.

    Args:
        rank: of the worker.
        exit_code: as the system says, a signal as its negative number.
        log_path: what it printed, if that went to a file.
    """

    rank: int
    exit_code: int
    log_path: Path | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """What a job failed of.

    Args:
        rank, host: the worker; None where only its host is known.
        what: the error in one line.
        log_path: where more is to be read, if there is something.
        fields: the worker's own error as a JSON object; empty if it said none.
        exit_code: its own, None if it said none.
        hint: what may help; None without one.
    """

    rank: int
    host: str
    what: str
    log_path: Path | None = None
    fields: Mapping[str, object] | None = None
    exit_code: int | None = None
    hint: str | None = None

    @property
    def sentence(self) -> str:
        """Who failed, and why."""
        return f"rank {self.rank} on {self.host} failed: {self.what}"


class LaunchError(WorkerError):
    """A job's workers failed, and are not started again.

    Args:
        cause: of what.
        n_restarts: how often they were started again.
        hint: how to go on; None where there is nothing to say.
    """

    def __init__(self, cause: Cause, *, n_restarts: int, hint: str | None) -> None:
        times = "" if not n_restarts else f" (after {n_restarts} restart{'s' * (n_restarts > 1)})"
        super().__init__(f"{cause.sentence.rstrip('.')}{times}", hint=hint)
        self.cause = cause
        self.n_restarts = n_restarts

    def fields(self) -> dict[str, object]:
        """As for every error, and what is known of the worker."""
        found = {**super().fields(), "rank": str(self.cause.rank), "host": self.cause.host}
        found["restarts"] = self.n_restarts
        if self.cause.log_path is not None:
            found["log"] = str(self.cause.log_path)
        if self.cause.fields is not None:
            found["worker"] = {**self.cause.fields, "exit_code": self.cause.exit_code}
        return found


def cause_of(
    ended: Sequence[Ended], results: Mapping[int, WorkerResult], *, first: Ended | None, host: str
) -> Cause | None:
    """What the job failed of, as far as this host knows; None if it knows of no failure.

    Args:
        ended: processes that did not end with 0.
        results: what workers said themselves, by rank.
        first: the process that failed first, if that is known.
        host: this one's name.
    """
    ended = [*ended, *([first] if first is not None and first not in ended else [])]
    failed = [one for one in results.values() if not one.is_verdict and one.exit_code not in _STOPPED]
    own = [one for one in failed if not one.is_secondary]
    by_themselves = [one for one in own if one.exit_code != _WORKER_FAILED]
    silent = [one for one in ended if one.rank not in results]
    killed = [one for one in silent if one.exit_code < 0 and one.exit_code != -signal.SIGTERM]
    killed.sort(key=lambda one: one.exit_code == -signal.SIGABRT)  # native code gives up so when a peer is gone
    broken = [one for one in silent if one.exit_code > 0 and one.exit_code not in _STOPPED]
    logs = {one.rank: one.log_path for one in ended}
    if by_themselves:
        return _said(by_themselves[0], logs)
    if killed or broken:
        one = (killed or broken)[0]
        unheard = f"rank {one.rank} on {host} has given no sign"
        return _silent(one, host, is_frozen=any(result.line.startswith(unheard) for result in failed))
    if own or failed:
        return _said((own or failed)[0], logs)
    if first is not None:  # ended from outside: the agent ends workers only after one has failed
        number = -first.exit_code if first.exit_code < 0 else first.exit_code - 128
        return Cause(first.rank, host, f"somebody ended its process with {_name_of(number)}")
    return None


def _said(result: WorkerResult, logs: Mapping[int, Path | None]) -> Cause:
    """A failure that the worker has told of."""
    log_path = None if result.traceback is None else Path(result.traceback)
    return Cause(
        rank=result.rank if result.worker is None else result.worker,
        host=result.worker_host or result.host,
        what=result.line or f"exit code {result.exit_code}",
        log_path=log_path or _filled(logs.get(result.rank)),
        fields=dict(result.fields),
        exit_code=result.exit_code,
    )


def _silent(one: Ended, host: str, *, is_frozen: bool) -> Cause:
    """A process that ended without a word.

    Args:
        is_frozen: the others have given it up before; the agent, which sees at once when a process ends, had not.
    """
    what = f"its process ended with exit code {one.exit_code}"
    if one.exit_code < 0:
        what = f"its process was killed by {_name_of(-one.exit_code)}"
    log_path = _filled(one.log_path)
    last = "" if log_path is None or one.exit_code < 0 else _last_line(log_path)
    hint = _MEMORY if one.exit_code == -signal.SIGKILL else None
    if is_frozen:
        hint = _FROZEN
    return Cause(one.rank, host, f"{what}: {last}" if last else what, log_path, hint=hint)


def _name_of(number: int) -> str:
    """A signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _filled(path: Path | None) -> Path | None:
    """The path, if there is something in the file."""
    return path if path is not None and path.is_file() and path.stat().st_size else None


def _last_line(path: Path) -> str:
    """The last line of a log that is not empty; of a long log's end."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
