"""Begin the publication of a save: to a directory, or to an object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from core.dist_checkpointing._directory.bucket_publication import BucketPublication
from core.dist_checkpointing._directory.publication import DirectoryPublication
from core.files.remote_path import is_remote

if TYPE_CHECKING:
    from core.dist_checkpointing.core import CheckpointingConfig


class Publication(Protocol):
    """A checkpoint that is being written; on the coordinator."""

    def publish(self, config: CheckpointingConfig, *, is_synced: bool = False) -> None:
        """Make what was written a checkpoint; see ``DirectoryPublication.publish``."""

    def abandon(self) -> None:
        """Remove what was written; do nothing after ``publish``."""


def begin_publication(target: Path, *, overwrite: bool, manifest: bool) -> Publication:
    """Return the publication of a save, after checking its destination.

    Args:
        target: an existing directory, or the URL of a prefix.
        overwrite, manifest: see ``DirectoryPublication`` and ``BucketPublication``.

    Raises:
        UsageError, StorageError: the destination cannot be written.
    """
    if is_remote(target):
        return BucketPublication(target, overwrite=overwrite, manifest=manifest)
    return DirectoryPublication(target, overwrite=overwrite, manifest=manifest)
