"""Multipart uploads to S3, in any order of the parts, through boto3.

Every part is sent with its CRC-32. Amazon S3 joins them to the CRC-32 of the object
(``ChecksumType: FULL_OBJECT``), which it states later. Of a store that does not confirm checksums
when an upload begins, the parts are sent with their MD5 (``Content-MD5``) instead.

Source: Amazon S3 User Guide, "Uploading and copying objects using multipart upload"; API of
2006-03-01.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from core.errors import StorageError
from core.files.multipart.protocol import ObjectUpload, SentPart, UploadClient, checksum_of
from core.files.multipart.s3_client import (
    count_requests,
    get_error_code,
    is_on,
    s3_client,
    s3_options,
    translate_s3_errors,
)
from core.files.object_client import no_conditional_writes
from core.files.object_listing import forget_listings
from core.files.remote_path import RemotePath
from core.files.requests.traffic import count_bytes
from core.files.requests.waiting import call_interruptibly
from core.files.store import override

T = TypeVar("T")

_N_CONNECTIONS = 128
"""Number of requests at the same time, above which they wait for each other."""
_PAGE_PARTS = 1000
"""Number of parts, or of uploads, in an answer of S3; it returns no more."""
_N_SENDS = 3
"""Number of times that a part is sent which arrives damaged."""
_SIGNER = "ckpt-s3v4"
"""Name of the signer of parts, in boto3's table."""
_GRACE_S = 1.0
"""Seconds that a request may still take after a signal; what it did is then known."""
_FINISH_GRACE_S = 5.0
"""The same for a request that makes an object visible."""
_CHECKSUMS: Sequence[Mapping[str, str]] = (
    {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"},
    {"ChecksumAlgorithm": "CRC32"},
    {},
)
"""What is asked for when an upload begins; the next one, where a store refuses."""


def _call(request: Callable[[], T]) -> T:
    """Send a request of boto3; a signal ends the wait, a moment later, for a store that is silent.

    Raises:
        StorageError: the wait was given up; the request may or may not have an effect.
    """
    return call_interruptibly(request, grace_s=_GRACE_S)


class S3Uploads(UploadClient):
    """Uploads to one bucket of S3 or of a store that speaks its protocol."""

    takes_any_order = True

    def __init__(self, path: RemotePath) -> None:
        options = s3_options(path)
        # Looking for credentials may ask a server.
        self._client = call_interruptibly(lambda: s3_client(path, n_connections=_N_CONNECTIONS))
        self._client.meta.events.register("choose-signer.s3.UploadPart", _signer_of_parts)
        self._client.meta.events.register("before-send.s3.UploadPart", _Body.begin_to_send)
        self._client.meta.events.register("after-call.s3", count_requests)
        self._is_conditional = options.get("conditional_put") != "disabled"
        self._encryption: dict[str, object] = {
            field: options[name]
            for field, name in (
                ("ServerSideEncryption", "server_side_encryption"),
                ("SSEKMSKeyId", "sse_kms_key_id"),
            )
            if name in options
        }
        if is_on(options, "sse_bucket_key_enabled"):
            self._encryption["BucketKeyEnabled"] = True
        self._n_refused = 0
        """Number of entries of ``_CHECKSUMS`` that the store has refused."""

    @override
    def begin(self, path: RemotePath, n_bytes: int, part_bytes: int) -> ObjectUpload:
        answer = self._create(path)
        return _S3Upload(
            self._client,
            path,
            answer["UploadId"],
            n_bytes=n_bytes,
            n_parts=max(1, -(-n_bytes // part_bytes)),
            has_checksums=answer.get("ChecksumAlgorithm") == "CRC32",
            is_conditional=self._is_conditional,
        )

    def _create(self, path: RemotePath) -> dict[str, Any]:
        """Create an upload, with the best checksums that the store takes."""
        from botocore.exceptions import ClientError

        with translate_s3_errors(path):
            while True:
                n_refused = self._n_refused
                try:
                    create = partial(
                        self._client.create_multipart_upload,
                        Bucket=path.bucket,
                        Key=path.key,
                        **self._encryption,
                        **_CHECKSUMS[n_refused],
                    )
                    answer: dict[str, Any] = _call(create)
                except ClientError as err:
                    status, code = get_error_code(err)
                    is_refusal = status == 501 or code.startswith(("Invalid", "NotImplemented"))
                    if not is_refusal or n_refused + 1 == len(_CHECKSUMS):
                        raise
                    self._n_refused = max(self._n_refused, n_refused + 1)
                else:
                    return answer

    @override
    def attach(self, path: RemotePath, upload_id: str) -> ObjectUpload:
        return _S3Upload(
            self._client, path, upload_id, is_conditional=self._is_conditional, has_checksums=None
        )

    @override
    def unfinished(self, prefix: RemotePath) -> list[ObjectUpload]:
        start = f"{prefix.key}/" if prefix.key else ""
        bucket = prefix
        while bucket.key:
            bucket = bucket.parent
        with translate_s3_errors(prefix, doing="list uploads"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=prefix.bucket, Prefix=start, MaxUploads=_PAGE_PARTS
            )
            return [
                self.attach(bucket / entry["Key"], entry["UploadId"])
                for page in _call(lambda: list(pages))
                for entry in page.get("Uploads", ())
                if entry["Key"].startswith(start)
            ]


class _S3Upload(ObjectUpload):
    """An upload of one object.

    Args:
        client: boto3's client.
        path: URL of the object.
        upload_id: the store's name of the upload.
        n_bytes, n_parts: length of the object and number of its parts; None if not known.
        has_checksums: whether the store checks the CRC-32 of a part; None if not known.
        is_conditional: whether the store knows conditional writes.
    """

    def __init__(
        self,
        client: Any,
        path: RemotePath,
        upload_id: str,
        *,
        n_bytes: int | None = None,
        n_parts: int | None = None,
        has_checksums: bool | None,
        is_conditional: bool,
    ) -> None:
        self.path = path
        self.upload_id = upload_id
        self._client = client
        self._names = {"Bucket": path.bucket, "Key": path.key, "UploadId": upload_id}
        self._n_bytes = n_bytes
        self._n_parts = n_parts
        self._has_checksums = has_checksums
        self._is_conditional = is_conditional
        self._parts: dict[int, SentPart] = {}
        self._lock = threading.Lock()

    @override
    def send(self, number: int, data: memoryview) -> SentPart:
        from botocore.exceptions import ClientError

        if self._has_checksums is None:
            self.sent()  # whose answer tells
        view = memoryview(data).cast("B")
        checksum = checksum_of(view)
        if self._has_checksums:
            check = {"ChecksumCRC32": checksum}
        else:
            digest = hashlib.md5(view, usedforsecurity=False).digest()
            check = {"ContentMD5": base64.b64encode(digest).decode()}

        with translate_s3_errors(self.path):
            for n_left in reversed(range(_N_SENDS)):
                try:
                    send = partial(
                        self._client.upload_part,
                        **self._names,
                        **check,
                        PartNumber=number,
                        ContentLength=len(view),
                        Body=_Body(view),
                    )
                    answer = _call(send)
                    break
                except ClientError as err:
                    # What was damaged on its way is sent again; boto3 repeats other requests.
                    if get_error_code(err)[1] != "BadDigest" or not n_left:
                        raise
        count_bytes(len(view))
        part = SentPart(number, len(view), answer["ETag"], checksum)
        with self._lock:
            self._parts[number] = part
        return part

    @override
    def sent(self) -> dict[int, SentPart]:
        parts: dict[int, SentPart] = {}
        has_checksums = False
        with translate_s3_errors(self.path, doing="list parts"):
            pages = self._client.get_paginator("list_parts").paginate(
                **self._names, MaxParts=_PAGE_PARTS
            )
            for page in _call(lambda: list(pages)):
                has_checksums |= page.get("ChecksumAlgorithm") == "CRC32"
                for entry in page.get("Parts", ()):
                    number = entry["PartNumber"]
                    parts[number] = SentPart(
                        number, entry["Size"], entry["ETag"], entry.get("ChecksumCRC32")
                    )
        with self._lock:
            # A store that lists no checksums may have compared those that were sent.
            for number, part in parts.items():
                own = self._parts.get(number)
                if own is None or own.etag.strip('"') != part.etag.strip('"'):
                    self._parts[number] = part
            for number in self._parts.keys() - parts.keys():
                del self._parts[number]
            if self._has_checksums is None:
                self._has_checksums = has_checksums
            return dict(self._parts)

    @override
    def finish(self, *, replaces: bool) -> None:
        from botocore.exceptions import ClientError

        if not replaces and not self._is_conditional:
            raise no_conditional_writes(self.path)
        parts = self._all_parts()
        condition = {} if replaces else {"IfNoneMatch": "*"}
        forget_listings()
        with translate_s3_errors(self.path):
            try:
                complete = partial(
                    self._client.complete_multipart_upload,
                    **self._names,
                    **condition,
                    MultipartUpload={"Parts": [self._described(part) for part in parts]},
                )
                call_interruptibly(complete, grace_s=_FINISH_GRACE_S)
            except ClientError as err:
                status, code = get_error_code(err)
                if status == 501 and not replaces:
                    raise no_conditional_writes(self.path) from None
                # The answer to the first request may have been lost, and boto3 repeated it.
                if code != "NoSuchUpload" and status not in (409, 412):
                    raise
                entry = self._ask_for_object()
                if entry is not None and _is_made_of(parts, entry):
                    self.abort()  # or the same bytes were written before
                    return
                if entry is not None and not replaces:
                    raise FileExistsError(str(self.path)) from None
                raise

    def _all_parts(self) -> list[SentPart]:
        """Return the parts of the object, in order.

        Raises:
            StorageError: parts are missing.
        """
        if self._n_bytes == 0 and not self._parts:
            self.send(1, memoryview(b""))  # there is no object without a part
        with self._lock:
            parts = dict(self._parts)
        if self._n_parts is None or len(parts) != self._n_parts:
            parts = self.sent()
        n_expected = self._n_parts or max(parts, default=1)
        missing = [number for number in range(1, n_expected + 1) if number not in parts]
        n_bytes = sum(part.n_bytes for part in parts.values())
        if missing:
            raise StorageError(
                f"the upload is incomplete: part {missing[0]} of {n_expected} is missing",
                file=str(self.path),
                hint="run the command again",
            )
        if self._n_bytes is not None and n_bytes != self._n_bytes:
            raise StorageError(
                f"the uploaded parts add up to {n_bytes:,} bytes, but the object is "
                f"{self._n_bytes:,} bytes long",
                file=str(self.path),
                hint="run the command again",
            )
        return [parts[number] for number in sorted(parts)]

    def _described(self, part: SentPart) -> dict[str, object]:
        """Return a part as the request to finish names it."""
        is_checked = self._has_checksums and part.checksum is not None
        checksum = {"ChecksumCRC32": part.checksum} if is_checked else {}
        return {"PartNumber": part.number, "ETag": part.etag, **checksum}

    def _ask_for_object(self) -> dict[str, Any] | None:
        """Return the description of the object of this name; None if there is none."""
        from botocore.exceptions import ClientError

        try:
            answer: dict[str, Any] = _call(
                lambda: self._client.head_object(Bucket=self.path.bucket, Key=self.path.key)
            )
        except ClientError as err:
            if get_error_code(err)[0] != 404:
                raise
            return None
        return answer

    @override
    def abort(self) -> None:
        from botocore.exceptions import ClientError

        with translate_s3_errors(self.path):
            try:
                _call(lambda: self._client.abort_multipart_upload(**self._names))
            except ClientError as err:
                if get_error_code(err)[1] not in ("NoSuchUpload", "NoSuchBucket"):
                    raise
        with self._lock:
            self._parts.clear()


def _is_made_of(parts: Sequence[SentPart], entry: Mapping[str, Any]) -> bool:
    """Return whether an object was made of these parts.

    Its ETag is the MD5 of the ETags of its parts, and their number.

    Args:
        entry: the store's description of the object.
    """
    try:
        digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
    except ValueError:
        return False  # of a store with other ETags
    digest = hashlib.md5(digests, usedforsecurity=False).hexdigest()
    n_bytes = sum(part.n_bytes for part in parts)
    is_equal: bool = entry["ETag"].strip('"') == f"{digest}-{len(parts)}"
    return is_equal and entry["ContentLength"] == n_bytes


def _signer_of_parts(signature_version: object, **_: object) -> object:
    """Return the name of the signer of a part; called by boto3.

    Where awscrt is installed, boto3 signs with it, and hashes the bytes of a part at half the speed
    of hashlib. This chooses boto3's own signer, of the same signature, under another name.
    """
    from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth

    if signature_version != "s3v4":
        return None
    AUTH_TYPE_MAPS.setdefault(_SIGNER, S3SigV4Auth)
    return _SIGNER


class _Body:
    """The bytes of a part as a file for boto3, which reads them without copying any."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0
        self._is_sent = False

    def __len__(self) -> int:
        return len(self._view)

    def read(self, n_bytes: int | None = None) -> memoryview:
        """Return the next bytes; all of them, once the request is being sent.

        urllib3 asks for 16 KiB at a time, each of which would wait for the other threads of Python.
        """
        n_read = len(self._view) if n_bytes is None or n_bytes < 0 or self._is_sent else n_bytes
        piece = self._view[self._position : self._position + n_read]
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte, as files do."""
        self._position = offset + (0, self._position, len(self._view))[whence]
        self._is_sent = False
        return self._position

    def tell(self) -> int:
        """Return the number of the next byte."""
        return self._position

    @staticmethod
    def begin_to_send(request: Any, **_: object) -> None:
        """Note that the request is signed, and will be read to be sent; called by boto3."""
        if isinstance(request.body, _Body):
            request.body._is_sent = True
