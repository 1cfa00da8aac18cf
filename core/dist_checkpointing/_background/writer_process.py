"""The process that writes an asynchronous save, and its report to the rank that started it.

The process uses neither torch.distributed nor an accelerator, so it may be a plain fork of a
process that does. Their state in its memory must stay untouched: the garbage collector is off (it
might free tensors of a device that the fork cannot access) and torch computes with one thread (a
pool of OpenMP threads does not survive a fork).
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
"""Interval, in seconds, at which a blocking wait checks that the process lives.

A fork of the rank may keep its pipes open.
"""


@contextmanager
def pause_collection() -> Iterator[None]:
    """Switch automatic garbage collection off within the block.

    It stays off in a process that is forked there.
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

    A signal that interrupts or ends a job goes to all of its processes; the rank decides whether a
    save is still finished then.

    Args:
        parent_pid: the rank that started this process.
        dies_with_parent: end when the thread ends that started this process, so only for a main
            thread. A restarted job must not meet writers of the killed one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    torch.set_num_threads(1)
    if dies_with_parent:
        die_with_parent(parent_pid)


def is_main_thread() -> bool:
    """Return whether this is the main thread, which lives as long as the process."""
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
    """Return the error for a writer of this rank that could not report one itself."""
    return WorkerError(f"the process that wrote an asynchronous save {text}", rank=str(comm.rank()))


def describe_exit(process: Any) -> str:
    """Describe how an ending process ended, as a predicate: "was killed by SIGKILL"."""
    process.join()
    exit_code: int | None = process.exitcode
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} before its work was done"


def with_rank(failure: CheckpointingException | None) -> CheckpointingException | None:
    """Return the failure that a writer reported, with this rank's number added."""
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

    Call it once the failure was sent, or the other side has ended.

    Raises:
        EOFError: the other side died.
    """
    if not receiver.poll():
        raise EOFError
    try:
        failure: Any = receiver.recv()
    except (EOFError, OSError) as err:
        raise EOFError from err
    except Exception as err:
        return writer_failure(
            f"failed with an error that could not be read here: {type(err).__name__}: {err}"
        )
    return with_rank(failure)
