"""Write an object from bytes that come in order, by parts of which several are sent at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from core.files.object_client import client_of, translate_store_errors
from core.files.object_listing import forget_listings
from core.files.remote_path import RemotePath
from core.files.requests.traffic import count_bytes
from core.files.requests.waiting import call_interruptibly

PART_BYTES = 8 << 20
"""Number of bytes of a part, unless the object would have more than ``MAX_PARTS``."""
MAX_PARTS = 10_000
"""Largest number of parts that S3 accepts."""
N_PARTS = 4
"""Number of parts of a stream that are sent at the same time."""

Piece: TypeAlias = bytes | bytearray | memoryview


def part_bytes_of(n_bytes: int) -> int:
    """Return the size of the parts of an object; the last part may be shorter."""
    return max(PART_BYTES, -(-n_bytes // MAX_PARTS))


def upload_stream(path: RemotePath, pieces: Iterable[Piece], n_bytes: int) -> None:
    """Write an object; an error of ``pieces`` aborts the upload.

    Args:
        path: URL of the object, which is replaced if it exists.
        pieces: the content in order.
        n_bytes: its length.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    import obstore

    part_bytes = part_bytes_of(n_bytes)
    with translate_store_errors(path, doing="write"):
        client = client_of(path)
        call_interruptibly(
            lambda: obstore.put(
                client,
                path.key,
                iter(pieces),
                use_multipart=n_bytes > part_bytes,
                chunk_size=part_bytes,
                max_concurrency=N_PARTS,
            )
        )
        count_bytes(n_bytes)
    forget_listings()
