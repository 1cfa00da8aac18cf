"""The workers of this host under PyTorch's elastic agent (``torch.distributed.launcher.api``).

The agent meets the agents of other hosts, numbers the workers, starts and monitors them, and
restarts all of them when one has failed, until the restarts are used up. This module builds the
agent's settings and translates its output: its log goes to a file, the workers of each attempt get
a directory for their results, and its errors become errors of ckpt.

Workers are in sessions of their own, so a terminal's Ctrl-C reaches only the agent, which ends
them. The handlers of ``ckpt_cli.screen.failure.end_on_signals`` stay installed: those of the agent
raise again at every further signal, and react to SIGHUP even under nohup.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from ckpt_cli.host.results import LAUNCHER_VARIABLE, RESULTS_VARIABLE, WorkerResult, read_results
from ckpt_cli.launch.failure import Ended
from ckpt_cli.launch.meeting_place import Rendezvous
from ckpt_cli.screen.failure import Terminated
from core.errors import WorkerError
from core.values import dataclass

_KEPT_SIGNAL = "SIGQUIT"
"""The only signal that torch may handle; torch would warn about an empty list."""
_LOGGERS = ("torch.distributed", "torch.multiprocessing")

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SILENT, _DEFAULT_LEVEL = "FATAL", "ERROR"


def silence_torch() -> None:
    """Keep torch's native code from printing stack traces while this process waits.

    Call it before importing torch. Errors that torch raises are still reported, and workers get
    their own log level.
    """
    os.environ.setdefault(_LOG_LEVEL, _SILENT)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the workers of this host.

    Args:
        number: number of earlier starts.
        n_restarts: number of starts that followed a failure of a worker of this host; unlike
            ``number`` it excludes those because another host failed or joined.
        results_dir: directory of the workers' results.
        ranks: ranks of the workers, by local rank.
        logs: log files of the workers, by local rank; None for output that goes to the terminal.
    """

    number: int
    n_restarts: int
    results_dir: Path
    ranks: tuple[int, ...]
    logs: tuple[Path | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """The job of the agent of one host.

    Args:
        program, arguments: command line of a worker.
        n_workers: number of workers on this host.
        nodes: smallest and largest number of hosts.
        rendezvous: the rendezvous of the hosts.
        local_addr: address at which other hosts reach this one; None to let torch choose one.
        max_restarts: maximum number of restarts of the workers.
        monitor_s: seconds between checks of the workers.
        shutdown_s: seconds that workers may take to exit.
        log_dir: directory for logs and results.
        redirects, tee: streams to redirect or duplicate, in torchrun's syntax; None for the
            default.
        role: prefix of lines that ``tee`` copies to the terminal.
    """

    program: str
    arguments: tuple[str, ...]
    n_workers: int
    nodes: tuple[int, int]
    rendezvous: Rendezvous
    local_addr: str | None
    max_restarts: int
    monitor_s: float
    shutdown_s: int
    log_dir: Path
    redirects: str | None
    tee: str | None
    role: str


@dataclass(slots=True)
class LaunchHistory:
    """The history of the workers of this host.

    Args:
        attempts: all starts of the workers so far.
        first: the process that failed first in the last attempt, as the agent observed it.
        ended: processes that had not exited with 0 when the agent gave up.
        results: results of the workers in the last finished attempt, by rank.
    """

    attempts: list[Attempt] = field(default_factory=list)
    first: Ended | None = None
    ended: list[Ended] = field(default_factory=list)
    results: dict[int, WorkerResult] = field(default_factory=dict)

    def close(self) -> None:
        """Read the results that the workers of the last attempt have written."""
        if self.attempts:
            self.results = read_results(self.attempts[-1].results_dir)


class _JobDone(Exception):
    """Signal that the job is done, so that workers must not be restarted."""


@dataclass(frozen=True, slots=True)
class FailureHooks:
    """Functions that are called while the agent runs.

    Args:
        on_failure: called after a worker of this host has failed and all of them have ended.
        may_restart: called before the workers are restarted; returns False if the job is done.
        on_start: called right before workers are started, each time.
    """

    on_failure: Callable[[LaunchHistory], None]
    may_restart: Callable[[LaunchHistory], bool]
    on_start: Callable[[], None]


def run_agent(job: AgentJob, history: LaunchHistory, hooks: FailureHooks) -> None:
    """Run the workers until they are done or have failed for good; record events in ``history``.

    Raises:
        WorkerError: the hosts did not meet, or not again after a failure.
        Terminated: this process received a signal to end; the workers have ended.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    with _log_to(job.log_dir / f"agent-{socket.gethostname()}.{os.getpid()}.log", history, hooks):
        config = _config(job, _AttemptLogs(job, history, hooks))
        # The agent treats arguments as templates for ${local_rank}, so a $ must be doubled.
        arguments = [argument.replace("$", "$$") for argument in job.arguments]
        try:
            elastic_launch(config, job.program)(*arguments)
        except _JobDone:
            pass
        except ChildFailedError as err:
            # Not an error yet: the results of the workers may show that the job is done.
            attempt = history.attempts[-1]
            history.ended = [
                Ended(
                    attempt.ranks[failure.local_rank],
                    failure.exitcode,
                    attempt.logs[failure.local_rank],
                )
                for failure in err.failures.values()
            ]
        except SignalException as err:
            raise Terminated(err.sigval) from err
        except (RendezvousError, DistError, ConnectionError, TimeoutError) as err:
            raise _rendezvous_error(job, history, err) from err
        finally:
            history.close()


def _config(job: AgentJob, logs: _AttemptLogs) -> Any:
    """Return the agent's settings for the job, as a ``LaunchConfig``."""
    from torch.distributed.launcher.api import LaunchConfig

    # Older versions of torch do not have all settings; omit those that are missing.
    names = {field.name for field in fields(LaunchConfig)}
    newer = {"signals_to_handle": _KEPT_SIGNAL, "shutdown_timeout": job.shutdown_s}
    # A static rendezvous needs the rank of this host; the other kinds assign it.
    settings: dict[str, Any] = {**job.rendezvous.settings}
    if job.rendezvous.node_rank is not None:
        settings["rank"] = job.rendezvous.node_rank
    config = LaunchConfig(
        min_nodes=job.nodes[0],
        max_nodes=job.nodes[1],
        nproc_per_node=job.n_workers,
        run_id=job.rendezvous.job_id,
        role=job.role,
        rdzv_backend=job.rendezvous.backend,
        rdzv_endpoint=job.rendezvous.endpoint,
        rdzv_configs=settings,
        max_restarts=job.max_restarts,
        monitor_interval=job.monitor_s,
        local_addr=job.local_addr,
        logs_specs=logs,
        log_line_prefix_template=os.getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        **{name: value for name, value in newer.items() if name in names},
    )
    # Newer versions pin workers to NUMA nodes by default, but ckpt's workers pin themselves.
    if "numa_options" in names:
        config.numa_options = None
    return config


class _AttemptLogs:
    """An implementation of torch's ``LogsSpecs``, which provides the log files of an attempt.

    The agent calls ``reify`` right before it starts the workers, so that is where an attempt
    begins: the workers get a directory for their results, and the history gets a new attempt.

    Args:
        job: the agent's job.
        history: extended by an ``Attempt`` for each start.
        hooks: decide before a restart whether it makes sense.
    """

    def __init__(self, job: AgentJob, history: LaunchHistory, hooks: FailureHooks) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

        # By default only local rank 0 prints to the terminal; the others print to their log files.
        redirects: Any = dict.fromkeys(range(1, job.n_workers), Std.ALL)
        self._specs = DefaultLogsSpecs(
            log_dir=str(job.log_dir),
            redirects=redirects if job.redirects is None else Std.from_str(job.redirects),
            tee=Std.NONE if job.tee is None else Std.from_str(job.tee),
        )
        self._history = history
        self._hooks = hooks
        # Workers inherit the environment: undo ``silence_torch``, but keep a level set by the user.
        level = os.environ.get(_LOG_LEVEL, _SILENT)
        self._log_level = _DEFAULT_LEVEL if level == _SILENT else level

    @property
    def root_log_dir(self) -> str:
        """Path of the log directory; the name is torch's."""
        return str(self._specs.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Begin an attempt; return the files for each worker's streams.

        Args:
            envs: environments of the workers, by local rank; extended by ckpt's variables.
        """
        history = self._history
        # Before a restart, check that the job is not already done.
        if history.attempts:
            history.close()
            if not self._hooks.may_restart(history):
                raise _JobDone
            history.first = None
        self._hooks.on_start()
        # The results go to the directory of torch's log files, attempt_N, which is new each time.
        # There, torch's error files are at attempt_N/LOCAL_RANK/error.json.
        destinations = self._specs.reify(envs)
        directory = Path(destinations.error_files[0]).parent.parent
        for env in envs.values():
            env[RESULTS_VARIABLE] = str(directory)
            env[LAUNCHER_VARIABLE] = str(os.getpid())
            env[_LOG_LEVEL] = self._log_level
        history.attempts.append(
            Attempt(
                number=len(history.attempts),
                n_restarts=int(envs[0]["TORCHELASTIC_RESTART_COUNT"]),
                results_dir=directory,
                ranks=tuple(int(envs[local]["RANK"]) for local in range(len(envs))),
                logs=tuple(
                    Path(path) if (path := destinations.stderrs[local]) else None
                    for local in range(len(envs))
                ),
            )
        )
        return destinations


class _FailureLogHandler(logging.Handler):
    """A log handler that learns from the agent's log which process failed first.

    Before a restart, the agent reports it nowhere else.

    Args:
        history: its ``first`` is set to the process.
        hooks: called after a failure.
    """

    def __init__(self, history: LaunchHistory, hooks: FailureHooks) -> None:
        super().__init__(logging.ERROR)
        self._history = history
        self._hooks = hooks

    def emit(self, record: logging.LogRecord) -> None:
        """Record the process that a log message of the agent reports as failed."""
        # The arguments of that message begin with exit code and local rank; in torch 2.13 it is
        # "failed (exitcode: %s) local_rank: %s (pid: %s) of binary: %s".
        args = record.args
        if (
            not isinstance(args, tuple)
            or "exitcode" not in record.msg
            or len(args) < 2
            or not self._history.attempts
        ):
            return
        attempt, (code, local) = self._history.attempts[-1], args[:2]
        if isinstance(code, int) and isinstance(local, int) and local < len(attempt.ranks):
            self._history.first = Ended(attempt.ranks[local], code, attempt.logs[local])
            self._history.close()
            self._hooks.on_failure(self._history)


@contextmanager
def _log_to(path: Path, history: LaunchHistory, hooks: FailureHooks) -> Iterator[None]:
    """Send the log of torch's elastic modules to a file instead of the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    watch = _FailureLogHandler(history, hooks)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.propagate, list(logger.handlers)) for logger in loggers]
    for logger in loggers:
        logger.propagate, logger.handlers = False, [handler, watch]
    try:
        yield
    finally:
        for logger, (propagate, handlers) in zip(loggers, before, strict=True):
            logger.propagate, logger.handlers = propagate, handlers
        with suppress(OSError):
            handler.close()


def _rendezvous_error(job: AgentJob, history: LaunchHistory, err: Exception) -> WorkerError:
    """Return the error for agents that lost each other or never met, given torch's error."""
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousTimeoutError,
    )

    # The least specific class comes last: any other error means that the connection broke.
    rendezvous = job.rendezvous
    again = " again" if history.attempts else ""
    least, _ = job.nodes
    if isinstance(err, RendezvousClosedError):
        return WorkerError(
            f"another host ended the job at {rendezvous.endpoint}",
            hint="look for the error in that host's output, then start the same command on all "
            "hosts again",
        )
    if isinstance(err, (RendezvousTimeoutError, TimeoutError)):
        return WorkerError(
            f"fewer than {least} hosts joined{again} at {rendezvous.endpoint} "
            f"within {rendezvous.join_s:g} s",
            hint="start the same command on all hosts, or wait longer with "
            "--rdzv-conf join_timeout=SECONDS",
        )
    # torch wraps the error that caused the others: report the innermost message that is not empty.
    reason = ""
    inner: BaseException | None = err
    while inner is not None:
        reason = str(inner).strip().split("\n")[0] or reason
        inner = inner.__cause__
    return WorkerError(
        f"lost contact with the rendezvous at {rendezvous.endpoint}: "
        f"{reason.rstrip('.') or type(err).__name__}",
        hint="that host has exited or is unreachable; start the same command on all hosts again",
    )
