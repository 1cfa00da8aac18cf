"""Check what exists at a destination: ``--force`` replaces a checkpoint, and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from core.errors import CheckpointingException, UsageError, list_some
from core.files.remote_path import is_remote
from core.files.source_store import open_store
from core.files.walk import list_tree
from core.formats.registry import sniffed
from core.opening.iterations import ITERATION_DIR
from core.opening.locate import store_of_file
from core.publish.manifest.file import MANIFEST, manifest_name
from core.publish.manifest.lookup import find_manifest, is_manifest

_OF_SYSTEM = re.compile(r"\.DS_Store|\._.*|\.nfs.*|\.directory|Thumbs\.db|desktop\.ini")
"""Files that operating systems and file managers leave in any directory."""


def check_replaceable(dst: Path, paths: Collection[str]) -> None:
    """Raise unless ``dst`` is free, or is a checkpoint that the new one replaces completely.

    Args:
        dst: the destination; it need not exist.
        paths: paths of the new files, relative to the destination.

    Raises:
        UsageError: the destination is not a checkpoint, or contains other iterations or files of
            the user's that would be lost.
    """
    if not (dst.exists() or dst.is_symlink()) or (dst.is_dir() and not any(dst.iterdir())):
        return
    if not _holds_checkpoint(dst):
        raise UsageError(
            "the destination is not a checkpoint, and ckpt replaces only checkpoints",
            file=str(dst),
            hint="remove the destination, or choose another one",
        )

    # Iterations that the new checkpoint does not have are training progress: never remove them.
    new_names = {path.split("/")[0] for path in paths}
    lost = [] if dst.is_file() else [name for name in _iterations_in(dst) if name not in new_names]
    if lost:
        raise UsageError(
            f"the destination contains other iterations ({', '.join(lost[:4])}) that would be lost",
            file=str(dst),
            hint="choose another destination, or move these iterations elsewhere first",
        )
    added = [] if dst.is_file() else _list_added_files(dst, paths)
    if added:
        raise UsageError(
            f"the destination contains files that were added to it and would be lost: "
            f"{list_some(added)}",
            file=str(dst),
            hint="move these files elsewhere first, or choose another destination",
        )


def _holds_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint, intact or damaged.

    It is one if a format recognises it, or if it has a manifest that this toolkit wrote.
    """
    # A manifest is sufficient: a damaged checkpoint may not be recognised by any format.
    if path.is_file():
        if (path.parent / manifest_name(path.name)).is_file():
            return True
        store = store_of_file(path)
    else:
        if (path / manifest_name()).is_file() or _iterations_in(path):
            return True
        store = open_store(path)
    try:
        sniffed(store)
    except CheckpointingException:
        return False
    finally:
        store.close()
    return True


def _list_added_files(dst: Path, paths: Collection[str]) -> list[str]:
    """List the entries that the manifest of a destination lacks and the new checkpoint has not.

    Of a checkpoint without a manifest nobody knows which files belong to it.
    """
    recorded = find_manifest(dst) if (dst / MANIFEST).is_file() else None
    if recorded is None or recorded.manifest is None:
        return []
    expected = {*(file.path for file in recorded.manifest.files), *paths}
    return [
        name
        for name in _list_entries(dst)
        if not (name in expected or is_manifest(name) or _OF_SYSTEM.fullmatch(name.split("/")[-1]))
    ]


def _list_entries(dst: Path) -> list[str]:
    """List everything below a directory or a prefix that is not a directory itself."""
    if is_remote(dst):
        return list(list_tree(dst).files)
    names: list[str] = []
    for folder, folders, files in os.walk(dst):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        below = os.path.relpath(folder, dst)
        names += [os.path.normpath(os.path.join(below, name)) for name in (*links, *files)]
    return sorted(names)


def _iterations_in(root: Path) -> list[str]:
    """Return the names of the subdirectories that are named like iterations."""
    return [
        name
        for name in open_store(root).folders()
        if ITERATION_DIR.match(name) or name == "release"
    ]
