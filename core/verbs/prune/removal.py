"""Remove an iteration in such an order that half of it is never taken for a checkpoint.

A local directory first gets a hidden name, which no program reads, and which is on the disk before
the first file is deleted::

    run/iter_0000010/  →  run/.iter_0000010.ckpt-removed/  →  deleted, metadata first

An object store has no rename. A hidden object is written first, which lists what will be deleted;
``core.opening.iterations`` skips an iteration that has one. The metadata, without which other
programs do not find the rest, go next, the hidden object last::

    run/.iter_0000010.ckpt-removed     {"objects": {"common.pt": [1024, "etag"], …}}
    run/iter_0000010/…

``finish_removal`` continues a removal that was interrupted at any point. Of a prefix it deletes
only the listed objects that have not been written again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeAlias

from core.errors import CorruptError, StorageError
from core.files.folders import sync_folder
from core.files.json_object import parse_json_object
from core.files.object_client import put_object
from core.files.object_listing import delete_objects, forget_listings
from core.files.remote_path import RemotePath, is_remote
from core.files.source_store import open_store
from core.files.store import translate_os_errors
from core.files.syscalls import rename_new
from core.opening.iterations import removed_name
from core.verbs.prune.contents import Contents, read_contents

OnRemoved: TypeAlias = Callable[[int], None]
"""Called with a number of files that have been deleted."""

_METADATA = re.compile(
    r"(\.metadata|metadata\.json|common\.pt|config\.json|ckpt-manifest\.json|latest|.*\.index\.json"
    r"|zarr\.json|\.zarray|\.zgroup|manifest\.ocdbt|_METADATA|_CHECKPOINT_METADATA"
    r"|trainer_state\.json|latest_checkpointed_iteration\.txt)"
)
"""Files by which programs recognise a checkpoint, or find the others; they are deleted first."""
_MOST_KEYS = 1000
"""Number of objects in a request; the limit of S3."""


def remove_iteration(folder: Path, contents: Contents, *, on_removed: OnRemoved) -> None:
    """Remove the directory of an iteration.

    Args:
        folder: the directory, or its URL.
        contents: what it contains; of a prefix, these objects are deleted.
        on_removed: called with the number of files that have been deleted.

    Raises:
        StorageError: the system or the store refuses.
    """
    if is_remote(folder):
        objects = {name: [stamp.n_bytes, stamp.identity] for name, stamp in contents.files.items()}
        marker = folder.parent / removed_name(folder.name)
        put_object(marker, json.dumps({"objects": objects}).encode(), replace=True)
        _delete_prefix(folder, contents.files, on_removed=on_removed)
        delete_objects([marker])
        return
    hidden = folder.with_name(removed_name(folder.name))
    with translate_os_errors(str(folder), doing="rename"):
        rename_new(folder, hidden)
    # Without this, a crash could leave a half-removed directory under its old name.
    sync_folder(folder.parent)
    _delete_folder(hidden, on_removed=on_removed)


def finish_removal(folder: Path, *, on_removed: OnRemoved) -> None:
    """Finish the removal of an iteration that was interrupted.

    Args:
        folder: the directory under its old name, or its URL; one that has been written again since
            stays.
        on_removed: as for ``remove_iteration``.

    Raises:
        CorruptError: the list of objects to delete is damaged.
        StorageError: the system or the store refuses.
    """
    if not is_remote(folder):
        hidden = folder.with_name(removed_name(folder.name))
        if os.path.lexists(hidden):
            _delete_folder(hidden, on_removed=on_removed)
        return
    marker = folder.parent / removed_name(folder.name)
    objects = _objects_to_delete(marker)
    unchanged = [
        name
        for name, stamp in read_contents(folder).files.items()
        if objects.get(name) == [stamp.n_bytes, stamp.identity]
    ]
    _delete_prefix(folder, unchanged, on_removed=on_removed)
    delete_objects([marker])


def _objects_to_delete(marker: Path) -> dict[str, object]:
    """Read the list in the hidden object: name → [bytes, ETag].

    Raises:
        CorruptError: it is damaged.
    """
    forget_listings()
    with closing(open_store(marker.parent)) as store:
        data = store.read(marker.name, 0, store.size(marker.name))
    objects = parse_json_object(data, file=str(marker)).get("objects")
    if not isinstance(objects, dict):
        raise CorruptError(
            "the list of objects to delete is damaged",
            file=str(marker),
            hint="delete this object and the iteration that it names yourself",
        )
    return objects


def _delete_prefix(folder: RemotePath, names: Iterable[str], *, on_removed: OnRemoved) -> None:
    """Delete objects below a prefix, the metadata first."""
    names = sorted(names, key=_is_data)
    # The metadata are gone before the request for the first other object is sent.
    n_metadata = sum(not _is_data(name) for name in names)
    for group in (names[:n_metadata], names[n_metadata:]):
        for start in range(0, len(group), _MOST_KEYS):
            keys = group[start : start + _MOST_KEYS]
            delete_objects([folder / name for name in keys])
            on_removed(len(keys))


def _is_data(name: str) -> bool:
    """Return whether a file is deleted after the metadata."""
    return _METADATA.fullmatch(name.rpartition("/")[2]) is None


def _delete_folder(folder: Path, *, on_removed: OnRemoved) -> None:
    """Delete a directory with a hidden name, the metadata first, without following links.

    Raises:
        StorageError: an entry cannot be deleted.
    """
    if folder.is_symlink():
        raise StorageError(
            "a symbolic link has a name that is reserved for interrupted removals",
            file=str(folder),
            hint="remove the link",
        )

    def stop_at(err: OSError) -> None:
        raise err

    with translate_os_errors(str(folder), doing="delete"):
        with os.scandir(folder) as entries:
            metadata = [entry.name for entry in entries if not _is_data(entry.name)]
        for name in metadata:
            with suppress(IsADirectoryError, PermissionError):  # a directory: deleted below
                os.unlink(folder / name)
                on_removed(1)
        # The innermost directories come first. All names are relative to open directories, so that
        # nothing outside is deleted if a directory is replaced by a link meanwhile.
        for _, folders, files, fd in os.fwalk(folder, topdown=False, onerror=stop_at):
            for name in files:
                os.unlink(name, dir_fd=fd)
            on_removed(len(files))
            for name in folders:
                try:
                    os.rmdir(name, dir_fd=fd)
                except NotADirectoryError:
                    os.unlink(name, dir_fd=fd)  # a link to a directory
        os.rmdir(folder)
