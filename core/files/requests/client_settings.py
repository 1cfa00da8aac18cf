"""Sort the storage options of a user into those of the store and those of its HTTP client.

obstore takes ``region`` or ``endpoint`` as settings of the store, and ``timeout`` or ``proxy_url``
as settings of the HTTP client; one that is passed in the wrong place makes it panic.

Source: obstore 0.12, ``obstore.store.ClientConfig``; durations are those of Rust's ``humantime``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from core.errors import UsageError
from core.values import dataclass

_BY_BOTH = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_url",
    "timeout",
    "user_agent",
)
"""Options of the HTTP client that boto3 has, too."""
_BY_OBSTORE = (
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_max_frame_size",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "randomize_addresses",
    "read_timeout",
)
"""Options that choose how obstore keeps connections; boto3 speaks HTTP/1 and chooses by itself."""
_REFUSED = {
    "default_content_type": "omit this option",
    "default_headers": "omit this option",
    "proxy_ca_certificate": "point SSL_CERT_FILE at the CA certificate",
    "proxy_excludes": "list the hosts in NO_PROXY",
    "root_certificate": "point SSL_CERT_FILE at the CA certificate",
}
"""Options of obstore's HTTP client that are not text, or that boto3 does not have → what to do."""
_PREFIX = re.compile(r"(?:aws|google|azure)_")
_SECRET = re.compile(r"key|token|secret|password|credential|account|proxy", re.IGNORECASE)
"""Parts of the names of options whose value no message may show."""
_UNPARSED = re.compile(r'[Ff]ailed to parse "(.*)" as (\w+)', re.DOTALL)
_KINDS = {
    "boolean": ("neither true nor false", "use true or false"),
    "Duration": ("not a valid duration", "add a unit, as in 30s or 2m"),
    "usize": ("not a whole number", None),
}
"""Type in obstore's messages → what is wrong with the value, and what to write."""
_UNITS_S = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "hr": 3600.0}
"""Units of durations that boto3's client is given in seconds."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """The storage options of a user, by what they are settings of.

    Args:
        config: options of the store, in obstore's names.
        client: options of its HTTP client.
    """

    config: dict[str, str] = field(default_factory=dict)
    client: dict[str, str] = field(default_factory=dict)


def sort_options(options: Mapping[str, str]) -> ClientSettings:
    """Sort storage options into those of the store and those of its HTTP client.

    Raises:
        UsageError: an endpoint is not a URL, or an option cannot be set in this way.
    """
    settings = ClientSettings()
    for name, value in options.items():
        if "endpoint" in name.lower():
            _check_endpoint(name, value)
        key = _PREFIX.sub("", name.lower(), count=1)
        if key in _REFUSED:
            raise UsageError(
                f"--storage-option {name}: ckpt does not accept this obstore option",
                hint=_REFUSED[key],
            )
        if key in _BY_BOTH or key in _BY_OBSTORE:
            settings.client[key] = value
        else:
            settings.config[name] = value
    return settings


def _check_endpoint(name: str, value: str) -> None:
    """Raise unless an endpoint is the URL of a host.

    Raises:
        UsageError: it is not.
    """
    shown = value if "@" not in value else "…"  # it may have a password
    if "://" not in value:
        raise UsageError(
            f"--storage-option {name}={shown}: the value is not a URL",
            hint=f"use --storage-option {name}=https://{shown}",
        )
    try:
        parts = urlsplit(value)
        is_url = parts.scheme.lower() in ("http", "https") and bool(parts.hostname)
        parts.port  # noqa: B018  # raises if it is none
    except ValueError:
        is_url = False
    if not is_url:
        raise UsageError(
            f"--storage-option {name}={shown}: the value is not a valid endpoint URL",
            hint=f"use --storage-option {name}=https://HOST",
        )


def unusable_setting(options: Mapping[str, str], name: str | None, text: str) -> UsageError:
    """Return the error for a setting that obstore cannot use.

    Args:
        options: the storage options of the user.
        name: the option; None if the setting comes from the environment.
        text: obstore's message.
    """
    subject = "an environment variable" if name is None else f"--storage-option {name}"
    match = _UNPARSED.search(text)
    if match is not None and match[2] in _KINDS:
        wrong, hint = _KINDS[match[2]]
        shown = "the value" if name is None or _SECRET.search(name) else repr(options[name])
        return UsageError(f"{subject}: {shown} is {wrong}", hint=hint)
    # Other messages may have a part of the value.
    detail = "" if name is None or _SECRET.search(name) else f" {options[name]!r}"
    hint = (
        "check the variables that begin with AWS_, GOOGLE_ or AZURE_"
        if name is None
        else "check obstore's documentation for the values that this option accepts"
    )
    return UsageError(f"{subject}: the value{detail} is not valid", hint=hint)


def boto3_settings(client: Mapping[str, str], *, endpoint: str | None) -> dict[str, Any]:
    """Return the options of the HTTP client as arguments for boto3.

    Args:
        client: options that obstore has accepted.
        endpoint: URL of the store; None for Amazon's.

    Returns:
        ``verify``, if it is set, and arguments of ``botocore.config.Config``.

    Raises:
        UsageError: the endpoint has no TLS, which ``allow_http=false`` asks for.
    """
    settings: dict[str, Any] = {}
    is_plain = endpoint is not None and endpoint.lower().startswith("http:")
    if is_plain and client.get("allow_http", "true").lower() in ("false", "0", "off", "no", "n"):
        raise UsageError(
            "--storage-option allow_http=false does not allow an endpoint that begins with http:",
            hint="use an endpoint that begins with https:",
        )
    if client.get("allow_invalid_certificates", "").lower() in ("true", "1", "on", "yes", "y"):
        settings["verify"] = False
    for option, argument in (("timeout", "read_timeout"), ("connect_timeout", "connect_timeout")):
        if option in client:
            settings[argument] = _seconds(client[option], option)
    if "proxy_url" in client:
        settings["proxies"] = dict.fromkeys(("http", "https"), client["proxy_url"])
    if "user_agent" in client:
        settings["user_agent"] = client["user_agent"]
    return settings


def _seconds(text: str, option: str) -> float:
    """Convert a duration such as ``1m 30s`` into seconds.

    Raises:
        UsageError: it has other units.
    """
    spans = re.findall(r"(\d+)\s*([a-z]+)", text)
    if not spans or any(unit not in _UNITS_S for _, unit in spans):
        raise UsageError(
            f"--storage-option {option}: {text!r} is not a valid duration",
            hint="give the duration in seconds or minutes, as in 30s or 2m",
        )
    return timedelta(seconds=sum(int(n) * _UNITS_S[unit] for n, unit in spans)).total_seconds()
