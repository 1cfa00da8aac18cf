"""The engine's interface to several processes that do one job together.

A *team* is the workers of a job; rank 0 is its *lead*, which plans, judges and publishes. Ranks
meet at few points: after the lead has planned, and after all shares are done; in between each works
on its own share. They send each other only small data (the plan, sums, findings), never tensors.

::

    lead      plan ─┬─ its share ─┬─ literals, manifest, commit ─┬─ done
    others          └─ its share ─┘                              └─ done
             broadcast_result  gather_results            broadcast_result

The engine uses this protocol only. The implementation with torch's process groups is outside of the
engine (``ckpt_cli.workers.torch_team``); ``ALONE`` is the team of a process that works by itself,
in which every function of this module is a plain call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Protocol, TypeVar

from core.errors import CheckpointingException, WorkerError
from core.values import dataclass

T = TypeVar("T")

FINAL_CODES = frozenset({1, 2, 3, 4, 5, 7})
"""Exit codes of errors that would occur again if the same work were retried."""


class Team(Protocol):
    """The workers of a job, as one of them sees it.

    Attributes:
        rank: number of this worker, from 0.
        size: number of workers.
        hosts: host name of each worker, by rank.
        runtime_bytes: memory that membership in the team takes in this process, in addition to the
            memory that the engine counts.
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
        """Return the data of all ranks, by rank, at the lead, and None on the others.

        Raises:
            WorkerError: a worker is gone, or has been silent for too long.
        """

    def broadcast(self, data: bytes) -> bytes:
        """Return the lead's data on every rank.

        Raises:
            WorkerError: a worker is gone, or has been silent for too long.
        """

    def expect(self, n_bytes: int) -> None:
        """Announce that this rank has ``n_bytes`` more bytes to process."""

    def advance(self, n_bytes: int) -> None:
        """Report that this rank has processed some bytes; called from any thread.

        Raises:
            StoppedError: another rank has failed.
        """

    def alarm(self) -> None:
        """Stop the other ranks because this one has failed; return at once and never raise."""


class StoppedError(WorkerError):
    """Error of a rank that stops because another rank has failed.

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
    """Return True if this rank plans, judges and publishes."""
    return team.rank == 0


def gather_results(team: Team, compute: Callable[[], T]) -> list[T] | None:
    """Run ``compute`` on every rank; return all results, by rank, at the lead (None elsewhere).

    All ranks call it. However ``compute`` ends, no rank waits for one that has failed: the first to
    fail alarms the others, whose ``Team.advance`` then raises.

    Args:
        compute: returns a small, picklable result, which is sent to the lead.

    Raises:
        Exception: the error of the lowest rank that failed, on every rank; ``failed_rank_of``
            returns that rank.
    """
    if team.size == 1:
        return [compute()]

    # Collect the outcome of every rank at the lead: (value, None) or (None, error).
    gathered = team.gather(pickle.dumps(_attempt(team, compute)))
    outcomes = None if gathered is None else [pickle.loads(data) for data in gathered]

    # The lead chooses the failure that the job reports, and sends it to every rank. Errors of ranks
    # that only stopped because another had failed come last.
    failure = None
    if outcomes is not None:
        failures = [(rank, error) for rank, (_, error) in enumerate(outcomes) if error is not None]
        failures.sort(key=lambda failed: isinstance(failed[1], StoppedError))
        failure = failures[0] if failures else None
    failure = pickle.loads(team.broadcast(pickle.dumps(failure)))
    if failure is not None:
        rank, cause = failure
        cause.worker = rank
        raise cause
    return None if outcomes is None else [value for value, _ in outcomes]


def broadcast_result(team: Team, compute: Callable[[], T]) -> T:
    """Run ``compute`` on the lead and return its result on every rank; the others wait for it.

    All ranks call it.

    Raises:
        Exception: ``compute`` raised this error on the lead; it is raised on every rank.
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
    """Run ``compute``; return (its result, None), or (None, its error) in a picklable form.

    An error alarms the other ranks, unless it is itself the result of an alarm.
    """
    try:
        return compute(), None
    except Exception as err:
        if not isinstance(err, StoppedError):
            team.alarm()
        # Classes with other arguments than ``args`` can be pickled but not unpickled, so try both.
        try:
            pickle.loads(pickle.dumps(err))
        except Exception:
            return None, WorkerError(f"{type(err).__name__}: {err}")
        return None, err
    except BaseException:  # an interrupt ends this process; the others must not wait for it
        team.alarm()
        raise


def failed_rank_of(error: BaseException) -> int | None:
    """Return the rank on which an error of a team occurred, or None if the error has no rank."""
    rank = getattr(error, "worker", None)
    return rank if isinstance(rank, int) else None


def is_final(error: BaseException) -> bool:
    """Return True if a retry would fail again.

    That is so if the request or the checkpoint is invalid, unsupported, unsafe or too large.
    """
    return isinstance(error, CheckpointingException) and error.exit_code in FINAL_CODES


@dataclass(frozen=True, slots=True)
class Figures:
    """The amount of work that one worker has done.

    Args:
        rank, host: the worker's rank and host name.
        read_bytes, written_bytes: bytes of tensors that the worker has read and written.
        seconds: duration of the worker's share.
    """

    rank: int
    host: str
    read_bytes: int
    written_bytes: int
    seconds: float


def idle_figures(team: Team) -> tuple[Figures, ...]:
    """Return the figures of workers that read and wrote nothing, by rank."""
    return tuple(Figures(rank, host, 0, 0, 0.0) for rank, host in enumerate(team.hosts))


def sum_figures(passes: Iterable[Sequence[Figures]]) -> tuple[Figures, ...]:
    """Return the figures of several passes as if they were one pass, by rank."""
    totals: dict[int, Figures] = {}
    for figures in passes:
        for worker in figures:
            total = totals.get(worker.rank, Figures(worker.rank, worker.host, 0, 0, 0.0))
            totals[worker.rank] = Figures(
                worker.rank,
                worker.host,
                total.read_bytes + worker.read_bytes,
                total.written_bytes + worker.written_bytes,
                total.seconds + worker.seconds,
            )
    return tuple(totals[rank] for rank in sorted(totals))


def summarize_figures(figures: Sequence[Figures]) -> dict[str, object]:
    """Return the figures of all workers as a JSON object.

    ``balance`` is the number of bytes that the busiest rank has read and written, divided by the
    mean of all ranks.
    """
    n_bytes = [worker.read_bytes + worker.written_bytes for worker in figures]
    mean = sum(n_bytes) / len(n_bytes) if n_bytes else 0
    return {
        "n_workers": len(figures),
        "n_hosts": len({worker.host for worker in figures}),
        "balance": round(max(n_bytes) / mean, 4) if mean else 1.0,
        "workers": [asdict(worker) for worker in figures],
    }
