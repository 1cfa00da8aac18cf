"""``metadata.json``: which backends wrote a checkpoint directory. Its bytes: ``core.formats.mcore.metadata_json``."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from core.dist_checkpointing._directory.durable_file import write_file
from core.errors import CheckpointingException, CorruptError
from core.files.store import LocalStore
from core.files.url import refuse_url
from core.formats.mcore.metadata_json import CONFIG, config_of

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
    """The backends of a checkpoint, and the versions of their formats (not of the content).

    Args:
        sharded_backend: how the tensors are stored: ``torch_dist`` or ``zarr``.
        sharded_backend_version: version of that.
        common_backend: how everything else is stored: ``torch``.
        common_backend_version: version of that.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether the directory has a ``metadata.json`` that states the backends."""
    try:
        return maybe_load_config(checkpoint_dir) is not None
    except CorruptError:
        return False


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """What ``metadata.json`` of a directory states; None if there is no such file, or no directory is named.

    Raises:
        UsageError: a URL.
        CorruptError: the file is no JSON object, or states something that is not known or of another type.
    """
    refuse_url(checkpoint_dir)
    if not checkpoint_dir or not (Path(checkpoint_dir) / CONFIG_FNAME).is_file():
        return None
    with closing(LocalStore(Path(checkpoint_dir))) as store:
        stated = config_of(store)
    types = {known.name: int if known.name.endswith("_version") else str for known in fields(CheckpointingConfig)}
    wrong = [name for name, value in stated.items() if name not in types or type(value) is not types[name]]
    if wrong:
        raise CorruptError(f"{wrong[0]!r} is not known, or not as {stated[wrong[0]]!r}", file=CONFIG_FNAME)
    if "sharded_backend" not in stated:
        raise CorruptError("'sharded_backend' is not stated", file=CONFIG_FNAME)
    return CheckpointingConfig(**stated)  # type: ignore[arg-type]


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Writes ``metadata.json`` into a directory; it is on the disk when this returns.

    Raises:
        UsageError: a URL.
        StorageError: the directory does not exist or cannot be written.
    """
    refuse_url(checkpoint_dir)
    write_file(checkpoint_dir, CONFIG_FNAME, [json.dumps(asdict(config)).encode()])
