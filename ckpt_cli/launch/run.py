"""``ckpt launch``: one command of ``ckpt``, run by the workers of one or many hosts.

::

    ckpt launch ─ agent (torch) ─┬─ python -m ckpt_cli.worker COMMAND ARGS   rank 0: plans, prints
                                 └─ python -m ckpt_cli.worker COMMAND ARGS   rank 1 …

A verdict (exit codes 0 to 5 and 7) is rank 0's to print; every worker says it in its result file, and every host's
launcher ends with it. A worker that fails otherwise is started again with all others, ``--max-restarts`` times; then
the launcher says which one failed, and ends with 8.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.host.binding import allowed_cores, n_cores
from ckpt_cli.launch.agent import AgentJob, Course, Heed, run_agent, silence_torch
from ckpt_cli.launch.failure import Cause, LaunchError, cause_of
from ckpt_cli.launch.guard import Limits, Overdue, guarded
from ckpt_cli.launch.meeting_place import look, rendezvous_of
from ckpt_cli.options.launch import nodes_in
from ckpt_cli.options.worker import LONGEST_S, WorkerOptions
from ckpt_cli.screen.failure import Terminated
from ckpt_cli.screen.terminal import say_note
from ckpt_cli.workers.published import recalled, tidied
from core.errors import StorageError, UsageError, WorkerError

if TYPE_CHECKING:
    from ckpt_cli.launch.meeting_place import Rendezvous
    from ckpt_cli.options.launch import LaunchOptions

COMMANDS = ("convert", "reshard", "manifest", "validate", "diff")
"""What several workers can do together."""
_WRITING = ("convert", "reshard")
_KEPT = "what is done so far is kept"
_REJOIN_S = 60
"""What is added to the workers' ``--timeout``: for ending workers, and for the agents to meet again."""
_MEET_S = 120
"""Seconds within which workers meet that agents have started: as long as the slowest takes to import torch."""
_MOST_AUTO = 16
"""Workers of ``--nproc-per-node auto`` without GPUs: beyond, threads are cheaper than processes."""


def check_command(command: Sequence[str] | None) -> Sequence[str]:
    """The command, if it is one that several workers can do.

    Raises:
        UsageError: none, or not one of ``COMMANDS``.
    """
    if not command:
        raise UsageError(
            "which command? nothing follows the options", hint="for example: ckpt launch -- convert SRC DST --to dcp"
        )
    if command[0] == "inspect":
        raise UsageError("inspect reads no tensor data: one process does it", hint="run: ckpt inspect …")
    if command[0] == "launch":
        raise UsageError("launch cannot be launched", hint="give one: ckpt launch OPTIONS -- COMMAND ARGS")
    if command[0] not in COMMANDS:
        raise UsageError(f"no such command {command[0]!r} to launch", hint=f"it is one of: {', '.join(COMMANDS)}")
    return command


def launch(options: LaunchOptions, report: Callable[[BaseException], int]) -> int:
    """Runs the workers of this host; returns the job's exit code.

    Args:
        report: tells an error, if the process has to end without returning from here; gives its exit code.

    Raises:
        UsageError: the options contradict one another, or ask for what this host has not.
        WorkerError: workers failed, or could not be started.
        Terminated: a signal asked this process to end; the workers are gone.
    """
    command = list(options.command or ())
    rendezvous = rendezvous_of(options)
    workers = worker_options_of(options)
    silence_torch()
    n_workers = workers_of(options.nproc_per_node or "auto", workers.device)
    course = Course()
    rejoin_s = options.rejoin_timeout or workers.timeout_s + _REJOIN_S

    def end(overdue: Overdue) -> int:
        if overdue.signal is not None:
            return report(Terminated(overdue.signal))
        if overdue.is_done:
            return _settled(course, command) or 0
        gone = WorkerError(f"hosts that were lost have not come back within {overdue.seconds:.0f} s")
        return report(_failure(course, command, lost=gone if overdue.is_rejoin else None) or gone)

    def say_wait() -> None:
        if not rendezvous.is_standalone and _is_listener(rendezvous):
            least, _ = nodes_in(options.nnodes)
            say_note(f"waiting for {least} hosts at {rendezvous.endpoint} up to {rendezvous.join_s:g} s")

    limits = Limits(rejoin_s, options.shutdown_timeout, options.max_restarts)
    with _log_dir(options.log_dir) as log_dir, guarded(course, limits, on_wait=say_wait, end=end):
        look(rendezvous, is_listener=_is_listener(rendezvous), say=say_note)
        job = AgentJob(
            program=sys.executable,
            arguments=("-m", "ckpt_cli.worker", *workers.as_arguments(), *command),
            n_workers=n_workers,
            nodes=nodes_in(options.nnodes),
            rendezvous=rendezvous,
            local_addr=options.local_addr or ("127.0.0.1" if rendezvous.is_standalone else None),
            max_restarts=options.max_restarts,
            monitor_s=options.monitor_interval,
            shutdown_s=options.shutdown_timeout,
            log_dir=log_dir,
            redirects=options.redirects,
            tee=options.tee,
            role=options.role,
        )
        return _run(job, course, command, rejoin_s)


def _run(job: AgentJob, course: Course, command: Sequence[str], rejoin_s: float) -> int:
    """Runs the agent; returns the exit code that the workers agree on."""
    is_quiet = "--quiet" in command or "-q" in command

    def on_failure(course: Course) -> None:
        n_restarts = course.attempts[-1].n_restarts
        cause = _cause(course)
        if is_quiet or cause is None or n_restarts >= job.max_restarts or _settled(course, command) is not None:
            return
        wait = "" if job.nodes[1] == 1 else f", when all hosts are there; they are waited for for {rejoin_s:g} s"
        say_note(
            f"{cause.sentence.rstrip('.')}; all workers start again "
            f"({n_restarts + 1} of {job.max_restarts} restarts){wait}"
        )

    def may_restart(course: Course) -> bool:
        if _settled(course, command) is not None:
            return False
        if course.first is None and not is_quiet:
            say_note("workers of another host have failed, or hosts came: all workers start again")
        return True

    lost = None
    try:
        run_agent(job, course, Heed(on_failure, may_restart))
    except WorkerError as err:
        lost = err
    except Terminated:
        if command[0] in _WRITING and course.attempts:
            say_note(f"{_KEPT}, and the same command goes on from there")
        raise
    code = _published(course)
    if code is None:
        code = _settled(course, command)
    if code is not None:
        return code
    raise (
        _failure(course, command, lost=lost)
        or lost
        or WorkerError(
            f"a worker on {socket.gethostname()} ended without a result",
            hint="this is a bug in ckpt: run again with --debug and report what it prints",
        )
    )


def _settled(course: Course, command: Sequence[str]) -> int | None:
    """The exit code that the job has come to, as far as this host knows; None if it has not, or nothing is known.

    That is so when all workers of the host have come to one. It is so as well, whatever became of others, when the lead
    has, which is the last to be done; and of a command that writes when any worker is done, as what is written is then
    in its place.
    """
    attempt = course.attempts[-1] if course.attempts else None
    if attempt is None:
        return None
    codes = {rank: result.exit_code for rank, result in course.results.items() if result.is_verdict}
    if 0 in codes:
        return codes[0]
    if codes.keys() >= set(attempt.ranks):
        return next((code for code in codes.values() if code), 0)
    return 0 if command[0] in _WRITING and 0 in codes.values() else None


def _published(course: Course) -> int | None:
    """0 if the destination got its name although the worker that was to tell of it is gone; None if not."""
    has_told = 0 in course.results and course.results[0].is_verdict
    report = recalled(course.attempts[-1].results_dir) if course.attempts and not has_told else None
    if report is None:
        return None
    with suppress(StorageError):  # a stage of no use stays
        tidied(report)
    say_note(f"{report.dst} is complete; the worker that was to report it has been ended")
    return 0


def _failure(course: Course, command: Sequence[str], *, lost: WorkerError | None = None) -> WorkerError | None:
    """The error of a job whose workers failed; None if none did here.

    Args:
        lost: why they were not started again, if it is not that the restarts are used up.
    """
    cause = _cause(course)
    if cause is None:
        return None
    hints = [hint for hint in (cause.hint, None if lost is None else lost.message) if hint]
    if cause.log_path is not None:
        hints.append(f"its log is {cause.log_path}")
    if command[0] in _WRITING:
        hints.append(f"{_KEPT}, and the same command goes on from there")
    n_restarts = course.attempts[-1].n_restarts if course.attempts else 0
    return LaunchError(cause, n_restarts=n_restarts, hint="; ".join(hints) or None)


def _cause(course: Course) -> Cause | None:
    """What the workers of this host failed of."""
    return cause_of(course.ended, course.results, first=course.first, host=socket.gethostname())


def workers_of(count: str, device: str) -> int:
    """How many workers this host gets.

    Args:
        count: a number, ``auto``, ``cpu`` or ``gpu``.
        device: of ``--device``.

    Raises:
        UsageError: there are not so many GPUs.
    """
    n_gpus = _n_gpus() if device == "cuda" or count == "gpu" or (count == "auto" and device == "auto") else 0
    if not n_gpus and (device == "cuda" or count == "gpu"):
        raise UsageError("this host has no GPU that torch can use", hint="say --device cpu, or look at nvidia-smi")
    if count == "gpu" or (count == "auto" and n_gpus):
        return n_gpus
    if count in ("cpu", "auto"):
        cores = n_cores(allowed_cores())
        number = cores if count == "cpu" else min(cores, _MOST_AUTO)
    else:
        number = int(count)
    if device == "cuda" and number > n_gpus:
        raise UsageError(
            f"{number} workers with a GPU each, but this host has {n_gpus} that torch can use",
            hint=f"say --nproc-per-node {n_gpus}",
        )
    return number


def _n_gpus() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def worker_options_of(options: LaunchOptions) -> WorkerOptions:
    """What of the options is the workers' own.

    Raises:
        UsageError: workers would refuse it.
    """
    usual = WorkerOptions()
    timeout_s = options.timeout or usual.timeout_s
    return WorkerOptions(
        device=options.device or usual.device,
        backend=options.backend or usual.backend,
        timeout_s=timeout_s,
        join_timeout_s=min(max(_MEET_S, 2 * timeout_s), LONGEST_S),
        bind=options.bind or usual.bind,
    )


def _is_listener(rendezvous: Rendezvous) -> bool:
    """Whether this host is the one that is to listen, as torch finds it out."""
    if rendezvous.node_rank is not None:
        return rendezvous.node_rank == 0
    said = rendezvous.settings.get("is_host")
    if said is not None:
        return said.lower() in ("1", "true", "t", "yes", "y")
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    try:
        return bool(_matches_machine_hostname(rendezvous.host))
    except OSError:  # this host's own name does not resolve
        return False


@contextmanager
def _log_dir(asked: Path | None) -> Iterator[Path]:
    """The directory for logs; one that nobody asked for is removed, unless workers failed.

    Raises:
        UsageError: the one that is asked for is a file, or lies nowhere.
        StorageError: it cannot be written.
    """
    if asked is not None:
        if asked.exists() and not asked.is_dir():
            raise UsageError("--log-dir: that is a file", file=str(asked), hint="name a directory")
        if not asked.absolute().parent.is_dir():
            raise UsageError("--log-dir: there is no directory to make it in", file=str(asked), hint="check the path")
        asked.mkdir(exist_ok=True)
        if not os.access(asked, os.W_OK | os.X_OK):
            raise StorageError("--log-dir: permission denied", file=str(asked))
        yield asked.absolute()
        return
    own = Path(tempfile.mkdtemp(prefix="ckpt-launch-"))
    try:
        yield own
    except LaunchError:
        raise
    except BaseException:
        shutil.rmtree(own, ignore_errors=True)
        raise
    shutil.rmtree(own, ignore_errors=True)
