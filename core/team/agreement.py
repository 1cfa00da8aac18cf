"""Make sure that all ranks of a team see the same data before they divide the work.

Each rank opens a checkpoint by itself. The shares of the ranks fit together only if all opened the
same: the same files, the same tensors, or the same error. A host that sees another directory at the
same path is reported here, instead of showing up later as wrong results.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from core.errors import CheckpointingException, WorkerError
from core.team.protocol import Team, broadcast_result, gather_results

if TYPE_CHECKING:
    from core.files.store import LocalStore

T = TypeVar("T")

_N_TIMES = 64
"""Files whose modification times are compared; each costs one request to a file system that all
hosts share.
"""


def require_agreement(
    team: Team, compute: Callable[[], T], observed_state: Callable[[T], object], *, subject: str
) -> T:
    """Run ``compute`` on every rank and return this rank's result, if all ranks saw the same.

    All ranks call it. In a team of one it is a plain call of ``compute``.

    Args:
        compute: the same on every rank.
        observed_state: gives the part of a result that must be equal on all ranks, as numbers,
            strings and tuples.
        subject: what ``compute`` looks at, for the error message: a path.

    Raises:
        CheckpointingException: the error of ``compute``, if every rank got the same one.
        WorkerError: the ranks see different data.
    """
    if team.size == 1:
        return compute()
    values: list[T] = []
    errors: list[CheckpointingException] = []

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
        states: by rank, the digest of the observed state and the message of the error; one of them
            is empty.
        subject: what the ranks looked at.

    Raises:
        WorkerError: the state of a rank differs from that of rank 0.
    """
    for rank, (digest, error) in enumerate(states):
        if (digest, error) == states[0]:
            continue
        lead_error = (
            f", where rank 0 on {team.hosts[0]} has: {states[0][1]}" if states[0][1] else ""
        )
        raise WorkerError(
            f"rank {rank} on {team.hosts[rank]} sees different data at {subject} than rank 0 on {team.hosts[0]}"
            + (f": {error}" if error else "")
            + lead_error,
            rank=str(rank),
            hint="every host must see the same directory at this path, and nothing may write into it meanwhile",
        )


def observe_files(store: LocalStore, files: Mapping[str, int]) -> tuple[object, ...]:
    """Return what tells a directory from another: its file names, sizes, and some times.

    Args:
        files: sizes in bytes, by name.
    """
    names = sorted(files)
    step = -(-len(names) // _N_TIMES) or 1
    return tuple((name, files[name]) for name in names), tuple(
        _mtime_seconds(store, name) for name in names[::step]
    )


def _mtime_seconds(store: LocalStore, name: str) -> int | None:
    """Return when a file was changed, in whole seconds, or None if it cannot be read.

    Seconds are the finest resolution that all file systems and network protocols report alike.
    """
    try:
        return int(os.stat(store.path(name)).st_mtime)
    except OSError:
        return None
