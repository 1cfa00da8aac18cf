"""What stands at a destination already: ``--force`` replaces a checkpoint, and nothing else."""

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
    """Returns if replacing ``dst`` removes nothing but a checkpoint that the new one stands for.

    Args:
        dst: the destination.
        paths: of the new files, relative to it.

    Raises:
        UsageError: the destination holds no checkpoint, or other iterations that would be lost.
    """
    if _is_free(dst):
        return
    if not _holds_checkpoint(dst):
        raise UsageError(
            "the destination is no checkpoint, so it is not replaced",
            file=str(dst),
            hint="remove it, or choose another",
        )
    ours = {path.split("/")[0] for path in paths}
    others = [] if dst.is_file() else [name for name in _iterations_in(dst) if name not in ours]
    if others:
        raise UsageError(
            f"the destination holds other iterations ({', '.join(others[:4])}), which would be lost",
            file=str(dst),
            hint="choose another destination, or move them away",
        )


def _is_free(path: Path) -> bool:
    """Whether a name is not taken, or is an empty directory."""
    return not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))


def _holds_checkpoint(path: Path) -> bool:
    """Whether a path holds a checkpoint, whole or damaged: a format recognises it, or it has a manifest of ours."""
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
    """Names of the directories of a root that look like iterations."""
    return [name for name in LocalStore(root).folders() if ITERATION_DIR.match(name) or name == "release"]
