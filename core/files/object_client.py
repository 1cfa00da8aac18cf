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
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

from core.errors import (
    AccessDeniedError,
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

_RETRIES: Any = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}
"""How long requests are repeated: with growing waits, and not after the time."""
_IMPATIENT: dict[str, Any] = {
    "client_options": {"allow_http": True, "timeout": "10s", "connect_timeout": "2s"},
    "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=6)},
}
"""Settings of a client that has no credentials."""
_STATUS = re.compile(r"status code: (\d{3})")
_QUERY = re.compile(r"\?\S*")
"""The query of a URL, which may hold a signature."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_TRANSPORT = (
    ("dns error", "the name of its host is unknown"),
    ("Connection refused", "it refused the connection"),
    ("InvalidUri", "the endpoint is not a URL"),
    ("InvalidCertificate", "its certificate is not trusted"),
    ("TimedOut", "it did not answer in time"),
    ("timed out", "it did not answer in time"),
    ("response body error", "it cut the connection"),
    ("error sending request", "it could not be reached"),
)
"""Part of a message of the HTTP client → what happened."""
_METADATA_SERVICES = (
    "/latest/api/token",
    "/latest/meta-data",
    "//169.254.170.",
    "/computeMetadata/",
    "/metadata/identity/",
)
"""Parts of addresses that give a machine its credentials, asked when there are no others."""
_PERMISSIONS: Mapping[str, Mapping[str, str]] = {
    "s3": {"list": "s3:ListBucket", "read": "s3:GetObject", "write": "s3:PutObject"},
    "gs": {
        "list": "storage.objects.list",
        "read": "storage.objects.get",
        "write": "storage.objects.create",
    },
    "az": {
        "list": "Storage Blob Data Reader",
        "read": "Storage Blob Data Reader",
        "write": "Storage Blob Data Contributor",
    },
}
_WITHOUT_PERMISSION = ("AccessDenied", "AuthorizationPermissionMismatch")
"""The credentials are good, but do not allow the request."""
_DENIED, _NO_PERMISSION = "access denied", "no permission"
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_WRONG_REGION = ("PermanentRedirect", "IllegalLocation", "AuthorizationHeaderMalformed")
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
    for name, value in _options.items():
        if "endpoint" in name.lower() and "://" not in value:
            raise UsageError(
                f"--storage-option {name}={value}: not a URL",
                hint=f"write --storage-option {name}=https://{value}",
            )
    if scheme not in ("http", "https"):
        settings["config"] = dict(_options)
    if scheme in ("s3", "s3a") and _reads_profile():
        from obstore.auth.boto3 import Boto3CredentialProvider

        settings["credential_provider"] = Boto3CredentialProvider()
    try:
        url = f"{scheme}://{bucket}"
        is_asked = (
            scheme in ("s3", "s3a")
            and "credential_provider" not in settings
            and not any("skip_signature" in name.lower() for name in _options)
        )
        if is_asked and not _has_credentials(url, settings):
            return from_url(url, **{**settings, **_IMPATIENT})
        return from_url(url, retry_config=_RETRIES, **settings)
    except UnknownConfigurationKeyError as err:
        names = re.search(r"key: '([^']*)'", str(err))
        raise UsageError(
            f"--storage-option {names[1] if names else ''}: no such option for {scheme}://",
            hint="options are those of obstore: endpoint, region, access_key_id …",
        ) from err


def _has_credentials(url: str, settings: Mapping[str, Any]) -> bool:
    """Return whether credentials of S3 are found within seconds.

    Without any, the client asks the metadata service of the machine, which most machines do not
    have, and would wait for its answer as long as for that of a busy store.
    """
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    impatient: Any = from_url(url, **{**settings, **_IMPATIENT})
    try:
        # To sign an address takes credentials, but no request to the store.
        obstore.sign(impatient, "GET", "any", timedelta(minutes=1))
    except BaseError as err:
        return not any(part in str(err) for part in _METADATA_SERVICES)
    return True


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
def translate_store_errors(path: Address, *, doing: str = "read") -> Iterator[None]:
    """Turn errors of the client into typed errors of the project, in one line each.

    Args:
        path: what was asked for.
        doing: ``list``, ``read`` or ``write``.

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
    except BaseException as err:
        # obstore's classes derive from Exception alone; others are not errors of a store. A panic
        # of its Rust code derives from BaseException.
        if type(err).__module__ not in ("obstore.exceptions", "pyo3_runtime"):
            raise
        # Not chained: the client's own text has the query of the URL, which may hold a signature.
        raise _translated(path, type(err).__name__, str(err), doing) from None


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
    from obstore.exceptions import AlreadyExistsError, NotSupportedError

    client = client_of(path)
    mode: Any = "overwrite" if replace else "create"
    with translate_store_errors(path, doing="write"):
        try:
            obstore.put(client, path.key, data, mode=mode, use_multipart=False)
        except FileNotFoundError as err:  # the object need not exist: it is the bucket
            raise _no_such_bucket(path) from err
        except (NotImplementedError, NotSupportedError) as err:
            raise StorageError(
                "the store cannot refuse to replace an object",
                file=str(path),
                hint="use one that knows If-None-Match, or write to a local disk",
            ) from err
        except AlreadyExistsError:
            # It may be ours: the answer to the first request was lost, and the client repeated it.
            is_written = bytes(obstore.get(client, path.key).bytes()) == data
            if not is_written:
                raise FileExistsError(str(path)) from None


def _translated(path: Address, name: str, text: str, doing: str) -> CheckpointingException:
    """Return the error for a message of the client.

    Args:
        path: what was asked for.
        name: obstore's class.
        text: its message, of many lines.
        doing: ``list``, ``read`` or ``write``.
    """
    status, code = _STATUS.search(text), _CODE.search(text)
    answer = f" ({status[1]}{f' {code[1]}' if code else ''})" if status else ""
    if name == "PreconditionError":
        return SourceChangedError(
            "the object changed while it was being read"
            if doing != "write"
            else "another process has written the object in the meantime",
            file=str(path),
            hint="run again when nothing else writes to it",
        )
    if code and code[1] in ("NoSuchBucket", "ContainerNotFound"):
        return _no_such_bucket(path)
    if any(part in text for part in _METADATA_SERVICES):
        return StorageError(
            "no credentials found", file=str(path), hint=_HINTS[_canonical_scheme(path)]
        )
    reason, hint = (
        _refused(path, name, status[1] if status else "", code[1] if code else "", doing)
        or (None if status else _unanswered(path, text))
        or _failed(name, text, status[1] if status else "")
    )
    is_denied = reason == _DENIED or reason.startswith(_NO_PERMISSION)
    kind = AccessDeniedError if is_denied else StorageError
    return kind(f"{reason}{answer}", file=str(path), hint=hint)


def _canonical_scheme(path: Address) -> str:
    """Return ``s3``, ``gs``, ``az`` or ``https``."""
    return {"s3a": "s3", "abfs": "az", "abfss": "az", "http": "https"}.get(path.scheme, path.scheme)


def _refused(
    path: Address, name: str, status: str, code: str, doing: str
) -> tuple[str, str | None] | None:
    """Return message and hint if the store knows neither the user nor the region; else None."""
    scheme = _canonical_scheme(path)
    if code == "RequestTimeTooSkewed":
        return "the clock of this machine is wrong", "set it, for example by NTP"
    if code in _EXPIRED:
        return "the credentials have expired", "renew them, and run again"
    if code in _WRONG_REGION or status in ("301", "307"):
        return "the bucket is in another region", "set AWS_REGION or --storage-option region=NAME"
    if code in _WITHOUT_PERMISSION and scheme in _PERMISSIONS:
        permission = _PERMISSIONS[scheme][doing]
        return f"{_NO_PERMISSION} to {doing} this", f"the credentials need {permission}"
    if name in ("PermissionDeniedError", "UnauthenticatedError") or status in ("401", "403"):
        return _DENIED, _HINTS[scheme]
    return None


def _unanswered(path: Address, text: str) -> tuple[str, str | None] | None:
    """Return message and hint if no store has answered; None if another reason is known."""
    if "redirect" in text:
        return "the bucket is in another region", "set AWS_REGION or --storage-option region=NAME"
    for part, happened in _TRANSPORT:
        if part in text:
            return f"no answer from the store: {happened}", _NETWORK_HINT
    return None


def _failed(name: str, text: str, status: str) -> tuple[str, str | None]:
    """Return message and hint for a request that failed for another reason."""
    if name == "NotSupportedError" and "Range" in text:
        return (
            "the server does not answer requests for a part of a file",
            "copy the checkpoint to a local disk, or serve it with nginx or an object store",
        )
    if status in ("429", "503"):
        return "the store is throttling requests", "run again with fewer -j"
    if status:
        return "the request failed", "run again; if it fails again, ask who runs the store"
    return _QUERY.sub("", text.partition("\n")[0].strip()), None


def _no_such_bucket(path: Address) -> StorageError:
    return StorageError(
        f"no such bucket: {path.bucket}",
        file=str(path),
        hint="check the name, and the region or account",
    )
