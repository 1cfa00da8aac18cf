"""What ranks tell each other: small Python objects, and whether all of them succeeded.

Everything works in one process without torch.distributed, too: it is then a world of one rank. ``group`` is always a
process group of torch.distributed, None for the default one; ranks are counted within it. A rank that died or does not
answer in time makes every call here a WorkerError.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from core.errors import CheckpointingException, WorkerError

T = TypeVar("T")

_MAX_NAMED = 8


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
    if world_size(group) == 1:
        return [value]
    found: list[Any] = [None] * world_size(group)
    with _contact():
        dist.all_gather_object(found, value, group=group)
    return found


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
    _raise_failures(error, all_gather(None if error is None else _text(error), group))
    return result  # type: ignore[no-any-return]


def collect(work: Callable[[], T], group: Any = None) -> list[T]:
    """Every rank's ``work()``, by rank, on every rank, if it succeeded on all of them.

    One collective call, however the work ends. A result that cannot be pickled is a failure of its rank.

    Raises:
        CheckpointingException: as :func:`together` does.
    """
    if world_size(group) == 1:
        return [work()]
    packed, error = _attempt(lambda: pickle.dumps(work()))
    found = all_gather((None if error is None else _text(error), packed), group)
    _raise_failures(error, [text for text, _ in found])
    return [pickle.loads(result) for _, result in found]


def _attempt(work: Callable[[], T]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as err:
        return None, err


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
