"""torch's reader of DCP directories, with ``.metadata`` read once, and safely."""

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
        """Return the checkpoint's metadata, which the first call reads without unpickling the file.

        Raises:
            CheckpointingException: the file is missing, damaged or hostile.
        """
        if self._cached_metadata is None:
            self._cached_metadata = read_torch_metadata(Path(self.path))
            self._cached_metadata.storage_meta.load_id = self.load_id
        return self._cached_metadata

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a new read; a given directory replaces the earlier one and its cached metadata."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._cached_metadata = None
