"""``metadata.json``, which names the backends that wrote a checkpoint directory.

The bytes of the file are described in ``core.formats.mcore.metadata_json``.
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass, fields

from core.dist_checkpointing._directory.durable_file import write_file
from core.errors import CheckpointingException, CorruptError
from core.files.source_store import open_store
from core.files.url import find_location, refuse_url
from core.formats.mcore.metadata_json import CONFIG, read_metadata_json

__all__ = [
    "CONFIG_FNAME",
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]

CONFIG_FNAME = CONFIG


@dataclass
class CheckpointingConfig:
    """The backends of a checkpoint, and the versions of their formats, not of the content.

    Args:
        sharded_backend: how the tensors are stored: ``torch_dist`` or ``zarr``.
        sharded_backend_version: version of the tensor backend's format.
        common_backend: how everything else is stored: ``torch``.
        common_backend_version: version of the common backend's format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the directory has a valid ``metadata.json`` that names its backends."""
    try:
        return maybe_load_config(checkpoint_dir) is not None
    except CorruptError:
        return False


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """Read ``metadata.json`` of a checkpoint directory.

    Returns:
        The backends; None if the file does not exist or ``checkpoint_dir`` is empty.

    Raises:
        UsageError: ``checkpoint_dir`` is on another host.
        CorruptError: the file is not a JSON object, has an unknown key or a value of the wrong
            type, or lacks ``sharded_backend``.
    """
    if not checkpoint_dir:
        return None
    with closing(open_store(find_location(checkpoint_dir))) as store:
        if not store.exists(CONFIG_FNAME):
            return None
        entries = read_metadata_json(store)
    # Check every entry, because an unknown key may change what the other entries mean. A version
    # must be an int and nothing else: JSON's true would pass an isinstance check.
    types = {
        entry.name: int if entry.name.endswith("_version") else str
        for entry in fields(CheckpointingConfig)
    }
    wrong = [
        name
        for name, value in entries.items()
        if name not in types or type(value) is not types[name]
    ]
    if wrong:
        raise CorruptError(
            f"the key {wrong[0]!r} or its value {entries[wrong[0]]!r} is not valid",
            file=CONFIG_FNAME,
        )
    if "sharded_backend" not in entries:
        raise CorruptError("the key 'sharded_backend' is missing", file=CONFIG_FNAME)
    return CheckpointingConfig(**entries)  # type: ignore[arg-type]


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write ``metadata.json`` into a directory and flush it to disk.

    Raises:
        UsageError: ``checkpoint_dir`` is a URL.
        StorageError: the directory does not exist or cannot be written.
    """
    refuse_url(checkpoint_dir)
    write_file(checkpoint_dir, CONFIG_FNAME, [json.dumps(asdict(config)).encode()])
