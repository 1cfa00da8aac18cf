"""Small files of a checkpoint, each written completely and to the disk, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from core.errors import StorageError
from core.files.folders import sync_folder
from core.files.store import check_name, translate_os_errors


def write_file(
    checkpoint_dir: str | os.PathLike[str], name: str, pieces: Iterable[bytes | memoryview]
) -> None:
    """Write or replace a file of a checkpoint atomically, and wait until it is on the disk.

    Args:
        checkpoint_dir: an existing directory.
        name: path in it, ``/`` between components; missing folders are created.
        pieces: the content, in order.

    Raises:
        UnsafeError: the name leads out of the directory.
        StorageError, CapacityError: the directory does not exist, or the file cannot be written;
            nothing new is visible then.
    """
    root = Path(checkpoint_dir)
    path = root / check_name(name)
    with translate_os_errors(str(root), doing="look at"):
        is_dir = root.is_dir()
    if not is_dir:
        raise StorageError(
            "the directory does not exist", file=str(root), hint="create it before saving into it"
        )
    # Write a hidden file next to the target and rename it, so that no reader sees a part of it.
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
    # A new name is on the disk only once its folder is.
    for folder in (path.parent, *path.parent.parents):
        sync_folder(folder)
        if folder == root:
            break
