"""Runs the workers of this host with PyTorch's elastic agent: ``torch.distributed.launcher.api``.

The agent meets the agents of other hosts, numbers the workers, starts and monitors them, and
restarts all of them when one has failed, until the restarts are used up. This module builds its
settings and translates its output: the agent's log goes to a file, the workers of each attempt get
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
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ckpt_cli.host.results import LAUNCHER_VARIABLE, RESULTS_VARIABLE, WorkerResult, read_results
from ckpt_cli.launch.failure import Ended
from ckpt_cli.launch.meeting_place import Rendezvous
from ckpt_cli.screen.failure import Terminated
from core.errors import WorkerError

_KEPT_SIGNAL = "SIGQUIT"
"""The one signal that torch may handle; it would warn about an empty list."""
_LOGGERS = ("torch.distributed", "torch.multiprocessing")

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SILENT, _DEFAULT_LEVEL = "FATAL", "ERROR"


def silence_torch() -> None:
    """Keep torch's native code from printing stack traces while this process waits.

    Call it before importing torch.

    Errors that torch raises are still reported. Workers get their own log level.
    """
    os.environ.setdefault(_LOG_LEVEL, _SILENT)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the workers of this host.

    Args:
        number: how often they were started before.
        n_restarts: how many of these starts followed a failure of a worker of this host.
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
        rendezvous: where the hosts meet.
        local_addr: address at which other hosts reach this one; None to let torch choose one.
        max_restarts: how often to restart the workers.
        monitor_s: seconds between checks of the workers.
        shutdown_s: seconds that workers may take to exit.
        log_dir: directory for logs and results.
        redirects, tee: streams, as torchrun spells them; None for its default.
        role: prefix of teed lines.
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
    """What has happened to the workers of this host so far.

    Args:
        attempts: every start of the workers.
        first: the process that failed first in the last attempt, as the agent saw it.
        ended: processes that did not exit with 0 when the agent gave up.
        results: results of the workers of the last attempt that is over, by rank.
    """

    attempts: list[Attempt] = field(default_factory=list)
    first: Ended | None = None
    ended: list[Ended] = field(default_factory=list)
    results: dict[int, WorkerResult] = field(default_factory=dict)

    def close(self) -> None:
        """Read the results that the workers of the last attempt have left."""
        if self.attempts:
            self.results = read_results(self.attempts[-1].results_dir)


class _JobDone(Exception):
    """Raised instead of restarting workers, because the job is done."""


@dataclass(frozen=True, slots=True)
class FailureHooks:
    """Functions that are called while the agent runs.

    Args:
        on_failure: called when a worker of this host has failed and all of them have ended.
        may_restart: called before the workers are restarted; returns False if the job is done.
    """

    on_failure: Callable[[LaunchHistory], None]
    may_restart: Callable[[LaunchHistory], bool]


def run_agent(job: AgentJob, history: LaunchHistory, hooks: FailureHooks) -> None:
    """Run the workers until they are done or have failed for good, and record what happens in
    ``history``.

    Raises:
        WorkerError: the hosts did not meet, or not again after a failure.
        Terminated: a signal asked this process to end; the workers have ended.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    with _log_to(job.log_dir / f"agent-{socket.gethostname()}.{os.getpid()}.log", history, hooks):
        config = _config(job, _AttemptLogs(job, history, hooks))
        arguments = [
            argument.replace("$", "$$") for argument in job.arguments
        ]  # the agent fills in ${local_rank}
        try:
            elastic_launch(config, job.program)(*arguments)
        except _JobDone:
            pass
        except ChildFailedError as err:
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
    """Return torch's settings for the job, without those that this version of torch does not
    have.
    """
    from torch.distributed.launcher.api import LaunchConfig

    names = {field.name for field in fields(LaunchConfig)}
    newer = {"signals_to_handle": _KEPT_SIGNAL, "shutdown_timeout": job.shutdown_s}
    # A static rendezvous is given the rank of its host; others find it out.
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
    if "numa_options" in names:
        config.numa_options = None  # workers pin themselves to cores, as they do below srun
    return config


class _AttemptLogs:
    """An implementation of torch's ``LogsSpecs``, which the agent asks for log files before it
    starts the workers.

    So an attempt begins in ``reify``: the workers get their directory for results, and the history
    a new attempt.

    Args:
        job: the agent's job.
        history: gets an ``Attempt`` for each start.
        hooks: asked before a restart.
    """

    def __init__(self, job: AgentJob, history: LaunchHistory, hooks: FailureHooks) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

        redirects: Any = dict.fromkeys(range(1, job.n_workers), Std.ALL)
        self._specs = DefaultLogsSpecs(
            log_dir=str(job.log_dir),
            redirects=redirects if job.redirects is None else Std.from_str(job.redirects),
            tee=Std.NONE if job.tee is None else Std.from_str(job.tee),
        )
        self._history = history
        self._hooks = hooks
        level = os.environ.get(_LOG_LEVEL, _SILENT)
        self._log_level = _DEFAULT_LEVEL if level == _SILENT else level

    @property
    def root_log_dir(self) -> str:
        """Torch's name for the directory."""
        return str(self._specs.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Return the files for each worker's streams, and put the directory of its results into its
        environment.
        """
        history = self._history
        # A restart: ask whether it makes sense.
        if history.attempts:
            history.close()
            if not self._hooks.may_restart(history):
                raise _JobDone
            history.first = None
        # The directory of the attempt is that of torch's log files.
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
    """Finds out from the agent's log which process failed first.

    The agent does not tell otherwise before a restart.

    Args:
        history: gets the process.
        hooks: told of the failure.
    """

    def __init__(self, history: LaunchHistory, hooks: FailureHooks) -> None:
        super().__init__(logging.ERROR)
        self._history = history
        self._hooks = hooks

    def emit(self, record: logging.LogRecord) -> None:
        """Record the process that a log message of the agent reports as failed."""
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
    """Return the error for agents that lost each other or never met."""
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousTimeoutError,
    )

    rendezvous = job.rendezvous
    again = " again" if history.attempts else ""
    least, most = job.nodes
    hosts = f"{least}" if least == most else f"{least} to {most}"
    if isinstance(err, RendezvousClosedError):
        return WorkerError(
            f"another host ended the job at {rendezvous.endpoint}",
            hint="the error is reported there; start the same command on all hosts",
        )
    if isinstance(err, (RendezvousTimeoutError, TimeoutError)):
        return WorkerError(
            f"not all {hosts} hosts met{again} at {rendezvous.endpoint} within {rendezvous.join_s:g} s",
            hint="start the same command on all hosts; --rdzv-conf join_timeout=SECONDS waits longer",
        )
    return WorkerError(
        f"the rendezvous at {rendezvous.endpoint} is gone: {_innermost_reason(err)}",
        hint="its host has ended or cannot be reached any more; start the same command on all hosts",
    )


def _innermost_reason(err: BaseException) -> str:
    """Return the first line of the innermost message that is not empty."""
    inner: BaseException | None = err
    text = ""
    while inner is not None:
        text = str(inner).strip().split("\n")[0] or text
        inner = inner.__cause__
    return text.rstrip(".") or type(err).__name__
