"""The process that writes an asynchronous save, and its report to the rank that started it.

The process uses neither torch.distributed nor an accelerator, so it may be an ordinary fork of a
process that does. The state of both in its memory must stay untouched: the garbage collector is off
(it might free tensors on a device that the fork cannot access) and torch computes with one thread
(a pool of OpenMP threads does not survive a fork).
"""

from __future__ import annotations

import gc
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from core.dist_checkpointing._ranks import comm
from core.errors import CheckpointingException, WorkerError
from core.files.syscalls import die_with_parent

POLL_INTERVAL_S = 0.5
"""Interval, in seconds, at which a blocking wait checks if the process is alive.

Waiting for the end of its pipe is not enough: a later fork of the rank may keep the pipe open.
"""


@contextmanager
def pause_collection() -> Iterator[None]:
    """Switch automatic garbage collection off within the ``with`` block.

    It stays off in a process that is forked in the block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def become_writer(parent_pid: int, *, dies_with_parent: bool) -> None:
    """Turn this new process into a writer, which ignores signals to the job but ends with its rank.

    Args:
        parent_pid: process id of the rank that started this process.
        dies_with_parent: end this process when the thread that started it ends. Set it only for a
            main thread, which lives as long as the rank.
    """
    # A signal that interrupts or ends a job goes to all of its processes; the rank decides if a
    # running save is completed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    torch.set_num_threads(1)
    # A restarted job must not meet writers of the job that was killed.
    if dies_with_parent:
        die_with_parent(parent_pid)


def is_main_thread() -> bool:
    """Check if this is the main thread, which lives as long as the process."""
    return threading.current_thread() is threading.main_thread()


def catch_failure(work: Callable[[], object]) -> CheckpointingException | None:
    """Run the work and return its failure in a form that can be sent, or None if it succeeded.

    A CheckpointingException is returned as it is; any other error becomes a WorkerError with the
    traceback as a note.
    """
    try:
        work()
    except CheckpointingException as err:
        failure = err
    except (Exception, SystemExit) as err:
        failure = WorkerError(f"{type(err).__name__}: {err}")
        failure.add_note(f"Original traceback:\n{traceback.format_exc()}")
    else:
        return None
    return failure


def writer_failure(text: str) -> WorkerError:
    """Build the error for a writer of this rank that could not report one itself.

    Args:
        text: predicate of the sentence, such as "was killed by SIGKILL".
    """
    return WorkerError(f"the writer process of an asynchronous save {text}", rank=str(comm.rank()))


def describe_exit(process: Any) -> str:
    """Wait for the end of a process and describe it, for example "was killed by SIGKILL"."""
    process.join()
    exit_code: int | None = process.exitcode
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} before its work was done"


def with_rank(failure: CheckpointingException | None) -> CheckpointingException | None:
    """Set the rank of a failure to this rank, unless the failure has a rank."""
    if failure is not None and failure.rank is None:
        failure.rank = str(comm.rank())
    return failure


def send_failure(sender: Connection, failure: CheckpointingException | None) -> None:
    """Send the result of ``catch_failure``; an error that cannot be pickled is sent as text."""
    try:
        sender.send(failure)
    except OSError:
        return  # the rank is gone
    except Exception:
        sender.send(WorkerError(f"{type(failure).__name__}: {failure}"))


def receive_failure(receiver: Connection) -> CheckpointingException | None:
    """Receive the failure from ``send_failure``.

    Call it after the failure was sent, or the other side has ended.

    Raises:
        EOFError: the other side ended without sending.
    """
    if not receiver.poll():
        raise EOFError
    try:
        failure: Any = receiver.recv()
    except (EOFError, OSError) as err:
        raise EOFError from err
    except Exception as err:
        return writer_failure(
            f"failed with an error that cannot be unpickled: {type(err).__name__}: {err}"
        )
    return with_rank(failure)
