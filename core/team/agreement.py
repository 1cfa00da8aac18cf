"""Whether all ranks of a team look at the same thing, before they divide it.

Each rank opens a checkpoint by itself. Shares of it fit together only if all found the same: the same files, the same
tensors, the same error. A host that sees another directory at the same path is told here, and not by wrong results.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from core.errors import CheckpointingException, WorkerError
from core.team.protocol import Team, collected, told

if TYPE_CHECKING:
    from core.files.store import LocalStore

T = TypeVar("T")

_N_TIMES = 64
"""Files whose times are compared; one request each to a file system that all hosts share."""


def agreed(team: Team, work: Callable[[], T], sight: Callable[[T], object], *, what: str) -> T:
    """What ``work()`` gives on this rank, if it gives the same on all.

    All ranks call it. Alone it is a plain call.

    Args:
        work: the same on every rank.
        sight: what must be equal of its value; numbers, texts and tuples of them.
        what: is looked at, for the message: a path.

    Raises:
        CheckpointingException: what ``work`` raised, if it raised the same everywhere.
        WorkerError: the ranks see different things.
    """
    if team.size == 1:
        return work()
    values: list[T] = []
    errors: list[CheckpointingException] = []

    def seen() -> tuple[str, str]:
        try:
            values.append(work())
        except CheckpointingException as err:
            errors.append(err)
            return "", err.sentence
        return hashlib.sha256(repr(sight(values[0])).encode("utf-8", "surrogatepass")).hexdigest(), ""

    sights = collected(team, seen)
    told(team, lambda: _refuse_difference(team, sights or [], what))
    if errors:
        raise errors[0]
    return values[0]


def _refuse_difference(team: Team, sights: list[tuple[str, str]], what: str) -> None:
    """Ends the work if a rank sees something else than the lead.

    Raises:
        WorkerError: see there.
    """
    for rank, (digest, error) in enumerate(sights):
        if (digest, error) == sights[0]:
            continue
        of_lead = f", where rank 0 on {team.hosts[0]} has: {sights[0][1]}" if sights[0][1] else ""
        raise WorkerError(
            f"rank {rank} on {team.hosts[rank]} sees something else at {what} than rank 0 on {team.hosts[0]}"
            + (f": {error}" if error else "")
            + of_lead,
            rank=str(rank),
            hint="every host must see the same directory at this path, and nobody may write into it meanwhile",
        )


def sight_of_files(store: LocalStore, files: Mapping[str, int]) -> tuple[object, ...]:
    """What tells one directory from another: names and sizes of its files, and the times of some."""
    names = sorted(files)
    step = -(-len(names) // _N_TIMES) or 1
    return tuple((name, files[name]) for name in names), tuple(_seconds(store, name) for name in names[::step])


def _seconds(store: LocalStore, name: str) -> int | None:
    """When a file was changed, in whole seconds: the most that all file systems and protocols tell alike."""
    try:
        return int(os.stat(store.path(name)).st_mtime)
    except OSError:
        return None
