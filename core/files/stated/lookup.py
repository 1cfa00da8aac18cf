"""Look up the checksums that a store states about its objects.

Google Cloud Storage and Azure are asked by signed ``HEAD`` requests. Google states CRC-32C, and MD5
unless the object is composed (``x-goog-hash``); Azure states MD5 if the program that wrote the
object computed it (``Content-MD5``).

Source: "Hashes and ETags" of Google Cloud Storage; "Get Blob Properties" of Azure's REST API.

Ask S3 for the checksums of objects.

``HeadObject`` returns them on request (``x-amz-checksum-mode: ENABLED``), ``GetObjectAttributes``
those of the parts of an upload. A checksum is of the whole object (``FULL_OBJECT``), or one of the
checksums of its parts (``COMPOSITE``, written ``BASE64-N``).

Source: Amazon S3 User Guide, "Checking object integrity in Amazon S3"; API of 2006-03-01.
"""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from email.message import Message
from functools import partial
from http.client import HTTPException
from typing import Any

from core.errors import SourceChangedError, StorageError
from core.files.multipart.s3_client import s3_client
from core.files.object_client import client_of, limiter_of, translate_store_errors
from core.files.object_listing import N_REQUESTS
from core.files.remote_path import RemotePath
from core.files.remote_store import RemoteStore
from core.files.requests.daemon_threads import DaemonThreads
from core.files.requests.repeat import with_retries
from core.files.requests.waiting import call_interruptibly, map_in
from core.files.stated.checksum import (
    RangeSum,
    StatedChecksum,
    StatedChecksums,
    decode_sum,
    whole_checksum,
)
from core.files.store_kinds import store_kind

_N_ASKED = 2 * N_REQUESTS
"""Up to this number of objects, S3 is not asked first which of them have the needed checksum."""


def look_up_checksums(
    store: RemoteStore, names: Iterable[str], *, needed: str | None = None
) -> StatedChecksums:
    """Ask a store for the checksums of objects, several at a time, without reading any.

    Not being told is no error: ``StatedChecksums.failure`` has the reason.

    Args:
        names: names of existing objects.
        needed: the algorithm that is of use; others may be returned without their checksums.

    Raises:
        SourceChangedError: an object is no longer the one that was listed.
    """
    names = list(names)
    scheme = store.root.scheme
    if scheme in ("http", "https") or not names:
        return StatedChecksums()
    if not store_kind(scheme).is_s3:
        return _ask_about_all(store, names, ask_by_signed_url)
    if importlib.util.find_spec("boto3") is None:
        return StatedChecksums(failure="boto3 is not installed (run pip install boto3)")
    try:
        client = call_interruptibly(lambda: s3_client(store.root, n_connections=N_REQUESTS))
        is_filtered = needed is not None and len(names) > _N_ASKED
        algorithms = (
            with_retries(
                limiter_of(store.root),
                lambda: list_algorithms(client, store.root),
                is_counted=False,
            )
            if is_filtered
            else {}
        )
    except Exception as err:  # of many modules of boto3: settings, profiles, endpoints
        return StatedChecksums(failure=_reason(err))
    # A listing takes one request for 1,000 objects.
    useless = {
        name: tuple(StatedChecksum(algorithm, ()) for algorithm in algorithms.get(name, ()))
        for name in names
        if algorithms and needed not in algorithms.get(name, ())
    }
    answer = _ask_about_all(
        store, [name for name in names if name not in useless], partial(ask_s3, client)
    )
    unneeded = {name: checksums for name, checksums in useless.items() if checksums}
    return StatedChecksums({**unneeded, **answer.by_name}, answer.failure)


def _ask_about_all(
    store: RemoteStore, names: list[str], ask: Callable[..., tuple[StatedChecksum, ...]]
) -> StatedChecksums:
    """Ask a store about objects, one request for each.

    Raises:
        SourceChangedError: an object is no longer the one that was listed.
    """
    if not names:
        return StatedChecksums()

    def ask_about(name: str) -> tuple[StatedChecksum, ...] | str:
        try:
            path, n_bytes, e_tag = store.path(name), store.disk_bytes(name), store.e_tag(name)
            # boto3 repeats and counts requests itself.
            return with_retries(
                limiter_of(path),
                lambda: ask(path, n_bytes=n_bytes, e_tag=e_tag),
                is_counted=not store_kind(path.scheme).is_s3,
            )
        except SourceChangedError:
            raise
        except Exception as err:
            if not _is_of_client(err):
                raise
            return _reason(err)

    # A store that does not tell of the first object is not asked about the others.
    first = ask_about(names[0])
    if isinstance(first, str):
        return StatedChecksums(failure=first)
    threads = DaemonThreads(N_REQUESTS, "ckpt-sums")
    answers = [first, *map_in(threads, ask_about, names[1:])]
    threads.shutdown()
    failures = [answer for answer in answers if isinstance(answer, str)]
    return StatedChecksums(
        {
            name: answer
            for name, answer in zip(names, answers, strict=True)
            if answer and not isinstance(answer, str)
        },
        failures[0] if failures else None,
    )


def _is_of_client(err: Exception) -> bool:
    """Return whether an error is one of the store's client: boto3, obstore or the system."""
    return isinstance(err, (StorageError, OSError)) or type(err).__module__.startswith(
        ("botocore.", "boto3.")
    )


def _reason(err: Exception) -> str:
    """Return the reason of an error in one line."""
    if isinstance(err, StorageError):
        return err.message
    status = getattr(err, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
    if status is not None:
        return (
            f"access denied ({status})" if status in (401, 403) else f"the store answered {status}"
        )
    return str(err).partition("\n")[0]


_SIGNED_FOR = timedelta(hours=1)
_TIMEOUT_S = 60.0
_GOOGLE = {"crc32c": "CRC-32C", "md5": "MD5"}


def ask_by_signed_url(
    path: RemotePath, *, n_bytes: int, e_tag: str | None
) -> tuple[StatedChecksum, ...]:
    """Return the checksums that a store states about an object in the headers of ``HEAD``.

    Args:
        n_bytes, e_tag: size and ETag of the object in its listing.

    Raises:
        SourceChangedError: the object is no longer the one that was listed.
        StorageError: the credentials cannot sign.
        OSError: the request failed; its text has no signature.
    """
    import obstore

    client: Any = client_of(path)  # of a store that signs
    # Azure signs permissions, and HEAD needs that of GET; Google signs the method.
    method: Any = "HEAD" if path.scheme == "gs" else "GET"
    with translate_store_errors(path):
        url: str = obstore.sign(client, method, path.key, _SIGNED_FOR)
    condition = {} if e_tag is None else {"If-Match": e_tag}
    request = urllib.request.Request(url, method="HEAD", headers=condition)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            headers: Message = answer.headers
    except urllib.error.HTTPError as err:
        if err.code == 412:
            raise SourceChangedError(
                "the object changed while it was being read",
                file=str(path),
                hint="run the command again when nothing is writing to the object",
            ) from None
        if err.code == 404:
            return ()  # reading it reports this
        raise OSError(f"the store answered {err.code}") from None
    except HTTPException as err:  # its text may have the URL
        raise OSError(f"the store sent no valid answer ({type(err).__name__})") from None
    return tuple(
        checksum
        for algorithm, text in _sums_in(headers)
        if (checksum := whole_checksum(algorithm, text, n_bytes)) is not None
    )


def _sums_in(headers: Message) -> list[tuple[str, str]]:
    """Return (algorithm, base64 checksum) of the headers that state one."""
    sums = []
    # Several headers, or one with a list: x-goog-hash: crc32c=n03x6A==,md5=Ojk9c3dhfxgoKVVHYwFbHQ==
    for header in headers.get_all("x-goog-hash", []):
        for item in header.split(","):
            name, _, text = item.strip().partition("=")
            if name in _GOOGLE:
                sums.append((_GOOGLE[name], text))
    md5 = headers.get("Content-MD5")
    if md5 is not None:
        sums.append(("MD5", md5))
    return sums


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
                hint="run the command again when nothing is writing to the object",
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
