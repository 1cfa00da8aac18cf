"""Publication of a save to an object store: the objects appear one by one, the metadata last.

A bucket has neither a hidden directory nor a rename, so the ranks write the objects of a checkpoint
where they belong::

    iter_0000010/
    ├── .ckpt-stage/lock         names the save that is running; put only if it does not exist
    ├── .ckpt-stage/sums/…       only with a manifest: checksums of what each rank wrote
    ├── __0_0.distcp …           uploaded by the ranks
    ├── .metadata                put when all ranks have finished
    └── metadata.json            put last

``metadata.json``, without which a prefix is not a distributed checkpoint, is put by one conditional
request. A save that fails deletes its objects. A process that is killed leaves objects and the
lock, but no ``metadata.json``; a save with ``overwrite`` deletes them.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from core.dist_checkpointing._directory.publication import (
    is_file_of_key,
    is_own_name,
    warn_when_dropped,
)
from core.dist_checkpointing._directory.sums import LOCK, STAGE, SUMS, WANTS_SUMS
from core.dist_checkpointing._live.upload import upload_object
from core.dist_checkpointing.core import CONFIG_FNAME
from core.errors import CheckpointingException, StorageError, UsageError, list_some
from core.files.object_client import read_object
from core.files.object_listing import delete_objects, find_object, forget_listings, is_listed
from core.files.remote_path import RemotePath, is_remote
from core.files.remote_store import RemoteStore, list_objects
from core.files.store_kinds import WRITABLE_STORES
from core.formats.dcp.reading.data_files import METADATA
from core.publish.manifest.file import manifest_name
from core.publish.manifest.partial_sums import combine_sums

if TYPE_CHECKING:
    from core.dist_checkpointing.core import CheckpointingConfig

logger = logging.getLogger(__name__)


class BucketPublication:
    """A checkpoint that is being written to an object store; on the coordinator.

    Args:
        root: URL of the prefix.
        overwrite: accept a prefix with objects, and delete the checkpoint in it before the new one
            is written; other objects stay.
        manifest: let the ranks compute checksums, and publish the checkpoint with its manifest.

    Attributes:
        data_dir: the prefix that the strategies write to, ``root``.

    Raises:
        UsageError: the prefix has objects, or the URL is that of a web server.
        StorageError: another process is saving to the prefix, or the store refuses.
    """

    def __init__(self, root: Path, *, overwrite: bool = False, manifest: bool = False) -> None:
        assert is_remote(root), "directories have another publication"
        if not is_listed(root):
            raise UsageError(
                "ckpt cannot write to a web server",
                file=f"{root.scheme}://{root.bucket}",  # its path may end with a signature
                hint=f"save to a local directory, or to {WRITABLE_STORES}",
            )
        self.data_dir = root
        self._has_manifest = manifest
        self._id = uuid.uuid4().hex.encode()
        # The lock is put before anything below the prefix is read or changed.
        lock = root / STAGE / LOCK
        try:
            upload_object(lock, self._id, replaces=overwrite)
        except UsageError as err:
            raise StorageError(
                "another save to this URL is running or was interrupted",
                file=str(root),
                hint="wait for that save to finish, or pass overwrite=True to delete its objects",
            ) from err
        self._kept: set[str] = set()
        try:
            self._begin(overwrite=overwrite)
        except BaseException:
            with suppress(CheckpointingException):
                delete_objects([lock])
            raise
        self._end = partial(_delete_save, root, self.token, os.getpid(), frozenset(self._kept))
        self._unfinalized = warn_when_dropped(self, root, self._end)

    @staticmethod
    def data_dir_of(root: Path) -> Path:
        """Return the prefix that strategies write to, the same on every rank."""
        return root

    @staticmethod
    def is_visible(root: Path) -> bool:
        """Return whether this rank sees the save that the coordinator has begun.

        Raises:
            StorageError: the store refuses, or cannot be reached.
        """
        assert is_remote(root)
        return find_object(root / STAGE / LOCK) is not None

    def _begin(self, *, overwrite: bool) -> None:
        """Check that nothing is below the prefix, or delete the checkpoint there."""
        names = [name for name in _list(self.data_dir) if name != f"{STAGE}/{LOCK}"]
        content = "a checkpoint" if CONFIG_FNAME in names else "objects"
        examples = list_some(names, 3)
        if names and not overwrite:
            raise UsageError(
                f"the target URL already contains {content} ({examples})",
                file=str(self.data_dir),
                hint="save to another URL, or pass overwrite=True to delete the checkpoint there",
            )
        old = _names_of_checkpoint(names)
        if old:
            logger.warning(
                "%s contains %s (%s), which will be deleted", self.data_dir, content, examples
            )
        # Without its metadata, the old checkpoint cannot be taken for a complete one any more.
        delete_objects([self.data_dir / name for name in (CONFIG_FNAME, METADATA) if name in old])
        delete_objects([self.data_dir / name for name in old])
        self._kept = {*names} - {*old}
        if self._has_manifest:
            upload_object(self.data_dir / STAGE / WANTS_SUMS, b"")

    @property
    def token(self) -> str:
        """Content of the lock, by which ranks recognise the save."""
        return self._id.decode()

    def publish(self, config: CheckpointingConfig, *, is_synced: bool = False) -> None:
        """Make the objects a distributed checkpoint.

        Args:
            config: the content of ``metadata.json``.
            is_synced: not used; an object is durable once it was put.

        Raises:
            StorageError: as ``publish_files``.
        """
        self.publish_files({CONFIG_FNAME: json.dumps(asdict(config)).encode()})

    def publish_files(self, last: Mapping[str, bytes]) -> None:
        """Put the objects that make the others a checkpoint.

        Args:
            last: name → content, in the order in which they are put.

        Raises:
            StorageError: another save has taken over the prefix, or the store refuses. The objects
                of this save are then deleted.
        """
        try:
            if read_lock_token(self.data_dir) != self.token:
                raise StorageError(
                    "during this save, another save to the URL began or the lock was deleted",
                    file=str(self.data_dir),
                    hint="save again, with only one program saving to this URL at a time",
                )
            if self._has_manifest:
                self._put_manifest(last)
            for name, data in last.items():
                upload_object(self.data_dir / name, data)
        except BaseException:
            self.abandon()
            raise
        # From here on the checkpoint exists.
        self._unfinalized.detach()
        _delete_stage(self.data_dir)

    def _put_manifest(self, last: Mapping[str, bytes]) -> None:
        """Put the manifest, also of the objects that are put after it."""
        name = manifest_name()
        forget_listings()
        sizes = {
            path: size
            for path, size in list_objects(self.data_dir).items()
            if path != name and path not in self._kept and not path.startswith(f"{STAGE}/")
        }
        with (
            closing(RemoteStore(self.data_dir)) as store,
            closing(RemoteStore(self.data_dir / STAGE / SUMS)) as sums,
        ):
            lines = combine_sums(sums, store, sizes, last)
        upload_object(self.data_dir / name, "".join(lines).encode())

    def abandon(self) -> None:
        """Delete the objects of the save and its lock; do nothing after ``publish``."""
        if self._unfinalized.detach():
            self._end()


def _list(root: RemotePath) -> list[str]:
    """Return the names of all objects below a prefix, as they are now."""
    forget_listings()
    return sorted(list_objects(root))


def _names_of_checkpoint(names: Iterable[str]) -> list[str]:
    """Return those of the objects below a prefix that belong to a distributed checkpoint.

    These are objects with known names, everything in the directory of a key, and what an
    interrupted save left.
    """
    names = list(names)
    folders = {name.partition("/")[0] for name in names if "/" in name and is_file_of_key(name)} | {
        STAGE
    }
    return [
        name
        for name in names
        if (name.partition("/")[0] in folders if "/" in name else is_own_name(name))
    ]


def read_lock_token(root: RemotePath) -> str | None:
    """Return the token of the save that the lock names; None without a lock."""
    data = read_object(root / STAGE / LOCK)
    return None if data is None else data.decode(errors="replace")


def _delete_save(root: RemotePath, token: str, owner: int, kept: frozenset[str]) -> None:
    """Delete the objects of a save, unless another save has taken over the prefix.

    A fork of the process ``owner`` does nothing.
    """
    if os.getpid() != owner:
        return
    try:
        if read_lock_token(root) != token:
            return
        names = [name for name in _list(root) if name not in kept]
        # The lock is deleted last: a save that begins earlier would lose its objects.
        delete_objects([root / name for name in names if not name.startswith(f"{STAGE}/")])
        _delete_stage(root)
    except CheckpointingException as err:
        logger.error("objects of the failed save to %s were not deleted: %s", root, err.message)


def _delete_stage(root: RemotePath) -> None:
    """Delete what is needed only while a save is running, the lock last."""
    try:
        names = [name for name in _list(root) if name.startswith(f"{STAGE}/")]
        delete_objects([root / name for name in names if name != f"{STAGE}/{LOCK}"])
        delete_objects([root / STAGE / LOCK])
    except CheckpointingException as err:
        logger.error("%s/%s was not deleted: %s", root, STAGE, err.message)
