"""``ckpt launch``: runs one command of ``ckpt`` with the workers of one or many hosts.

::

    ckpt launch ─ agent (torch) ─┬─ python -m ckpt_cli.worker COMMAND ARGS   rank 0: plans, prints
                                 └─ python -m ckpt_cli.worker COMMAND ARGS   rank 1 …

A verdict (exit codes 0 to 5 and 7) is printed by rank 0; every worker writes it to its result file,
and the launcher of every host exits with it. If a worker fails otherwise, all workers are
restarted, up to ``--max-restarts`` times; then the launcher reports which one failed and exits with
8.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import ckpt_cli
from ckpt_cli.host.binding import n_cores
from ckpt_cli.launch.agent import AgentJob, FailureHooks, LaunchHistory, run_agent, silence_torch
from ckpt_cli.launch.failure import Cause, LaunchError, cause_of
from ckpt_cli.launch.guard import Limits, Overdue, guard_agent
from ckpt_cli.launch.meeting_place import check_rendezvous, rendezvous_of
from ckpt_cli.options.launch import parse_nodes
from ckpt_cli.options.shared.progress import is_quiet, progress_form, requested_form, with_form
from ckpt_cli.options.worker import LONGEST_S, WorkerOptions
from ckpt_cli.screen.failure import Terminated, raise_if_ended
from ckpt_cli.screen.terminal import print_note
from ckpt_cli.workers.progress import show_progress
from ckpt_cli.workers.published import finish_published, recall_report
from ckpt_cli.workers.remaining import InterruptedOutput
from core.errors import StorageError, UsageError, WorkerError, did_you_mean
from core.files.syscalls import allowed_cores
from core.progress import Phase, begin_phase

if TYPE_CHECKING:
    from ckpt_cli.launch.meeting_place import Rendezvous
    from ckpt_cli.options.launch import LaunchOptions

COMMANDS = ("convert", "reshard", "merge", "manifest", "validate", "diff")
"""Commands that several workers can run together."""
_WRITING = ("convert", "reshard", "merge")
_CONTINUE = "partial output is kept; rerun the same command to continue"
_REJOIN_S = 60
"""Seconds, in addition to ``--timeout``, to end the workers and for the agents to meet again."""
_MEET_S = 120
"""Minimum of the workers' join timeout, in seconds: the slowest may take long to import torch."""
_MOST_AUTO = 16
"""Maximum number of workers of ``--nproc-per-node auto`` without GPUs; beyond that, threads are
cheaper than processes."""


def check_command(command: Sequence[str] | None) -> Sequence[str]:
    """Return the command if several workers can run it.

    Raises:
        UsageError: the command is missing or not one of ``COMMANDS``.
    """
    if not command:
        raise UsageError(
            "no command to launch", hint="for example: ckpt launch -- convert SRC DST --to dcp"
        )
    if command[0] == "inspect":
        raise UsageError(
            "ckpt launch does not support inspect, which runs in one process",
            hint="use ckpt inspect …",
        )
    if command[0] == "explore":
        raise UsageError(
            "ckpt launch does not support explore, which is interactive", hint="use ckpt explore …"
        )
    if command[0] == "prune":
        raise UsageError(
            "ckpt launch does not support prune, which runs in one process",
            hint="use ckpt prune …",
        )
    if command[0] == "launch":
        raise UsageError(
            "ckpt launch cannot launch itself", hint="use ckpt launch OPTIONS -- COMMAND ARGS"
        )
    if command[0] not in COMMANDS:
        raise UsageError(
            f"ckpt launch does not support the command {command[0]!r}",
            hint=did_you_mean(command[0], COMMANDS) or f"use one of: {', '.join(COMMANDS)}",
        )
    return command


def launch(
    options: LaunchOptions, report: Callable[[BaseException], int], *, dst: Path | None = None
) -> int:
    """Run the workers of this host and return the job's exit code.

    The launcher shows progress until the workers start; then rank 0 does.

    Args:
        dst: the destination that the command names; None without one.
        report: prints an error and returns its exit code; called if the process must end without
            returning from this function.

    Raises:
        UsageError: the options contradict each other, or request more than this host has.
        WorkerError: workers failed or could not be started.
        StorageError: the log directory is not writable.
        Terminated: this process received a signal to end; the workers have ended.
    """
    command = with_form(options.command or (), options.progress)
    form = progress_form(requested_form(command), is_quiet=is_quiet(command))
    history = LaunchHistory()
    try:
        with ExitStack() as starting:
            begin_phase(starting.enter_context(show_progress(form)), Phase.STARTING)

            def on_start() -> None:
                raise_if_ended()
                starting.close()

            return _launch(options, command, history, report, on_start=on_start)
    except Terminated as err:
        if command[0] in _WRITING:
            err.remaining = _remaining(history, dst)
        raise


def _launch(
    options: LaunchOptions,
    command: Sequence[str],
    history: LaunchHistory,
    report: Callable[[BaseException], int],
    *,
    on_start: Callable[[], None],
) -> int:
    """Run the workers of this host and return the job's exit code, as ``launch`` does.

    Args:
        on_start: called right before workers are started.
    """
    # Check the options before anything is started. ``local_worker_count`` imports torch, so its
    # log level must be set before.
    rendezvous = rendezvous_of(options)
    workers = worker_options_of(options)
    silence_torch()
    n_workers = local_worker_count(options.nproc_per_node or "auto", workers.device)
    rejoin_s = options.rejoin_timeout or workers.timeout_s + _REJOIN_S

    # The guard calls these functions in its own thread, if the agent waits or hangs.
    def end(overdue: Overdue) -> int:
        if overdue.signal is not None:
            return report(Terminated(overdue.signal))
        if overdue.is_done:
            return _agreed_exit_code(history, command) or 0
        lost = WorkerError(f"the lost hosts did not return within {overdue.seconds:.0f} s")
        return report(_failure(history, command, lost=lost if overdue.is_rejoin else None) or lost)

    def note_wait() -> None:
        if not rendezvous.is_standalone and _is_listener(rendezvous):
            least, _ = parse_nodes(options.nnodes)
            print_note(
                f"waiting up to {rendezvous.join_s:g} s for {least} hosts at {rendezvous.endpoint}"
            )

    # Keep the working directory off ``sys.path`` of the workers (python -P): folders there may have
    # the names of modules that the workers import. Without -P if ckpt itself is found only there,
    # as in a source tree that is not installed.
    search = [folder for folder in sys.path if folder and Path(folder) != Path.cwd()]
    spec = PathFinder.find_spec("ckpt_cli", search)
    package_path = Path(ckpt_cli.__file__).resolve()
    is_installed = spec is not None and spec.origin and Path(spec.origin).resolve() == package_path
    # Run the agent under the guard.
    limits = Limits(rejoin_s, options.shutdown_timeout, options.max_restarts)
    with (
        _log_dir(options.log_dir) as log_dir,
        guard_agent(history, limits, on_wait=note_wait, end=end),
    ):
        check_rendezvous(rendezvous, is_listener=_is_listener(rendezvous), note=print_note)
        job = AgentJob(
            program=sys.executable,
            arguments=(
                *(("-P",) if is_installed else ()),
                "-m",
                "ckpt_cli.worker",
                *workers.as_arguments(),
                *command,
            ),
            n_workers=n_workers,
            nodes=parse_nodes(options.nnodes),
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
        return _run(job, history, command, rejoin_s, on_start=on_start)


def _remaining(history: LaunchHistory, dst: Path | None) -> str:
    """Return what an interrupted command that writes has left at its destination."""
    report = recall_report(history.attempts[-1].results_dir) if history.attempts else None
    if report is not None:
        return f"{report.dst} was already complete"
    # Workers that share a job always keep their partial output.
    return InterruptedOutput(dst, keeps_partial=True, has_begun=bool(history.attempts)).remaining()


def _run(
    job: AgentJob,
    history: LaunchHistory,
    command: Sequence[str],
    rejoin_s: float,
    *,
    on_start: Callable[[], None],
) -> int:
    """Run the agent and return the exit code that the workers agree on.

    Args:
        rejoin_s: how long lost hosts may take to return, in seconds.
        on_start: called right before workers are started.

    Raises:
        WorkerError: the workers failed.
        Terminated: this process received a signal to end.
    """

    # The agent calls these functions after a failure; they print a note about a restart.
    def on_failure(history: LaunchHistory) -> None:
        n_restarts = history.attempts[-1].n_restarts
        cause = _cause(history)
        if is_quiet(command) or cause is None or n_restarts >= job.max_restarts:
            return
        if _agreed_exit_code(history, command) is not None:
            return
        wait = (
            ""
            if job.nodes[1] == 1
            else f" when all hosts have returned (waiting up to {rejoin_s:g} s)"
        )
        print_note(
            f"{cause.sentence.rstrip('.')}; restarting all workers"
            f"{wait}, restart {n_restarts + 1} of {job.max_restarts}"
        )

    def may_restart(history: LaunchHistory) -> bool:
        if _agreed_exit_code(history, command) is not None:
            return False
        if history.first is None and not is_quiet(command):
            print_note("restarting all workers: a worker on another host failed, or a host joined")
        return True

    lost = None
    try:
        run_agent(job, history, FailureHooks(on_failure, may_restart, on_start))
    except WorkerError as err:
        lost = err
    # The job may be done even if workers failed: its destination is published, or the workers that
    # matter have a verdict.
    if _finish_if_published(history):
        return 0
    code = _agreed_exit_code(history, command)
    if code is not None:
        return code
    raise (
        _failure(history, command, lost=lost)
        or lost
        or WorkerError(
            f"a worker on {socket.gethostname()} exited without reporting a result",
            hint="this is a bug in ckpt: rerun with --debug and report the output",
        )
    )


def _agreed_exit_code(history: LaunchHistory, command: Sequence[str]) -> int | None:
    """Return the exit code of the job, as far as this host knows; None if it is not known yet."""
    if not history.attempts:
        return None
    codes = {
        rank: result.exit_code for rank, result in history.results.items() if result.is_verdict
    }
    # The lead finishes last, so its verdict (rank 0) is the job's.
    if 0 in codes:
        return codes[0]
    # Without the lead on this host: all workers have a verdict, and a failure counts.
    if codes.keys() >= set(history.attempts[-1].ranks):
        return next((code for code in codes.values() if code), 0)
    # No worker of a command that writes succeeds before the destination is complete.
    return 0 if command[0] in _WRITING and 0 in codes.values() else None


def _finish_if_published(history: LaunchHistory) -> bool:
    """Return True if the destination is complete although the lead died before its report.

    The lead's remaining work is then finished, and the user is informed.
    """
    has_reported = 0 in history.results and history.results[0].is_verdict
    report = (
        recall_report(history.attempts[-1].results_dir)
        if history.attempts and not has_reported
        else None
    )
    if report is None:
        return False
    with suppress(StorageError):  # only a useless staging directory remains
        finish_published(report)
    print_note(f"{report.dst} is complete, although the worker that should have reported this died")
    return True


def _failure(
    history: LaunchHistory, command: Sequence[str], *, lost: WorkerError | None = None
) -> WorkerError | None:
    """Return the error of a job whose workers failed; None if no worker of this host failed.

    Args:
        lost: the reason why the workers were not restarted; None if the restarts were used up.
    """
    cause = _cause(history)
    if cause is None:
        return None
    hints = [hint for hint in (cause.hint, None if lost is None else lost.message) if hint]
    if cause.log_path is not None:
        hints.append(f"see the worker's log, {cause.log_path}")
    if command[0] in _WRITING:
        hints.append(_CONTINUE)
    n_restarts = history.attempts[-1].n_restarts if history.attempts else 0
    return LaunchError(cause, n_restarts=n_restarts, hint="; ".join(hints) or None)


def _cause(history: LaunchHistory) -> Cause | None:
    """Return the cause of the failure of this host's workers; None if none failed."""
    return cause_of(history.ended, history.results, first=history.first, host=socket.gethostname())


def local_worker_count(count: str, device: str) -> int:
    """Return the number of workers of this host.

    Args:
        count: value of ``--nproc-per-node``: a number, ``auto``, ``cpu`` or ``gpu``.
        device: value of ``--device``.

    Raises:
        UsageError: torch finds no GPU, or fewer GPUs than workers that need one.
    """
    # Look for GPUs only if they matter, because that imports torch.
    needs_gpus = device == "cuda" or count == "gpu"
    n_gpus = 0
    if needs_gpus or (count == "auto" and device == "auto"):
        import torch

        n_gpus = int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    if needs_gpus and not n_gpus:
        raise UsageError(
            "this host has no GPU that torch can use", hint="use --device cpu, or check nvidia-smi"
        )
    # One worker per GPU, one per core, or the number given.
    if count == "gpu" or (count == "auto" and n_gpus):
        return n_gpus
    if count in ("cpu", "auto"):
        cores = n_cores(allowed_cores())
        number = cores if count == "cpu" else min(cores, _MOST_AUTO)
    else:
        number = int(count)
    if device == "cuda" and number > n_gpus:
        raise UsageError(
            f"{number} workers need one GPU each, but torch can use only {n_gpus} on this host",
            hint=f"use --nproc-per-node {n_gpus}",
        )
    return number


def worker_options_of(options: LaunchOptions) -> WorkerOptions:
    """Return the options to pass on to the workers.

    Raises:
        UsageError: an option has a value that workers do not accept.
    """
    defaults = WorkerOptions()
    timeout_s = options.timeout or defaults.timeout_s
    return WorkerOptions(
        device=options.device or defaults.device,
        backend=options.backend or defaults.backend,
        timeout_s=timeout_s,
        join_timeout_s=min(max(_MEET_S, 2 * timeout_s), LONGEST_S),
        bind=options.bind or defaults.bind,
    )


def _is_listener(rendezvous: Rendezvous) -> bool:
    """Return True if this host must listen at the rendezvous, by torch's own rules."""
    # Host 0 of a static rendezvous; else the host that torch's setting ``is_host`` chooses, or the
    # one that the endpoint names.
    if rendezvous.node_rank is not None:
        return rendezvous.node_rank == 0
    is_host = rendezvous.settings.get("is_host")
    if is_host is not None:
        return is_host.lower() in ("1", "true", "t", "yes", "y")
    from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname

    try:
        return bool(_matches_machine_hostname(rendezvous.host))
    except OSError:  # this host's own name does not resolve
        return False


@contextmanager
def _log_dir(log_dir: Path | None) -> Iterator[Path]:
    """Create and yield the directory for logs.

    Args:
        log_dir: value of ``--log-dir``; None for a temporary directory, which is removed at the
            end unless workers failed.

    Raises:
        UsageError: ``log_dir`` is a file, or its parent directory does not exist.
        StorageError: ``log_dir`` is not writable.
    """
    # Without these checks torch would fail later, with an error that does not name the option.
    if log_dir is not None:
        if log_dir.exists() and not log_dir.is_dir():
            raise UsageError("--log-dir is a file", file=str(log_dir), hint="choose a directory")
        if not log_dir.absolute().parent.is_dir():
            raise UsageError(
                "the parent directory of --log-dir does not exist",
                file=str(log_dir),
                hint="check the path",
            )
        log_dir.mkdir(exist_ok=True)
        if not os.access(log_dir, os.W_OK | os.X_OK):
            raise StorageError("no permission to write to --log-dir", file=str(log_dir))
        yield log_dir.absolute()
        return
    temporary_dir = Path(tempfile.mkdtemp(prefix="ckpt-launch-"))
    try:
        yield temporary_dir
    except LaunchError:  # its hint names a log in the directory
        raise
    except BaseException:
        shutil.rmtree(temporary_dir, ignore_errors=True)
        raise
    shutil.rmtree(temporary_dir, ignore_errors=True)
