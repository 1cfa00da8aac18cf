"""Read a torch_dist checkpoint with torch."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a torch_dist checkpoint, as torch reads them."""
    reader = dcp.FileSystemReader(next(folder.glob("iter_*")))
    metas = reader.read_metadata().state_dict_metadata
    result = {
        key: torch.empty(meta.size, dtype=meta.properties.dtype)
        for key, meta in metas.items()
        if hasattr(meta, "properties")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(result, storage_reader=reader, no_dist=True)
    return result
