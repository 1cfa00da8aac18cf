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
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from core.errors import (
    AccessDeniedError,
    CheckpointingException,
    MissingShardError,
    SourceChangedError,
    StorageError,
    UnansweredError,
    UsageError,
)
from core.files.requests.client_settings import sort_options, unusable_setting
from core.files.requests.failure import CODE, METADATA_SERVICES, STATUS, ask_retry_after
from core.files.requests.repeat import RequestLimiter, with_retries
from core.files.requests.waiting import call_interruptibly
from core.files.store_kinds import store_kind

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")


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

MOST_REQUESTS = 64
"""Number of requests to a bucket that may be in flight, unless ``limit_requests`` says fewer."""
_most_requests = MOST_REQUESTS
_making = threading.Lock()
"""Held while a client or a limiter is looked up, of which a bucket has one, and while obstore is
imported: two threads that import parts of it at the same time may see it unfinished.
"""
_RETRIES: Any = {"max_retries": 10, "retry_timeout": timedelta(seconds=60)}
"""How long the client repeats requests: with growing waits, and not after the time."""
_NO_RETRIES: Any = {"max_retries": 0}
"""For requests that ``send_request`` repeats."""
_IMPATIENT: dict[str, Any] = {
    "client_options": {"timeout": "10s", "connect_timeout": "2s"},
    "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=6)},
}
"""Settings of a client that has no credentials."""
_QUERY = re.compile(r"\?\S*")
"""The query of a URL, which may hold a signature."""
_TRANSPORT = (
    ("dns error", "its host name could not be resolved"),
    ("Failed to resolve", "its host name could not be resolved"),
    ("Connection refused", "it refused the connection"),
    ("InvalidUri", "the endpoint is not a URL"),
    ("InvalidCertificate", "its certificate is not trusted"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted"),
    ("TimedOut", "it did not answer in time"),
    ("timed out", "it did not answer in time"),
    ("timeout on endpoint", "it did not answer in time"),
    ("response body error", "it closed the connection"),
    ("Connection was closed", "it closed the connection"),
    ("error sending request", "it could not be reached"),
    ("Could not connect", "it could not be reached"),
)
"""Part of a message of an HTTP client → what happened."""
_WITHOUT_PERMISSION = ("AccessDenied", "AuthorizationPermissionMismatch")
"""The credentials are good, but do not allow the request."""
_DENIED, _NO_PERMISSION = "access denied", "no permission"
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_WRONG_REGION = ("PermanentRedirect", "IllegalLocation", "AuthorizationHeaderMalformed")
_OTHER_REGION = (
    "the bucket is in a different region",
    "set AWS_REGION, or pass --storage-option region=NAME",
)
"""Message and hint."""
_CERTIFICATE_HINT = "point SSL_CERT_FILE at its CA certificate, or check the endpoint"


def set_storage_options(options: Mapping[str, str]) -> None:
    """Set options of the stores for this process; they take precedence over the environment.

    Args:
        options: option → value, in obstore's names (``endpoint``, ``region``, ``access_key_id`` …).
    """
    _options.clear()
    _options.update(options)
    _client.cache_clear()
    _limiter.cache_clear()
    _settings.cache_clear()


def limit_requests(most: int | None) -> None:
    """Set how many requests to a bucket may be in flight.

    Args:
        most: the number; None for ``MOST_REQUESTS``.
    """
    global _most_requests
    _most_requests = MOST_REQUESTS if most is None else most
    _limiter.cache_clear()


def storage_options() -> frozenset[tuple[str, str]]:
    """Return the options of this process, which tell stores of the same URL apart."""
    return frozenset(_options.items())


def client_of(path: Address) -> ObjectStore:
    """Return the client of a path's bucket; the same one for every path of the bucket.

    It repeats requests itself, which nobody limits, counts or can interrupt: it is for streams.
    Everything else is for ``send_request``.

    Raises:
        UsageError: obstore is not installed, or an option is unknown.
        StorageError: the store cannot be used with these settings.
    """
    with translate_store_errors(path), _making:
        return _client(path.scheme, path.bucket, is_repeating=True)


def send_request(
    path: Address, send: Callable[[Any], T], *, doing: str = "read", n_bytes: int = 0
) -> T:
    """Send a request to a path's bucket when its limiter allows it; repeat it while that helps.

    Args:
        path: what is asked for.
        send: sends the request once, by the client that it is given, and returns the answer with
            all its data. It may run in another thread.
        doing: ``list``, ``read`` or ``write``.
        n_bytes: bytes of data that the request moves.

    Raises:
        UsageError: obstore is not installed, or an option is unknown.
        CheckpointingException: see ``translate_store_errors``.
    """
    with translate_store_errors(path, doing=doing):
        return _send(path, send, n_bytes)


def _send(path: Address, send: Callable[[Any], T], n_bytes: int) -> T:
    """Do what ``send_request`` does, but raise the client's own errors."""
    client = _sender_of(path)
    return with_retries(
        limiter_of(path),
        lambda: send(client),
        n_bytes=n_bytes,
        ask_retry_after=partial(ask_retry_after, client, str(path), path.key),
    )


def _sender_of(path: Address) -> Any:
    """Return the client that repeats nothing."""
    with _making:
        return _client(path.scheme, path.bucket, is_repeating=False)


def limiter_of(path: Address) -> RequestLimiter:
    """Return the limiter of a path's bucket; the same one for every path of the bucket."""
    with _making:
        return _limiter(path.scheme, path.bucket)


@cache
def _limiter(scheme: str, bucket: str) -> RequestLimiter:
    return RequestLimiter(_most_requests)


@cache
def _client(scheme: str, bucket: str, *, is_repeating: bool) -> ObjectStore:
    try:
        # First the package: its native part lists its modules before they are complete, so that
        # another thread would find them empty.
        import obstore  # noqa: F401
        from obstore.exceptions import GenericError, UnknownConfigurationKeyError
        from obstore.store import from_url
    except ImportError as err:
        raise UsageError(
            f"{scheme}:// paths need obstore", hint="install it with pip install obstore"
        ) from err
    try:
        settings = {
            "retry_config": _RETRIES if is_repeating else _NO_RETRIES,
            **_settings(scheme, bucket),
        }
        return from_url(f"{scheme}://{bucket}", **settings)
    except GenericError as err:
        # Before any request was sent: a setting cannot be used. Not chained: the client's text may
        # have its value.
        name = _find_unusable(f"{scheme}://{bucket}", str(err))
        raise unusable_setting(_options, name, str(err)) from None
    except UnknownConfigurationKeyError as err:
        names = re.search(r"key: '([^']*)'", str(err))
        raise UsageError(
            f"--storage-option {names[1] if names else ''}: {scheme}:// has no such option",
            hint="use obstore's option names, such as endpoint, region or access_key_id",
        ) from err


def _find_unusable(url: str, text: str) -> str | None:
    """Return the name of the storage option that a client was refused for; None if none is.

    Args:
        url: URL of the bucket.
        text: message of obstore.
    """
    from obstore.exceptions import GenericError
    from obstore.store import from_url

    # The message does not name the option: find the one without which it is another, or none.
    for name in _options:
        rest = sort_options({other: value for other, value in _options.items() if other != name})
        settings: dict[str, Any] = {"client_options": {"allow_http": True, **rest.client}}
        if not url.startswith("http"):
            settings["config"] = rest.config
        try:
            from_url(url, **settings)
        except GenericError as err:
            if str(err) == text:
                continue
        return name
    return None


@cache
def _settings(scheme: str, bucket: str) -> dict[str, Any]:
    """Return the settings of a bucket's clients.

    Raises:
        UsageError: an endpoint is not a URL, or an option cannot be set in this way.
    """
    options = sort_options(_options)
    # An endpoint without TLS is used only if the user names one.
    client_options = {"allow_http": True, **options.client}
    settings: dict[str, Any] = {"client_options": client_options}
    if scheme not in ("http", "https"):
        settings["config"] = options.config
    if store_kind(scheme).is_s3 and _reads_profile():
        from obstore.auth.boto3 import Boto3CredentialProvider

        settings["credential_provider"] = Boto3CredentialProvider()
    is_asked = (
        store_kind(scheme).is_s3
        and "credential_provider" not in settings
        and not any("skip_signature" in name.lower() for name in _options)
    )
    if is_asked and not _has_credentials(f"{scheme}://{bucket}", settings):
        return {**settings, **_impatient(client_options)}
    return settings


def _has_credentials(url: str, settings: Mapping[str, Any]) -> bool:
    """Return whether credentials of S3 are found within seconds, or none are wanted.

    Without any, the client asks the metadata service of the machine, which most machines do not
    have, and would wait for its answer as long as for that of a busy store.
    """
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    impatient: Any = from_url(url, **{**settings, **_impatient(settings["client_options"])})
    try:
        # To sign an address takes credentials, but no request to the store.
        call_interruptibly(lambda: obstore.sign(impatient, "GET", "any", timedelta(minutes=1)))
        return True
    except BaseError as err:
        if not any(part in str(err) for part in METADATA_SERVICES):
            return True
    # The environment may say that requests are not signed. A client does not tell; but its
    # requests then reach the store without any credentials.
    once: Any = from_url(
        url,
        **{
            **settings,
            **_impatient(settings["client_options"]),
            "retry_config": {"max_retries": 0},
        },
    )
    try:
        call_interruptibly(lambda: obstore.head(once, "any"))
    except (BaseError, FileNotFoundError) as err:
        return not any(part in str(err) for part in METADATA_SERVICES)
    return True


def _impatient(client_options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a client that has no credentials.

    Args:
        client_options: options of its HTTP client; those timeouts are added that it lacks.
    """
    return {
        **_IMPATIENT,
        "client_options": {**_IMPATIENT["client_options"], **client_options},
    }


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


def read_object(path: Address) -> bytes | None:
    """Return the content of a small object; None if it does not exist.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    try:
        return send_request(path, lambda client: bytes(client.get(path.key).bytes()))
    except MissingShardError:
        return None


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
    mode: Any = "overwrite" if replace else "create"

    def put(client: Any) -> None:
        client.put(path.key, data, mode=mode, use_multipart=False)

    with translate_store_errors(path, doing="write"):
        _sender_of(path)  # raises if obstore is not installed
        from obstore.exceptions import AlreadyExistsError, NotSupportedError

        try:
            _send(path, put, len(data))
        except FileNotFoundError as err:  # the object need not exist: it is the bucket
            raise no_such_bucket(path) from err
        except (NotImplementedError, NotSupportedError) as err:
            raise no_conditional_writes(path) from err
        except AlreadyExistsError:
            # It may be ours: the answer to the first request was lost, and the client repeated it.
            is_written = data == _send(
                path, lambda client: bytes(client.get(path.key).bytes()), len(data)
            )
            if not is_written:
                raise FileExistsError(str(path)) from None


def _translated(path: Address, name: str, text: str, doing: str) -> CheckpointingException:
    """Return the error for a message of obstore.

    Args:
        path: what was asked for.
        name: obstore's class.
        text: its message, of many lines.
        doing: ``list``, ``read`` or ``write``.
    """
    status, code = STATUS.search(text), CODE.search(text)
    if any(part in text for part in METADATA_SERVICES) and name != "PreconditionError":
        return no_credentials(path)
    return store_error(
        path,
        kind=name,
        status=status[1] if status else "",
        code=code[1] if code else "",
        text=text,
        doing=doing,
    )


def store_error(
    path: Address, *, kind: str, status: str, code: str, text: str, doing: str
) -> CheckpointingException:
    """Return the error for a request that failed, in the words of all clients.

    Args:
        path: what was asked for.
        kind: class of the client's error, in obstore's names (``PreconditionError`` …).
        status: status of the answer, "" without an answer.
        code: the store's own code (``NoSuchBucket`` …), "" without one.
        text: message of the client, shown only where there is neither answer nor known reason.
        doing: ``list``, ``read`` or ``write``; of S3 also ``list uploads`` and ``list parts``.
    """
    answer = f" ({status}{f' {code}' if code else ''})" if status else ""
    if kind == "PreconditionError":
        return SourceChangedError(
            "the object changed while it was being read"
            if doing != "write"
            else "another process wrote the object in the meantime",
            file=str(path),
            hint="run the command again when nothing else is writing to the object",
        )
    if code in ("NoSuchBucket", "ContainerNotFound"):
        return no_such_bucket(path)
    reason, hint = (
        _refused(path, kind, status, code, doing)
        or (None if status else _unanswered(path, text))
        or _failed(kind, text, status)
    )
    is_denied = reason == _DENIED or reason.startswith(_NO_PERMISSION)
    is_unanswered = doing == "write" and (not status or status.startswith("5"))
    error = AccessDeniedError if is_denied else UnansweredError if is_unanswered else StorageError
    return error(f"{reason}{answer}", file=str(path), hint=hint)


def no_credentials(path: Address) -> StorageError:
    """Return the error for credentials that were found nowhere."""
    return StorageError(
        "no credentials found", file=str(path), hint=_advise_on_credentials(path.scheme)
    )


def _advise_on_credentials(scheme: str) -> str:
    """Return where credentials may be wrong; without boto3 no profile is read."""
    kind = store_kind(scheme)
    if kind.is_s3 and importlib.util.find_spec("boto3") is None:
        return (
            kind.credentials.replace(", AWS_SESSION_TOKEN or AWS_PROFILE", " or AWS_SESSION_TOKEN")
            + "; to use a profile from ~/.aws (AWS_PROFILE), run pip install 'ckpt-toolkit[s3]'"
        )
    return kind.credentials


def no_conditional_writes(path: Address) -> StorageError:
    """Return the error for a store that would replace an object that must not be replaced."""
    return StorageError(
        "the store does not support conditional writes",
        file=str(path),
        hint="use a store that supports If-None-Match, or write to a local disk",
    )


def _refused(
    path: Address, name: str, status: str, code: str, doing: str
) -> tuple[str, str | None] | None:
    """Return message and hint if the store knows neither the user nor the region; else None."""
    kind = store_kind(path.scheme)
    if code == "RequestTimeTooSkewed":
        return "this machine's clock is wrong", "synchronize the clock, for example with NTP"
    if code in _EXPIRED:
        return "the credentials have expired", "renew the credentials, and run the command again"
    if code in _WRONG_REGION or status in ("301", "307"):
        return _OTHER_REGION
    if code in _WITHOUT_PERMISSION and doing in kind.permissions:
        permission = kind.permissions[doing]
        verb = doing.partition(" ")[0]
        return f"{_NO_PERMISSION} to {verb} this path", f"the credentials need {permission}"
    if name in ("PermissionDeniedError", "UnauthenticatedError") or status in ("401", "403"):
        return _DENIED, _advise_on_credentials(path.scheme)
    return None


def _unanswered(path: Address, text: str) -> tuple[str, str | None] | None:
    """Return message and hint if no store has answered; None if another reason is known."""
    if "redirect" in text:
        return _OTHER_REGION
    for part, happened in _TRANSPORT:
        if part in text:
            kind = store_kind(path.scheme)
            whom = "store" if kind.is_writable else "server"
            hint = _CERTIFICATE_HINT if "certificate" in happened else kind.network
            return f"the request to the {whom} failed because {happened}", hint
    return None


def _failed(name: str, text: str, status: str) -> tuple[str, str | None]:
    """Return message and hint for a request that failed for another reason."""
    if name == "NotSupportedError" and "Range" in text:
        return (
            "the server does not support HTTP range requests",
            "copy the checkpoint to a local disk, or serve it with nginx or an object store",
        )
    if status in ("429", "503"):
        return "the store is throttling requests", "run the command again with a lower -j"
    if status:
        return (
            "the request failed",
            "run the command again; if it fails again, ask whoever runs the store",
        )
    return _QUERY.sub("", text.partition("\n")[0].strip()), None


def no_such_bucket(path: Address) -> StorageError:
    """Return the error for a bucket that does not exist."""
    return StorageError(
        f"no such bucket: {path.bucket}",
        file=str(path),
        hint="check the bucket name, and the region or account",
    )
