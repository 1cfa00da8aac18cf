"""Small files of a checkpoint, each written completely, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable

from core.dist_checkpointing._live.upload import upload_object
from core.errors import StorageError
from core.files.folders import sync_folder, write_whole
from core.files.remote_path import is_remote, location_of
from core.files.store import check_name, translate_os_errors


def write_file(
    checkpoint_dir: str | os.PathLike[str], name: str, pieces: Iterable[bytes | memoryview]
) -> None:
    """Write or replace a file of a checkpoint atomically, and wait until it is stored.

    Args:
        checkpoint_dir: an existing directory, or the URL of a prefix, where nothing is replaced.
        name: path relative to the directory, ``/`` between components; missing folders are created.
        pieces: consecutive parts of the content.

    Raises:
        UsageError: the object exists.
        UnsafeError: the name leads out of the directory.
        StorageError, CapacityError: the directory does not exist, or the file cannot be written; an
            earlier file is then unchanged.
    """
    root = location_of(checkpoint_dir)
    path = root / check_name(name)
    if is_remote(path):
        upload_object(path, b"".join(pieces))
        return
    # Do not create the directory: a misspelled path has to be an error.
    with translate_os_errors(str(root), doing="look at"):
        is_dir = root.is_dir()
    if not is_dir:
        raise StorageError(
            "the directory does not exist", file=str(root), hint="create it before saving"
        )
    with translate_os_errors(str(path), doing="write"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, pieces)
    # A new name is on disk only after its folder is synced.
    for folder in (path.parent, *path.parent.parents):
        sync_folder(folder)
        if folder == root:
            break
