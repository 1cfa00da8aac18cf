"""The process that does the writing of an asynchronous save, and how it tells its end to the rank that started it.

It uses neither torch.distributed nor an accelerator, so it may be a plain fork of a process that does. What it finds
of them in its memory must stay untouched: the garbage collector is off (it might free tensors of a device that the
fork cannot talk to) and torch computes with one thread (a pool of OpenMP threads does not survive a fork).
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

LOOK_AGAIN_S = 0.5
"""How often a blocking wait asks whether the process lives, for when its pipes are kept open by a fork of the rank."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """No automatic garbage collection inside, nor in a process that is forked inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def be_writer(parent_pid: int, *, dies_with_parent: bool) -> None:
    """Makes this new process a writer: it outlives signals that are meant for the job, but not the rank itself.

    What interrupts or ends a job goes to all of its processes; whether a save is still finished then, the rank decides.

    Args:
        parent_pid: the rank that started this process.
        dies_with_parent: end when the thread ends that started this process, so only for a main thread. A job that
            is started again must not meet writers of the killed one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    torch.set_num_threads(1)
    if dies_with_parent:
        die_with_parent(parent_pid)


def is_main_thread() -> bool:
    """Whether this is the thread that lives as long as the process."""
    return threading.current_thread() is threading.main_thread()


def reported(work: Callable[[], object]) -> CheckpointingException | None:
    """Does the work; None if it succeeded, else its failure as an error that can be sent to another process.

    A CheckpointingException stays what it is; anything else becomes a WorkerError with the traceback as a note.
    """
    try:
        work()
    except CheckpointingException as err:
        failure = err
    except (Exception, SystemExit) as err:
        failure = WorkerError(f"{type(err).__name__}: {err}")
        failure.add_note(f"As it was raised:\n{traceback.format_exc()}")
    else:
        return None
    return failure


def failed(text: str) -> WorkerError:
    """The error of this rank's writer that could not report one itself."""
    return WorkerError(f"the process that wrote an asynchronous save {text}", rank=str(comm.rank()))


def how_it_ended(process: Any) -> str:
    """What the exit code of a process that is ending says, as a predicate: "was killed by SIGKILL"."""
    process.join()
    exit_code: int | None = process.exitcode
    if exit_code is not None and exit_code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} before its work was done"


def of_this_rank(failure: CheckpointingException | None) -> CheckpointingException | None:
    """The failure that a writer reported, with this rank's number."""
    if failure is not None and failure.rank is None:
        failure.rank = str(comm.rank())
    return failure


def send_failure(sender: Connection, failure: CheckpointingException | None) -> None:
    """Sends what ``reported`` returned; an error that cannot be pickled goes as text."""
    try:
        sender.send(failure)
    except OSError:
        return  # nobody listens any more
    except Exception:
        sender.send(WorkerError(f"{type(failure).__name__}: {failure}"))


def receive_failure(receiver: Connection) -> CheckpointingException | None:
    """What the other side gave to ``send_failure``; for when it has, or has ended.

    Raises:
        EOFError: the other side died.
    """
    if not receiver.poll():
        raise EOFError
    try:
        found: Any = receiver.recv()
    except (EOFError, OSError) as err:
        raise EOFError from err
    except Exception as err:
        return failed(f"failed with an error that could not be read here: {type(err).__name__}: {err}")
    return of_this_rank(found)
