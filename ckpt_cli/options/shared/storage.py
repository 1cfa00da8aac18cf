"""The values of ``--storage-option``."""

from __future__ import annotations

from collections.abc import Sequence, Set

from core.errors import UsageError

_WEB = frozenset({"http", "https"})


def parse_storage_options(texts: Sequence[str], *, schemes: Set[str]) -> dict[str, str]:
    """Return option → value; the values, which may be secrets, are in no message.

    Args:
        texts: what the user wrote, each KEY=VALUE.
        schemes: schemes of the URLs that the options are for; empty if all paths are local.

    Raises:
        UsageError: a text is not of the form KEY=VALUE, or all URLs are those of web servers, and
            an option is one of object stores.
    """
    from core.files.requests.client_settings import sort_options

    options = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(
                "--storage-option expects KEY=VALUE",
                hint="for example: --storage-option endpoint=URL",
            )
        options[name.strip().lower()] = value
    if schemes and schemes <= _WEB:
        for name in sort_options(options).config:
            raise UsageError(
                f"--storage-option {name} is not supported for {min(schemes)}:// URLs",
                hint="omit it; web servers only support HTTP client settings such as timeout and "
                "proxy_url",
            )
    return options
