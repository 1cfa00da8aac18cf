"""The interface of multipart uploads."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable
from typing import Protocol

from core.files.remote_path import RemotePath
from core.values import dataclass

_crc32: Callable[..., int]
try:
    from zlib_ng.zlib_ng import crc32 as _crc32
except ImportError:
    _crc32 = zlib.crc32  # no wheel for this platform: the same sums, slower


def checksum_of(data: memoryview) -> str:
    """Compute the CRC-32 of bytes, big-endian in base64."""
    return base64.b64encode(int(_crc32(data)).to_bytes(4)).decode()


@dataclass(frozen=True, slots=True)
class SentPart:
    """A part that the store has.

    Args:
        number: number of the part, from 1.
        n_bytes: its length.
        etag: its identity, as the store states it, with quotes; "" where it states none.
        checksum: CRC-32 of its bytes, big-endian in base64, as S3 writes it; None for a part of
            another process in a store that does not list checksums.
    """

    number: int
    n_bytes: int
    etag: str
    checksum: str | None

    def is_of(self, data: memoryview) -> bool:
        """Return whether the part has these bytes."""
        if self.n_bytes != len(data):
            return False
        if self.checksum is not None:
            return self.checksum == checksum_of(data)
        # Without checksums, the ETag of a part is its MD5, unless it is encrypted by a key.
        return self.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest()

    @property
    def crc(self) -> int | None:
        """CRC-32 as a number, which ``core.arrays.checksum.crc32_combine`` joins."""
        return None if self.checksum is None else int.from_bytes(base64.b64decode(self.checksum))


class ObjectUpload(Protocol):
    """An upload of one object, invisible until it is finished.

    Attributes:
        path: URL of the object.
        upload_id: name that the store gave to the upload; "" where it cannot be continued.
    """

    path: RemotePath
    upload_id: str

    def send(self, number: int, data: memoryview) -> SentPart:
        """Send a part, and replace the one with this number if there is one.

        The store compares the part with a checksum that is sent with it. If the client's
        ``takes_any_order`` is true, several threads may send parts, in any order; otherwise the
        caller sends the parts of an object in order, one at a time.

        Args:
            number: number of the part, from 1.
            data: its bytes, which may be changed after the return: ``part_bytes`` of them, fewer in
                the last part only.

        Raises:
            StorageError: the store refuses, fails or cannot be reached, or the upload is gone.
        """

    def sent(self) -> dict[int, SentPart]:
        """Ask the store which parts it has: number → part; {} where uploads cannot be continued.

        Raises:
            StorageError: the store refuses, fails or cannot be reached, or the upload is gone.
        """

    def finish(self, *, replaces: bool) -> None:
        """Make the object visible, completely, by one request.

        Parts that other processes have sent belong to it, too.

        Args:
            replaces: replace an existing object; otherwise the store itself refuses to, where it
                can.

        Raises:
            FileExistsError: another object has this name, and ``replaces`` is false.
            StorageError: parts are missing, or the store refuses, fails or cannot be reached.
        """

    def abort(self) -> None:
        """Delete the parts that were sent; do nothing if the upload is gone.

        Raises:
            StorageError: the store refuses, fails or cannot be reached.
        """


class UploadClient(Protocol):
    """Begins and finds uploads in the bucket of one URL, for any number of threads.

    Attributes:
        takes_any_order: whether the parts of an object may be sent in any order, several at the
            same time.
    """

    takes_any_order: bool

    def begin(self, path: RemotePath, n_bytes: int, part_bytes: int) -> ObjectUpload:
        """Begin the upload of an object.

        Args:
            path: URL of the object.
            n_bytes: its length.
            part_bytes: length of its parts but the last one; S3 and Google take at least 5 MiB, and
                10,000 parts.

        Raises:
            StorageError: the store refuses, fails or cannot be reached.
        """

    def attach(self, path: RemotePath, upload_id: str) -> ObjectUpload:
        """Return an upload that this or another process has begun; the store is not asked.

        Raises:
            UsageError: uploads to this store cannot be continued.
        """

    def unfinished(self, prefix: RemotePath) -> list[ObjectUpload]:
        """Return the unfinished uploads of objects below a prefix; [] where they have no names.

        Raises:
            StorageError: the store refuses, fails or cannot be reached.
        """
