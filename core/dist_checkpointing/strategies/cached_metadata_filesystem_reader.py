"""torch's reader of DCP directories, which reads ``.metadata`` once, and safely."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata

from core.dist_checkpointing.torch_dcp.torch_metadata import read_torch_metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """A FileSystemReader that keeps the metadata.

    Args:
        path: directory of the checkpoint.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path=path)
        self._cached_metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The checkpoint's metadata; the file is read in the first call, without unpickling it.

        Raises:
            CheckpointingException: it is not there, damaged or hostile.
        """
        if self._cached_metadata is None:
            self._cached_metadata = read_torch_metadata(Path(self.path))
            self._cached_metadata.storage_meta.load_id = self.load_id
        return self._cached_metadata

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begins anew, for a checkpoint of another directory if one is given; its metadata are read again then."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._cached_metadata = None
