"""Ask Google Cloud Storage and Azure for the checksums of objects, by signed ``HEAD`` requests.

Google states CRC-32C, and MD5 unless the object is composed (``x-goog-hash``); Azure states MD5 if
the program that wrote the object computed it (``Content-MD5``).

Source: "Hashes and ETags" of Google Cloud Storage; "Get Blob Properties" of Azure's REST API.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from datetime import timedelta
from email.message import Message
from http.client import HTTPException
from typing import Any

from core.errors import SourceChangedError
from core.files.object_client import client_of, translate_store_errors
from core.files.remote_path import RemotePath
from core.files.stated.checksum import StatedChecksum, whole_checksum

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
                hint="run again when nothing writes to it",
            ) from None
        if err.code == 404:
            return ()  # reading it reports this
        raise OSError(f"the store answered {err.code}") from None
    except HTTPException as err:  # its text may have the URL
        raise OSError(f"no proper answer ({type(err).__name__})") from None
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
