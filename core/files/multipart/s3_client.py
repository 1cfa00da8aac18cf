"""Make boto3's client of S3 with the settings that obstore takes, and put its errors into words.

Requests to a store that has answered none for a while are not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import Lock
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from core.errors import CheckpointingException, MissingShardError, StorageError, UsageError
from core.files.object_client import client_of, no_credentials, store_error
from core.files.remote_path import RemotePath
from core.files.requests.client_settings import boto3_settings
from core.files.requests.failure import PATIENCE_S
from core.files.requests.traffic import count_request


class RetryDeadline:
    """Ends the repetition of a client's requests ``PATIENCE_S`` after the last success of any.

    To a store that throttles, botocore's adaptive mode sends one request in two seconds, for all
    threads together. When it throttles everything, the attempts of 64 parts would take 20 minutes.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._failing_since: float | None = None

    def check(
        self, *, response: Any, caught_exception: Exception | None, operation: Any, **_: object
    ) -> None:
        """Look at how an attempt ended; botocore calls this after each (event ``needs-retry``).

        Args:
            response: the answer, raw and parsed; None if there was none.
            caught_exception: why there was none.
            operation: of the request.

        Raises:
            Exception: that of the attempt: no request has succeeded for a while.
        """
        status = response[0].status_code if response is not None else None
        now = monotonic()
        with self._lock:
            if status is not None and status < 500 and status != 429:
                self._failing_since = None
                return
            if self._failing_since is None:
                self._failing_since = now
            if now - self._failing_since <= PATIENCE_S:
                return
        if caught_exception is not None:
            raise caught_exception
        from botocore.exceptions import ClientError

        raise ClientError(response[1], operation.name)


_VARIABLES: Mapping[str, tuple[str | None, list[str], None, None]] = {
    "region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None),
    "ca_bundle": ("ca_bundle", ["AWS_CA_BUNDLE", "SSL_CERT_FILE"], None, None),
    "endpoint": (None, ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"], None, None),
    **{
        name: (None, [f"AWS_{name.upper()}"], None, None)
        for name in (
            "conditional_put",
            "request_payer",
            "server_side_encryption",
            "skip_signature",
            "sse_bucket_key_enabled",
            "sse_customer_key_base64",
            "sse_kms_key_id",
            "unsigned_payload",
            "virtual_hosted_style_request",
        )
    },
}
"""Option of obstore → key in ``~/.aws/config`` and variables of the environment that boto3 reads.

By itself, boto3 does not know most of these variables, ``AWS_REGION`` among them.
"""
_OF_BOTO3 = ("ca_bundle",)
"""Variables that obstore has no option for."""
_N_ATTEMPTS = 11
"""Number of attempts of a request, with growing waits; ``RetryDeadline`` ends them earlier."""
_EXPIRED = ("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError")
"""Errors of boto3 for credentials that must be renewed."""
_DAMAGED = ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch")
"""Codes of S3 for a checksum that does not match the bytes."""


def s3_options(path: RemotePath) -> dict[str, str]:
    """Return the options of this process and, where it has none, of the environment.

    Returns:
        Option, by obstore's name without ``aws_`` → value.

    Raises:
        UsageError: obstore is not installed, or an option is unknown.
        StorageError: the store cannot be used with these settings.
    """
    import botocore.session

    store: Any = client_of(path)
    session = botocore.session.Session(session_vars=_VARIABLES)
    names = _VARIABLES.keys() - _OF_BOTO3
    variables = {name: session.get_config_variable(name) for name in names}
    # obstore brings the names of options into one form.
    options = {name: value for name, value in variables.items() if value} | dict(store.config)
    if "default_region" in options and "region" not in store.config:
        options["region"] = options["default_region"]
    return options


def is_on(options: Mapping[str, str], name: str) -> bool:
    """Return whether an option is set to true."""
    return str(options.get(name, "")).lower() in ("true", "1", "on", "yes", "y")


def s3_client(path: RemotePath, *, n_connections: int) -> Any:
    """Return a boto3 client with the storage options of this process.

    Credentials that are no option come from the environment, ``~/.aws`` or the machine's role.

    Args:
        n_connections: number of requests at the same time.

    Raises:
        UsageError: obstore is not installed, or an option is unknown or not supported here.
        StorageError: the store cannot be used with these settings.
    """
    import boto3
    import botocore.session
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.handlers import add_expect_header
    from urllib3 import disable_warnings
    from urllib3.exceptions import InsecureRequestWarning

    options = s3_options(path)
    if "sse_customer_key_base64" in options:
        raise UsageError(
            "customer-provided keys (sse_customer_key_base64) are not supported",
            file=str(path),
            hint="use --storage-option server_side_encryption=aws:kms",
        )

    # Over TLS the payload is not signed: hashing it takes longer than sending it, and its checksum
    # is sent with it.
    endpoint = options.get("endpoint")
    is_secure = endpoint is None or endpoint.lower().startswith("https:")
    is_unsigned = is_on(options, "unsigned_payload") or (
        is_secure and "unsigned_payload" not in options
    )
    s3: dict[str, Any] = {"payload_signing_enabled": not is_unsigned}
    if is_on(options, "virtual_hosted_style_request"):
        s3["addressing_style"] = "virtual"
        endpoint = endpoint and _without_bucket(endpoint, path.bucket)
    elif endpoint is not None:
        s3["addressing_style"] = "path"
    settings: dict[str, Any] = {
        "max_pool_connections": n_connections,
        "retries": {"mode": "adaptive", "total_max_attempts": _N_ATTEMPTS},
        "connect_timeout": 5,
        "read_timeout": 60,
        "tcp_keepalive": True,
        # Stores that only resemble S3 refuse checksums that were not asked for.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": s3,
    }
    if is_on(options, "skip_signature"):
        settings["signature_version"] = UNSIGNED
    store: Any = client_of(path)
    settings |= boto3_settings(dict(store.client_options or {}), endpoint=endpoint)
    verify = {"verify": settings.pop("verify")} if "verify" in settings else {}
    if verify:  # whoever asks for that needs no warning at every request
        disable_warnings(InsecureRequestWarning)

    with translate_s3_errors(path):
        session = botocore.session.Session(session_vars=_VARIABLES)
        client = boto3.Session(botocore_session=session).client(
            "s3",
            endpoint_url=endpoint,
            region_name=options.get("region") or "us-east-1",
            aws_access_key_id=options.get("access_key_id"),
            aws_secret_access_key=options.get("secret_access_key"),
            aws_session_token=options.get("session_token"),
            config=Config(**settings),
            **verify,
        )
    # Waiting for "100 Continue" takes a round trip for each part, or a second where it never comes.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    client.meta.events.register("needs-retry.s3", RetryDeadline().check)
    if is_on(options, "request_payer"):
        client.meta.events.register("before-call.s3", partial(_add_header, "x-amz-request-payer"))
    return client


def _without_bucket(endpoint: str, bucket: str) -> str:
    """Return an endpoint without the bucket, which obstore expects in it, and boto3 adds."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.removeprefix(f"{bucket}.")).geturl()


def count_requests(parsed: Mapping[str, Any], **_: object) -> None:
    """Count a request and its repetitions; called by boto3 after each."""
    n_retries = parsed.get("ResponseMetadata", {}).get("RetryAttempts", 0)
    for number in range(n_retries + 1):
        count_request(is_retry=number > 0)


def _add_header(name: str, params: dict[str, Any], **_: object) -> None:
    """Add ``x-amz-request-payer: requester`` to a request of boto3."""
    params["headers"][name] = "requester"


@contextmanager
def translate_s3_errors(path: RemotePath, *, doing: str = "write") -> Iterator[None]:
    """Turn errors of boto3 into typed errors of the project, like ``translate_store_errors``.

    Args:
        path: what was asked for.
        doing: ``list``, ``list uploads``, ``list parts``, ``read`` or ``write``.

    Raises:
        MissingShardError: the object does not exist.
        SourceChangedError: another process has written the object in the meantime.
        StorageError: the store refuses, fails, or cannot be reached.
    """
    try:
        yield
    except Exception as err:
        if not type(err).__module__.startswith(("botocore.", "boto3.")):
            raise
        # Not chained: the client's own text may have what was signed.
        raise _translated(path, err, doing) from None


def get_error_code(err: Exception) -> tuple[int, str]:
    """Return the status and the code of an answer of S3; (0, "") for other errors of boto3."""
    answer = getattr(err, "response", None) or {}
    code = str(answer.get("Error", {}).get("Code", ""))
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status, "" if code.isdigit() else code


def _translated(path: RemotePath, err: Exception, doing: str) -> CheckpointingException:
    status, code = get_error_code(err)
    name = type(err).__name__
    if name == "NoCredentialsError" or name == "PartialCredentialsError":
        return no_credentials(path)
    if code == "NoSuchUpload":
        return StorageError(
            "the upload no longer exists, because another process finished or aborted it or it "
            "expired",
            file=str(path),
            hint="run the command again",
        )
    if code == "NoSuchKey":
        return MissingShardError("the object does not exist", file=str(path))
    if code in _DAMAGED:
        return StorageError(
            f"the store received different bytes than were sent ({status} {code})",
            file=str(path),
            hint="run the command again; if it fails again, check the network and this "
            "machine's memory",
        )
    # The message has no reason of a broken connection; the error that caused it has.
    cause = getattr(err, "kwargs", {}).get("error")
    text = " ".join(f"{err} {cause or ''}".split())
    return store_error(
        path,
        kind="PreconditionError" if status in (409, 412) else name,
        status=str(status or ""),
        code="ExpiredToken" if name in _EXPIRED else code,
        text=text,
        doing=doing,
    )
