"""The option ``--storage-option``, which the commands that read URLs share."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Annotated

from typer import Option

from ckpt_cli.options.typer_command import PANELS
from core.errors import UsageError

_WEB = frozenset({"http", "https"})
_HELP = "Setting of the object store of a URL, such as endpoint=URL or region=NAME; repeatable."


def storage_option(panel: str) -> object:
    """Return the option for a section of the help page."""
    return Option("--storage-option", metavar="KEY=VALUE", rich_help_panel=panel, help=_HELP)


StorageOptions = Annotated[list[str] | None, storage_option(PANELS[-1])]


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
            raise UsageError("--storage-option takes KEY=VALUE", hint="such as endpoint=URL")
        options[name.strip().lower()] = value
    if schemes and schemes <= _WEB:
        for name in sort_options(options).config:
            raise UsageError(
                f"--storage-option {name}: no such option for {min(schemes)}://",
                hint="omit it: web servers have no settings but those of the HTTP client "
                "(timeout, proxy_url …)",
            )
    return options
