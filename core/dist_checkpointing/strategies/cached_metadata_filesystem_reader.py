"""A reader of DCP directories for torch that reads ``.metadata`` once, without unpickling it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata
from typing_extensions import override

from core.dist_checkpointing.torch_dcp.torch_metadata import read_torch_metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """A FileSystemReader that caches the metadata.

    Args:
        path: directory of the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path=path)
        self._cached_metadata: Metadata | None = None

    @override
    def read_metadata(self) -> Metadata:
        """Return the checkpoint's metadata, read from the file by the first call.

        Raises:
            CheckpointingException: the file is missing, is damaged, or names something that runs
                code.
        """
        if self._cached_metadata is None:
            self._cached_metadata = read_torch_metadata(Path(self.path))
            self._cached_metadata.storage_meta.load_id = self.load_id
        return self._cached_metadata

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a new read, of another directory if one is given.

        Args:
            checkpoint_id: the new directory; the cached metadata is dropped. None for the same.
        """
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._cached_metadata = None
