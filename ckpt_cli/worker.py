"""A worker, one of several processes that run a ckpt command together.

It is started by ``ckpt launch``, ``torchrun -m ckpt_cli.worker``, ``srun python -m
ckpt_cli.worker`` or an MPI launcher, with the arguments ``[OPTIONS] COMMAND ARGS``. It finds its
rank (``host.rank_env``), meets the others (``workers.rendezvous``), and runs the command as
``ckpt`` does; only rank 0 prints.

The exit code is the command's. An elastic agent restarts workers that exit with another code than
0. Below ``ckpt launch``, which sets a directory for results, a worker therefore exits with 0 after
a verdict (``host.results``).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_cli.host.launcher_watch import end_with
from ckpt_cli.host.rank_env import WorkerIdentity, identify_worker
from ckpt_cli.host.results import (
    LAUNCHER_VARIABLE,
    RESULTS_VARIABLE,
    VERDICTS,
    WorkerResult,
    write_result,
)
from ckpt_cli.options.shared.progress import is_quiet, progress_form, requested_form
from ckpt_cli.options.worker import USAGE, WorkerOptions, parse_worker_arguments
from ckpt_cli.screen.failure import Failure, end_on_signals, failure_of
from ckpt_cli.screen.terminal import screen_of
from ckpt_cli.workers import current_team as teamwork
from ckpt_cli.workers.progress import show_progress
from ckpt_cli.workers.store import GoneError
from core.engine.team.protocol import ALONE, StoppedError, failed_rank_of, is_final
from core.errors import CheckpointingException, WorkerError
from core.progress import Phase, begin_phase

if TYPE_CHECKING:
    from ckpt_cli.workers.torch_team import TorchTeam


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker and return the exit code of its process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    started_bytes = _resident_bytes()
    restore = end_on_signals()
    # Below ``ckpt launch``, do not outlive the launcher.
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    if launcher.isdigit():
        end_with(int(launcher))
    # Join the team. Errors up to here are printed as those of the worker, not of the command.
    outcome = _Outcome()
    try:
        options, command = parse_worker_arguments(arguments)
        identity = outcome.identity = identify_worker()
        is_shown = identity.rank == 0 and identity.size > 1
        form = progress_form(requested_form(command), is_quiet=is_quiet(command))
        with show_progress(form if is_shown else "none") as progress:
            begin_phase(progress, Phase.MEETING)
            team = _join_team(identity, options, command, started_bytes)
        from ckpt_cli.app import main as run
    except BaseException as err:
        restore()
        failure = failure_of(err, command="ckpt worker")
        printed = outcome.note(err, failure)
        if printed is not None and printed.message:
            with suppress(OSError):
                print(printed.text(screen_of(sys.stderr)), file=sys.stderr)
        return outcome.exit_code(failure.exit_code)
    # Run the command; only rank 0 prints.
    if identity.rank:
        sys.stdout = open(os.devnull, "w")
    outcome.team = team
    code = run(command, failure_filter=outcome.note)
    if team is not None:
        team.end()
    restore()
    return outcome.exit_code(code)


def _join_team(
    identity: WorkerIdentity, options: WorkerOptions, command: Sequence[str], started_bytes: int
) -> TorchTeam | None:
    """Make this process a member of its team, and return the team.

    Returns None for the only worker of a job.

    Args:
        started_bytes: memory of the process at its start.

    Raises:
        UsageError: a worker lacks its device or backend, or the workers do not fit together.
        WorkerError: not all workers joined in time.
    """
    # Pin the process before torch, imported below, starts its threads.
    n_cores = _pin_to_cores(identity, options)
    if identity.size == 1:
        if options.device != "cpu":
            from ckpt_cli.workers.device import open_device

            teamwork.join(ALONE, open_device(options.device, identity))
        return None
    # torch's native log repeats errors that are reported anyway; the level is read at its import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from ckpt_cli.workers.begin_check import check_members, describe_worker
    from ckpt_cli.workers.device import backend_of, open_device, use_device
    from ckpt_cli.workers.rendezvous import meet_workers
    from ckpt_cli.workers.torch_team import PART_MEMORY_BYTES, TorchTeam

    # A worker that cannot run joins nevertheless, so that the others do not wait for it;
    # ``meet_workers`` then raises its error on all of them.
    try:
        device = open_device(options.device, identity)
        backend = backend_of(options.backend, device)
        torch_name = "cpu" if device is None else device.torch_name
        use_device(device)
        facts = describe_worker(identity, command, backend=backend, device=torch_name)
    except CheckpointingException as err:
        facts = describe_worker(identity, command, problem=err)
    # Meet the others and start the team.
    meeting = meet_workers(
        identity,
        facts,
        check_members,
        timeout_s=options.timeout_s,
        join_timeout_s=options.join_timeout_s,
    )
    data_device = torch_name if options.backend == "nccl" else "cpu"
    team = TorchTeam(
        identity,
        meeting,
        backend=backend,
        device=torch_name,
        data_device=data_device,
        timeout_s=options.timeout_s,
    )
    team.runtime_bytes = max(_resident_bytes() - started_bytes, 0) + PART_MEMORY_BYTES
    teamwork.join(
        team,
        device=device,
        facts=team.facts,
        n_cores=n_cores,
        n_local=identity.local_size or 1,
    )
    gc.freeze()  # spares every garbage collection the hundred thousand objects of torch
    return team


def _pin_to_cores(identity: WorkerIdentity, options: WorkerOptions) -> int | None:
    """Pin this process to its share of the host's cores.

    Returns:
        The number of threads to start; None if the launcher does not set the number of workers on
        this host.
    """
    if identity.local_rank is None or identity.local_size is None:
        return None
    from ckpt_cli.host.binding import bind

    share = bind(
        options.bind,
        local_rank=identity.local_rank,
        local_size=identity.local_size,
        is_below_agent="TORCHELASTIC_RUN_ID" in os.environ,
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(share.n_threads))
    return share.n_threads


class _Outcome:
    """The outcome of a worker, to be reported to the team, the launcher and the user.

    Attributes:
        identity: the worker's identity; None until known.
        team: the worker's team; None until it has joined one.
    """

    def __init__(self) -> None:
        self.identity: WorkerIdentity | None = None
        self.team: TorchTeam | None = None
        self._failure: Failure | None = None
        self._traceback: str | None = None
        self._is_secondary = False
        self._origin: int | None = None

    def note(self, err: BaseException, failure: Failure) -> Failure | None:
        """Record the failure that ended the work, and announce it to the team.

        Returns:
            The failure that this process must print; None if another process does.
        """
        # An error with a rank (its origin) has already been raised on all workers.
        self._failure = failure
        self._is_secondary = isinstance(err, (StoppedError, GoneError))
        self._traceback = None if is_final(err) else "".join(traceback.format_exception(err))
        self._origin = failed_rank_of(err)
        if self.team is not None and self._origin is None:
            self.team.leave(_portable(err, failure.line))
        # Below ``ckpt launch``, the launcher prints everything but verdicts.
        is_verdict = is_final(err) or failure.exit_code in VERDICTS
        if os.environ.get(RESULTS_VARIABLE) and not is_verdict:
            return None
        if not self._must_print(err, is_verdict=is_verdict):
            return None
        return self._named(failure, is_verdict=is_verdict)

    def _must_print(self, err: BaseException, *, is_verdict: bool) -> bool:
        """Return True if this process is the one that prints the failure."""
        rank = 0 if self.identity is None else self.identity.rank
        # If rank 0 may be gone, the first worker of each host prints.
        if isinstance(err, GoneError) and err.is_of_lead:
            return self.identity is None or self.identity.local_rank in (None, 0)
        # Rank 0 prints the failures that all workers share: verdicts, interrupts, and the failure
        # of one worker that the others have received. Any other error is printed where it occurred.
        is_shared = (
            is_verdict
            or self._is_secondary
            or not isinstance(err, Exception)
            or self._origin not in (None, rank)
        )
        return rank == 0 or not is_shared

    def _named(self, failure: Failure, *, is_verdict: bool) -> Failure:
        """Return the failure with the rank and host on which it happened, if these are certain."""
        if self.team is None or self.identity is None or self._is_secondary:
            return failure
        rank = self.identity.rank if self._origin is None else self._origin
        host = self.team.hosts[rank]
        message = failure.message if is_verdict else f"rank {rank} on {host}: {failure.message}"
        return replace(
            failure, message=message, fields={**failure.fields, "worker": rank, "worker_host": host}
        )

    def exit_code(self, code: int) -> int:
        """Write the worker's results for its launcher, and return the exit code of the process."""
        # Below torchrun: the file from which it reports a failed worker.
        failure = self._failure
        if failure is not None:
            _write_error_file(failure, self._traceback)
        # Below ``ckpt launch``: the result, with the failure and its traceback.
        directory = os.environ.get(RESULTS_VARIABLE)
        if not directory or self.identity is None:
            return code
        rank = self.identity.rank
        result = WorkerResult(
            rank, socket.gethostname(), os.getpid(), code, is_secondary=self._is_secondary
        )
        with suppress(OSError):
            if failure is not None:
                host = (
                    None
                    if self._origin is None or self.team is None
                    else self.team.hosts[self._origin]
                )
                origin = None if host is None else self._origin
                result = replace(
                    result,
                    line=failure.line,
                    fields=failure.fields,
                    worker=origin,
                    worker_host=host,
                )
            if self._traceback is not None:
                path = Path(directory) / f"rank-{rank}.traceback"
                path.write_text(self._traceback, "utf-8")
                result = replace(result, traceback=str(path))
            write_result(Path(directory), result)
            return 0 if result.is_verdict else code
        return code


def _portable(err: BaseException, line: str) -> Exception:
    """Return the error for the other workers to raise: ``err`` itself if it can be pickled."""
    import pickle

    if isinstance(err, Exception):
        with suppress(Exception):
            pickle.loads(pickle.dumps(err))
            return err
    return WorkerError(line)


def _write_error_file(failure: Failure, text: str | None) -> None:
    """Write the error file of torchrun, in the format of torch's ``ErrorHandler``.

    Args:
        text: the traceback; None without one.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not failure.message:
        return
    extra = {"py_callstack": text or failure.line, "timestamp": str(int(time.time()))}
    message = {"message": failure.line, "errorCode": failure.exit_code, "extraInfo": extra}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), "utf-8")


def _resident_bytes() -> int:
    """Return the resident memory of this process, in bytes; 0 if it cannot be read."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


if __name__ == "__main__":
    # As for ``ckpt``: until the work begins, Ctrl-C ends the process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)  # a thread that is stuck in native code must not keep the process alive
