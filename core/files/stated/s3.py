"""Ask S3 for the checksums of objects.

``HeadObject`` returns them on request (``x-amz-checksum-mode: ENABLED``), ``GetObjectAttributes``
those of the parts of an upload. A checksum is of the whole object (``FULL_OBJECT``), or one of the
checksums of its parts (``COMPOSITE``, written ``BASE64-N``).

Source: Amazon S3 User Guide, "Checking object integrity in Amazon S3"; API of 2006-03-01.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import SourceChangedError
from core.files.remote_path import RemotePath
from core.files.stated.checksum import RangeSum, StatedChecksum, decode_sum, whole_checksum

_FIELDS: Mapping[str, str] = {
    "ChecksumCRC32": "CRC-32",
    "ChecksumCRC32C": "CRC-32C",
    "ChecksumCRC64NVME": "CRC-64/NVME",
    "ChecksumSHA256": "SHA-256",
    "ChecksumSHA1": "SHA-1",
}
"""Field of an answer → algorithm."""
_MAX_PARTS = 10_000
"""Number of parts of the longest upload."""


def list_algorithms(client: Any, root: RemotePath) -> dict[str, tuple[str, ...]]:
    """Return object → algorithms of its checksums, of all objects below a prefix.

    S3 lists them, without the checksums themselves; some of the stores that speak its protocol do
    not, and the result is empty.

    Raises:
        ClientError, BotoCoreError: boto3's errors.
    """
    algorithm_of = {field.removeprefix("Checksum"): name for field, name in _FIELDS.items()}
    prefix = f"{root.key}/" if root.key else ""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=root.bucket, Prefix=prefix)
    return {
        item["Key"].removeprefix(prefix): tuple(
            algorithm_of[name] for name in item["ChecksumAlgorithm"] if name in algorithm_of
        )
        for page in pages
        for item in page.get("Contents", ())
        if item.get("ChecksumAlgorithm")
    }


def ask_s3(
    client: Any, path: RemotePath, *, n_bytes: int, e_tag: str | None
) -> tuple[StatedChecksum, ...]:
    """Return the checksums that S3 states about an object.

    Args:
        client: from ``core.files.multipart.s3_client``.
        n_bytes, e_tag: size and ETag of the object in its listing.

    Raises:
        SourceChangedError: the object is no longer the one that was listed.
        ClientError, BotoCoreError: boto3's errors.
    """
    from botocore.exceptions import ClientError

    condition = {} if e_tag is None else {"IfMatch": e_tag}
    try:
        answer = client.head_object(
            Bucket=path.bucket, Key=path.key, ChecksumMode="ENABLED", **condition
        )
    except ClientError as err:
        status = err.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        if status == 412:
            raise SourceChangedError(
                "the object changed while it was being read",
                file=str(path),
                hint="run again when nothing writes to it",
            ) from err
        if status == 404:
            return ()  # reading it reports this
        raise

    checksums = []
    for field, algorithm in _FIELDS.items():
        text = answer.get(field)
        if text is None:
            continue
        if "-" in text or _kind_of(answer) == "COMPOSITE":
            ranges = _ask_for_parts(client, path, field, n_bytes=n_bytes)
            checksums.append(StatedChecksum(algorithm, ranges))
        else:
            checksum = whole_checksum(algorithm, text, n_bytes)
            checksums += [] if checksum is None else [checksum]
    return tuple(checksums)


def _kind_of(answer: Mapping[str, str]) -> str:
    """Return the kind of an object's checksum: ``FULL_OBJECT`` or ``COMPOSITE``.

    Stores that do not state it may mean either for an upload in parts, which its ETag shows
    (``"…-2"``): it is taken for the one that is never compared with the whole object.
    """
    is_in_parts = "-" in answer.get("ETag", "")
    return answer.get("ChecksumType") or ("COMPOSITE" if is_in_parts else "FULL_OBJECT")


def _ask_for_parts(
    client: Any, path: RemotePath, field: str, *, n_bytes: int
) -> tuple[RangeSum, ...]:
    """Return the checksums of an object's parts; () if S3 does not state all of them.

    Args:
        field: name of the checksum in the answer.
    """
    from botocore.exceptions import ClientError

    ranges: list[RangeSum] = []
    end = marker = 0
    while len(ranges) < _MAX_PARTS:
        try:
            answer = client.get_object_attributes(
                Bucket=path.bucket,
                Key=path.key,
                ObjectAttributes=["ObjectParts"],
                PartNumberMarker=marker,
            )
        except ClientError:
            return ()  # often it is not permitted, although reading is
        listed = answer.get("ObjectParts") or {}
        parts = listed.get("Parts") or []
        for part in parts:
            value = decode_sum(_FIELDS[field], part.get(field, ""))
            if value is None:
                return ()
            ranges.append(RangeSum(end, end + part["Size"], value))
            end += part["Size"]
        if not parts or not listed.get("IsTruncated"):
            break
        marker = listed.get("NextPartNumberMarker", 0)
    return tuple(ranges) if end == n_bytes else ()
