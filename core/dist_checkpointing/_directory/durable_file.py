"""Small files of a checkpoint: there as a whole, and on the disk, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from core.errors import StorageError
from core.files.folders import sync_folder
from core.files.store import check_name, translate_os_errors


def write_file(checkpoint_dir: str | os.PathLike[str], name: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Makes a file of a checkpoint, or replaces it, at one go.

    Args:
        checkpoint_dir: exists.
        name: path in it, ``/`` between components; the folders on the way are made.
        pieces: what it consists of, in order.

    Raises:
        UnsafeError: the name leads out of the directory.
        StorageError, CapacityError: the directory does not exist, or the system refuses; nothing new is visible then.
    """
    root = Path(checkpoint_dir)
    path = root / check_name(name)
    with translate_os_errors(str(root), doing="look at"):
        is_there = root.is_dir()
    if not is_there:
        raise StorageError("the directory does not exist", file=str(root), hint="make it before saving into it")
    with translate_os_errors(str(path), doing="write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.ckpt-part")
        try:
            with part.open("wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
    for folder in (path.parent, *path.parent.parents):
        sync_folder(folder)
        if folder == root:
            break
