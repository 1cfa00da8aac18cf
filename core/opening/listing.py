"""List the checkpoints in a directory that is none itself; reads file names and sizes only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from core.errors import CheckpointingException
from core.files.remote_path import is_remote
from core.files.source_store import SourceStore, open_store
from core.files.store import list_files_below
from core.formats.format import Format
from core.formats.registry import sniffed
from core.opening.iterations import ITERATION_DIR, iteration_dirs
from core.opening.locate import NAMING_TRACKERS, locate_checkpoint, store_of_file
from core.opening.unrecognised import loose_files, search_below
from core.values import dataclass

_MOST_BESIDE = 10
"""Maximum number of iterations that are described beside one that is opened."""
_MOST_FILES_BESIDE = 20_000
"""Maximum number of their files whose sizes are looked at."""
_MOST_FILES = 200_000
"""Maximum number of files whose sizes are looked at; checkpoints after that have no size."""


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint in a directory.

    Args:
        path: its directory or file.
        format: its format; None if looking at it fails.
        iteration: the iteration in the directory's name, or None.
        n_files, n_bytes: number and total size of its files; None if there are too many to count.
        modified: time at which its newest file was modified, in seconds since 1970.
    """

    path: Path
    format: Format | None
    iteration: int | None
    n_files: int | None
    n_bytes: int | None
    modified: float


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints in a directory that is none itself.

    Args:
        checkpoints: the newest first.
        rest: what is not listed, a clause for people: where the search stopped, or how many older
            iterations there are; None if everything is.
    """

    checkpoints: tuple[ListedCheckpoint, ...]
    rest: str | None


def list_checkpoints(root: Path) -> Listing:
    """Return the checkpoints in a directory and below, the newest first.

    Hidden directories are skipped, and the search ends after some time. In a training root each
    iteration is listed; one that contains the directory it stands for (a Trainer's
    ``checkpoint-2/global_step2``) is one checkpoint.

    Raises:
        StorageError: the directory cannot be read.
    """
    with closing(open_store(root)) as store:
        search = search_below(store, is_checkpoint)
        names = [*loose_files(store, store.files()), *search.paths]
    # Final weights may have the iterations of their run next to them.
    for name in list(names):
        with closing(open_store(root / name)) as folder:
            names += [f"{name}/{inner}" for inner in iteration_dirs(folder).values()]

    # Sizes by stat, until it would take too long.
    listed = []
    n_left = _MOST_FILES
    located: set[Path] = set()
    for name in names:
        path = root / name
        if path in located:
            continue
        item, inner = _describe(path, n_left)
        located.add(inner)
        n_left = 0 if item.n_files is None else n_left - item.n_files
        listed.append(item)
    listed.sort(key=lambda item: (-int(item.modified), -(item.iteration or 0), str(item.path)))
    return Listing(tuple(listed), search.rest)


def list_iterations(passed: Sequence[Path]) -> Listing | None:
    """Describe the iterations of the training root from which a checkpoint was reached.

    Args:
        passed: the directories that were descended through, the outermost first.

    Returns:
        The newest iterations, that with the highest number first; None unless there are several,
        and in an object store, where each would take requests.

    Raises:
        StorageError: a directory cannot be read.
    """
    for root in passed:
        if is_remote(root):
            return None
        with closing(open_store(root)) as store:
            names = iteration_dirs(store)
        if len(names) < 2:
            continue
        listed = []
        n_left = _MOST_FILES_BESIDE
        for number in sorted(names, reverse=True)[:_MOST_BESIDE]:
            item, _ = _describe(root / names[number], n_left)
            n_left = 0 if item.n_files is None else n_left - item.n_files
            listed.append(replace(item, iteration=number))
        n_more = len(names) - len(listed)
        return Listing(tuple(listed), f"{n_more:,} older ones" if n_more else None)
    return None


def is_checkpoint(store: SourceStore) -> bool:
    """Return whether a directory is a checkpoint itself, not only a root with some."""
    # An iteration may contain the directory that DeepSpeed wrote, and nothing else of the weights.
    if ITERATION_DIR.match(store.root.name) and any(map(store.exists, NAMING_TRACKERS)):
        return True
    try:
        sniffed(store)
    except CheckpointingException:
        return False
    return True


def _describe(path: Path, most_files: int) -> tuple[ListedCheckpoint, Path]:
    """Describe one checkpoint, and return the directory in which its files are.

    Args:
        most_files: maximum number of files to look at.
    """
    format: Format | None = None
    iteration: int | None = None
    inner = path
    with suppress(CheckpointingException):
        location = locate_checkpoint(path)
        location.store.close()
        format, iteration, inner = location.format, location.iteration, location.path
    files = list(islice(_sizes_and_times(path), most_files + 1))
    is_counted = len(files) <= most_files
    item = ListedCheckpoint(
        path,
        format,
        iteration,
        len(files) if is_counted else None,
        sum(size for size, _ in files) if is_counted else None,
        max((modified for _, modified in files), default=0.0),
    )
    return item, inner


def runs_below(root: Path) -> list[Path]:
    """Return the training roots below a directory, that of the newest iteration first.

    Raises:
        StorageError: the directory cannot be read.
    """
    return list(
        dict.fromkeys(
            item.path.parent
            for item in list_checkpoints(root).checkpoints
            if item.iteration is not None and item.path.parent != root
        )
    )


def _sizes_and_times(path: Path) -> Iterator[tuple[int, float]]:
    """Yield size and modification time of a file, or of every file below a directory."""
    if is_remote(path):
        store = store_of_file(path) if path.is_file() else open_store(path)
        for name, size in list_files_below(store).items():
            yield size, store.modified_ns(name) / 1e9
        return
    paths = [str(path)] if path.is_file() else _files_below(path)
    for file in paths:
        # A link may lead nowhere, and a file may be gone since.
        with suppress(OSError):
            status = os.stat(file)
            yield status.st_size, status.st_mtime


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the paths of all files below a directory."""
    for inner, _, files in os.walk(folder):
        yield from (os.path.join(inner, file) for file in files)
