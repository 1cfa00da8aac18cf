"""Choose the client for multipart uploads to a store."""

from __future__ import annotations

import importlib.util

from core.errors import UsageError
from core.files.multipart.ordered import OrderedUploads
from core.files.multipart.protocol import UploadClient
from core.files.multipart.s3 import S3Uploads
from core.files.remote_path import RemotePath
from core.files.store_kinds import WRITABLE_STORES, store_kind


def upload_client(path: RemotePath) -> UploadClient:
    """Return a new client for uploads to the bucket of a URL; make one per destination.

    Raises:
        UsageError: nothing can be written there.
        StorageError: the store cannot be used with these settings.
    """
    kind = store_kind(path.scheme)
    if not kind.is_writable:
        raise UsageError(
            "ckpt cannot write to a web server",
            file=str(path),
            hint=f"write to a local path, {WRITABLE_STORES}",
        )
    return S3Uploads(path) if can_continue_uploads(path) else OrderedUploads(path)


def can_continue_uploads(path: RemotePath) -> bool:
    """Return whether uploads to the store of a URL outlive their process: on S3, with boto3."""
    return store_kind(path.scheme).is_s3 and importlib.util.find_spec("boto3") is not None
