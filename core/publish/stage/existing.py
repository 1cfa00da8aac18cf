"""Check what exists at a destination: ``--force`` replaces a checkpoint, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from core.errors import CheckpointingException, UsageError
from core.files.source_store import open_store
from core.formats.registry import sniffed
from core.opening.iterations import ITERATION_DIR
from core.opening.locate import store_of_file
from core.publish.manifest.of_copy import manifest_name


def check_replaceable(dst: Path, paths: Iterable[str]) -> None:
    """Raise unless ``dst`` is free, or is a checkpoint that the new one replaces completely.

    Args:
        dst: the destination; it need not exist.
        paths: paths of the new files, relative to the destination.

    Raises:
        UsageError: the destination is not a checkpoint, or contains other iterations that would be
            lost.
    """
    if not (dst.exists() or dst.is_symlink()) or (dst.is_dir() and not any(dst.iterdir())):
        return
    if not _holds_checkpoint(dst):
        raise UsageError(
            "only a checkpoint can be replaced, and the destination is not one",
            file=str(dst),
            hint="remove it, or choose another destination",
        )

    # Iterations that the new checkpoint does not have are training progress: never remove them.
    new_names = {path.split("/")[0] for path in paths}
    lost = [] if dst.is_file() else [name for name in _iterations_in(dst) if name not in new_names]
    if lost:
        raise UsageError(
            f"the destination contains other iterations ({', '.join(lost[:4])}) that would be lost",
            file=str(dst),
            hint="choose another destination, or move them elsewhere first",
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


def _iterations_in(root: Path) -> list[str]:
    """Return the names of the subdirectories that are named like iterations."""
    return [
        name
        for name in open_store(root).folders()
        if ITERATION_DIR.match(name) or name == "release"
    ]
