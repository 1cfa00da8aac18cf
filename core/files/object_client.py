"""Make clients of object stores, and put their errors into words.

The client is obstore (https://developmentseed.org/obstore), Python's door to Rust's object_store.
It takes credentials, regions, endpoints and proxies from the environment (``AWS_…``,
``GOOGLE_…``, ``AZURE_STORAGE_…``, ``HTTPS_PROXY``), or from the roles of the machine; profiles of
``~/.aws`` are read by boto3 where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

from core.errors import (
    CheckpointingException,
    MissingShardError,
    SourceChangedError,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Address(Protocol):
    """The URL of an object or of a prefix; see ``core.files.remote_path.RemotePath``."""

    @property
    def scheme(self) -> str:
        """Scheme in lower case, such as ``s3``."""

    @property
    def bucket(self) -> str:
        """Bucket, container or host."""

    @property
    def key(self) -> str:
        """Name of the object, or the prefix, in the bucket; "" for the bucket itself."""

    def __truediv__(self, name: str) -> Self:
        """Return the URL of what lies below this one."""


_options: dict[str, str] = {}
"""Settings of the user for every client of this process; see ``set_storage_options``."""

_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"\?\S*")
"""The query of a URL, which may hold a signature."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_TRANSPORT = (
    ("dns error", "the name of its host is unknown"),
    ("Connection refused", "it refused the connection"),
    ("certificate", "its certificate was refused"),
    ("TimedOut", "it did not answer in time"),
    ("timed out", "it did not answer in time"),
    ("error sending request", "it could not be reached"),
)
"""Part of a message of the HTTP client → what happened."""
_NETWORK_HINT = "check the endpoint (AWS_ENDPOINT_URL, --storage-option endpoint=URL) and the proxy"
_HINTS: Mapping[str, str] = {
    "s3": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or AWS_PROFILE",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, or run: gcloud auth application-default login",
    "az": "check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run: az login",
    "https": "check whether the address needs a login",
}


def set_storage_options(options: Mapping[str, str]) -> None:
    """Set options of the stores for this process; they take precedence over the environment.

    Args:
        options: option → value, in obstore's names (``endpoint``, ``region``, ``access_key_id`` …).
    """
    _options.clear()
    _options.update(options)
    _client.cache_clear()


def storage_options() -> frozenset[tuple[str, str]]:
    """Return the options of this process, which tell stores of the same URL apart."""
    return frozenset(_options.items())


def client_of(path: Address) -> ObjectStore:
    """Return the client of a path's bucket; the same one for every path of the bucket.

    Raises:
        UsageError: obstore is not installed, or an option is unknown.
        StorageError: the store cannot be used with these settings.
    """
    with translate_store_errors(path):
        return _client(path.scheme, path.bucket)


@cache
def _client(scheme: str, bucket: str) -> ObjectStore:
    try:
        from obstore.exceptions import UnknownConfigurationKeyError
        from obstore.store import from_url
    except ImportError as err:
        raise UsageError(
            f"{scheme}:// needs obstore", hint="install it: pip install obstore"
        ) from err
    # An endpoint without TLS is used only if the user names one.
    settings: dict[str, Any] = {"client_options": {"allow_http": True}}
    if scheme not in ("http", "https"):
        settings["config"] = dict(_options)
    if scheme in ("s3", "s3a") and _reads_profile():
        from obstore.auth.boto3 import Boto3CredentialProvider

        settings["credential_provider"] = Boto3CredentialProvider()
    try:
        return from_url(f"{scheme}://{bucket}", **settings)
    except UnknownConfigurationKeyError as err:
        names = re.search(r"key: '([^']*)'", str(err))
        raise UsageError(
            f"--storage-option {names[1] if names else ''}: no such option for {scheme}://",
            hint="options are those of obstore: endpoint, region, access_key_id …",
        ) from err


def _reads_profile() -> bool:
    """Return whether boto3 finds the credentials: in ``~/.aws``, which obstore does not read.

    It asks the environment and the roles of the machine, too.
    """
    folder = os.path.expanduser("~/.aws")
    has_profile = any(
        os.path.exists(os.path.join(folder, name)) for name in ("credentials", "config")
    )
    return (
        has_profile
        and "access_key_id" not in _options
        and importlib.util.find_spec("boto3") is not None
    )


@contextmanager
def translate_store_errors(path: Address) -> Iterator[None]:
    """Turn errors of the client into typed errors of the project, in one line each.

    Args:
        path: what was asked for.

    Raises:
        MissingShardError: the object does not exist.
        SourceChangedError: the object is not the one that was seen first.
        StorageError: the store refuses, fails, or cannot be reached.
    """
    try:
        yield
    except CheckpointingException:
        raise
    except FileNotFoundError as err:
        raise MissingShardError("the object does not exist", file=str(path)) from err
    except Exception as err:
        # obstore's classes derive from Exception alone; others are not errors of a store.
        if type(err).__module__ != "obstore.exceptions":
            raise
        # Not chained: the client's own text has the query of the URL, which may hold a signature.
        raise _translated(path, type(err).__name__, str(err)) from None


def put_object(path: Address, data: bytes, *, replace: bool) -> None:
    """Write an object by one request; readers see all of it or nothing.

    Args:
        path: URL of the object.
        data: its content, up to 5 GB.
        replace: replace an existing object; otherwise the store itself refuses to
            (``If-None-Match: *``).

    Raises:
        FileExistsError: another object has this name, and ``replace`` is false.
        StorageError: the store refuses, fails, cannot be reached, or has no conditional writes.
    """
    import obstore
    from obstore.exceptions import AlreadyExistsError

    client = client_of(path)
    mode: Any = "overwrite" if replace else "create"
    with translate_store_errors(path):
        try:
            obstore.put(client, path.key, data, mode=mode, use_multipart=False)
        except FileNotFoundError as err:  # the object need not exist: it is the bucket
            raise _no_such_bucket(path) from err
        except NotImplementedError as err:
            raise StorageError(
                "the store cannot refuse to replace an object",
                file=str(path),
                hint="--force writes without that condition",
            ) from err
        except AlreadyExistsError:
            # It may be ours: the answer to the first request was lost, and the client repeated it.
            is_written = bytes(obstore.get(client, path.key).bytes()) == data
            if not is_written:
                raise FileExistsError(str(path)) from None


def _translated(path: Address, name: str, text: str) -> CheckpointingException:
    """Return the error for a message of the client.

    Args:
        path: what was asked for.
        name: obstore's class.
        text: its message, of many lines.
    """
    scheme = {"s3a": "s3", "abfs": "az", "abfss": "az", "http": "https"}.get(
        path.scheme, path.scheme
    )
    status, code = _STATUS.search(text), _CODE.search(text)
    answer = f" ({status[1]}{f' {code[1]}' if code else ''})" if status else ""
    if name == "PreconditionError":
        return SourceChangedError(
            "the object changed while it was being read",
            file=str(path),
            hint="run again when nothing writes to it",
        )
    if code and code[1] in ("NoSuchBucket", "ContainerNotFound"):
        return _no_such_bucket(path)
    if code and code[1] in ("ExpiredToken", "RequestTimeTooSkewed", "InvalidToken"):
        reason = "clock is wrong" if code[1] == "RequestTimeTooSkewed" else "credentials expired"
        return StorageError(f"the {reason}{answer}", file=str(path), hint=_HINTS[scheme])
    if name in ("PermissionDeniedError", "UnauthenticatedError") or (
        status and status[1] in ("401", "403")
    ):
        return StorageError(f"access denied{answer}", file=str(path), hint=_HINTS[scheme])
    if name == "NotSupportedError" and "Range" in text:
        return StorageError(
            "the server does not answer requests for a part of a file",
            file=str(path),
            hint="copy the checkpoint to a local disk, or serve it with nginx or an object store",
        )
    if not status:
        for part, happened in _TRANSPORT:
            if part in text:
                return StorageError(
                    f"no answer from the store: {happened}", file=str(path), hint=_NETWORK_HINT
                )
    if status and status[1] in ("429", "503"):
        return StorageError(
            f"the store is throttling requests{answer}",
            file=str(path),
            hint="run again with fewer -j",
        )
    if "redirect" in text or (code and code[1] in ("PermanentRedirect", "IllegalLocation")):
        return StorageError(
            f"the bucket is in another region{answer}",
            file=str(path),
            hint="set AWS_REGION or --storage-option region=NAME",
        )
    first = "the request failed" if status else _QUERY.sub("", text.partition("\n")[0].strip())
    return StorageError(f"{first}{answer}", file=str(path))


def _no_such_bucket(path: Address) -> StorageError:
    return StorageError(
        f"no such bucket: {path.bucket}",
        file=str(path),
        hint="check the name, and the region or account",
    )
