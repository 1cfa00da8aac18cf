"""Read a training root: its iterations, the files that name some of them, interrupted removals.

::

    run/
    ├── latest_checkpointed_iteration.txt   Megatron's tracker: "30"
    ├── latest                              DeepSpeed's: "global_step30"
    ├── iter_0000010/ …                     iterations (``core.opening.open``)
    ├── best -> iter_0000010                a link protects what it leads to
    ├── .iter_0000020.ckpt-stage/           a command of ckpt is writing iteration 20
    └── .iter_0000005.ckpt-removed/         an interrupted removal; in an object store, an object
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from shlex import quote

from core.errors import CorruptError, UsageError
from core.files.json_object import parse_json_object
from core.files.object_listing import forget_listings, is_listed
from core.files.remote_path import is_remote
from core.files.source_store import SourceStore, open_store
from core.files.store import translate_os_errors
from core.files.url import refuse_url
from core.opening.absent import absent
from core.opening.iterations import ITERATION_DIR, all_iteration_dirs, removed_name
from core.opening.listing import runs_below
from core.opening.locate import NAMING_TRACKERS, RELEASE, TRACKER
from core.publish.stage.folder_lock import stage_dir_of
from core.values import dataclass

TRAINER_STATE = "trainer_state.json"
"""File of Hugging Face's Trainer in an iteration, which may name the best one."""
_REMOVED = re.compile(re.escape(removed_name("NAME")).replace("NAME", "(.+)"), re.DOTALL)


@dataclass(frozen=True, slots=True)
class TrainingRoot:
    """The iterations, trackers and links in a training root.

    Args:
        path: the root.
        names: iteration → names of its directories.
        unfinished: names of iterations whose removal was interrupted.
        trackers: file name of a tracker → the iteration that it names, whether it exists or not.
        links: name of a symbolic link right below the root → the path that it leads to.
        staged: names of iterations that a command of ckpt is writing, or was when it was killed.
    """

    path: Path
    names: Mapping[int, tuple[str, ...]]
    unfinished: tuple[str, ...]
    trackers: Mapping[str, int]
    links: Mapping[str, str]
    staged: frozenset[str]

    @property
    def last_completed(self) -> tuple[int, str] | None:
        """(iteration, file name) of the tracker that counts; None if no tracker names one."""
        return next(((number, name) for name, number in self.trackers.items()), None)


def read_root(path: Path) -> TrainingRoot:
    """Read a training root, as it is now.

    Raises:
        UsageError: the path is not a directory that contains iterations, or it cannot be listed.
        CorruptError: Megatron's tracker names no iteration.
        StorageError: the root cannot be read.
    """
    if is_remote(path):
        forget_listings()
        if not is_listed(path):
            raise UsageError(
                "the objects under this URL cannot be listed, so ckpt cannot remove any of them",
                file=f"{path.scheme}://{path.bucket}",
                hint="pass a local directory, or an s3://, gs:// or az:// URL",
            )
    else:
        refuse_url(path)
    if not path.is_dir():
        raise absent(path, what="no such directory")
    with closing(open_store(path)) as store:
        names = {
            number: tuple(names) for number, names in sorted(all_iteration_dirs(store).items())
        }
        hidden = [name for name in (*store.folders(), *store.files()) if name.startswith(".")]
        trackers = _read_trackers(store)
    unfinished = tuple(
        match[1]
        for name in hidden
        if (match := _REMOVED.fullmatch(name))
        and (ITERATION_DIR.match(match[1]) or match[1].isdigit())
    )
    if not (names or unfinished):
        raise _without_iterations(path)
    return TrainingRoot(
        path,
        names,
        unfinished,
        trackers,
        _links_in(path),
        frozenset(
            name
            for every in names.values()
            for name in every
            if stage_dir_of(path / name).name in hidden
        ),
    )


def _links_in(root: Path) -> dict[str, str]:
    """Return name → target of the symbolic links right below a root."""
    with translate_os_errors(str(root), doing="list the directory"):
        return {path.name: os.path.realpath(path) for path in root.iterdir() if path.is_symlink()}


def _read_trackers(store: SourceStore) -> dict[str, int]:
    """Return tracker → iteration, the one that decides what was completed last first.

    Raises:
        CorruptError: Megatron's tracker contains neither a number nor ``release``.
    """
    trackers = {}
    for name in (TRACKER, *NAMING_TRACKERS):
        if not store.exists(name):
            continue
        data = store.read(name, 0, min(store.size(name), 256))
        text = data.decode("ascii", "replace").strip()
        # DeepSpeed's tracker contains the name of a directory, which need not have a number.
        match = re.fullmatch(r"(\d{1,15})", text) or ITERATION_DIR.search(text)
        if match is not None:
            trackers[name] = int(match[1])
        elif name == TRACKER and text != RELEASE:
            raise CorruptError(
                f"the tracker contains {text[:40]!r}, which is neither a number nor {RELEASE!r}, "
                "so ckpt cannot tell which iteration to keep",
                file=str(store.root / name),
                hint="write the number of the iteration to resume from into the tracker",
            )
    return trackers


def best_iteration(folder: Path) -> str | None:
    """Return the directory name of the best iteration, as Hugging Face's Trainer recorded it.

    Args:
        folder: the newest valid iteration.

    Raises:
        CorruptError: its ``trainer_state.json`` is not a JSON object.
    """
    with closing(open_store(folder)) as store:
        if not store.exists(TRAINER_STATE):
            return None
        data = store.read(TRAINER_STATE, 0, store.size(TRAINER_STATE))
    best = parse_json_object(data, file=str(folder / TRAINER_STATE)).get("best_model_checkpoint")
    return Path(best).name if isinstance(best, str) else None


def _without_iterations(root: Path) -> UsageError:
    """Return the error for a directory without iterations."""
    runs = [] if is_remote(root) else runs_below(root)
    hint = (
        "pass the directory that contains iter_0000010, step-10, checkpoint-10, global_step10 or "
        "the like"
    )
    if runs:
        hint = f"pass one of the runs in it, such as {quote(str(runs[0]))}"
    return UsageError("no iterations found", file=str(root), hint=hint)
