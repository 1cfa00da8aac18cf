"""Check that all ranks of a team see the same data before they divide the work.

Each rank opens a checkpoint by itself. The shares of the ranks fit together only if all ranks found
the same files and tensors, or the same error. A host that sees another directory at the same path
is reported here; otherwise it would produce wrong results later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from core.engine.team.protocol import Team, broadcast_result, gather_results
from core.errors import CheckpointingException, MissingShardError, WorkerError

if TYPE_CHECKING:
    from core.files.source_store import SourceStore

T = TypeVar("T")

_N_TIMES = 64
"""Maximum number of files whose modification times are compared.

Each costs a request to a file system that all hosts share.
"""


def require_agreement(
    team: Team, compute: Callable[[], T], observed_state: Callable[[T], object], *, subject: str
) -> T:
    """Run ``compute`` on every rank and return this rank's result, if all ranks saw the same data.

    All ranks call it. In a team of one it is a plain call of ``compute``.

    Args:
        compute: reads the data; must be the same function on every rank.
        observed_state: returns the part of a result that must be equal on all ranks, as numbers,
            strings and tuples, whose ``repr`` is the same in every process.
        subject: path that ``compute`` reads, for the error message.

    Raises:
        CheckpointingException: the error of ``compute``, if every rank got the same one.
        WorkerError: the ranks see different data.
    """
    if team.size == 1:
        return compute()
    values: list[T] = []
    errors: list[CheckpointingException] = []

    # An error of this kind is a state as well: if every rank got the same one, they agree. Only a
    # digest of a state travels, because the names of all files may take megabytes.
    def observe() -> tuple[str, str]:
        try:
            values.append(compute())
        except CheckpointingException as err:
            errors.append(err)
            return "", err.sentence
        state = repr(observed_state(values[0]))
        return hashlib.sha256(state.encode("utf-8", "surrogatepass")).hexdigest(), ""

    # Only the lead has the states of all ranks; its verdict travels to every rank.
    states = gather_results(team, observe)
    broadcast_result(team, lambda: _check_states_equal(team, states or [], subject))
    if errors:
        raise errors[0]
    return values[0]


def _check_states_equal(team: Team, states: list[tuple[str, str]], subject: str) -> None:
    """Raise if a rank observed another state than the lead.

    Args:
        states: by rank, the digest of the observed state and the message of the error; one of the
            two is empty.
        subject: path that the ranks read.

    Raises:
        WorkerError: the state of a rank differs from that of rank 0.
    """
    for rank, (digest, error) in enumerate(states):
        if (digest, error) == states[0]:
            continue
        lead_error = f"; rank 0 reports: {states[0][1]}" if states[0][1] else ""
        raise WorkerError(
            f"rank {rank} on {team.hosts[rank]} and rank 0 on {team.hosts[0]} see different data "
            f"at {subject}" + (f"; rank {rank} reports: {error}" if error else "") + lead_error,
            rank=str(rank),
            hint="make sure that all hosts see the same directory at this path, "
            "and that nothing else is writing to it",
        )


def observe_files(store: SourceStore, files: Mapping[str, int]) -> tuple[object, ...]:
    """Return file names and sizes, and some modification times, to compare directories by.

    Args:
        files: sizes in bytes, by name.

    Returns:
        The (name, size) pairs, and the times of at most ``_N_TIMES`` files in whole seconds; None
        for a file that cannot be read.
    """
    names = sorted(files)
    step = -(-len(names) // _N_TIMES) or 1
    # Seconds are the finest resolution that all file systems and network protocols report alike.
    times: list[int | None] = []
    for name in names[::step]:
        try:
            times.append(store.modified_ns(name) // 10**9)
        except (OSError, MissingShardError):
            times.append(None)
    return tuple((name, files[name]) for name in names), tuple(times)
