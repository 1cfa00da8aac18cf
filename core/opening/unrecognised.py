"""Explain why a path is not a checkpoint in a known format, and what to point at instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing

from core.errors import CheckpointingException, UnsupportedError
from core.files.store import LocalStore
from core.files.substitute import substitute_in
from core.formats.safetensors.files import SUFFIX
from core.formats.safetensors.header import looks_like_header
from core.formats.torch.format import SUFFIXES
from core.formats.torch.tree import stream_kind

_MOST_LISTED = 8
_MOST_OPENED = 32
"""Maximum number of files of a directory whose first bytes are read."""
_MOST_FOLDERS = 1000
_MOST_LEVELS = 3
_OTHER_FORMATS = (
    (re.compile(r"\.gguf$"), "a GGUF file"),
    (re.compile(r"\.nemo$"), "a NeMo archive"),
    (re.compile(r"\.(h5|keras)$"), "a Keras file"),
    (re.compile(r"\.msgpack$"), "a Flax file"),
    (re.compile(r"\.onnx$"), "an ONNX model"),
    (re.compile(r"\.npz$"), "a NumPy archive"),
    (re.compile(r"\.npy$"), "a NumPy array"),
    (
        re.compile(r"(\.data-\d+-of-\d+|\.ckpt(-\d+)?\.(index|meta)|^saved_model\.pb)$"),
        "a TensorFlow checkpoint",
    ),
)


def refusal_of(store: LocalStore, *, known: str, below: Sequence[str]) -> UnsupportedError:
    """Return the error for a directory or file that no format recognises.

    Args:
        known: the hint where there is nothing better, such as the formats that are recognised.
        below: paths of checkpoints in the directories below.

    Raises:
        StorageError: the directory or file cannot be read.
    """
    if store.entry is not None:
        return _refusal_of_file(store, store.entry, known)
    files = store.files()
    loose = _loose_files(store, files)
    places = [*loose, *below]
    hint = (
        f"point at {store.root / places[0]}"
        if len(places) == 1
        else f"point at one of them: {listed(places)}"
    )
    if loose:
        count = (
            "one torch or safetensors file"
            if len(loose) == 1
            else f"{len(loose)} torch or safetensors files"
        )
        message = f"not a checkpoint directory, but it contains {count}: {listed(loose)}"
        return UnsupportedError(message, file=store.label, hint=hint)
    if below:
        message = "not a checkpoint directory, but it contains checkpoints"
        return UnsupportedError(message, file=store.label, hint=hint)
    title = next(
        (title for expression, title in _OTHER_FORMATS if any(map(expression.search, files))), None
    )
    if title is not None:
        return UnsupportedError(f"{title} cannot be read", file=store.label, hint=known)
    return UnsupportedError("not a checkpoint in a known format", file=store.label, hint=known)


def _refusal_of_file(store: LocalStore, file: str, known: str) -> UnsupportedError:
    """Return the error for a file that no format recognises."""
    title = next((title for expression, title in _OTHER_FORMATS if expression.search(file)), None)
    if title is not None:
        return UnsupportedError(f"{title} cannot be read", file=store.label, hint=known)
    substitute = substitute_in(store, file)
    if substitute is not None:
        return UnsupportedError(substitute.title, file=store.label, hint=substitute.hint)
    return UnsupportedError("not a checkpoint in a known format", file=store.label, hint=known)


def checkpoints_below(
    store: LocalStore, is_checkpoint: Callable[[LocalStore], bool], *, without: Sequence[str] = ()
) -> list[str]:
    """Return the relative paths of checkpoints in the directories below a directory.

    Directories whose names begin with a dot are left out, and so is what lies more than three
    levels or a thousand directories away. A checkpoint is not searched for others.

    Args:
        is_checkpoint: returns whether a directory is a checkpoint, or a training root with some.
        without: names of directories right below that are not searched.
    """
    paths: list[str] = []
    waiting = [
        (name, 1) for name in store.folders() if not name.startswith(".") and name not in without
    ]
    for n_opened, (path, depth) in enumerate(waiting):  # the list grows on the way
        if n_opened >= _MOST_FOLDERS:
            break
        with closing(LocalStore(store.root / path)) as folder:
            try:
                if is_checkpoint(folder):
                    paths.append(path)
                    continue
                paths += [f"{path}/{name}" for name in _loose_files(folder, folder.files())]
                if depth < _MOST_LEVELS:
                    names = [name for name in folder.folders() if not name.startswith(".")]
                    waiting += [(f"{path}/{name}", depth + 1) for name in names]
            except CheckpointingException:
                continue  # the directory cannot be read
    return paths


def listed(paths: Sequence[str]) -> str:
    """Return the first of some paths as text."""
    return ", ".join([*paths[:_MOST_LISTED], *(["…"] if len(paths) > _MOST_LISTED else [])])


def _loose_files(store: LocalStore, files: Sequence[str]) -> list[str]:
    """Return the files of a directory that are checkpoints on their own, by their first bytes."""
    loose = []
    for name in [name for name in files if name.endswith((*SUFFIXES, SUFFIX))][:_MOST_OPENED]:
        try:
            is_torch = stream_kind(store, name, 0, store.size(name)) in ("zip", "legacy")
            if is_torch or looks_like_header(store, name):
                loose.append(name)
        except CheckpointingException:
            continue
    return loose
