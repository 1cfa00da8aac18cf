"""Explain why a path is not a checkpoint, and what to point at instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from shlex import quote

from core.errors import CheckpointingException, TruncatedError, UnsupportedError, list_some
from core.files.source_store import SourceStore, open_store
from core.files.substitute import substitute_in
from core.files.walk import MAX_DEPTH
from core.formats.safetensors.files import INDEX_SUFFIX, SUFFIX
from core.formats.torch.stream import SUFFIXES, stream_kind
from core.opening.iterations import CHECKPOINTS_BELOW, MOST_PATHS
from core.opening.other_software import explain_unrecognised
from core.values import dataclass

_MOST_OPENED = 1000
"""Maximum number of files of a directory whose first bytes are read."""
_MOST_FOLDERS = 10_000
_MOST_SECONDS = 5.0
NEAR = 3
"""Levels below a checkpoint in which separate checkpoints are looked for."""


def build_unrecognised_error(
    store: SourceStore, *, known: str, below: Search
) -> CheckpointingException:
    """Return the error for a directory or file that no format recognises.

    Args:
        known: the fallback hint, which lists the formats that are recognised.
        below: the checkpoints in the directories below.

    Raises:
        StorageError: the directory or file cannot be read.
    """
    if store.entry is not None:
        return _refusal_of_file(store, store.entry, known)
    # Checkpoints in the directory come first: the user probably means one of them.
    files = store.files()
    loose = loose_files(store, files)
    paths = [quote(str(store.root / place)) for place in (*loose, *below.paths)]
    hint = (
        f"pass {paths[0]}"
        if len(paths) == 1
        else f"pass one of them: {list_some(paths, MOST_PATHS)}"
    )
    if loose:
        if sum(name.endswith(SUFFIX) for name in loose) > 1:
            hint += f"; if the files belong to one model, add their index (model{INDEX_SUFFIX})"
        count = (
            "one torch or safetensors file"
            if len(loose) == 1
            else f"{len(loose)} torch or safetensors files"
        )
        message = f"not a checkpoint directory, but it contains {count}: {list_some(loose)}"
        return UnsupportedError(message, file=store.label, hint=hint, rule=CHECKPOINTS_BELOW)
    if below.paths:
        message = "not a checkpoint directory, but it contains checkpoints"
        return UnsupportedError(message, file=store.label, hint=hint, rule=CHECKPOINTS_BELOW)
    # Otherwise another program's files can explain it.
    explained = explain_unrecognised(store, known=known)
    if explained is None and below.rest is not None:
        return UnsupportedError(
            "not a checkpoint in a known format, and no subdirectory with one was found; "
            f"{below.rest}",
            file=store.label,
            hint="pass the subdirectory that contains the checkpoint",
        )
    return explained or UnsupportedError(
        "not a checkpoint in a known format", file=store.label, hint=known
    )


def _refusal_of_file(store: SourceStore, file: str, known: str) -> CheckpointingException:
    """Return the error for a file that no format recognises."""
    # An empty file, a Git LFS pointer or a server's message in place of the weights has a remedy of
    # its own, whatever the file is called.
    if store.size(file) == 0:
        return TruncatedError("the file is empty", file=store.label, hint="copy the file again")
    substitute = substitute_in(store, file)
    if substitute is not None:
        # Text under the name of another kind of file was hardly downloaded in place of weights.
        is_download = substitute.is_download or file.endswith((*SUFFIXES, SUFFIX))
        hint = substitute.hint if is_download else "pass a weights file or a checkpoint directory"
        return UnsupportedError(substitute.title, file=store.label, hint=hint)
    return explain_unrecognised(store, known=known) or UnsupportedError(
        "not a checkpoint in a known format", file=store.label, hint=known
    )


@dataclass(frozen=True, slots=True)
class Search:
    """The checkpoints that were found below a directory.

    Args:
        paths: their paths, relative to the directory.
        rest: where the search stopped, a clause for people; None if it looked everywhere.
    """

    paths: Sequence[str]
    rest: str | None = None


def search_below(
    store: SourceStore,
    is_checkpoint: Callable[[SourceStore], bool],
    *,
    without: Sequence[str] = (),
    most_levels: int = MAX_DEPTH,
) -> Search:
    """Search the directories below a directory for checkpoints, at any depth.

    Hidden directories are skipped, and a checkpoint is not searched for others. The search, breadth
    first, ends after a number of directories or seconds.

    Args:
        is_checkpoint: returns whether a directory is a checkpoint, or a training root with some.
        without: names of directories right below that are not searched.
        most_levels: levels below the directory; deeper ones are ignored without a word.
    """
    paths: list[str] = []
    waiting = [(name, 1) for name in _visible_folders(store) if name not in without]
    end = time.monotonic() + _MOST_SECONDS
    for number, (path, depth) in enumerate(waiting):  # the loop extends the list
        if number == _MOST_FOLDERS or time.monotonic() > end:
            n_left = len(waiting) - number
            return Search(
                paths,
                f"the search stopped after {number:,} directories; {n_left:,} more were"
                f" not searched, starting with {path}",
            )
        with closing(open_store(store.root / path)) as folder:
            try:
                if is_checkpoint(folder):
                    paths.append(path)
                    continue
                paths += [f"{path}/{name}" for name in loose_files(folder, folder.files())]
                if depth < most_levels:
                    waiting += [(f"{path}/{name}", depth + 1) for name in _visible_folders(folder)]
            except CheckpointingException:
                continue  # the directory cannot be read, and the search is only a service
    return Search(paths)


def _visible_folders(store: SourceStore) -> list[str]:
    """Return the names of the directories right below a directory that are not hidden."""
    return [name for name in store.folders() if not name.startswith(".")]


def loose_files(store: SourceStore, files: Sequence[str]) -> list[str]:
    """Return the files in a directory that are separate checkpoints, by their first bytes."""
    loose: list[str] = []
    names = [name for name in files if name.endswith((*SUFFIXES, SUFFIX))][:_MOST_OPENED]
    if not names:
        return loose
    from core.formats.safetensors.header import looks_like_header

    for name in names:
        try:
            is_torch = stream_kind(store, name, 0, store.size(name)) in ("zip", "legacy")
            if is_torch or looks_like_header(store, name):
                loose.append(name)
        except CheckpointingException:
            continue  # a file that cannot be read is no suggestion
    return loose
