"""PyTorch's elastic agent, asked to run a job's workers on this host: ``torch.distributed.launcher.api``.

The agent meets the others, numbers the workers, starts them, looks after them, and starts all of them again when one
has failed, until the restarts are used up. Here its settings are put together, and what it says is translated: its
own log goes to a file, each attempt's workers get a directory for their results, and its errors become one of ours.

Workers are in sessions of their own, so a terminal's Ctrl-C reaches the agent alone, which ends them. The handlers of
``ckpt_cli.screen.failure.end_on_signals`` stay in place: the agent's own raise again and again, and hear a SIGHUP under
nohup.
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

from ckpt_cli.host.results import LAUNCHER_VARIABLE, RESULTS_VARIABLE, WorkerResult, results_in
from ckpt_cli.launch.failure import Ended
from ckpt_cli.launch.meeting_place import Rendezvous
from ckpt_cli.screen.failure import Terminated
from core.errors import WorkerError

_KEPT_SIGNAL = "SIGQUIT"
"""The one signal that is left to torch; an empty list it would warn of."""
_LOGGERS = ("torch.distributed", "torch.multiprocessing")


_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
_SILENT, _USUAL_LEVEL = "FATAL", "ERROR"


def silence_torch() -> None:
    """Keeps torch's native code from printing stacks of this process while it waits for others; before its import.

    What it raises is told all the same. Workers get their own level.
    """
    os.environ.setdefault(_LOG_LEVEL, _SILENT)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The workers of this host, started once.

    Args:
        number: how often they were started before.
        n_restarts: of these, how often because a worker of this host had failed.
        results_dir: where workers leave their results.
        ranks: of the workers, by local rank.
        logs: what a worker prints, by local rank, where it goes to a file.
    """

    number: int
    n_restarts: int
    results_dir: Path
    ranks: tuple[int, ...]
    logs: tuple[Path | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJob:
    """What the agent of one host is to do.

    Args:
        program, arguments: of a worker.
        n_workers: of this host.
        nodes: least and most hosts.
        rendezvous: where they meet.
        local_addr: under which the others reach this host; None: torch finds one.
        max_restarts: how often workers are started again.
        monitor_s: seconds between two looks at them.
        shutdown_s: seconds that they may take to end.
        log_dir: for logs and results.
        redirects, tee: torchrun's words for streams; None for its default.
        role: what teed lines begin with.
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
class Course:
    """What happened to the workers of this host so far.

    Args:
        attempts: each time they were started.
        first: the process that failed first in the last attempt, as the agent saw it.
        ended: processes that did not end with 0 when the agent gave up.
        results: what the workers of the last attempt that is over said.
    """

    attempts: list[Attempt] = field(default_factory=list)
    first: Ended | None = None
    ended: list[Ended] = field(default_factory=list)
    results: dict[int, WorkerResult] = field(default_factory=dict)

    def close(self) -> None:
        """Reads what the workers of the last attempt have left."""
        if self.attempts:
            self.results = results_in(self.attempts[-1].results_dir)


class _Settled(Exception):
    """Workers are not started again, as the job is done."""


@dataclass(frozen=True, slots=True)
class Heed:
    """Who is asked while the agent runs.

    Args:
        on_failure: a worker of this host has failed, and all of them have ended.
        may_restart: whether it makes sense to start them again, before that is done.
    """

    on_failure: Callable[[Course], None]
    may_restart: Callable[[Course], bool]


def run_agent(job: AgentJob, course: Course, heed: Heed) -> None:
    """Runs the workers until they are done, or have failed for good; what happens is put down in ``course``.

    Raises:
        WorkerError: the hosts did not come together, or not again.
        Terminated: a signal asked this process to end; the workers are gone.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    with _log_to(job.log_dir / f"agent-{socket.gethostname()}.{os.getpid()}.log", course, heed):
        config = _config(job, _Logs(job, course, heed))
        arguments = [argument.replace("$", "$$") for argument in job.arguments]  # the agent fills in ${local_rank}
        try:
            elastic_launch(config, job.program)(*arguments)
        except _Settled:
            pass
        except ChildFailedError as err:
            course.ended = [_ended(course, failure) for failure in err.failures.values()]
        except SignalException as err:
            raise Terminated(err.sigval) from err
        except (RendezvousError, DistError, ConnectionError, TimeoutError) as err:
            raise _lost(job, course, err) from err
        finally:
            course.close()


def _config(job: AgentJob, logs: _Logs) -> Any:
    """Torch's settings; those that its version does not know are left out."""
    from torch.distributed.launcher.api import LaunchConfig

    known = {field.name for field in fields(LaunchConfig)}
    newer = {"signals_to_handle": _KEPT_SIGNAL, "shutdown_timeout": job.shutdown_s}
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
        **{name: value for name, value in newer.items() if name in known},
    )
    if "numa_options" in known:
        config.numa_options = None  # workers bind themselves, as they do below srun
    return config


class _Logs:
    """Torch's ``LogsSpecs``, which the agent asks for files each time before it starts the workers.

    So it is also where an attempt begins: the workers get their directory for results, and ``course`` a new attempt.

    Args:
        job, course, heed: see ``run_agent``.
    """

    def __init__(self, job: AgentJob, course: Course, heed: Heed) -> None:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

        redirects: Any = dict.fromkeys(range(1, job.n_workers), Std.ALL)
        self._specs = DefaultLogsSpecs(
            log_dir=str(job.log_dir),
            redirects=redirects if job.redirects is None else Std.from_str(job.redirects),
            tee=Std.NONE if job.tee is None else Std.from_str(job.tee),
        )
        self._course = course
        self._heed = heed
        level = os.environ.get(_LOG_LEVEL, _SILENT)
        self._log_level = _USUAL_LEVEL if level == _SILENT else level

    @property
    def root_log_dir(self) -> str:
        """Torch's name for the directory."""
        return str(self._specs.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> Any:
        """Where each worker's streams go; puts the place of its result into its environment."""
        course = self._course
        if course.attempts:
            course.close()
            if not self._heed.may_restart(course):
                raise _Settled
            course.first = None
        found = self._specs.reify(envs)
        directory = Path(found.error_files[0]).parent.parent
        for env in envs.values():
            env[RESULTS_VARIABLE] = str(directory)
            env[LAUNCHER_VARIABLE] = str(os.getpid())
            env[_LOG_LEVEL] = self._log_level
        course.attempts.append(
            Attempt(
                number=len(course.attempts),
                n_restarts=int(envs[0]["TORCHELASTIC_RESTART_COUNT"]),
                results_dir=directory,
                ranks=tuple(int(envs[local]["RANK"]) for local in range(len(envs))),
                logs=tuple(_path(found.stderrs[local]) for local in range(len(envs))),
            )
        )
        return found


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _ended(course: Course, failure: Any) -> Ended:
    """Torch's ``ProcessFailure`` in our terms."""
    attempt = course.attempts[-1]
    return Ended(attempt.ranks[failure.local_rank], failure.exitcode, attempt.logs[failure.local_rank])


class _Watch(logging.Handler):
    """Hears from the agent's log which process failed first: nothing else of it tells, when workers start again.

    Args:
        course, heed: see ``run_agent``.
    """

    def __init__(self, course: Course, heed: Heed) -> None:
        super().__init__(logging.ERROR)
        self._course = course
        self._heed = heed

    def emit(self, record: logging.LogRecord) -> None:
        """Puts a process down that the agent says has failed."""
        args = record.args
        if not isinstance(args, tuple) or "exitcode" not in record.msg or len(args) < 2 or not self._course.attempts:
            return
        attempt, (code, local) = self._course.attempts[-1], args[:2]
        if isinstance(code, int) and isinstance(local, int) and local < len(attempt.ranks):
            self._course.first = Ended(attempt.ranks[local], code, attempt.logs[local])
            self._course.close()
            self._heed.on_failure(self._course)


@contextmanager
def _log_to(path: Path, course: Course, heed: Heed) -> Iterator[None]:
    """Sends the log of torch's elastic parts to a file, in place of the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    watch = _Watch(course, heed)
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


def _lost(job: AgentJob, course: Course, err: Exception) -> WorkerError:
    """What it means that the agents lost each other, or never came together."""
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

    rendezvous = job.rendezvous
    again = " again" if course.attempts else ""
    if isinstance(err, RendezvousClosedError):
        return WorkerError(
            f"the job of {rendezvous.endpoint} was ended by another host",
            hint="what went wrong is told there; start the same command on all hosts",
        )
    if isinstance(err, (RendezvousTimeoutError, TimeoutError)):
        return WorkerError(
            f"not all {_hosts(job.nodes)} came together{again} at {rendezvous.endpoint} within {rendezvous.join_s:g} s",
            hint="start the same command on all hosts; --rdzv-conf join_timeout=SECONDS waits longer",
        )
    return WorkerError(
        f"the rendezvous at {rendezvous.endpoint} is gone: {_first_line(err)}",
        hint="its host has ended, or is not reached any more; start the same command on all hosts",
    )


def _hosts(nodes: tuple[int, int]) -> str:
    least, most = nodes
    return f"{least} hosts" if least == most else f"{least} to {most} hosts"


def _first_line(err: BaseException) -> str:
    """The first line of the innermost message that is not empty."""
    inner: BaseException | None = err
    text = ""
    while inner is not None:
        text = str(inner).strip().split("\n")[0] or text
        inner = inner.__cause__
    return text.rstrip(".") or type(err).__name__
