"""The newest iteration of a training root that is whole: what a job should resume from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from core.checks.finding import Severity
from core.errors import CheckpointingException, UsageError
from core.files.store import LocalStore
from core.files.url import refuse_url
from core.opening.open import ITERATION_DIR, NAMING_TRACKERS, TRACKER, iteration_dirs
from core.team.protocol import ALONE, Team, broadcast_result
from core.validate.run import Validation

_UNFINISHED = re.compile(r"^\..*\.ckpt-tmp|\.(orbax-checkpoint-)?tmp([-.]|$)|\.partial$|\.incomplete$")


@dataclass(frozen=True, slots=True)
class Skipped:
    """An iteration that is not to be used.

    Args:
        path: its directory.
        why: one sentence.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The answer.

    Args:
        path: directory of the newest iteration that is whole; None if there is none.
        iteration: its number.
        skipped: newer ones, the newest first.
    """

    path: str | None
    iteration: int | None
    skipped: tuple[Skipped, ...]


def newest_valid(root: Path, is_whole: Callable[[Path], tuple[bool, Validation]], *, team: Team = ALONE) -> Newest:
    """The newest iteration of ``root`` that is whole.

    A root is what ``core.opening.open`` takes for one. Where a tracker (Megatron's, DeepSpeed's) tells the last
    iteration that was finished, newer directories are skipped: the tracker is written last, and someone who went back
    to an older iteration by hand did so on purpose. Stages of unfinished work are skipped by name.

    Args:
        root: the directory that holds the iterations.
        is_whole: says of an iteration's directory whether it may be used, and what was found in it; the same on all
            ranks of a team.
        team: of which all ranks call this, and get the same answer.

    Raises:
        UsageError: there is no such directory.
    """
    iterations, last, unfinished = broadcast_result(
        team, lambda: (_iterations(root), _last_finished(root), list(_unfinished(root)))
    )
    skipped = [Skipped(str(root / name), "not finished: its name is that of a stage") for name in unfinished]
    for number, path in reversed(iterations):
        if last is not None and number > last[0]:
            why = f"newer than {last[0]}, which {last[1]} names; that is written last, so this save was not finished"
            skipped.append(Skipped(str(path), why))
            continue
        is_good, validation = is_whole(path)
        if is_good:
            return Newest(str(path), number, tuple(skipped))
        skipped.append(Skipped(str(path), _reason(validation)))
    return Newest(None, None, tuple(skipped))


def iteration_paths(root: Path) -> list[Path]:
    """Every iteration of a training root, the oldest first.

    Raises:
        UsageError: there is no such directory, or it holds no iterations.
    """
    found = _iterations(root)
    if not found:
        raise UsageError(
            "there are no iterations here",
            file=str(root),
            hint="point at the directory that holds iter_0000010, step-10, checkpoint-10, global_step10 or the like",
        )
    return [path for _, path in found]


def _iterations(root: Path) -> list[tuple[int, Path]]:
    refuse_url(root)
    if not root.is_dir():
        raise UsageError("no such directory", file=str(root), hint="check the spelling of the path")
    return [(number, root / name) for number, name in sorted(iteration_dirs(LocalStore(root)).items())]


def _unfinished(root: Path) -> Iterator[str]:
    yield from (name for name in LocalStore(root).folders() if _UNFINISHED.search(name))


def _last_finished(root: Path) -> tuple[int, str] | None:
    """The iteration that a tracker names, and the tracker's name; None where there is none that names one."""
    store = LocalStore(root)
    try:
        for tracker in (TRACKER, *NAMING_TRACKERS):
            if not store.exists(tracker):
                continue
            text = store.read(tracker, 0, min(store.size(tracker), 256)).decode("ascii", "replace").strip()
            named = re.fullmatch(r"(\d{1,15})", text) or ITERATION_DIR.search(text)
            if named is not None:
                return int(named[1]), tracker
    except CheckpointingException:
        return None
    finally:
        store.close()
    return None


def _reason(validation: Validation) -> str:
    errors = [finding for finding in validation.findings if finding.severity == Severity.ERROR]
    finding = (errors or validation.findings)[0]
    where = f" ({finding.file or finding.key or finding.rank})" if finding.file or finding.key or finding.rank else ""
    more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
    return f"{finding.code} {finding.message}{where}{more}"
