"""The choice of the one error to report after workers have ended.

When one worker fails the others fail too, because it is gone or because they are stopped. The error
to report is that of the worker that did not fail because of another, with its log.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_cli.host.results import WorkerResult
from core.errors import WorkerError
from core.values import dataclass

_STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP}
_WORKER_FAILED = WorkerError.exit_code
_MEMORY_HINT = (
    "the kernel may have killed the worker because the host ran out of memory; use fewer workers "
    "or a lower --memory"
)
_FROZEN_HINT = (
    "the worker sent no heartbeat, so the other workers gave up on it; it was stopped, or waited "
    "for a disk or network that does not respond; to wait longer, pass --timeout SECONDS"
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker process of this host that did not exit with 0.

    Args:
        rank: rank of the worker.
        exit_code: exit code of the process; minus the signal's number if a signal killed it.
        log_path: file with the output of the process; None if that went to the terminal.
    """

    rank: int
    exit_code: int
    log_path: Path | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a job's failure.

    Args:
        rank, host: the worker that failed.
        message: the error on one line.
        log_path: file with more information; None without one.
        fields: the error that the worker reported, as a JSON object; None if it reported none.
        exit_code: the exit code that the worker reported; None if it reported none.
        hint: the next step or likely reason; None without one.
    """

    rank: int
    host: str
    message: str
    log_path: Path | None = None
    fields: Mapping[str, object] | None = None
    exit_code: int | None = None
    hint: str | None = None

    @property
    def sentence(self) -> str:
        """The worker and its error as a sentence."""
        return f"rank {self.rank} on {self.host} failed: {self.message}"


class LaunchError(WorkerError):
    """Error of a job whose workers have failed and are not restarted.

    Args:
        cause: the failure that made the other workers fail.
        n_restarts: how often the workers were restarted before.
        hint: how to continue; None without one.
    """

    def __init__(self, cause: Cause, *, n_restarts: int, hint: str | None) -> None:
        times = "" if not n_restarts else f" (after {n_restarts} restart{'s' * (n_restarts > 1)})"
        super().__init__(f"{cause.sentence.rstrip('.')}{times}", hint=hint)
        self.cause = cause
        self.n_restarts = n_restarts

    def fields(self) -> dict[str, object]:
        """Return the fields common to all errors, plus those of the worker that failed."""
        fields = {**super().fields(), "rank": str(self.cause.rank), "host": self.cause.host}
        fields["restarts"] = self.n_restarts
        if self.cause.log_path is not None:
            fields["log"] = str(self.cause.log_path)
        if self.cause.fields is not None:
            fields["worker"] = {**self.cause.fields, "exit_code": self.cause.exit_code}
        return fields


def cause_of(
    ended: Sequence[Ended], results: Mapping[int, WorkerResult], *, first: Ended | None, host: str
) -> Cause | None:
    """Return the cause of the job's failure, as far as this host knows.

    Returns None if this host knows of no failure.

    Args:
        ended: processes that did not exit with 0.
        results: results that the workers left, by rank.
        first: the process that failed first, if known.
        host: name of this host.
    """
    if first is not None and first not in ended:
        ended = [*ended, first]
    logs = {process.rank: process.log_path for process in ended}
    # An error of a worker's own is the most certain cause.
    failed = _failure_reports(results)
    if failed and not failed[0].is_secondary and failed[0].exit_code != _WORKER_FAILED:
        return _reported_cause(failed[0], logs)
    # Next a process that ended without a report: the reports that remain may be due to its end.
    process = _silent_process([process for process in ended if process.rank not in results])
    if process is not None:
        # The message by which other workers report it, from ``workers.team_watch``.
        lost = f"rank {process.rank} on {host} has sent no heartbeat"
        return _unreported_cause(
            process, host, is_frozen=any(result.line.startswith(lost) for result in failed)
        )
    # The remaining reports name a lost worker, which must be one of another host.
    if failed:
        return _reported_cause(failed[0], logs)
    # The agent ends workers only after one has failed; if none has, the signal came from outside.
    if first is not None:
        number = -first.exit_code if first.exit_code < 0 else first.exit_code - 128
        return Cause(
            first.rank, host, f"its process was terminated from outside by {_signal_name(number)}"
        )
    return None


def _failure_reports(results: Mapping[int, WorkerResult]) -> list[WorkerResult]:
    """Return the results of workers that failed, the most certain cause first.

    First come workers with an error of their own, then those that lost another worker, last those
    that only stopped because of another.
    """
    failed = [
        result
        for result in results.values()
        if not result.is_verdict and result.exit_code not in _STOPPED
    ]
    failed.sort(
        key=lambda result: 2 if result.is_secondary else int(result.exit_code == _WORKER_FAILED)
    )
    return failed


def _silent_process(unreported: Sequence[Ended]) -> Ended | None:
    """Return the process that most likely failed by itself; None without one.

    Args:
        unreported: processes that ended without a result.
    """
    # Ignore processes that the agent ended after the failure: it sends SIGTERM.
    killed = [
        process
        for process in unreported
        if process.exit_code < 0 and process.exit_code != -signal.SIGTERM
    ]
    exited = [
        process
        for process in unreported
        if process.exit_code > 0 and process.exit_code not in _STOPPED
    ]
    # Native code aborts when a peer is gone, so of those killed an aborted process comes last.
    killed.sort(key=lambda process: process.exit_code == -signal.SIGABRT)
    return next(iter([*killed, *exited]), None)


def _reported_cause(result: WorkerResult, logs: Mapping[int, Path | None]) -> Cause:
    """Return the failure that a worker reported."""
    log_path = None if result.traceback is None else Path(result.traceback)
    return Cause(
        rank=result.rank if result.worker is None else result.worker,
        host=result.worker_host or result.host,
        message=result.line or f"exit code {result.exit_code}",
        log_path=log_path or _nonempty(logs.get(result.rank)),
        fields=dict(result.fields),
        exit_code=result.exit_code,
    )


def _unreported_cause(process: Ended, host: str, *, is_frozen: bool) -> Cause:
    """Return the failure of a process that ended without reporting one.

    Args:
        is_frozen: the other workers had given up on it while its process still existed.
    """
    if process.exit_code < 0:
        message = f"its process was killed by {_signal_name(-process.exit_code)}"
    else:
        message = f"its process ended with exit code {process.exit_code}"
    # The last line of the log usually is the error of a process that exited by itself. A log can be
    # long, so only its end is read.
    log_path = _nonempty(process.log_path)
    if log_path is not None and process.exit_code >= 0:
        with log_path.open("rb") as file:
            file.seek(max(0, log_path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").split("\n")
        last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        message = f"{message}: {last_line}" if last_line else message
    hint = _MEMORY_HINT if process.exit_code == -signal.SIGKILL else None
    if is_frozen:
        hint = _FROZEN_HINT
    return Cause(process.rank, host, message, log_path, hint=hint)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _nonempty(path: Path | None) -> Path | None:
    """Return the path if it is a file that is not empty, else None."""
    return path if path is not None and path.is_file() and path.stat().st_size else None
