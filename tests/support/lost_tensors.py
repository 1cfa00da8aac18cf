"""Remove tensors from the metadata of a DCP checkpoint, as if they had never been saved."""

from __future__ import annotations

import pickle
from fnmatch import fnmatch
from pathlib import Path


def lose_tensors(folder: Path, pattern: str) -> None:
    """Remove the tensors whose names match a glob; at least one must."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    names = {name for name in metadata.state_dict_metadata if fnmatch(name, pattern)}
    assert names
    for name in names:
        del metadata.state_dict_metadata[name]
    # Megatron removes the nested names.
    if metadata.planner_data is not None:
        for name in names:
            metadata.planner_data.pop(name, None)
    metadata.storage_data = {
        index: place for index, place in metadata.storage_data.items() if index.fqn not in names
    }
    path.write_bytes(pickle.dumps(metadata))
