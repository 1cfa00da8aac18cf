"""Several processes that do one job together, as far as the engine needs to know.

A *team* is the workers of a job; rank 0 is its *lead*, which plans, judges and publishes. Ranks
meet at few points: when it is known what is to be done, and when everything is done; in between
each works at its own share. What they send each other is small (what to do, sums, findings), never
the data of tensors.

::

    lead      plan ─┬─ its share ─┬─ literals, manifest, commit ─┬─ done
    others          └─ its share ─┘                              └─ done
             broadcast_result  gather_results            broadcast_result

The engine knows this protocol only. The process groups of torch implement it outside of the engine
(``ckpt_cli.workers.torch_team``); ``ALONE`` is the team of a process that works by itself, in which
everything here is a plain call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from core.errors import CheckpointingException, WorkerError

T = TypeVar("T")

FINAL_CODES = frozenset({1, 2, 3, 4, 5, 7})
"""Exit codes of errors that a retry of the same work would meet again."""


class Team(Protocol):
    """The workers of a job, as one of them sees it.

    Attributes:
        rank: number of this worker, from 0.
        size: number of workers.
        hosts: host name of each worker, by rank.
        runtime_bytes: memory that membership in the team takes in this process, beyond what the
            engine counts.
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
        """Return every rank's data, by rank, at the lead, and None elsewhere.

        Raises:
            WorkerError: a worker is gone, or has been silent for too long.
        """

    def broadcast(self, data: bytes) -> bytes:
        """Return the lead's data on every rank.

        Raises:
            WorkerError: as for ``gather``.
        """

    def expect(self, n_bytes: int) -> None:
        """Announce how many bytes this rank has to process from now on."""

    def advance(self, n_bytes: int) -> None:
        """Report that this rank has processed some bytes; called from any thread.

        Raises:
            StoppedError: another rank has failed.
        """

    def alarm(self) -> None:
        """Tell the other ranks that this one has failed, so that they stop.

        Returns at once and never raises.
        """


class StoppedError(WorkerError):
    """Raised on a rank that stops because another rank has failed.

    ``gather_results`` raises the error of that other rank instead.
    """

    def __init__(self) -> None:
        super().__init__("another worker has failed")

    def __reduce__(self) -> tuple[type[StoppedError], tuple[()]]:
        return StoppedError, ()


class _Alone:
    """The team of a process that works alone."""

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
    """Return whether this rank plans, judges and publishes."""
    return team.rank == 0


def gather_results(team: Team, compute: Callable[[], T]) -> list[T] | None:
    """Run ``compute`` on every rank; return all results, by rank, at the lead (None elsewhere).

    All ranks call it. However ``compute`` ends, no rank waits for one that has failed: the first to
    fail alarms the others, whose ``Team.advance`` then raises.

    Args:
        compute: its result must be picklable, and small, as it travels to the lead.

    Raises:
        Exception: the error of the first rank that failed, on every rank; ``failed_rank_of`` gives
            that rank.
    """
    if team.size == 1:
        return [compute()]

    # Collect the outcome of every rank at the lead: (value, None) or (None, error).
    gathered = team.gather(pickle.dumps(_attempt(team, compute)))
    outcomes = None if gathered is None else [pickle.loads(data) for data in gathered]

    # The lead decides which failure the whole job reports, and tells every rank.
    failure = None if outcomes is None else _first_failure([error for _, error in outcomes])
    failure = pickle.loads(team.broadcast(pickle.dumps(failure)))
    if failure is not None:
        rank, cause = failure
        cause.worker = rank
        raise cause
    return None if outcomes is None else [value for value, _ in outcomes]


def broadcast_result(team: Team, compute: Callable[[], T]) -> T:
    """Run ``compute`` on the lead and return its result on every rank; the others wait for it.

    Raises:
        Exception: the error of ``compute``, on every rank.
    """
    if team.size == 1:
        return compute()
    value: T | None = None
    error: Exception | None = None
    if is_lead(team):
        value, error = _attempt(team, compute)
    value, error = pickle.loads(team.broadcast(pickle.dumps((value, error))))
    if error is not None:
        error.worker = 0  # type: ignore[union-attr]
        raise error
    return value


def _attempt(team: Team, compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run ``compute``; return its result and None, or None and its error, made picklable.

    An error alarms the other ranks, unless it is the echo of an alarm.
    """
    try:
        return compute(), None
    except Exception as err:
        if not isinstance(err, StoppedError):
            team.alarm()
        return None, _make_picklable(err)
    except BaseException:  # an interrupt ends this process; the others need not wait for it
        team.alarm()
        raise


def _make_picklable(err: Exception) -> Exception:
    """Return the error, or a WorkerError with its text if another process could not unpickle it."""
    try:
        pickle.loads(pickle.dumps(err))
    except Exception:
        return WorkerError(f"{type(err).__name__}: {err}")
    return err


def _first_failure(errors: Sequence[Exception | None]) -> tuple[int, Exception] | None:
    """Return the rank and the error that the whole job reports, or None without errors.

    Ranks that only stopped because another had failed count last.
    """
    failures = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    causes = [(rank, error) for rank, error in failures if not isinstance(error, StoppedError)]
    return next(iter(causes or failures), None)


def failed_rank_of(error: BaseException) -> int | None:
    """Return the rank on which an error of a team happened, or None if it has no rank."""
    rank = getattr(error, "worker", None)
    return rank if isinstance(rank, int) else None


def is_final(error: BaseException) -> bool:
    """Return whether a retry would fail again.

    It would if the request or the checkpoint is wrong, is refused, or does not fit.
    """
    return isinstance(error, CheckpointingException) and error.exit_code in FINAL_CODES


@dataclass(frozen=True, slots=True)
class Figures:
    """How much one worker did.

    Args:
        rank, host: the worker.
        read_bytes, written_bytes: bytes of tensors.
        seconds: from the beginning of its share to the end.
    """

    rank: int
    host: str
    read_bytes: int
    written_bytes: int
    seconds: float


def summarize_figures(figures: Sequence[Figures]) -> dict[str, object]:
    """Return the figures of all workers as a JSON object.

    ``balance`` is the bytes of the busiest rank, read and written, divided by the mean of all
    ranks.
    """
    n_bytes = [worker.read_bytes + worker.written_bytes for worker in figures]
    mean = sum(n_bytes) / len(n_bytes) if n_bytes else 0
    return {
        "n_workers": len(figures),
        "n_hosts": len({worker.host for worker in figures}),
        "balance": round(max(n_bytes) / mean, 4) if mean else 1.0,
        "workers": [asdict(worker) for worker in figures],
    }
