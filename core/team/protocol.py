"""Several processes that do one job together, as far as the engine needs to know.

A *team* is the workers of a job; rank 0 is its *lead*, which plans, judges and publishes. Ranks meet at few points:
when it is known what is to be done, and when everything is done; in between each works at its own share. What they tell
each other is small (what to do, sums, findings), never the data of tensors.

::

    lead      plan ─ told ─┬─ its share ─┬─ collected ─ literals, manifest, commit ─ told
    others                 └─ its share ─┘                                            └─ done

The engine knows this protocol only. The process groups of torch are behind it at the door
(``ckpt_cli.workers.torch_team``); ``ALONE`` is the team of a process that works by itself, in which everything here is
a plain call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from core.errors import CheckpointingException, WorkerError

T = TypeVar("T")

FINAL_CODES = frozenset({1, 2, 3, 4, 5, 7})
"""Exit codes of errors that would come again if the work were done again."""


class Team(Protocol):
    """The workers of a job, as one of them sees it.

    Attributes:
        rank: of this worker, from 0.
        size: how many there are.
        hosts: the host of each worker, by rank.
        runtime_bytes: memory that belonging to the team takes in this process, beside what the engine counts.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def hosts(self) -> Sequence[str]: ...

    @property
    def runtime_bytes(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes] | None:
        """Every rank's data, by rank, at the lead; None elsewhere.

        Raises:
            WorkerError: a worker is gone, or has been silent for too long.
        """

    def broadcast(self, data: bytes) -> bytes:
        """The lead's data.

        Raises:
            WorkerError: as for ``gather``.
        """

    def expect(self, n_bytes: int) -> None:
        """Says how many bytes this rank has to do from now on."""

    def advance(self, n_bytes: int) -> None:
        """Says that this rank has done so many; called from any thread.

        Raises:
            StoppedError: another rank has failed.
        """

    def alarm(self) -> None:
        """Tells the others that this rank has failed, so that they stop; returns at once and never raises."""


class StoppedError(WorkerError):
    """This rank stops because another has failed; ``collected`` raises that one's error in its place."""

    def __init__(self) -> None:
        super().__init__("another worker has failed")

    def __reduce__(self) -> tuple[type[StoppedError], tuple[()]]:
        return StoppedError, ()


class _Alone:
    """The team of one."""

    rank = 0
    size = 1
    hosts: Sequence[str] = ("",)
    runtime_bytes = 0

    def gather(self, data: bytes) -> list[bytes] | None:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data

    def expect(self, n_bytes: int) -> None:
        pass

    def advance(self, n_bytes: int) -> None:
        pass

    def alarm(self) -> None:
        pass


ALONE: Team = _Alone()


def is_lead(team: Team) -> bool:
    """Whether this rank plans, judges and publishes."""
    return team.rank == 0


def collected(team: Team, work: Callable[[], T]) -> list[T] | None:
    """Every rank's ``work()``, by rank, at the lead (None elsewhere), if it succeeded on all of them.

    All ranks call it. However the work ends, no rank waits for one that has failed: the first to fail alarms the
    others, whose ``Team.advance`` then raises.

    Args:
        work: its value can be pickled; it is small, as it travels to the lead.

    Raises:
        Exception: the error of the first rank that failed, on every rank. Its ``worker`` attribute is that rank.
    """
    if team.size == 1:
        return [work()]
    value, error = _attempt(team, work)
    found = team.gather(pickle.dumps((value, error)))
    outcomes = None if found is None else [pickle.loads(data) for data in found]
    verdict = None if outcomes is None else _verdict([error for _, error in outcomes])
    verdict = pickle.loads(team.broadcast(pickle.dumps(verdict)))
    if verdict is not None:
        rank, error = verdict
        raise _of_worker(error, rank)
    return None if outcomes is None else [value for value, _ in outcomes]


def told(team: Team, work: Callable[[], T]) -> T:
    """What ``work()`` gives at the lead, on every rank; the others wait for it.

    Raises:
        Exception: what it raised, on every rank.
    """
    if team.size == 1:
        return work()
    value: T | None = None
    error: Exception | None = None
    if is_lead(team):
        value, error = _attempt(team, work)
    value, error = pickle.loads(team.broadcast(pickle.dumps((value, error))))
    if error is not None:
        raise _of_worker(error, 0)
    return value


def _attempt(team: Team, work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as err:
        if not isinstance(err, StoppedError):
            team.alarm()
        return None, _portable(err)
    except BaseException:  # an interrupt ends this process; the others need not wait for it
        team.alarm()
        raise


def _portable(err: Exception) -> Exception:
    """The error as another process can read it."""
    try:
        pickle.loads(pickle.dumps(err))
    except Exception:
        return WorkerError(f"{type(err).__name__}: {err}")
    return err


def _verdict(errors: Sequence[Exception | None]) -> tuple[int, Exception] | None:
    """(rank, error) of the failure that the job is said to have failed with; None without any."""
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    own = [(rank, error) for rank, error in failed if not isinstance(error, StoppedError)]
    return next(iter(own or failed), None)


def _of_worker(error: Exception, rank: int) -> Exception:
    error.worker = rank  # type: ignore[attr-defined]
    return error


def worker_of(error: BaseException) -> int | None:
    """The rank on which an error of a team happened; None for one of a process that works alone."""
    found = getattr(error, "worker", None)
    return found if isinstance(found, int) else None


def is_final(error: BaseException) -> bool:
    """Whether it would fail again: the request or the checkpoint is wrong, it is refused, or it does not fit."""
    return isinstance(error, CheckpointingException) and error.exit_code in FINAL_CODES


@dataclass(frozen=True, slots=True)
class Figures:
    """What one worker did.

    Args:
        rank, host: who.
        read_bytes, written_bytes: of tensors.
        seconds: from the beginning of its share to the end.
    """

    rank: int
    host: str
    read_bytes: int
    written_bytes: int
    seconds: float


def summary_of(figures: Sequence[Figures]) -> dict[str, object]:
    """The figures of all workers as a JSON object.

    ``balance`` is the largest rank's bytes, read and written, by the mean.
    """
    n_bytes = [one.read_bytes + one.written_bytes for one in figures]
    mean = sum(n_bytes) / len(n_bytes) if n_bytes else 0
    return {
        "n_workers": len(figures),
        "n_hosts": len({one.host for one in figures}),
        "balance": round(max(n_bytes) / mean, 4) if mean else 1.0,
        "workers": [asdict(one) for one in figures],
    }
