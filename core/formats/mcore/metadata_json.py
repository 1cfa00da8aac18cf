"""``metadata.json`` of Megatron-core's distributed checkpoints: which backend wrote the tensors.

On disk::

    {"sharded_backend": "torch_dist", "sharded_backend_version": 1,
     "common_backend": "torch", "common_backend_version": 1}

``sharded_backend`` is ``torch_dist`` or, up to megatron-core 0.12, ``zarr``. HEAD leaves out the
common backend, because its common state is an object among the others. Megatron writes the file
last.

Not supported: versions other than 1, other common backends.

Source: megatron-core 0.12.1, 0.16.1 and Megatron-LM d98e8a64, pinned in tests/golden (``mcore*``);
``megatron/core/dist_checkpointing/core.py``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from core.catalog.file_image import FileImage, literal_file
from core.errors import CorruptError, MissingShardError, UnsupportedError
from core.files.json_object import read_json_object

if TYPE_CHECKING:
    from core.files.store import ReadStore

CONFIG = "metadata.json"
VERSION = 1
BACKEND_KEY = "sharded_backend"
BACKENDS = ("torch_dist", "zarr")
_MAX_CONFIG_BYTES = 1 << 20


def config_of(store: ReadStore) -> dict[str, object]:
    """Read ``metadata.json``, which must exist.

    Raises:
        CorruptError: the file is not a JSON object.
    """
    return read_json_object(store, CONFIG, max_bytes=_MAX_CONFIG_BYTES)


def names_backend(store: ReadStore) -> bool:
    """Return whether there is a ``metadata.json`` that names a backend, be it a known one or not.

    A ``metadata.json`` without the key is some other software's, and says nothing about the
    tensors.

    Raises:
        CorruptError: the file is not a JSON object.
    """
    return store.exists(CONFIG) and BACKEND_KEY in config_of(store)


def check_version(store: ReadStore, *, backend: str) -> int:
    """Check that the file names ``backend`` in a supported version, and return the version.

    Raises:
        MissingShardError: the file is missing.
        CorruptError: it is not a JSON object, or names another backend.
        UnsupportedError: the backend is unknown, or its version or that of the common state is not
            supported.
    """
    if not store.exists(CONFIG):
        raise MissingShardError(
            f"{CONFIG} is missing; Megatron writes it last, so the save did not finish",
            file=store.label,
            hint="use an older checkpoint",
        )
    config = config_of(store)
    stated, version = config.get(BACKEND_KEY), config.get("sharded_backend_version", VERSION)
    if stated not in BACKENDS:
        named = f"the unknown backend {stated!r:.60}" if BACKEND_KEY in config else "no backend"
        raise UnsupportedError(
            f"{CONFIG} names {named}",
            file=CONFIG,
            hint=f"known backends: {', '.join(BACKENDS)}; the files in the directory are those of {backend}",
        )
    if stated != backend:
        raise CorruptError(
            f"{CONFIG} names the backend {stated!r}, but the files in the directory are those of {backend}",
            file=CONFIG,
            hint="find out which of the two belongs to another save",
        )
    if version != VERSION:
        raise UnsupportedError(
            f"version {version!r:.60} of the backend {stated!r} is not supported", file=CONFIG
        )
    common = config.get("common_backend", "torch"), config.get("common_backend_version", 1)
    if common != ("torch", 1):
        raise UnsupportedError(
            f"the common backend {common[0]!r} of version {common[1]!r} is not supported",
            file=CONFIG,
        )
    return VERSION


def config_image(*, backend: str, has_common_file: bool, is_metadata: bool = False) -> FileImage:
    """Return the image of ``metadata.json``, as Megatron writes it."""
    config: dict[str, object] = {"sharded_backend": backend, "sharded_backend_version": VERSION}
    if has_common_file:
        config |= {"common_backend": "torch", "common_backend_version": 1}
    return literal_file(CONFIG, json.dumps(config).encode(), is_metadata=is_metadata)
