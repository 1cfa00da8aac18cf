"""Find the newest valid iteration of a training root, for a job to resume from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from core.engine.team.protocol import ALONE, Team, broadcast_result
from core.errors import CheckpointingException, UsageError
from core.files.source_store import open_store
from core.opening.absent import absent
from core.opening.iterations import ITERATION_DIR, iteration_dirs
from core.opening.listing import runs_below
from core.opening.locate import NAMING_TRACKERS, TRACKER
from core.values import dataclass
from core.verbs.checks.finding import Severity
from core.verbs.validate.run import Validation

_UNFINISHED = re.compile(
    r"^\..*\.ckpt-tmp|\.(orbax-checkpoint-)?tmp([-.]|$)|\.partial$|\.incomplete$"
)
"""Names of directories with an unfinished save or copy, for example Orbax's."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """An iteration that should not be used.

    Args:
        path: directory of the iteration.
        why: the reason, in one clause.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest valid iteration of a training root.

    Args:
        path: directory of the newest valid iteration; None if there is none.
        iteration: number of that iteration.
        skipped: iterations that are newer, the newest first.
    """

    path: str | None
    iteration: int | None
    skipped: tuple[Skipped, ...]


def find_newest_valid(
    root: Path, is_valid: Callable[[Path], tuple[bool, Validation]], *, team: Team = ALONE
) -> Newest:
    """Find the newest valid iteration of a training root.

    If a tracker (Megatron's, DeepSpeed's) names the last completed iteration, newer directories are
    skipped: trackers are written last, and a user who set one back did so on purpose. Staging
    directories of unfinished work are skipped by name.

    Args:
        root: the directory that contains the iterations.
        is_valid: returns whether an iteration may be used, and its validation; the same on all
            ranks of a team.
        team: ranks that all call this and get the same result.

    Raises:
        UsageError: the directory does not exist.
    """

    # The lead lists the root, so that all ranks try the same iterations.
    def list_root() -> tuple[list[tuple[int, Path]], tuple[int, str] | None, list[str]]:
        iterations, last = _iterations(root), last_completed(root)
        folders = open_store(root).folders()
        return iterations, last, [name for name in folders if _UNFINISHED.search(name)]

    iterations, last, unfinished = broadcast_result(team, list_root)
    skipped = [
        Skipped(str(root / name), "incomplete, because its name is a staging directory's")
        for name in unfinished
    ]
    # Try the newest iteration first.
    for number, path in reversed(iterations):
        if last is not None and number > last[0]:
            why = (
                f"newer than iteration {last[0]} in {last[1]}, which is written last, so this save"
                " was not completed"
            )
            skipped.append(Skipped(str(path), why))
            continue
        is_good, validation = is_valid(path)
        if is_good:
            return Newest(str(path), number, tuple(skipped))
        skipped.append(Skipped(str(path), worst_finding(validation)))
    return Newest(None, None, tuple(skipped))


def iteration_paths(root: Path) -> list[Path]:
    """Return the directories of all iterations of a training root, the oldest first.

    Raises:
        UsageError: the directory does not exist, or holds no iterations.
    """
    iterations = _iterations(root)
    if not iterations:
        runs = runs_below(root)
        hint = (
            "pass the directory that contains iter_0000010, step-10, checkpoint-10, global_step10"
            " or the like"
        )
        if runs:
            run = quote(str(runs[0]))
            hint = f"pass one of the runs in it; the newest iteration is in {run}"
        raise UsageError("no iterations found", file=str(root), hint=hint)
    return [path for _, path in iterations]


def _iterations(root: Path) -> list[tuple[int, Path]]:
    """Return (number, directory) of all iterations, sorted.

    Raises:
        UsageError: the path is a URL, or not a directory.
    """
    if not root.is_dir():
        raise absent(root, what="no such directory")
    return [
        (number, root / name) for number, name in sorted(iteration_dirs(open_store(root)).items())
    ]


def last_completed(root: Path) -> tuple[int, str] | None:
    """Read the first tracker that names an iteration.

    Returns:
        (iteration, file name of the tracker); None if no tracker names one.
    """
    store = open_store(root)
    try:
        for tracker in (TRACKER, *NAMING_TRACKERS):
            if not store.exists(tracker):
                continue
            text = (
                store.read(tracker, 0, min(store.size(tracker), 256))
                .decode("ascii", "replace")
                .strip()
            )
            match = re.fullmatch(r"(\d{1,15})", text) or ITERATION_DIR.search(text)
            if match is not None:
                return int(match[1]), tracker
    except CheckpointingException:
        return None
    finally:
        store.close()
    return None


def worst_finding(validation: Validation) -> str:
    """Describe the worst finding in one clause, with the number of further errors."""
    errors = [finding for finding in validation.findings if finding.severity == Severity.ERROR]
    finding = (errors or validation.findings)[0]
    place = finding.file or finding.key or finding.rank
    where = f" ({place})" if place else ""
    suffix = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
    return f"{finding.code} {finding.message}{where}{suffix}"
