"""Check what exists at a destination: ``--force`` replaces a checkpoint, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from core.errors import CheckpointingException, UsageError
from core.files.store import LocalStore
from core.formats.registry import sniffed
from core.manifest.of_copy import manifest_name
from core.opening.open import ITERATION_DIR, store_of_file


def check_replaceable(dst: Path, paths: Iterable[str]) -> None:
    """Raise unless replacing ``dst`` removes only a checkpoint that the new one takes the place of.

    Args:
        dst: the destination; it may be free.
        paths: paths of the new files, relative to the destination.

    Raises:
        UsageError: the destination is not a checkpoint, or holds other iterations that would be
            lost.
    """
    if not os.path.lexists(dst) or (dst.is_dir() and not any(dst.iterdir())):
        return
    if not _holds_checkpoint(dst):
        raise UsageError(
            "only a checkpoint can be replaced, and the destination is not one",
            file=str(dst),
            hint="remove it, or choose another destination",
        )
    new_names = {path.split("/")[0] for path in paths}
    lost = [] if dst.is_file() else [name for name in _iterations_in(dst) if name not in new_names]
    if lost:
        raise UsageError(
            f"the destination holds other iterations ({', '.join(lost[:4])}), which would be lost",
            file=str(dst),
            hint="choose another destination, or move them elsewhere first",
        )


def _holds_checkpoint(path: Path) -> bool:
    """Return whether a path holds a checkpoint, intact or damaged.

    A path does if a format recognises it, or if it has a manifest that this toolkit wrote.
    """
    if path.is_file():
        if (path.parent / manifest_name(path.name)).is_file():
            return True
        store = store_of_file(path)
    else:
        if (path / manifest_name()).is_file() or _iterations_in(path):
            return True
        store = LocalStore(path)
    try:
        sniffed(store)
    except CheckpointingException:
        return False
    finally:
        store.close()
    return True


def _iterations_in(root: Path) -> list[str]:
    """Return the names of the folders of a directory that are named like iterations."""
    return [
        name
        for name in LocalStore(root).folders()
        if ITERATION_DIR.match(name) or name == "release"
    ]
