"""What ranks tell each other: small Python objects, and whether all of them succeeded.

Everything works in one process without torch.distributed, too: it is then a world of one rank. ``group`` is always a
process group of torch.distributed, None for the default one; ranks are counted within it. A rank that died or does not
answer in time makes every call here a WorkerError.
"""

from __future__ import annotations

import atexit
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from core.errors import CheckpointingException, WorkerError

T = TypeVar("T")

_MAX_NAMED = 8


@atexit.register
def _let_others_end() -> None:
    """Gives the threads of gloo a moment to let go of the tensors of the last exchange.

    They do so after the call has returned, and need the interpreter for it: where that is gone by then, torch 2.13
    aborts the process ("terminate called without an active exception") although all work is done.
    """
    if _has_exchanged:
        time.sleep(0.1)


_has_exchanged: list[bool] = []
"""Not empty once this process has exchanged anything with others."""


def is_distributed() -> bool:
    """Whether there is a default process group."""
    return bool(dist.is_available() and dist.is_initialized())


def rank(group: Any = None) -> int:
    """This process's rank in the group; 0 without torch.distributed."""
    return dist.get_rank(group) if is_distributed() else 0


def world_size(group: Any = None) -> int:
    """Ranks in the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if is_distributed() else 1


@contextmanager
def _contact() -> Iterator[None]:
    """Around a collective call."""
    if not _has_exchanged:
        _has_exchanged.append(True)
    try:
        yield
    except RuntimeError as err:  # torch has no class of its own for gloo's closed connections and timeouts
        raise WorkerError(
            f"lost contact with another rank: {str(err).splitlines()[0]}",
            hint="see that rank's own output; it may have been killed for want of memory",
        ) from err


def barrier(group: Any = None) -> None:
    """Waits for all ranks of the group."""
    if world_size(group) > 1:
        with _contact():
            dist.barrier(group=group)


def all_gather(value: T, group: Any = None) -> list[T]:
    """Every rank's value, by rank, on every rank. Values are pickled between the processes of this job."""
    return _exchanged(_VALUE, value, group)


_VALUE, _OUTCOME, _RESULT = "a value", "how something ended", "a result"
_depth = threading.local()
"""``n``: in how many works of :func:`together` and :func:`collect` this thread is."""


def _exchanged(kind: str, value: Any, group: Any, text: str | None = None) -> list[Any]:
    """Every rank's value, by rank, once all ranks are known to be at the same step.

    A rank whose work failed may meet others that are still inside of theirs, and wait there for each other. All see it
    here, and the outer calls of those that are inside need no further exchange to end: see :class:`OutOfStepError`.

    Args:
        kind: what the call exchanges.
        value: of this rank.
        group: its process group.
        text: how this rank's work has failed.

    Raises:
        OutOfStepError: ranks are at different steps.
    """
    if world_size(group) == 1:
        return [value]
    depth = getattr(_depth, "n", 0)
    found: list[Any] = [None] * world_size(group)
    with _contact():
        dist.all_gather_object(found, (kind, depth, text, value), group=group)
    if any((kind, depth) != (other, there) for other, there, _, _ in found):
        failed = [(number, text) for number, (_, _, text, _) in enumerate(found) if text is not None]
        steps = "; ".join(f"rank {number}: {other} at level {there}" for number, (other, there, _, _) in _some(found))
        raise OutOfStepError(
            f"rank {failed[0][0]} failed: {failed[0][1]}" if failed else f"ranks do not do the same ({steps})",
            min(there for _, there, _, _ in found),
            rank=str(failed[0][0]) if failed else None,
        )
    return [value for _, _, _, value in found]


def _some(found: list[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(found))[:_MAX_NAMED]


class OutOfStepError(WorkerError):
    """Ranks met at different steps: one of them failed or was called with other arguments.

    Args:
        message: what is wrong.
        depth: the lowest level at which a rank was. The calls that surround this one at that level or above, on this
            rank, have had their answer: to talk again would be to talk about something else than the others.
        rank: the one that failed.
    """

    def __init__(self, message: str, depth: int = 0, *, rank: str | None = None) -> None:
        hint = None if rank else "call it on all ranks, with the same arguments and strategies"
        super().__init__(message, rank=rank, hint=hint)
        self.depth = depth


def gather(value: T, dst: int = 0, group: Any = None) -> list[T] | None:
    """Every rank's value, by rank, on rank ``dst`` of the group; None elsewhere."""
    if world_size(group) == 1:
        return [value]
    found: list[Any] | None = [None] * world_size(group) if rank(group) == dst else None
    with _contact():
        dist.gather_object(value, found, dst=global_rank(dst, group), group=group)
    return found


def broadcast(value: T, src: int = 0, group: Any = None) -> T:
    """The value that rank ``src`` of the group has, on every rank."""
    if world_size(group) == 1:
        return value
    box: list[Any] = [value if rank(group) == src else None]
    with _contact():
        dist.broadcast_object_list(box, src=global_rank(src, group), group=group)
    return box[0]  # type: ignore[no-any-return]


def broadcast_bytes(raw: torch.Tensor, src: int, group: Any = None) -> None:
    """Fills ``raw``, 1-D uint8 of one size on all ranks, with what rank ``src`` of the group has in it."""
    with _contact():
        dist.broadcast(raw, src=global_rank(src, group), group=group)


def gather_bytes(all_ranks: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
    """Fills ``all_ranks`` with what each rank of the group has in ``own``, by rank; 1-D uint8 tensors."""
    # all_gather_into_tensor goes by the other name since torch 2.13.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with _contact():
        collective(all_ranks, own, group=group)


def any_of_all(is_so: bool, group: Any = None) -> bool:
    """Whether it is so on any rank of the group; cheap enough to be asked in every training step."""
    if world_size(group) == 1:
        return is_so
    device = torch.cuda.current_device() if dist.get_backend(group) == "nccl" else "cpu"
    flag = torch.tensor([is_so], dtype=torch.int32, device=device)
    with _contact():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def together(work: Callable[[], T], group: Any = None) -> T:
    """This rank's ``work()``, if it succeeded on all ranks of the group.

    A collective call, however the work ends: so no rank waits for one that has failed.

    Raises:
        CheckpointingException: the work failed somewhere. A rank whose own work failed raises what it raised (other
            errors than the project's included); the others raise a WorkerError that names the ranks and the first of
            their errors.
    """
    result, error = _attempt(work)
    text = None if error is None else _text(error)
    _raise_failures(error, _outcome(error, lambda: _exchanged(_OUTCOME, text, group, text)))
    return result  # type: ignore[no-any-return]


def _outcome(error: Exception | None, exchange: Callable[[], list[Any]]) -> list[Any]:
    """What the exchange gives; this rank's own error in place of one by which ranks are out of step.

    Raises:
        Exception: ranks are out of step.
    """
    if isinstance(error, OutOfStepError) and error.depth <= getattr(_depth, "n", 0):
        raise error  # the others have had their answer
    try:
        return exchange()
    except OutOfStepError as err:
        if error is None or err.depth < getattr(_depth, "n", 0):
            raise err from error
        raise error from None


def collect(work: Callable[[], T], group: Any = None) -> list[T]:
    """Every rank's ``work()``, by rank, on every rank, if it succeeded on all of them.

    One collective call, however the work ends. A result that cannot be pickled is a failure of its rank.

    Raises:
        CheckpointingException: as :func:`together` does.
    """
    if world_size(group) == 1:
        return [work()]
    packed, error = _attempt(lambda: pickle.dumps(work()))
    text = None if error is None else _text(error)
    found = _outcome(error, lambda: _exchanged(_RESULT, (text, packed), group, text))
    _raise_failures(error, [text for text, _ in found])
    return [pickle.loads(result) for _, result in found]


def _attempt(work: Callable[[], T]) -> tuple[Any, Exception | None]:
    _depth.n = getattr(_depth, "n", 0) + 1
    try:
        return work(), None
    except Exception as err:
        return None, err
    finally:
        _depth.n -= 1


def _raise_failures(error: Exception | None, texts: list[str | None]) -> None:
    """Raises if a rank failed: this rank's own error, or one that names the others' (``texts``, by rank)."""
    if error is not None:
        raise error
    failed = [number for number, text in enumerate(texts) if text is not None]
    if failed:
        named = ", ".join(map(str, failed[:_MAX_NAMED])) + (" …" if len(failed) > _MAX_NAMED else "")
        raise WorkerError(
            f"{'ranks' if len(failed) > 1 else 'rank'} {named} failed: {texts[failed[0]]}", rank=str(failed[0])
        )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointingException) else f"{type(error).__name__}: {error}"


def global_rank(number: int, group: Any = None) -> int:
    """The rank in the world of rank ``number`` of the group."""
    return number if group is None else dist.get_global_rank(group, number)
