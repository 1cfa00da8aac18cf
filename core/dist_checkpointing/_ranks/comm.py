"""Communication of ranks: exchange of small Python objects and of success or failure.

Everything works in one process without torch.distributed, too: it is then a world of one rank.
``group`` is always a process group of torch.distributed, None for the default one; ranks are
counted within it. If a rank died or does not answer in time, every call here raises a WorkerError.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from core.errors import CheckpointingException, WorkerError, list_some

T = TypeVar("T")

_MAX_NAMED = 8


@atexit.register
def _wait_for_gloo_threads() -> None:
    """Give the threads of gloo a moment to release the tensors of the last exchange.

    They do so after the call has returned, and need the interpreter for it: if that is gone by
    then, torch 2.13 aborts the process ("terminate called without an active exception") although
    all work is done.
    """
    if _has_exchanged:
        time.sleep(0.1)


_has_exchanged: list[bool] = []
"""Not empty once this process has exchanged anything with others."""


def has_process_group() -> bool:
    """Return whether torch.distributed has a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def rank(group: Any = None) -> int:
    """Return this process's rank in the group; 0 without torch.distributed."""
    return dist.get_rank(group) if has_process_group() else 0


def world_size(group: Any = None) -> int:
    """Return the number of ranks in the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if has_process_group() else 1


@contextmanager
def _translate_lost_contact() -> Iterator[None]:
    """Turn the error of a failed collective call within the block into a WorkerError."""
    if not _has_exchanged:
        _has_exchanged.append(True)
    try:
        yield
    except (
        RuntimeError
    ) as err:  # torch has no class of its own for gloo's closed connections and timeouts
        raise WorkerError(
            f"lost contact with another rank: {str(err).splitlines()[0]}",
            hint="check the output of the other ranks; a rank may have run out of memory",
        ) from err


def barrier(group: Any = None) -> None:
    """Wait for all ranks of the group."""
    if world_size(group) > 1:
        with _translate_lost_contact():
            dist.barrier(group=group)


def all_gather(value: T, group: Any = None) -> list[T]:
    """Return the values of all ranks, by rank, on every rank.

    Values are pickled and sent between the processes of this job.
    """
    return _exchange(_VALUE, value, group)


_VALUE, _OUTCOME, _RESULT = "exchange of values", "exchange of outcomes", "exchange of results"
_depth = threading.local()
"""Its attribute ``n`` counts the nested :func:`together` and :func:`collect` of this thread."""


class RankFailure(NamedTuple):
    """The failure of one rank, as it is sent to the others.

    Args:
        text: description of the error.
        packed: pickle of the error and the stack summary of its traceback; b"" if the error cannot
            be pickled.
    """

    text: str
    packed: bytes

    def unpack(self) -> tuple[Exception, traceback.StackSummary]:
        """Return the error and where it was raised; a WorkerError if it cannot be rebuilt here."""
        try:
            error, summary = pickle.loads(self.packed)
        except Exception:  # the class may be unknown on this rank, or refuse its own arguments
            return WorkerError(self.text), traceback.StackSummary()
        return error, summary


class Outcome(NamedTuple):
    """The outcome of a work that all ranks of a group have run.

    Args:
        result: result on this rank; None if the work failed here.
        error: the error that this rank has to raise, None if no rank failed.
        failures: failure of each rank, by rank; None where the work succeeded.
    """

    result: Any
    error: Exception | None
    failures: Sequence[RankFailure | None]


class _Message(NamedTuple):
    """The message that a rank sends to all others in an exchange.

    Args:
        kind: kind of the exchange.
        depth: number of works that the rank is inside of.
        failure: failure of the rank's work, None if it has not failed.
        value: the value to be exchanged.
    """

    kind: str
    depth: int
    failure: RankFailure | None
    value: Any


def _exchange(kind: str, value: Any, group: Any, failure: RankFailure | None = None) -> list[Any]:
    """Return the values of all ranks, by rank, after checking that all ranks are at the same step.

    A rank whose work failed may meet others that are still inside of theirs, and exchange something
    else there. All ranks notice it here, and the outer calls of those that are inside of a work end
    without a further exchange, see :class:`OutOfStepError`.

    Args:
        kind: kind of the exchange.
        value: value of this rank.
        group: process group.
        failure: failure of this rank's work, None if it has not failed.

    Raises:
        OutOfStepError: ranks are at different steps.
    """
    if world_size(group) == 1:
        return [value]
    depth = getattr(_depth, "n", 0)
    received: list[Any] = [None] * world_size(group)
    with _translate_lost_contact():
        dist.all_gather_object(received, tuple(_Message(kind, depth, failure, value)), group=group)
    messages = [_Message(*message) for message in received]
    if any((message.kind, message.depth) != (kind, depth) for message in messages):
        raise _out_of_step_error(messages)
    return [message.value for message in messages]


def _out_of_step_error(messages: list[_Message]) -> OutOfStepError:
    """Return the error for ranks at different steps: the first failure, else the steps."""
    depth = min(message.depth for message in messages)
    for number, message in enumerate(messages):
        if message.failure is not None:
            return OutOfStepError(
                f"rank {number} failed: {message.failure.text}", depth, rank=str(number)
            )
    steps = "; ".join(
        f"rank {number}: {message.kind} at level {message.depth}"
        for number, message in enumerate(messages[:_MAX_NAMED])
    )
    return OutOfStepError(f"ranks are executing different steps ({steps})", depth)


class OutOfStepError(WorkerError):
    """Ranks met at different steps: one of them failed or was called with other arguments.

    Args:
        message: description of the failure, or of the steps.
        depth: the lowest level at which a rank was. On this rank, the calls around this one at that
            level or above have been answered by this exchange: a further exchange would meet
            another step of the other ranks.
        rank: the rank that failed.
    """

    def __init__(self, message: str, depth: int = 0, *, rank: str | None = None) -> None:
        hint = (
            None
            if rank
            else "make the same calls on all ranks, with the same arguments and strategies"
        )
        super().__init__(message, rank=rank, hint=hint)
        self.depth = depth


def gather(value: T, dst: int = 0, group: Any = None) -> list[T] | None:
    """Return the values of all ranks, by rank, on rank ``dst`` of the group; None elsewhere."""
    if world_size(group) == 1:
        return [value]
    values: list[Any] | None = [None] * world_size(group) if rank(group) == dst else None
    with _translate_lost_contact():
        dist.gather_object(value, values, dst=global_rank(dst, group), group=group)
    return values


def broadcast(value: T, src: int = 0, group: Any = None) -> T:
    """Return the value of rank ``src`` of the group, on every rank."""
    if world_size(group) == 1:
        return value
    box: list[Any] = [value if rank(group) == src else None]
    with _translate_lost_contact():
        dist.broadcast_object_list(box, src=global_rank(src, group), group=group)
    return box[0]  # type: ignore[no-any-return]


def broadcast_bytes(raw: torch.Tensor, src: int, group: Any = None) -> None:
    """Copy the bytes of ``raw`` from rank ``src`` of the group to all others.

    Args:
        raw: 1-D uint8, of one size on all ranks.
        src: rank of the source.
        group: process group.
    """
    with _translate_lost_contact():
        dist.broadcast(raw, src=global_rank(src, group), group=group)


def gather_bytes(rows: torch.Tensor, group: Any = None) -> None:
    """Fill the row of each rank of the group with the bytes that this rank has in its own row.

    Args:
        rows: 2-D uint8, one row for each rank.
        group: process group.
    """
    # gloo's own gather would copy all rows twice, in memory of its threads.
    if rows.device.type == "cpu":
        with _translate_lost_contact():
            works = [
                dist.broadcast(row, src=global_rank(source, group), group=group, async_op=True)
                for source, row in enumerate(rows)
            ]
            for work in works:
                work.wait()
        return
    # torch 2.13 has renamed all_gather_into_tensor.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _translate_lost_contact():
        collective(rows.view(-1), rows[rank(group)], group=group)


def any_of_all(is_so: bool, group: Any = None) -> bool:
    """Return whether a flag is set on any rank of the group.

    Cheap enough for every training step.
    """
    return bool(largest(int(is_so), group))


def largest(value: int, group: Any = None) -> int:
    """Return the largest of the values of all ranks of the group; as cheap as ``any_of_all``.

    Args:
        value: an integer of 32 bits.
        group: process group.
    """
    if world_size(group) == 1:
        return value
    device = torch.cuda.current_device() if dist.get_backend(group) == "nccl" else "cpu"
    tensor = torch.tensor([value], dtype=torch.int32, device=device)
    with _translate_lost_contact():
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


def together(work: Callable[[], T], group: Any = None) -> T:
    """Run ``work`` on all ranks of the group and return this rank's result if all succeeded.

    A collective call, even if the work fails: so no rank waits for one that has failed.

    Raises:
        CheckpointingException: the work failed on a rank. A rank whose own work failed raises its
            own error (any exception, not only the project's). The others raise an error that names
            the failed ranks: of the same class if the first of the errors is one of the project's,
            so that scripts react to it in the same way on all ranks, else a WorkerError.
    """
    outcome = attempt(work, group)
    if outcome.error is not None:
        raise outcome.error
    return outcome.result  # type: ignore[no-any-return]


def attempt(work: Callable[[], Any], group: Any = None) -> Outcome:
    """Run ``work`` on all ranks of the group, as :func:`together`, and return its outcome.

    Raises:
        OutOfStepError: ranks are at different steps.
    """
    result, error = _attempt(work)
    failure = _pack_failure(error)
    failures = _exchange_outcomes(_OUTCOME, failure, group, error=error, failure=failure)
    return Outcome(result, _error_to_raise(error, failures), failures)


def _exchange_outcomes(
    kind: str, value: Any, group: Any, *, error: Exception | None, failure: RankFailure | None
) -> list[Any]:
    """Exchange the outcome of this rank's work, unless all ranks know already that it failed.

    Args:
        kind, value, group: arguments of :func:`_exchange`.
        error: error of this rank's work.
        failure: the same, to be sent.

    Raises:
        Exception: ranks are out of step; this rank's own error if it has one.
    """
    if isinstance(error, OutOfStepError) and error.depth <= getattr(_depth, "n", 0):
        raise error  # the others know of it from the same exchange
    try:
        return _exchange(kind, value, group, failure)
    except OutOfStepError as err:
        if error is None or err.depth < getattr(_depth, "n", 0):
            raise err from error
        raise error from None


def collect(work: Callable[[], T], group: Any = None) -> list[T]:
    """Run ``work`` on all ranks and return all results, by rank, on every rank.

    One collective call, even if the work fails. A result that cannot be pickled is a failure of its
    rank.

    Raises:
        CheckpointingException: as :func:`together`.
    """
    if world_size(group) == 1:
        return [work()]
    packed, error = _attempt(lambda: pickle.dumps(work()))
    failure = _pack_failure(error)
    outcomes = _exchange_outcomes(_RESULT, (failure, packed), group, error=error, failure=failure)
    to_raise = _error_to_raise(error, [failure_of_rank for failure_of_rank, _ in outcomes])
    if to_raise is not None:
        raise to_raise
    return [pickle.loads(result) for _, result in outcomes]


def _attempt(work: Callable[[], T]) -> tuple[Any, Exception | None]:
    """Run ``work`` one level deeper and return its result or its error."""
    _depth.n = getattr(_depth, "n", 0) + 1
    try:
        return work(), None
    except Exception as err:
        return None, err
    finally:
        _depth.n -= 1


def _pack_failure(error: Exception | None) -> RankFailure | None:
    """Return the error of this rank in a form that can be sent; None if there is none."""
    if error is None:
        return None
    # Frames are rebuilt from plain values, because Python 3.13 keeps code objects in them, which
    # cannot be pickled.
    frames = traceback.extract_tb(error.__traceback__)
    summary = traceback.StackSummary.from_list(
        [(frame.filename, frame.lineno or 0, frame.name, frame.line) for frame in frames]
    )
    try:
        return RankFailure(_error_text(error), pickle.dumps((error, summary)))
    except Exception:  # any class and any attribute of a user's error may refuse
        return RankFailure(_error_text(error), b"")


def _error_to_raise(
    error: Exception | None, failures: Sequence[RankFailure | None]
) -> Exception | None:
    """Return this rank's own error, or one that names the other ranks that failed.

    Args:
        error: error of this rank.
        failures: failures of all ranks, by rank; None where the work succeeded.

    Returns:
        None if no rank failed.
    """
    failed = [number for number, failure in enumerate(failures) if failure is not None]
    if error is not None or not failed:
        return error
    prefix = f"{'ranks' if len(failed) > 1 else 'rank'} {list_some(failed)} failed"
    first = failures[failed[0]]
    assert first is not None, "the rank has failed"
    cause, _ = first.unpack()
    # An OutOfStepError answers the calls around it on its own rank, but not on this one.
    if not isinstance(cause, CheckpointingException) or isinstance(cause, OutOfStepError):
        return WorkerError(f"{prefix}: {first.text}", rank=str(failed[0]))
    cause.message = f"{prefix}: {cause.message}"
    cause.rank = cause.rank or str(failed[0])
    return cause


def _error_text(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, CheckpointingException)
        else f"{type(error).__name__}: {error}"
    )


def global_rank(number: int, group: Any = None) -> int:
    """Return the rank in the world of rank ``number`` of the group."""
    return number if group is None else dist.get_global_rank(group, number)
