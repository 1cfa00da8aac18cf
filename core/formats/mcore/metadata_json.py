"""``metadata.json`` in Megatron-core's distributed checkpoints, the file that names the backend.

On disk::

    {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
     "common_backend": "torch", "common_backend_version": 1}

``sharded_backend`` is ``torch_dist`` or, up to megatron-core 0.12, ``zarr``. HEAD omits the common
backend, because its common state is one of the checkpoint's objects. Megatron writes the file last.

Not supported: versions other than 1, other common backends.

Source: megatron-core 0.12.1, 0.16.1 and Megatron-LM d98e8a64, pinned in tests/golden (``mcore*``);
``megatron/core/dist_checkpointing/core.py``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from core.engine.catalog.file_image import FileImage, literal_file
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.json_object import read_json_object

if TYPE_CHECKING:
    from core.files.store import ReadStore

CONFIG = "metadata.json"
VERSION = 1
BACKEND_KEY = "sharded_backend"
BACKENDS = ("torch_dist", "zarr")
_MAX_CONFIG_BYTES = 1 << 20


def read_metadata_json(store: ReadStore, *, folder: str = "") -> dict[str, object]:
    """Read ``metadata.json``, which must exist, in the directory or in a ``folder/`` of it.

    Raises:
        CorruptError: the file is not a JSON object.
    """
    return read_json_object(store, folder + CONFIG, max_bytes=_MAX_CONFIG_BYTES)


def names_backend(store: ReadStore) -> bool:
    """Return whether there is a ``metadata.json`` that names a backend, known or not.

    A ``metadata.json`` without the key was written by other software, and is ignored.

    Raises:
        CorruptError: the file is not a JSON object.
    """
    return store.exists(CONFIG) and BACKEND_KEY in read_metadata_json(store)


def read_version(store: ReadStore, *, backend: str, folder: str = "") -> int:
    """Check that the file names ``backend`` in a supported version, and return the version.

    Args:
        backend: the backend whose files the directory contains.
        folder: the directory with the file, as ``folder/``.

    Raises:
        MissingShardError: the file is missing.
        CorruptError: the file is not a JSON object, or names another backend.
        UnsupportedError: the backend is unknown, or its version or that of the common state is not
            supported.
    """
    if not store.exists(folder + CONFIG):
        raise MissingShardError(
            f"{folder}{CONFIG} is missing; Megatron writes it last, so the save did not finish",
            file=store.label,
            hint="use an older checkpoint",
        )
    # The backend in the file must be known, and the one whose files were found.
    config = read_metadata_json(store, folder=folder)
    named, version = config.get(BACKEND_KEY), config.get("sharded_backend_version", VERSION)
    if named not in BACKENDS:
        problem = f"the unknown backend {named!r:.60}" if BACKEND_KEY in config else "no backend"
        raise UnsupportedError(
            f"{CONFIG} specifies {problem}",
            file=CONFIG,
            hint=f'set "{BACKEND_KEY}" to "{backend}" in {CONFIG}, because the files were written '
            "by that backend",
        )
    if named != backend:
        raise CorruptError(
            f"{CONFIG} specifies the backend {named!r}, but the files were written by {backend}",
            file=CONFIG,
            hint=f"check whether {CONFIG} or the files are from a different checkpoint",
        )
    # Both versions must be supported; HEAD omits those of the common state.
    if version != VERSION:
        raise UnsupportedError(
            f"version {version!r:.60} of the backend {named!r} is not supported", file=CONFIG
        )
    common = config.get("common_backend", "torch"), config.get("common_backend_version", 1)
    if common != ("torch", 1):
        raise UnsupportedError(
            f"version {common[1]!r} of the common backend {common[0]!r} is not supported",
            file=CONFIG,
        )
    return VERSION


def config_image(*, backend: str, has_common_file: bool, is_metadata: bool = False) -> FileImage:
    """Build ``metadata.json`` as Megatron writes it.

    Args:
        has_common_file: whether the common state is in ``common.pt``.
        is_metadata: whether the file is written last.
    """
    config: dict[str, object] = {"sharded_backend": backend, "sharded_backend_version": VERSION}
    if has_common_file:
        config |= {"common_backend": "torch", "common_backend_version": 1}
    return literal_file(CONFIG, json.dumps(config).encode(), is_metadata=is_metadata)
