"""One of several workers that run a ckpt command together: ``python -m ckpt_cli.worker [options] VERB ARGS``.

Started by ``ckpt launch``, ``torchrun -m ckpt_cli.worker``, ``srun python -m ckpt_cli.worker`` or an MPI launcher. It
finds its rank (``rank_env``), meets the others (``rendezvous``), and runs the verb as ``ckpt``
does; rank 0 alone prints.

The exit code is the verb's. An elastic agent starts workers again that end with another code than 0; below ``ckpt
launch``, which names a directory for results, a worker therefore ends with 0 after a verdict (``launch_results``).
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
from ckpt_cli.host.rank_env import Place, place_of
from ckpt_cli.host.results import LAUNCHER_VARIABLE, RESULTS_VARIABLE, VERDICTS, WorkerResult, write_result
from ckpt_cli.options.worker import USAGE, WorkerOptions, parsed
from ckpt_cli.screen.failure import Failure, end_on_signals, failure_of
from ckpt_cli.screen.terminal import screen_of
from ckpt_cli.workers import current_team as teamwork
from ckpt_cli.workers.store import GoneError
from core.errors import CheckpointingException, WorkerError
from core.team.protocol import ALONE, StoppedError, failed_rank_of, is_final

if TYPE_CHECKING:
    from ckpt_cli.workers.torch_team import TorchTeam


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker; returns the exit code of its process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    started_bytes = _resident_bytes()
    restore = end_on_signals()
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    if launcher.isdigit():
        end_with(int(launcher))
    outcome = _Outcome()
    try:
        options, command = parsed(arguments)
        place = outcome.place = place_of()
        team = _joined(place, options, command, started_bytes)
        from ckpt_cli.app import main as run
    except BaseException as err:
        restore()
        failure = failure_of(err, command="ckpt worker")
        shown = outcome.note(err, failure)
        if shown is not None:
            _say(shown)
        return outcome.exit_code(failure.exit_code)
    if place.rank:
        sys.stdout = open(os.devnull, "w")
    outcome.team = team
    code = run(command, heed=outcome.note)
    if team is not None:
        team.end()
    restore()
    return outcome.exit_code(code)


def _joined(place: Place, options: WorkerOptions, command: Sequence[str], started_bytes: int) -> TorchTeam | None:
    """Makes this process one of the team; None for a worker that is the only one.

    Raises:
        CheckpointingException: it cannot be done.
    """
    n_cores = _bound(place, options)
    if place.size == 1:
        if options.device != "cpu":
            from ckpt_cli.workers.device import device_of

            teamwork.join(ALONE, device_of(options.device, place))
        return None
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what it logs are errors that we report
    from ckpt_cli.workers.begin_check import facts_of, problem_of
    from ckpt_cli.workers.device import backend_of, device_of, use
    from ckpt_cli.workers.rendezvous import met
    from ckpt_cli.workers.torch_team import PART_MEMORY_BYTES, TorchTeam

    try:
        device = device_of(options.device, place)
        backend = backend_of(options.backend, device)
        torch_name = "cpu" if device is None else device.torch_name
        use(device)
        facts = facts_of(place, command, backend=backend, device=torch_name)
    except CheckpointingException as err:
        facts = facts_of(place, command, problem=err)
    meeting = met(place, facts, problem_of, timeout_s=options.timeout_s, join_timeout_s=options.join_timeout_s)
    data_device = torch_name if options.backend == "nccl" else "cpu"
    team = TorchTeam(
        place, meeting, backend=backend, device=torch_name, data_device=data_device, timeout_s=options.timeout_s
    )
    team.runtime_bytes = max(_resident_bytes() - started_bytes, 0) + PART_MEMORY_BYTES
    teamwork.join(team, device=device, facts=team.facts, n_cores=n_cores)
    gc.freeze()  # the hundred thousand objects of torch: no collection need look at them
    return team


def _bound(place: Place, options: WorkerOptions) -> int | None:
    """Keeps the process to its cores, before torch starts threads on them; how many they are, if that is known."""
    if place.local_rank is None or place.local_size is None:
        return None
    from ckpt_cli.host.binding import bind

    share = bind(
        options.bind,
        local_rank=place.local_rank,
        local_size=place.local_size,
        is_below_agent="TORCHELASTIC_RUN_ID" in os.environ,
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(share.n_threads))
    return share.n_threads


class _Outcome:
    """What the worker came to, and who is told.

    Attributes:
        place: the worker's, once it is known.
        team: once it has joined one.
    """

    def __init__(self) -> None:
        self.place: Place | None = None
        self.team: TorchTeam | None = None
        self._failure: Failure | None = None
        self._traceback: str | None = None
        self._is_secondary = False
        self._origin: int | None = None

    def note(self, err: BaseException, failure: Failure) -> Failure | None:
        """Hears what ended the work, and tells the team unless it has agreed on that.

        Returns:
            What this process is to print; None for nothing.
        """
        self._failure = failure
        self._is_secondary = isinstance(err, (StoppedError, GoneError))
        self._traceback = None if is_final(err) else "".join(traceback.format_exception(err))
        self._origin = failed_rank_of(err)
        if self.team is not None and self._origin is None:
            self.team.leave(_portable(err, failure.line))
        rank = 0 if self.place is None else self.place.rank
        is_verdict = is_final(err) or failure.exit_code in VERDICTS
        if os.environ.get(RESULTS_VARIABLE) and not is_verdict:
            return None  # the launcher says it
        if isinstance(err, GoneError) and err.is_of_lead:  # once a host: rank 0 may not be there to say it
            is_first = self.place is None or self.place.local_rank in (None, 0)
            return failure if is_first else None
        if is_verdict or self._is_secondary or not isinstance(err, Exception) or self._origin not in (None, rank):
            return self._named(failure, is_verdict=is_verdict) if rank == 0 else None
        return self._named(failure, is_verdict=False)

    def _named(self, failure: Failure, *, is_verdict: bool) -> Failure:
        """The failure with the rank and the host that it came from."""
        if self.team is None or self.place is None or self._is_secondary:
            return failure
        rank = self.place.rank if self._origin is None else self._origin
        host = self.team.hosts[rank]
        message = failure.message if is_verdict else f"rank {rank} on {host}: {failure.message}"
        return replace(failure, message=message, fields={**failure.fields, "worker": rank, "worker_host": host})

    def exit_code(self, code: int) -> int:
        """Leaves the results; the exit code for the process."""
        failure = self._failure
        if failure is not None:
            _write_error_file(failure, self._traceback)
        directory = os.environ.get(RESULTS_VARIABLE)
        if not directory or self.place is None:
            return code
        rank = self.place.rank
        result = WorkerResult(rank, socket.gethostname(), os.getpid(), code, is_secondary=self._is_secondary)
        with suppress(OSError):
            if failure is not None:
                host = None if self._origin is None or self.team is None else self.team.hosts[self._origin]
                origin = None if host is None else self._origin
                result = replace(result, line=failure.line, fields=failure.fields, worker=origin, worker_host=host)
            if self._traceback is not None:
                path = Path(directory) / f"rank-{rank}.traceback"
                path.write_text(self._traceback, "utf-8")
                result = replace(result, traceback=str(path))
            write_result(Path(directory), result)
            return 0 if result.is_verdict else code
        return code


def _portable(err: BaseException, line: str) -> Exception:
    """What the other workers raise in place of ``err``."""
    import pickle

    if isinstance(err, Exception):
        with suppress(Exception):
            pickle.loads(pickle.dumps(err))
            return err
    return WorkerError(line)


def _write_error_file(failure: Failure, text: str | None) -> None:
    """What torchrun reports of a failed worker: the format of ``torch.distributed.elastic``'s ``ErrorHandler``."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not failure.message:
        return
    extra = {"py_callstack": text or failure.line, "timestamp": str(int(time.time()))}
    message = {"message": failure.line, "errorCode": failure.exit_code, "extraInfo": extra}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}), "utf-8")


def _say(failure: Failure) -> None:
    """Print a failure that came before the verb ran."""
    if failure.message:
        with suppress(OSError):
            print(failure.text(screen_of(sys.stderr)), file=sys.stderr)


def _resident_bytes() -> int:
    """Memory of this process now; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)  # a thread that is stuck in native code must not keep the process
